import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from aottrain.explain.report import CompileReport, GraphBreak
from aottrain.ir.settings.decisions import Decision, Record, Timing
from aottrain.report import html
from aottrain.report.charts import WIDTHS
from aottrain.report.page import Column, table
from tests.explain import example

VOID = {"meta", "rect", "wbr", "col"}


class Outline(HTMLParser):
    """Checks that every element is closed in order, and collects the visible text."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.goes_on = False

    def handle_starttag(self, tag, attrs):
        self.goes_on = tag == "wbr"  # only a place where a line may end
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.goes_on:
            data = self.text.pop() + data
        self.goes_on = False
        self.text.append(data)


def outline(page: str) -> str:
    parser = Outline()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return " ".join(parser.text)


REPORTS = [
    example.report(),
    example.report_with_timeline(),
    example.report_with_collectives(),
    example.report_with_fallbacks(),
    CompileReport(),
]


def test_collectives_have_a_table():
    text = outline(html.render(example.report_with_collectives()))
    assert "Collectives 2, 6.00 MiB into each process" in text
    assert "backward: sum_start(float32[8])" in text
    assert "Collectives" not in outline(html.render(example.report()))


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
        op = value.op.removeprefix("aten.").removesuffix(".default")
        for part in (value.name, op, value.module, value.reason):
            assert part in text
    for figure in ("13.0 MiB", "22.0 MiB", "61.0 MiB", "84.0 MiB", "44.2 MiB", "1.51 s", "0.45 % too low"):
        assert figure in text
    for stage in graph.stages:
        assert stage.name in text


def test_fallbacks_are_prominent_and_escaped():
    page = html.render(example.report_with_fallbacks())
    assert 'class="alarm"' in page and "&lt;unbounded&gt;" in page and "<unbounded>" not in page
    assert 'class="alarm"' not in html.render(example.report())


def test_graph_breaks_are_named_where_there_are_some():
    report = example.report()
    assert "Graph breaks" not in html.render(report)
    report.graph_breaks.append(GraphBreak("call of print <here>", "model.py:7", count=2))
    page = html.render(report).replace("<wbr>", "")
    assert "Graph breaks" in page and "model.py:7" in page and "&lt;here&gt;" in page and "<here>" not in page


def test_the_same_report_gives_the_same_text():
    assert html.render(example.report(), example.SUMMARY) == html.render(example.report(), example.SUMMARY)


def test_the_memory_over_the_step_is_drawn_and_its_top_explained():
    page = html.render(example.report_with_timeline(), {"optimizer_bytes": 5 * example.MIB})
    text = outline(page)
    # A layer for each category that is not empty, the optimizer's among them, at each width.
    assert page.count('<path class="layer') == 8 * len(WIDTHS)
    for part in ("while aten.mm.default runs in blocks.1.mlp, in the backward", "Alive at the top", "addmm_3", "mm_7"):
        assert part in text
    assert "without what library calls allocate inside themselves" in text and "saved activations" in text
    assert "optimizer 5.00 MiB" in re.sub(r"\s+", " ", text)


def test_what_a_saved_value_costs_and_brings_is_beside_it():
    text = outline(html.render(example.report_with_timeline()))
    for part in ("peak then", "1.50 ms", "-1.00 MiB", "none", "2 us"):
        assert part in text
    assert "peak then" not in outline(html.render(example.report()))


def test_a_long_table_folds_its_rows_and_cuts_none_off():
    values = [example.value(f"v{i}", "aten.mm.default", "m", (i + 1, 64), "kept") for i in range(30)]
    graph = replace(example.train_graph(), saved=tuple(values), recomputed=())
    page = html.render(CompileReport([graph]))
    text = outline(page)
    assert "18 more" in text and all(f" v{i} " in text for i in range(30))
    assert page.index("18 more") < page.index(">v17<")  # the largest are those that are seen
    assert page.index(">v18<") < page.index("18 more")


def test_each_stage_has_a_bar_of_its_own():
    page = html.render(example.report())
    graph = example.train_graph()
    bars = re.findall(r'<div class="meter" style="width:([\d.]+)%">', page)
    assert len(bars) == len(graph.stages) and max(map(float, bars)) == 100.0


def test_a_figure_that_is_not_there_is_not_shown_as_zero():
    exact = {**example.SUMMARY, "peak_bytes": example.train_graph().predicted_peak_bytes}
    text = outline(html.render(example.report(), exact))
    assert "measured: the same, to the byte" in text and "0.00 %" not in text
    close = {**exact, "peak_bytes": exact["peak_bytes"] + 8}
    assert "the prediction is <0.01 % too low" in outline(html.render(example.report(), close))


def test_the_machine_stands_beside_the_times():
    graph = replace(example.train_graph(), machine="a processor, 2 threads, torch 2.13, 2026-11-22")
    assert "times are of a processor, 2 threads, torch 2.13, 2026-11-22" in outline(html.render(CompileReport([graph])))


def test_decisions_are_named_with_times_spread_and_source():
    times = {"ATen": Timing(0.012, 0.05), "oneDNN": Timing(0.006, 0.031)}
    decided = (
        Decision("products", "float32", "oneDNN", "measured", times),
        Decision("rates", "cpu", {"bytes_per_s": 2**33, "op_overhead_s": 2e-6, "torch.float32": 90e9}, "busy"),
        *(Decision("workspace bytes", f"aten.mm({i})", 0, "cache") for i in range(3)),
    )
    report = CompileReport([replace(example.train_graph(), decisions=Record(decided))])
    page, text = html.render(report).replace("<wbr>", ""), " ".join(str(report).split())
    for part in (
        "products of float32", "ATen 12.0 ms (+5.00 %), oneDNN 6.00 ms (+3.10 %)", "measured now", "rates of cpu",
        "memory 8.00 GiB/s, a call 2 us, float32 90.0 GFLOP/s", "by the fixed model, for the machine was busy",
        "workspace bytes of calls", "3 figures",
    ):  # fmt: skip
        assert part in page and part in text, part
    assert "2 decisions: 1 measured now, 1 by the fixed model" in page and report.decisions.fingerprint in page


def test_each_colour_of_the_memory_picture_has_its_key():
    page = html.render(example.report_with_timeline())
    drawn = set(re.findall(r'class="layer ([\w-]+)"', page))
    keys = re.findall(r'<li><span class="key ([\w-]+)"></span>[^<]+</li>', page)
    assert drawn and drawn == set(keys)


def test_an_empty_column_is_left_out_of_a_table_without_widths():
    columns = [Column("what"), Column("times"), Column("from")]
    drawn = table(columns, [["a", "", "b"], ["c", "", "d"]])
    assert "times" not in drawn and drawn.count("<td") == 4
    assert "times" in table(columns, [["a", "", "b"], ["c", "1 s", "d"]])
    assert "times" in table([Column(c.name, share=33) for c in columns], [["a", "", "b"]])
