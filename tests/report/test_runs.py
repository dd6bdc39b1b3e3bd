"""The pages of runs: each run and each difference is there, names are text, damaged files cost a line."""

import csv
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from aottrain.errors import OutputError
from aottrain.explain.report import CompileReport
from aottrain.ir.units import format_seconds
from aottrain.metrics.sinks import write_result
from aottrain.report import html
from aottrain.report.runs.drawing import overview
from aottrain.report.runs.drawing.curves import Axes, Curve, Key, Mark, line_plot, thinned
from aottrain.report.runs.drawing.one import spikes
from aottrain.report.runs.drawing.pages import leave_page, render, write_page
from aottrain.report.runs.drawing.script import SCRIPT
from aottrain.report.runs.folders import collect, natural
from aottrain.report.runs.reading import read_metrics, read_run, timed
from aottrain.report.runs.rows import Bar, bar_rows
from aottrain.report.runs.settings import changing, differences, first_keys, short
from aottrain.report.runs.spread import quartiles, time_ratio
from aottrain.report.runs.verdicts import fastest, least_memory, losses, verdicts
from tests.report.fake_runs import write_comparison, write_overrides, write_run, write_sweep
from tests.report.test_html import outline

ENGINES = [{"engine.name": name} for name in ("eager", "torch_compile", "aot")]
HOSTILE = "<script>alert(1)</script>\"&'<img src=x>"


def text_of(page: str) -> str:
    """What is seen; it is well formed, runs one script alone, and loads nothing."""
    assert page.count("<script") == 1 and SCRIPT in page
    plain = page.replace(f"<script>{SCRIPT}</script>", "").replace('<link rel="icon" href="data:,">', "")
    assert not re.search(r"<img|@import|url\(|https?:|<link", plain)
    return re.sub(r"\s+", " ", outline(re.sub(r"<(meta|input)\b[^>]*>", "", plain)))


def page_of(*folders) -> str:
    return render(collect(folders))


def test_a_comparison_has_each_engine_a_verdict_and_the_command(tmp_path):
    page = page_of(write_comparison(tmp_path / "c"))
    text = text_of(page)
    for part in ("eager", "torch_compile", "aot was fastest: 2.00x the speed of eager", "aot needed least memory",
                 "aot: compiled by aottrain.",
                 "The losses agree", "3.0e-07", "python -m aottrain task=compare compare.rounds=3", "engine.name",
                 "Loss by step", "Loss by time", "Step time", "Tokens a second", "Compile time", "Peak memory",
                 "Saved for the backward, by module", "blocks.*.mlp"):  # fmt: skip
        assert part in text, part
    assert page.count('<tr data-run="') == 3 and len(re.findall(r'class="curve [^"]*" data-run="0"', page)) == 2
    assert "Held-out" not in text  # of a few steps it says nothing


def test_the_losses_of_a_comparison_pass_at_the_pace_that_was_timed_in_turns(tmp_path):
    """The steps whose losses are compared run one engine after the other, and say nothing of its speed."""
    write_comparison(tmp_path)
    settings = {"engine.name": "eager"}
    write_run(tmp_path / "eager" / "losses", steps=10, step_ms=9000.0, settings=settings)  # something else ran then
    found = collect([tmp_path])
    ends = {run.name: overview.timed(run)[-1][0] for run in found.runs}
    medians = {run.name: run.number("step_ms_median") for run in found.runs}
    assert ends == {name: pytest.approx(10 * ms / 1e3) for name, ms in medians.items()}
    assert "every step at its engine's median" in text_of(render(found)).replace("&#x27;", "'")


def test_an_engine_that_failed_has_its_row_and_its_reason(tmp_path):
    step_ms = {"eager": 300.0, "torch_compile": 1.0, "aot": 299.0}
    text = text_of(page_of(write_comparison(tmp_path, failing="torch_compile", step_ms=step_ms)))
    assert "torch_compile failed: E: no compiler." in text and "The losses agree" in text
    assert "torch_compile was fastest" not in text


