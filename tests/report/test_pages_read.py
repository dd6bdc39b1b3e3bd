"""What a reader of a page needs: headings in order, one unit on an axis, no empty lines in a narrow table, and of each
kernel what it moves beside what it must."""

import copy
import gc
import json
import pickle
import re
import weakref
from dataclasses import replace
from html import unescape as html_text

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler import reporting
from aottrain.explain.pictures import Pictures
from aottrain.explain.records import Diagram
from aottrain.explain.report import CompileReport
from aottrain.explain.traffic import Traffic
from aottrain.report import html
from aottrain.report.charts import breakable, byte_text, byte_ticks
from aottrain.report.page import heading, in_order, page, within
from aottrain.report.runs import plots
from aottrain.report.runs.drawing.pages import render
from aottrain.report.runs.folders import collect
from aottrain.report.style import CSS
from tests.explain import example
from tests.report.fake_runs import write_comparison, write_run, write_sweep

KIB = 1024


def levels(document: str) -> list[int]:
    return [int(level) for level in re.findall(r"<h([1-6])\b", document)]


def leaves_none_out(document: str) -> bool:
    found = levels(document)
    return found[0] == 1 and all(after <= before + 1 for before, after in zip(found, found[1:], strict=False))


def documents(folder):
    yield render(collect([write_comparison(folder / "comparison")]))
    yield render(collect([write_sweep(folder / "sweep", [{"seed": 1}, {"seed": 2}])]))
    run = write_run(folder / "run")
    yield render(collect([run]))
    (run / "compile_report.html").write_text(html.render(example.report_with_timeline()), encoding="utf-8")
    yield render(collect([run]))
    for made in (example.report(), example.report_with_timeline(), example.report_with_fallbacks()):
        yield html.render(made, example.SUMMARY)


def test_no_page_leaves_a_level_of_headings_out(tmp_path):
    for document in documents(tmp_path):
        assert leaves_none_out(document), levels(document)
        assert len(re.findall(r"<h[1-6]\b", document)) == len(re.findall(r"</h[1-6]>", document))


def test_a_heading_that_is_moved_up_keeps_its_look_and_closes_as_it_opens():
    moved = in_order(f"<h1>a</h1>{heading('b')}<h2>c</h2>{heading('d')}")
    assert moved == '<h1>a</h1><h2 class="h3">b</h2><h2>c</h2><h3>d</h3>'
    assert "<h3>" in page("t", ["<h1>a</h1><h2>b</h2><h3>c</h3>"])
    assert "<pre>&lt;h3&gt;</pre>" in page("t", ["<h1>a</h1><pre>&lt;h3&gt;</pre>"])


def test_what_stands_within_another_page_has_no_headings_of_its_own():
    """They would leave out levels there, as below the title of a notebook."""
    inner = within(["<h1>a</h1>", heading("b", "c"), "<pre>&lt;h3&gt;</pre>"])
    assert '<p class="h1">a</p>\n<p class="h3">b<small>c</small></p>\n<pre>&lt;h3&gt;</pre>' in inner
    assert not levels(inner)


def test_the_keyboard_comes_to_every_text_that_scrolls(tmp_path):
    """A region that scrolls and takes no focus shows its beginning alone to whoever has no pointer."""
    found = [text for document in documents(tmp_path) for text in re.findall(r"<pre\b[^>]*>", document)]
    assert found and all('tabindex="0"' in text for text in found)


def test_a_line_ends_between_names_and_not_within_a_file_s():
    assert breakable("a.b_c<d") == "a.<wbr>b_<wbr>c&lt;d"
    assert breakable("model.py:113, own.pyi:1, pyramid.pyx") == "model.py:113, own.pyi:1, pyramid.<wbr>pyx"


@pytest.mark.parametrize(
    ("most", "texts"),
    [
        (1000 * KIB, ["0", "200 KiB", "400 KiB", "600 KiB", "800 KiB", "1000 KiB"]),
        (1.2 * KIB**2, ["0", "0.5 MiB", "1 MiB", "1.5 MiB"]),
        (900, ["0", "200 B", "400 B", "600 B", "800 B", "1000 B"]),
    ],
)
def test_an_axis_of_bytes_has_one_unit(most, texts):
    assert list(byte_ticks([0, most], 5).values()) == texts
    assert byte_text(1000 * KIB, KIB) == "1000 KiB"


def test_the_memory_of_a_run_has_one_unit_on_its_axis(tmp_path):
    document = render(collect([write_run(tmp_path / "run", peak=int(110 * KIB))]))  # the process: nine times that
    memory = document.partition(">Peak memory of a step<")[2].partition("</figure>")[0]
    units = {text.partition(" ")[2] for text in re.findall(r'<span style="bottom:[^"]*">([^<]+)<', memory)} - {""}
    assert units == {"KiB"}


def test_a_cell_without_contents_takes_no_line_where_the_page_is_narrow():
    """Of two rules of one weight the later holds; cells of numbers have a rule of their own."""
    narrow = CSS.partition("@container (max-width: 720px)")[2]
    shown, hidden = narrow.index("td.number { display: grid"), narrow.index("td.number.empty { display: none")
    assert shown < hidden


def test_where_all_end_alike_none_is_the_lowest(tmp_path):
    document = render(collect([write_sweep(tmp_path, [{"seed": 1}, {"seed": 2}])]))
    assert "All ended with a held-out loss of" in document and "with the lowest" not in document


