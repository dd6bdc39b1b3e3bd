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


@pytest.mark.parametrize("report", [example.report(), example.report_with_fallbacks(), CompileReport()])
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