def test_a_sweep_names_its_jobs_by_what_differs_and_draws_its_budgets(tmp_path):
    jobs = [{"partition.budget": budget} for budget in (0.0, 0.5, 1.0)] + [{"engine.name": "eager"}]
    write_sweep(tmp_path, jobs, step_ms=lambda i: 300.0 - 40 * i, peak=lambda i: (60 + 20 * i) * 2**20)
    found = collect([tmp_path])
    assert [run.name for run in found.runs] == ["budget=0.0", "budget=0.5", "budget=1.0", "engine=eager"]
    assert found.page == tmp_path / "sweep.html"
    page = render(found)
    text = text_of(page)
    assert "Memory against speed" in text and "aottrain, by budget" in text and page.count('class="point s') == 3 * 4
    assert "partition.budget" in text and "engine.name" in text and "budget=0.0 needed least memory" in text
    (tmp_path / "3" / "summary.json").unlink()
    (tmp_path / "3" / "metrics.csv").unlink()
    assert "job engine=eager: 3 has no figures of a run" in text_of(page_of(tmp_path))


def test_two_hundred_jobs_are_one_page_of_less_than_three_megabytes(tmp_path):
    folder = write_run(tmp_path / "0", steps=400)
    run = read_run(folder)
    draws = [math.sin(i * i) for i in range(400)]  # curves that thinning cannot make short
    runs = []
    for i in range(200):
        loss = [(step, 3 + draws[(step * (i + 3)) % 400]) for step in range(1, 401)]
        metrics = {**run.metrics, "train/loss": loss, "val/loss": loss}
        settings = {**run.settings, "partition.budget": i / 200, "seed": i % 4}
        runs.append(run.__class__(f"budget={i / 200} seed={i % 4}", folder, run.summary, metrics, settings, run.rounds))
    found = collect([tmp_path])
    page = render(found.__class__("sweep", tmp_path, tuple(runs)))
    assert 500_000 < len(page.encode()) < 3_000_000
    assert page.count("<tr data-run=") == 200 and "seed=3" in page and "188 more" in page
    assert all(f'data-name="budget={i / 200} seed={i % 4}"' in page for i in range(200))


