"""What `print(step.report)` and `repr` show, and how a report reaches a file and a notebook."""

import re
from dataclasses import replace

import aottrain
from aottrain.explain.report import CompileReport, GraphBreak, add_fallback
from aottrain.explain.summary import WIDTH, summarise
from aottrain.report import html
from tests.explain import example

FACTS = {"capture": "trace", "inputs": ("float32[16 x 128]",), "num_parameters": 1_850_000}
FACTS |= {"machine": "a machine, today"}


def known(report: CompileReport) -> CompileReport:
    return CompileReport([replace(graph, **FACTS) for graph in report.graphs], report.fallbacks, target="GPT")


def test_a_printed_report_is_a_page():
    report = known(example.report_with_timeline())
    text = str(report)
    lines = text.splitlines()
    assert lines[0] == "Compile report of GPT" and len(lines) < 60 and max(map(len, lines)) <= WIDTH + 20
    flat = " ".join(text.split())
    for part in (
        "captured by direct trace",
        "float32[16 x 128]; 1.85 M parameters",
        "partition budget, budget 0.4",
        "13.0 MiB in 8 values; by min_cut 22.0 MiB, save_all 61.0 MiB",
        "4 values of 16.0 MiB; 16.8 MFLOP, 0.53 % of the forward",
        "while aten.mm.default runs in blocks.1.mlp",
        "compile time 1.51 s; of this program: joint 620 ms, capture 410 ms",
        "machine a machine, today",
        "fallbacks none",
        "3.00 MiB addmm_0 16 x 128 x 384 float32 blocks.0.attention.qkv, transformer.py:41",
        "recomputing it would need a matrix product",
    ):
        assert part in flat, part


COLLECTIVES = (
    "2, 6.00 MiB into each process; 6.00 ms on the link by the cost model, of it 4.00 ms exposed (66.7 %); "
    "the first sum leaves after 20.0 % of the backward"
)


def test_collectives_are_counted_with_what_is_exposed():
    report = example.report_with_collectives()
    assert f"collectives {COLLECTIVES}" in " ".join(str(report).split())
    text = report.explain()
    assert COLLECTIVES in text
    assert "4.00 MiB  2.00 ms     8.00 ms      4.00 ms  2.00 ms  2.00 ms  backward: sum_start(float32[8])" in text
    assert "ollectives" not in str(example.report()) + example.report().explain()


def test_what_ran_eagerly_is_named_with_its_line():
    text = str(known(example.report_with_fallbacks()))
    assert "3 calls ran eagerly, see below" in text and "3 calls at model.py:12" in text
    assert "aten.nonzero has a data-dependent shape <unbounded>" in text
    assert "2 programs; the one that saves most" in text and "Other programs" in text


def test_graph_breaks_are_named_with_their_lines():
    report = known(example.report_with_timeline())
    report.graph_breaks.append(GraphBreak("a call of print", "model.py:8"))
    text = str(report)
    assert "Where TorchDynamo broke the graph\n  model.py:8: a call of print\n  a peak, and a budget," in text


def test_what_is_said_of_fallbacks_agrees_with_the_graph_breaks_below_it():
    report = known(example.report_with_timeline())
    assert "fallbacks       none\n" in str(report) and "Everything ran compiled" in html.render(report)
    report.graph_breaks.append(GraphBreak("a call of print", "model.py:8"))
    assert "fallbacks       none inside the graphs; 1 graph break, see below\n" in str(report)
    page = html.render(report)
    assert "Everything ran compiled" not in page
    assert "No fallbacks to eager inside the graphs; 1 graph break, between which Python runs" in page


def test_where_nothing_is_computed_again_that_is_said():
    graph = replace(example.train_graph(), recomputed=(), recompute_flops=0)
    assert "recomputed      nothing\n" in str(CompileReport([graph]))


def test_an_empty_report_is_a_page_too():
    assert "nothing was compiled yet" in str(CompileReport()) and str(CompileReport()).count("\n") == 2


def test_a_repr_is_one_short_line():
    report = known(example.report())
    assert repr(report) == ("<CompileReport of GPT: 1 program, 0 fallbacks, saved 13.0 MiB; print it, or .save(path)>")
    assert repr(report.graphs[0]) == (
        "<GraphReport: train, budget 0.4, kernel aten, saved 13.0 MiB, predicted peak 44.0 MiB>"
    )
    assert "graph():" not in repr([report])


def test_a_report_is_saved_and_shown_in_a_notebook(tmp_path):
    report = known(example.report_with_fallbacks())
    path = report.save(tmp_path / "report.html")
    page = path.read_text()
    assert path == tmp_path / "report.html" and page.startswith("<!doctype html>") and "Compile report of GPT" in page
    shown = report._repr_html_()
    assert shown.startswith('<div class="aottrain"><style>') and "Compile report of GPT" in shown
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:|<html|<body", shown)
    assert "Forward graph" in page and "Forward graph" not in shown  # a notebook keeps what it shows
    # No rule of ours may reach what stands around the report.
    css = re.search(r"<style>(.*?)</style>", shown, re.DOTALL)[1]
    depth, selectors = 0, []
    for part in re.findall(r"[^{}]*[{}]", css):
        if part.endswith("{") and depth == 0:
            selectors.append(part[:-1].strip())
        depth += 1 if part.endswith("{") else -1
    assert depth == 0 and selectors and all(".aottrain" in name or name.startswith("@media") for name in selectors)


def test_what_was_compiled_is_in_the_report_of_either_frontend():
    import torch
    from torch import nn

    for capture, name in (("trace", "direct trace"), ("dynamo", "TorchDynamo")):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        step = aottrain.compile(model, capture=capture, kernel="aten")
        step(torch.ones(3, 4)).sum().backward()
        graph = step.report.graphs[0]
        assert graph.inputs == ("float32[3 x 4]",) and graph.num_parameters == 28 and graph.capture == capture
        fixed = {name: graph.memory[name] for name in ("parameters", "buffers", "batch")}
        assert fixed == {"parameters": 4 * 28, "buffers": 4 * 8 + 8, "batch": 4 * 12}
        assert graph.timeline is None or fixed.items() <= graph.timeline.fixed.items()
        assert "torch " + torch.__version__ in graph.machine
        text = summarise(step.report)
        assert text.startswith("Compile report of Sequential\n") and f"captured by     {name}" in text


def test_a_reason_is_new_once_and_counted_always():
    report = CompileReport([])
    assert [add_fallback(report, reason, "a.py:1") for reason in ("one", "one", "two")] == [True, False, True]
    assert not add_fallback(report, "one")  # wherever it was
    assert [(known.reason, known.count) for known in report.fallbacks] == [("one", 3), ("two", 1)]
