import re
from html.parser import HTMLParser

import pytest

from aottrain.ir.report import CompileReport
from aottrain.report import html
from tests.report import example

VOID = {"meta", "rect"}


class Outline(HTMLParser):
    """Checks that every element is closed in order, and collects the visible text."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def outline(page: str) -> str:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return " ".join(parser.text)


REPORTS = [example.report(), example.report_with_timeline(), example.report_with_fallbacks(), CompileReport()]


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("summary", [None, example.SUMMARY])
def test_the_page_is_well_formed_and_stands_alone(report, summary):
    page = html.render(report, summary)
    outline(page)
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:", page)


def test_every_decision_is_on_the_page():
    report = example.report()
    text = outline(html.render(report, example.SUMMARY))
    graph = report.graphs[0]
    for value in (*graph.saved, *graph.recomputed):
        for part in (value.name, value.op, value.module, value.reason):
            assert part in text
    for figure in ("13.0 MiB", "22.0 MiB", "61.0 MiB", "84.0 MiB", "44.2 MiB", "1.51 s", "0.45 % too low"):
        assert figure in text
    for stage in graph.stages:
        assert stage.name in text


def test_fallbacks_are_prominent_and_escaped():
    page = html.render(example.report_with_fallbacks())
    assert 'class="alarm"' in page and "&lt;unbounded&gt;" in page and "<unbounded>" not in page
    assert 'class="alarm"' not in html.render(example.report())


def test_the_same_report_gives_the_same_bytes(tmp_path):
    html.write(example.report(), tmp_path / "a.html", example.SUMMARY)
    html.write(example.report(), tmp_path / "b.html", example.SUMMARY)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_memory_over_the_step_is_drawn_and_its_top_explained():
    page = html.render(example.report_with_timeline(), {"optimizer_bytes": 5 * example.MIB})
    text = outline(page)
    assert page.count("<polygon") == 8  # a layer for each category that is not empty, the optimizer's among them
    for part in ("while aten.mm.default runs in blocks.1.mlp, in the backward", "Alive at the top", "addmm_3", "mm_7"):
        assert part in text
    assert "without what library calls allocate inside themselves" in text and "saved activations" in text
    assert "optimizer 5.00 MiB" in re.sub(r"\s+", " ", text)


def test_what_a_saved_value_costs_and_brings_is_beside_it():
    text = outline(html.render(example.report_with_timeline()))
    for part in ("peak then", "1.50 ms", "-1.00 MiB", "none", "2 us"):
        assert part in text
    assert "peak then" not in outline(html.render(example.report()))