def test_where_time_goes_is_on_the_page_of_a_run_that_was_profiled(tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    rows = [
        {"name": "aten::mm", "calls": 4.0, "seconds": 0.03},
        {"name": "forward_kernel_1", "calls": 2.0, "seconds": 0.01, "bytes": 2**26, "computes": "gelu",
         "lines": [f"{HOSTILE}.py:3"]},
    ]  # fmt: skip
    told = {"steps": 3, "seconds": 0.04, "bytes_per_s": 25 * 2**30, "rows": rows, "left_out": 7}
    (folder / "profile.json").write_text(json.dumps(told), encoding="utf-8")
    text = text_of(page_of(folder))
    assert "Where time goes" in text and "aten::mm" in text and "75.0 %" in text and "7 more are in trace.json" in text
    assert "12.5 GiB/s" in text and "50.0 % of memory's" in text and "gelu; <script>" in text
    for spoiled in ("", "[]", "{}", '{"rows": 3}', '{"rows": [3, {}], "seconds": 1}', '{"rows": [{}], "seconds": "x"}'):
        (folder / "profile.json").write_text(spoiled, encoding="utf-8")
        assert "Where time goes" not in text_of(page_of(folder))


def test_samples_of_each_evaluation_are_on_the_page(tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    assert "at each evaluation" not in text_of(page_of(folder))
    told = [{"step": step, "text": f"written-{step}. {HOSTILE}"} for step in (*range(1, 26), 25)]
    told[-1]["text"] = "again"
    lines = [*map(json.dumps, told), "[1]", "3", '{"step": "x"}', '{"step": 26, "te']
    (folder / "samples.jsonl").write_text("\n".join(lines), encoding="utf-8")
    text = text_of(page_of(folder))
    assert "What it wrote at each evaluation" in text and "the last 20 of 25" in text
    assert "again" in text and "written-25." not in text and "written-6." in text and "written-5." not in text
    assert "<script>alert(1)</script>" in text


def test_differences_from_eager_are_a_plot_where_steps_were_checked(tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    assert "Difference from eager" not in text_of(page_of(folder))
    lines = (folder / "metrics.csv").read_text(encoding="utf-8").splitlines()
    place = lines[0].split(",").index("verify/max_error")
    rows = [line.split(",") for line in lines[1:]]
    written = [",".join([*row[:place], "1e-6", *row[place + 1 :]]) for row in rows]
    (folder / "metrics.csv").write_text("\n".join([lines[0], *written]), encoding="utf-8")
    assert "Difference from eager" in text_of(page_of(folder))


def test_names_and_texts_are_text_wherever_they_come_from(tmp_path):
    for number in (1, 2):
        folder = tmp_path / f"{number}<b>x<"
        settings = {"engine.name": f"{HOSTILE}{number}", "seed": number, f"{HOSTILE}.key": number}
        write_run(folder, steps=12, settings=settings, recipe=HOSTILE, machine=HOSTILE, error=HOSTILE, device=HOSTILE,
                  saved_by_module={HOSTILE: 5.0}, status=HOSTILE, verify_note=HOSTILE)  # fmt: skip
        (folder / "sample.txt").write_text(HOSTILE, encoding="utf-8")
        write_overrides(folder, [HOSTILE])
    for page, names in ((page_of(tmp_path), True), (page_of(folder), False), (page_of(folder, tmp_path), True)):
        text = text_of(page)
        assert "<script>alert(1)</script>" in text and (not names or "1<b>x<" in text)
        assert page.count("alert(1)") == page.count("&lt;script&gt;alert(1)") and "<img" not in page
    write_page([tmp_path])


def test_the_policy_of_the_page_lets_that_script_run_alone(tmp_path):
    page = page_of(write_run(tmp_path, steps=3))
    assert "default-src 'none'" in page and re.search(r"script-src 'sha256-[\w+/]{43}='", page)
    assert "innerHTML" not in SCRIPT and "eval(" not in SCRIPT and "</" not in SCRIPT


DAMAGED = {
    "summary.json": [b"", b'{"status": "fin', b"[1, 2]", b"\xff\xfe\x00{", b"[" * 100_000, b'{"steps": 1e999}',
                     b'{"step_ms_median": "fast", "status": 7, "saved_by_module": [1], "fallbacks": "x"}'],
    "metrics.csv": [b"", b"\x00\x00\n\x00", b"step,train/loss\n1,2.5\n2,abc\n3", b"nonsense",
                    b"step,train/loss\n-1,2\n", b"step,train/loss\n1,nan\n2,inf\n3,1\n",
                    b"step,train/loss,perf/step_ms\n1,1e308,inf\n2,-1e308,1\n3,1,1e308\n",
                    b"step,train/loss\n1e300,2\n",
                    b'step,train/loss\n"1,2\n3,4\n'],
    "run_config.json": [b"", b"{", b"[]", b'"x"'],
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_a_line_on_the_page(tmp_path, name):
    write_run(tmp_path / "sound", steps=5)
    for number, content in enumerate(DAMAGED[name]):
        write_run(tmp_path / "bad", steps=5)
        (tmp_path / "bad" / name).write_bytes(content)
        for page in (page_of(tmp_path), page_of(tmp_path / "bad")):
            text = text_of(page)
            whole = name == "summary.json" and number > 4 or name == "metrics.csv" and number in (5, 6)  # each a table
            assert whole or f"{name}:" in text, (name, content)


def test_a_half_written_row_is_left_out_and_of_a_run_that_ended_told(tmp_path):
    path = write_run(tmp_path, steps=5) / "metrics.csv"
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "6,2.1", encoding="utf-8")
    for ended, told in ((False, []), (True, ["metrics.csv: 1 row cannot be read and is left out"])):
        problems: list[str] = []
        assert [step for step, _ in read_metrics(path, problems, ended=ended)["train/loss"]] == [1, 2, 3, 4, 5]
        assert problems == told
    assert read_run(tmp_path).problems == ("metrics.csv: 1 row cannot be read and is left out",)


@pytest.mark.parametrize("name", ["summary.json", "metrics.csv", "sample.txt", "run_config.json"])
def test_what_is_no_file_is_not_read_for_ever(tmp_path, name):
    (write_run(tmp_path, steps=3) / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    text = text_of(page_of(tmp_path))
    assert (f"{name}: cannot be read: is not a file" in text) == (name in ("summary.json", "metrics.csv"))


def test_tables_of_a_task_that_are_damaged_are_told(tmp_path):
    write_comparison(tmp_path / "c", rounds=1)
    (tmp_path / "c" / "compare.csv").write_bytes(b"\x00\xffengine\n\n1,2,3,4")
    assert "eager" in text_of(page_of(tmp_path / "c"))
    write_sweep(tmp_path / "s", [{"seed": 1}, {"seed": 2}], steps=3)
    (tmp_path / "s" / "sweep.csv").write_text("job,status\n0", encoding="utf-8")
    assert [run.name for run in collect([tmp_path / "s"]).runs] == ["0", "1"]


def test_a_comparison_of_two_rounds_has_one_time_of_a_step_and_the_rate_at_it(tmp_path):
    """Rounds of 100 and 300 ms were 163 ms in one place of a page and 200 in another, at 1.3 times the rate of 200."""
    for index, ms in enumerate((100.0, 300.0)):
        write_run(tmp_path / "eager" / f"timed-{index + 1}", steps=30, step_ms=ms)
    (run,) = collect([tmp_path]).runs
    step_ms, rate = run.number("step_ms_median"), run.number("tokens_per_s")
    first = read_run(tmp_path / "eager" / "timed-1")
    tokens = first.number("tokens_per_s") * first.number("step_ms_median")
    assert rate * step_ms == pytest.approx(tokens, rel=1e-3)
    page = render(collect([tmp_path]))
    assert page.count(f"<b>{format_seconds(step_ms / 1e3)}</b>") == 1


def test_the_points_of_a_budget_plot_have_their_rounds(tmp_path):
    rows = []
    for name, budget, round_ms in (("budget-1.0", 1.0, "30.0 31.0"), ("budget-0.2", 0.2, "40.0 44.0"), ("gone", 0, "")):
        if name != "gone":
            write_run(tmp_path / name, steps=0, settings={"partition.budget": budget}, status="running")
        rows.append({"name": name, "error": "", "round_ms": round_ms, "step_ms_median": "30"})
    with (tmp_path / "pareto.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = collect([tmp_path])
    assert [run.rounds for run in found.runs] == [((30.0,), (31.0,)), ((40.0,), (44.0,))]
    text = text_of(render(found))
    assert "Memory against speed" in text and "gone: no run of that name" in text and "budget-1.0 was fastest" in text


def test_the_page_of_a_run_marks_what_stands_out_and_links_what_is_there(tmp_path):
    write_run(tmp_path, steps=60, status="failed", error="NumericsError: step 61: the loss is nan",
              verify_max_error=4.9e-7, verify_update_error=1e-8)  # fmt: skip
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    for name, value in (("train/loss", "99"), ("perf/step_ms", "1234")):
        cells = rows[40].split(",")
        cells[rows[0].split(",").index(name)] = value
        rows[40] = ",".join(cells)
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "compile_report.html").write_text("")
    page = page_of(tmp_path)
    text = text_of(page)
    for part in ("Failed after step 60", "the loss is nan", "Gradient norm", "Learning rate", "Step time",
                 "Peak memory of a step", "Peak memory of the process",
                 "2 values that stand out", "4.9e-07", "of its update 1.0e-08", "compile_report.html"):  # fmt: skip
        assert part in text, part
    assert page.count('class="flag"') == 2 and page.count('class="flag fault"') == 1
    assert 'href="compile_report.html"' in page and "decisions.json" not in page


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    assert leave_page(tmp_path) == "no page: there are no figures of a run"
    write_run(tmp_path / "a", steps=2)
    (tmp_path / "a" / "run.html").mkdir()
    assert leave_page(tmp_path / "a").startswith(f"warning: {tmp_path / 'a' / 'run.html'}: cannot be written: ")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "b c" / "x", steps=2)
    path = write_page([tmp_path / "a", tmp_path / "b c" / "x"])
    assert path is not None and path.name == "runs.html" and (tmp_path / "runs.html").is_file()


def test_on_a_full_disk_the_page_that_was_there_stays(tmp_path, monkeypatch):
    write_run(tmp_path, steps=2)
    before = write_page([tmp_path]).read_bytes()
    write = Path.write_text

    def fills_up(self, text, **more):
        write(self, text[: len(text) // 2], **more)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fills_up)
    assert leave_page(tmp_path) == f"warning: {tmp_path / 'run.html'}: cannot be written: No space left on device"
    assert (tmp_path / "run.html").read_bytes() == before and not list(tmp_path.glob("*.tmp"))
    with pytest.raises(OutputError, match="No space left"):
        write_result(tmp_path / "compile_report.html", html.render(CompileReport()))
    assert not (tmp_path / "compile_report.html").exists()


def test_a_link_leads_from_where_the_page_lies_to_the_file(tmp_path):
    write_run(tmp_path / "a %#?", steps=2)
    write_run(tmp_path / "b", steps=2)
    write_page([tmp_path / "a %#?"])
    assert 'href="a%20%25%23%3F/run.html"' in page_of(tmp_path)
    found = collect([tmp_path])
    served = found.__class__(found.kind, found.folder, found.runs, has_links=False)
    assert "run.html" not in render(served)


def test_verdicts_respect_the_spread(tmp_path):
    def runs(*step_ms: float, jitter: float = 0.1):
        folders = [write_run(tmp_path / str(i), step_ms=ms, seed=i, jitter=jitter, settings=ENGINES[i]) for i, ms in
                   enumerate(step_ms)]  # fmt: skip
        return [read_run(folder, ENGINES[i]["engine.name"]) for i, folder in enumerate(folders)]

    assert fastest(runs(100, 101, 99)).startswith("No run was fastest: aot, eager and torch_compile are level")
    clear = fastest(runs(100, 101, 50))
    assert clear.startswith("aot was fastest: 2.0") and "the speed of eager" in clear
    partly = fastest(runs(100, 52, 50, jitter=0.2))
    assert partly.startswith("No run was fastest: aot and torch_compile are level (1.0")
    assert fastest(runs(100)) == "" and fastest([]) == ""


def test_ratios_are_taken_within_rounds_where_there_are_some():
    assert str(time_ratio([(20.0,), (30.0,)], [(10.0,), (10.0,)])) == "2.50x [2.00, 3.00]"
    pooled = time_ratio([(20.0, 22.0, 24.0)], [(10.0, 11.0, 12.0)])
    assert pooled is not None and pooled.median == 2 and pooled.low < 2 < pooled.high and pooled.verdict == "slower"
    assert time_ratio([(9.0, 11.0, 13.0)], [(10.0, 12.0, 14.0)]).verdict == "level"
    assert time_ratio([], [(1.0,)]) is None and time_ratio([()], [(1.0,)]) is None
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)


def test_steps_of_another_size_are_compared_by_the_token(tmp_path):
    small = write_run(tmp_path / "small", step_ms=100)
    large = write_run(tmp_path / "large", step_ms=150)
    summary = json.loads((large / "summary.json").read_text())
    summary["tokens_per_s"] *= 2
    (large / "summary.json").write_text(json.dumps(summary))
    told = fastest([read_run(small), read_run(large)])
    assert told.startswith("large was fastest: 1.3") and "by the time of a token" in told


def test_memory_within_a_percent_is_level(tmp_path):
    runs = [read_run(write_run(tmp_path / name, peak=peak)) for name, peak in (("a", 1000), ("b", 1005), ("c", 2000))]
    assert least_memory(runs).startswith("a and b needed least memory")
    assert least_memory(runs[:2]).startswith("All needed as much memory") and least_memory(runs[:1]) == ""


def test_a_run_that_went_on_from_another_says_so_and_one_that_runs_has_its_last_loss(tmp_path):
    """The steps before had that run's settings, which nothing else on the page tells."""
    whole = write_run(tmp_path / "whole", steps=60)
    rest = write_run(tmp_path / "rest", steps=60, settings={"resume": "runs/<first>"}, status="running", last_loss=None)
    lines = (rest / "metrics.csv").read_text().splitlines(keepends=True)
    (rest / "metrics.csv").write_text("".join([lines[0], *lines[31:]]))
    page = page_of(whole, rest)
    assert "rest went on after step 30 of runs/&lt;first&gt;." in page and "whole went on" not in page
    loss = float(lines[-1].split(",")[1])
    (row,) = re.findall(r'<tr data-run="\d">(?:(?!</tr>).)*>rest<.*?</tr>', page, re.DOTALL)
    assert f">{loss:.4f}<" in row and f", loss {loss:.4f}" in page_of(rest)


def test_losses_agree_or_need_not(tmp_path):
    runs = [read_run(write_run(tmp_path / s["engine.name"], settings=s), s["engine.name"]) for s in ENGINES]
    assert losses(runs, differences(runs)) == "The losses agree with those of eager to the last bit."
    off = read_run(write_run(tmp_path / "off", loss=6.0, settings=ENGINES[2]), "off")
    assert "The losses of off do not agree with those of eager" in losses([*runs, off], differences(runs))
    drops = [read_run(write_run(tmp_path / f"drop{i}", loss=5 + i, settings={**s, "recipe.model.dropout": 0.1}), str(i))
             for i, s in enumerate(ENGINES[::2])]  # fmt: skip
    assert "each engine draws its own random numbers" in losses(drops, differences(drops))
    other = read_run(write_run(tmp_path / "lr", loss=6.0, settings={"optimizer.lr": 1.0}), "lr")
    told = losses([runs[2], other], differences([runs[2], other]))
    assert "lowest held-out loss" in told and "As optimizer.lr differs, the losses need not agree" in told
    three = [read_run(write_run(tmp_path / f"lr{i}", loss=loss, settings={"optimizer.lr": float(i)}), str(i))
             for i, loss in enumerate((6.0, 5.0, 5.0))]  # fmt: skip
    assert "1 and 2 ended with the lowest held-out loss" in losses(three, differences(three))
    three[1] = dataclasses.replace(three[1], summary={**three[1].summary, "status": "running"})
    assert "1 and 2 have so far the lowest held-out loss" in losses(three, differences(three))
    broken = write_run(tmp_path / "nan", steps=3, settings=ENGINES[2])
    text = (broken / "metrics.csv").read_text().splitlines()
    text[2] = re.sub(r"^2,[^,]*", "2,nan", text[2])
    (broken / "metrics.csv").write_text("\n".join(text) + "\n")
    assert "is not finite at step 2" in losses([runs[0], read_run(broken)], {})
    assert verdicts([], {}) == []


def test_of_runs_that_judge_by_a_metric_its_better_end_is_named(tmp_path):
    def runs(judges, accuracies=(0.5, 0.875)):
        found = []
        for i, (judge, accuracy) in enumerate(zip(judges, accuracies, strict=True)):
            settings = {"optimizer.lr": float(i), "trainer.judge_by": judge}
            run = read_run(write_run(tmp_path / str(i), loss=5 + i, steps=20, settings=settings), str(i))
            found.append(dataclasses.replace(run, metrics={**run.metrics, "val/accuracy": ((20, accuracy),)}))
        return losses(found, {"optimizer.lr": ["0", "1"]})

    assert "1 ended with the highest held-out accuracy, 0.875 (the lowest is 0.5)" in runs(["accuracy:max"] * 2)
    assert "0 ended with the lowest held-out accuracy, 0.5 (the highest is 0.875)" in runs(["accuracy:min"] * 2)
    assert "All ended with a held-out accuracy of 0.5" in runs(["accuracy:max"] * 2, (0.5, 0.500001))
    for other in (["accuracy:max", "loss"], ["error:max"] * 2, ["odd"] * 2):
        assert "0 ended with the lowest held-out loss" in runs(other)


def test_different_models_have_no_lowest_loss(tmp_path):
    runs = [
        read_run(write_run(tmp_path / name, settings={"recipe.name": name, "recipe.model.width": 8 * i}), name)
        for i, name in enumerate(("resnet", "vit"), 1)
    ]
    told = " ".join(verdicts(runs, differences(runs)))
    assert "As recipe.name differs, these are different models" in told and "lowest" not in told


def test_only_differences_are_shown_and_by_their_short_names(tmp_path):
    runs = [read_run(write_run(tmp_path / str(i), steps=2, settings={"seed": i, "logger.group": i})) for i in (1, 2)]
    assert differences(runs) == {"seed": ["1", "2"]} and changing(["seed", "engine.name", "kernel.name"]) == ["seed"]
    assert short(["partition.budget", "engine.name", "a.lr", "b.lr"]) == ["budget", "engine", "a.lr", "b.lr"]
    assert first_keys(["engine.name", "engine.backend", "seed"], 5) == ["engine.name", "seed"]
    assert sorted(["10", "9", "a2"], key=natural) == ["9", "10", "a2"]


def test_thinning_keeps_ends_peaks_and_gaps():
    points = [(float(i), math.sin(i / 50)) for i in range(5000)]
    points[777], points[3333], points[4000] = (777.0, 9.0), (3333.0, -9.0), (4000.0, math.nan)
    kept = thinned(points, 200)
    assert len(kept) <= 202 and kept[0] == points[0] and kept[-1] == points[-1]
    assert points[777] in kept and points[3333] in kept and any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept) and thinned(points[:5], 10) == points[:5]


@pytest.mark.parametrize("points", [
    [(1.0, 2.0)], [(1.0, 5.0), (2.0, 5.0)], [(0.0, 0.0), (9.0, 0.0)], [(1.0, -3.0), (2.0, 4.0)],
    [(1.0, 1e-9), (9.0, 1e9)], [(1.0, math.nan), (2.0, 3.0), (3.0, math.inf), (4.0, 1.0)],
    [(5.0, 1e300), (6.0, -1e300)], [(5.0, 1e308), (6.0, -1e308), (7.0, 1.0)],
])  # fmt: skip
@pytest.mark.parametrize("unit", ["plain", "seconds", "bytes", "count"])
def test_curves_lie_within_the_drawing(points, unit):
    if unit in ("bytes", "seconds") and any(y < 0 for _, y in points):
        return  # neither is ever below zero
    curve = Curve(Key(0, "<a>", 0), points)
    drawn = line_plot([curve], Axes("t", "x", y_unit=unit), marks=[Mark(points[0][0], "<m>")])
    path = re.search(r'class="curve [^"]*"[^>]* d="([^"]*)"', drawn)[1]
    for part in path.split("M")[1:]:
        x, y, *steps = [int(number) for number in re.findall(r"-?\d+", part)]
        for right, down in zip(*[iter([0, 0, *steps])] * 2, strict=True):
            x, y = x + right, y + down
            assert 0 <= x <= 2000 and 0 <= y <= 1000
    assert "&lt;m&gt;" in drawn and "<a>" not in drawn and "nan" not in drawn.replace("data-name", "")
    assert line_plot([Curve(Key(0, "a", 0), [(1.0, math.nan)])], Axes("t", "x")) == ""


def test_the_last_tick_ends_within_the_panel_and_a_number_on_its_line():
    drawn = line_plot([Curve(Key(0, "a", 0), [(1.0, 2.0), (1000.0, 1.0)])], Axes("t", "step"))
    assert '<span class="edge" style="left:100.0%">1,000</span>' in drawn and drawn.count('"edge"') == 1
    rows = bar_rows([Bar(Key(0, "lr=0.0001 engine=torch_compile", 0), 1.0)], str)
    assert "lr=0.0001 engine=torch_<wbr>compile" in rows


def test_one_step_alone_is_one_tick():
    drawn = line_plot([Curve(Key(0, "a", 0), [(1.0, 4e-7)])], Axes("t", "step", from_zero=True))
    assert re.findall(r">(\d+)</span>", drawn.partition('class="xs"')[2]) == ["1"]
    drawn = line_plot([Curve(Key(0, "a", 0), [(1.0, 2.0), (2.0, 1.0)])], Axes("t", "step"))
    assert re.findall(r">(\d+)</span>", drawn.partition('class="xs"')[2]) == ["1", "2"]


def test_only_curves_that_cover_each_other_are_drawn_thinner_and_thinner():
    steps = [(float(x), float(x)) for x in range(50)]
    for other, is_layered in ((steps, True), ([(x, 2 * y) for x, y in steps], False), ([(99.0, 1.0)], False)):
        drawn = line_plot([Curve(Key(0, "a", 0), steps), Curve(Key(1, "b", 1), other)], Axes("t", "x", is_layered=True))
        assert ("layered" in drawn) == is_layered


def test_a_spike_is_what_stands_far_above_the_steps_before():
    calm = [(step, 2 + 0.01 * (step % 3)) for step in range(40)]
    assert spikes(calm, 1.1) == []
    calm[30] = (30, 4.0)
    calm[35] = (35, math.inf)
    assert spikes(calm, 1.1) == [(30, 4.0), (35, math.inf)]


def test_many_runs_have_the_colour_of_a_setting(tmp_path):
    run = read_run(write_run(tmp_path, steps=2))
    runs = [run.__class__(f"r{i}", tmp_path, settings={"seed": i, "optimizer.lr": i % 3}) for i in range(30)]
    keys, named = overview.looks(runs, differences(runs))
    assert named == {"optimizer.lr=0": 0, "optimizer.lr=1": 1, "optimizer.lr=2": 2}
    assert [key.look for key in keys[:4]] == [0, 1, 2, 0] and [key.index for key in keys] == list(range(30))
    assert len({key.look for key in overview.looks(runs[:15], {})[0]}) == 15


def test_the_warm_up_is_left_out_but_never_more_than_half():
    times = {"perf/step_ms": [(step, float(step)) for step in range(1, 5)]}
    assert timed(times, 1) == (2.0, 3.0, 4.0) and timed(times, 9) == (3.0, 4.0) and timed({}, 1) == ()