class Chain(nn.Module):
    """A norm whose result one product reads, and a sum of two things that no product can join."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    step = aottrain.compile(Chain(), capture="trace", kernel="cpp", partition="recompute_all")
    step(torch.randn(64, 16)).sum().backward()
    return step.report


def test_each_kernel_is_told_what_it_moves_and_what_it_must(compiled):
    graph = compiled.main_graph
    assert graph.kernel_records
    for record in graph.kernel_records:
        assert 0 < record.needed_bytes <= record.total_bytes, record.names
    between = [record for record in graph.kernel_records if record.needed_bytes < record.total_bytes]
    assert between  # a column sum of what another kernel made
    text = html.render(compiled)
    assert 'data-label="at least"' in text and "moves 1x" not in text and re.search(r"moves [\d.]+x", text)
    for least, told in ((60, True), (100, False)):  # of many saved values no less is known than what is moved
        of = replace(graph, traffic=Traffic(lambda least=least: (100, least)))
        assert ("The whole program, library calls among it" in html.render(CompileReport([of]))) is told


def test_a_kernel_between_library_calls_needs_all_that_it_moves():
    def between(x, w):
        return torch.mm(torch.tanh(torch.mm(x, w)) * 2, w)

    step = aottrain.compile(between, capture="trace", kernel="cpp")
    with torch.no_grad():
        step(torch.randn(16, 16), torch.randn(16, 16))
    (record,) = step.report.main_graph.kernel_records
    assert record.needed_bytes == record.total_bytes == 2 * 16 * 16 * 4


def test_what_goes_from_kernel_to_kernel_is_not_needed():
    def two(x):
        rows = x.softmax(-1)
        return rows.softmax(0)

    step = aottrain.compile(two, capture="trace", kernel="cpp")
    with torch.no_grad():
        step(torch.randn(64, 128))
    records = step.report.main_graph.kernel_records
    assert sum(len(record.names) for record in records) > 1
    least = 2 * 64 * 128 * 4  # what is given and what comes out
    assert sum(record.needed_bytes for record in records) == least < sum(record.total_bytes for record in records)


def test_where_the_bandwidth_was_not_measured_that_is_said(tmp_path):
    run = write_run(tmp_path / "run")
    rows = [{"name": "forward_kernel_0", "calls": 1, "seconds": 1e-3, "bytes": 2**20}]
    for rate, told in ((None, True), (2**33, False)):
        profile = {"steps": 1, "seconds": 1e-3, "bytes_per_s": rate, "rows": rows}
        (run / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
        document = render(collect([run]))
        assert ("no shares of the memory's bandwidth" in html_text(document)) is told
        assert ("of memory's" in html_text(document)) is not told


def test_pictures_are_made_when_they_are_read_and_once(monkeypatch):
    made = []
    monkeypatch.setattr(reporting, "half_diagrams", lambda *args: made.append(args) or [])
    step = aottrain.compile(torch.tanh, capture="trace", kernel="cpp")
    with torch.no_grad():
        step(torch.randn(4))
    graph = step.report.main_graph
    assert not made and repr(graph.diagrams) == "<Pictures: not drawn yet>"
    assert len(graph.diagrams) == len(list(graph.diagrams)) == 1 and len(made) == 1
    assert repr(graph.diagrams) == "<Pictures: 1>"


def test_pictures_are_copied_as_what_they_show():
    one = Diagram("a", (), ())
    for copied in (copy.deepcopy(Pictures(lambda: [one])), pickle.loads(pickle.dumps(Pictures(list)))):
        assert isinstance(copied, tuple)
    assert Pictures(lambda: [one])[0] == one and Pictures(lambda: [one, one])[:1] == (one,)


def test_what_pictures_are_made_from_is_let_go_of():
    class Program:
        pass

    program = Program()
    pictures, gone = Pictures(lambda held=program: [Diagram(type(held).__name__, (), ())]), weakref.ref(program)
    assert pictures[0].title == "Program"
    del program
    gc.collect()
    assert gone() is None


def test_the_texts_of_a_deep_model_leave_room_on_its_page():
    (graph,) = example.report_with_timeline().graphs
    short = len(html.render(CompileReport([graph])))
    deep = graph.changed(forward_text="a = add(b)\n" * 400_000, backward_text="c = mul(d)\n" * 700_000)
    page = html.render(CompileReport([deep]))
    assert len(page) - short < 650_000 and page.count("cut off: all of it is in the report") == 2


def test_plots_have_titles_units_and_grids_behind_their_bars(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "_save", lambda axes, path: drawn.setdefault(path.stem, axes) and path)
    plots.write_plots(collect([write_comparison(tmp_path)]).runs, tmp_path)
    titles = {name: axes.get_title(loc="left") for name, axes in drawn.items()}
    assert titles["train_loss"] == "Loss by step" and titles["peak_bytes"] == "Peak memory of each run"
    assert drawn["peak_bytes"].get_xlabel() == "peak memory (MiB)"
    assert [text.get_text() for text in drawn["peak_bytes"].texts] == ["150", "100", "50"]
    assert all(axes.get_axisbelow() for axes in drawn.values()) and drawn["perf_step_ms"].get_ylim()[0] == 0
    to_hex = pytest.importorskip("matplotlib.colors", reason="matplotlib is not installed").to_hex
    # A run has its colour in each; only losses, which cover each other, are drawn thinner and thinner.
    colours = [line.get_color() for line in drawn["train_loss"].get_lines()]
    assert [to_hex(bar.get_facecolor()) for bar in drawn["peak_bytes"].patches] == colours
    widths = {name: len({line.get_linewidth() for line in drawn[name].get_lines()}) for name in drawn}
    assert (widths["train_loss"], widths["perf_step_ms"]) == (3, 1)
