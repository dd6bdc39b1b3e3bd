"""Tables of figures in the texts are those that benchmarks recorded."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import bench_budget, bench_compare, bench_compile, bench_kernels, bench_peaks, bench_training, figures
from scripts.figures import COMMANDS, RECORDED, TEXTS, Figures, Row, markdown, plots_in, tables_in, written

TEXT = "before\n<!-- figures: speed -->\nold | figures\n<!-- end of figures -->\nafter\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RECORDED", tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_texts_have_what_was_recorded(path):
    text = path.read_text(encoding="utf-8")
    assert written(text) == text, "write the tables: python scripts/figures.py"


def test_every_recorded_table_stands_in_a_text_and_has_its_commands():
    texts = [path.read_text(encoding="utf-8") for path in TEXTS]
    tables, plots = ({name for text in texts for name in of(text)} for of in (tables_in, plots_in))
    recorded = {path.stem for path in RECORDED.glob("*.json")}
    assert tables == recorded - plots
    assert recorded | plots <= COMMANDS.keys()


def test_every_picture_shows_what_was_recorded():
    for path, drawn in figures.plots().items():
        assert path.read_text(encoding="utf-8") == drawn, "draw it: python scripts/figures.py"


def test_every_command_is_a_script_that_records():
    for command in {command.split()[0] for commands in COMMANDS.values() for command in commands}:
        assert '"--record"' in (figures.ROOT / command).read_text(encoding="utf-8"), command


def test_no_other_table_has_measured_figures():
    """Times, bytes and ratios of speed in a table come from a benchmark."""
    for path in TEXTS:
        rest = figures._BLOCK.sub("", path.read_text(encoding="utf-8"))
        rows = [line for line in rest.splitlines() if line.startswith("|")]
        assert [row for row in rows if re.search(r"\d(\.\d+)?x\b|\d (ms|s|MiB|GiB)\b", row)] == []


def test_rows_of_several_runs_make_one_table(folder, monkeypatch):
    for arguments, rows in ((["--model", "a"], [["a", "1 ms"], ["b", "2 ms"]]), (["--model", "b"], [["b", "3 ms"]])):
        monkeypatch.setattr(sys, "argv", ["/some/where/bench_speed.py", *arguments, "--record"])
        figures.record("speed", ("model", "time"), rows, "transformers 5")
    found = figures.load("speed")
    assert [row.cells for row in found.rows] == [("a", "1 ms"), ("b", "3 ms")]
    text = written(TEXT)
    assert "| a | 1 ms |\n| b | 3 ms |\n" in text and "old" not in text
    assert "<sub>a: `python scripts/bench_speed.py --model a`; " in text and ", transformers 5</sub>" in text
    assert text.startswith("before\n") and text.endswith("after\n") and written(text) == text


def test_a_command_is_kept_without_folders_of_the_machine(folder, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["/some/where/bench_speed.py", "--out", "/some/where/a.csv", "b/c.csv", "--record"]
    )
    figures.record("speed", ("model", "time"), [["a", "1 ms"]])
    (row,) = figures.load("speed").rows
    assert row.command == "scripts/bench_speed.py --out a.csv b/c.csv"


def test_another_header_is_another_table(folder):
    for header in (("model", "time"), ("model", "peak")):
        figures.record("speed", header, [[header[1], "1"]])
    assert [row.cells[0] for row in figures.load("speed").rows] == ["peak"]


def test_one_origin_is_named_once():
    known = Figures(("model", "time"), tuple(Row((name, "1 ms"), "bench.py", "a machine") for name in "ab"))
    assert markdown(known).endswith("| b | 1 ms |\n\n<sub>`python bench.py`; a machine</sub>\n")


def test_a_stale_text_fails_the_check(folder, monkeypatch, capsys):
    text = folder / "text.md"
    text.write_text(TEXT, encoding="utf-8")
    figures.save("speed", Figures(("model", "time"), (Row(("a", "1 ms"), "bench.py", "a machine"),)))
    monkeypatch.setattr(figures, "TEXTS", (text,))
    monkeypatch.setattr(figures, "ROOT", folder)
    for arguments, code, said in (["--check"], 1, "other figures"), ([], 0, "written"), (["--check"], 0, ""):
        monkeypatch.setattr(sys, "argv", ["figures.py", *arguments])
        assert figures.main() == code
        assert said in capsys.readouterr().out


def test_a_recorded_plot_is_drawn_and_shown(folder, monkeypatch):
    text = folder / "text.md"
    text.write_text("<!-- plot: speed -->\n<!-- end of figures -->\n", encoding="utf-8")
    monkeypatch.setattr(figures, "TEXTS", (text,))
    monkeypatch.setattr(figures, "ROOT", folder)
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0 and "![" not in text.read_text(encoding="utf-8") and not figures.plots()
    names = {"eager": (4e3, 900), "aottrain, budget 1.0": (3e3, 500), "aottrain, budget 0.4": (3500, 300)}
    rows = [
        {"engine": "aot" if "budget" in name else name, "budget": name[-3:], "round_ms": f"{ms - 9} {ms} {ms + 9}",
         "peak_bytes": str(peak << 20)}
        for name, (ms, peak) in names.items()
    ]  # fmt: skip
    kept = [Row(tuple(cells), "bench.py", "a machine") for cells in bench_compare.recorded(rows)]
    assert kept[2].cells == ("aottrain, budget 0.4", "3500 [3491, 3509]", "300")
    figures.save("speed", Figures(("<A model>", "ms", "MiB"), tuple(kept)))
    assert figures.main() == 0 and figures.main() == 0
    shown = text.read_text(encoding="utf-8")
    assert "](scripts/recorded/speed.svg)\n\n<sub>`python bench.py`; a machine</sub>\n<!--" in shown
    drawn = ElementTree.parse(folder / "speed.svg").getroot()
    words = list(drawn.itertext())
    assert set(words) >= {*names, "A training step: <A model>", "0"}
    points = [point.get("transform") for point in drawn.iter() if point.get("class", "").startswith("point")]
    tight, roomy, eager = (float(place.partition(",")[2][:-1]) for place in points)
    assert eager < tight < roomy  # the slowest stands highest


def test_lines_are_drawn_and_told_where_they_begin_and_end(folder, monkeypatch):
    text = folder / "text.md"
    text.write_text("<!-- plot: losses -->\n<!-- end of figures -->\n", encoding="utf-8")
    monkeypatch.setattr(figures, "TEXTS", (text,))
    rows = {"eager": "1:5.5 2:4 3:3", "aottrain": "1:5.5 2:4.01 3:3", "another": "1:2 3:1"}
    kept = tuple(Row(each, "bench.py", "a machine") for each in rows.items())
    figures.save("losses", Figures(("Loss: <A model>", "lines", "step", "loss"), kept))
    assert "eager: 5.5 at step 1, 3 at 3; aottrain: " in written(text.read_text(encoding="utf-8"))
    (drawn,) = figures.plots().values()
    found = ElementTree.fromstring(drawn)
    assert {"Loss: <A model>", "eager", "aottrain", "another", "step", "loss"} <= set(found.itertext())
    lines = [each for each in found.iter() if each.tag.endswith("polyline") and each.get("points").count(" ") > 1]
    widths = [float(re.search(r"stroke-width:([\d.]+)", each.get("style"))[1]) for each in lines]
    assert len(lines) == 2 and widths[0] > widths[1], "the lower of two that lie over each other is thicker"
    heights = [float(pair.split(",")[1]) for pair in lines[0].get("points").split()]
    assert heights == sorted(heights), "losses fall"


def test_figures_of_a_training_are_those_of_its_folders(tmp_path):
    for name, peak in (("0", 300), ("1", 200), ("2", 100)):
        (tmp_path / name).mkdir()
        summary = {"peak_bytes": peak << 20, "predicted_peak_bytes": peak << 20, "saved_bytes": 1 << 20}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        (tmp_path / name / "metrics.csv").write_text("step,train/loss\n1,5.51234\n2,4.5\n", encoding="utf-8")
    (tmp_path / "sweep.csv").write_text("job,engine\n0,eager\n1,torch_compile\n2,aot\n", encoding="utf-8")
    engines = bench_training.jobs(tmp_path, "engine")
    assert bench_training.losses(engines)[1:] == [
        ["torch.compile", "1:5.5123 2:4.5000"], ["aottrain", "1:5.5123 2:4.5000"],
    ]  # fmt: skip
    table = bench_training.memory(engines, dict.fromkeys(bench_training.BUDGETS, tmp_path / "2"))
    assert table[0] == ["eager's peak", "0.0:300.0 1.0:300.0"] and table[2][0] == "measured peak"
    assert table[2][1].startswith("0.0:100.0 ") and table[4] == ["saved", table[4][1].replace("100.0", "1.0")]


def test_a_table_without_record_is_named():
    with pytest.raises(KeyError, match="nowhere"):
        written("<!-- figures: nowhere -->\n<!-- end of figures -->")


def test_it_runs_as_a_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(figures.__file__)), run_name="__main__")
    assert ended.value.code == 0


def test_rows_of_each_benchmark():
    points = {engine: bench_kernels.Point(engine, engine).timed(times) for engine, times in
              (("eager", [4.0, 6.0]), ("aot", [2.0, 2.0]))}  # fmt: skip
    known = {engine: {"peak_bytes": 1 << 20, "compile_s": 1.0} for engine in points}
    assert bench_kernels._recorded("gates", points, known)[1:] == [
        "5.0, -, 2.0", "-", "2.50x [2.00, 3.00]", "-", "1.00 MiB, -, 1.00 MiB", "-, 1.0 s",
    ]  # fmt: skip
    mib = bench_peaks.MIB
    engines = {"eager": {"peak": 3 * mib}, "torch.compile": {"peak": 2 * mib},
               "ours": {"peak": mib, "predicted": None, "graphs": 2}}  # fmt: skip
    assert bench_peaks.recorded({"gpt2": engines, "vit-base": {"eager": {}}}, ["gpt2", "vit-base"]) == [
        ["GPT-2 124M", "2 x 256", "3", "2", "1 (2 graphs)"]
    ]
    del engines["torch.compile"]
    assert bench_peaks.recorded({"gpt2": engines}, ["gpt2"])[0][3] == "not measured"
    runs = [
        {"engine": "eager", "peak_bytes": str(4 * mib), "round_ms": "3 3"},
        {"engine": "eager_checkpoint", "peak_bytes": str(2 * mib), "round_ms": "4 4"},
        {"engine": "aot", "peak_bytes": str(3 * mib), "round_ms": "2 2"},
        {"engine": "aot", "peak_bytes": str(mib), "round_ms": "3 2"},
    ]
    assert bench_budget.recorded("llama", runs) == [
        "llama", "4.00 MiB", "2.00 MiB; ours in 1.00 MiB takes 0.62x [0.50, 0.75] of that time", "-", "1.00 MiB",
    ]  # fmt: skip
    seconds = {name: 1.0 for name in ("aottrain", "prepare", "first step", "second step", "all")}
    run = {"cpu_s": seconds, "wall_s": seconds, "stages": [("link", 0.5, 0.25)], "kernels": 8, "functions": 3}
    rows = bench_compile.recorded({4: {"cold": run, "warm": run}})
    assert rows[0] == ["cold, all of it", "1.00 s"] and rows[1][1] == "0.25 s"
    assert rows[-1] == ["kernels launched, distinct functions", "8, 3"]
