"""A bar for a terminal, lines for everything else."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

import aottrain
from aottrain.counted import counted, counts_told, tell
from aottrain.tasks.measuring.worker import last_line
from aottrain.toolchain import native
from aottrain.trainer.console import copied_to
from aottrain.trainer.progress import BAR_CELLS, Progress, Status, bar, describe

ROOT = Path(__file__).parents[2]
ROW = {"step": 2, "train/loss": 1.5, "train/lr": 1e-3, "perf/tokens_per_s": 1234.5, "val/loss": None}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(evaluated: dict | None = None) -> None:
    with Progress(total=4, initial=1, name="transformer") as progress:
        progress.advance()
        progress.log(ROW)
        progress.advance()
        progress.log({**ROW, "step": 3, **(evaluated or {})})


def test_a_terminal_gets_a_bar_with_figures(capsys, monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    train({"val/loss": 1.25})
    assert "transformer" in stderr.getvalue() and "3/4" in stderr.getvalue()
    assert "loss 1.5000" in stderr.getvalue() and "1,234 tokens/s" in stderr.getvalue()
    assert capsys.readouterr().out.splitlines() == [
        "step 2/4  loss 1.5000  lr 1.00e-03  1,234 tokens/s",
        "step 3/4  loss 1.5000  held-out 1.2500  lr 1.00e-03  1,234 tokens/s",
    ]


def test_what_a_check_takes_is_not_in_the_time_to_go(monkeypatch):
    """The bar said 15 hours after the first step, which eager had been compared with, where an hour was to go."""
    stderr, clock = Terminal(), [1000.0]
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr("time.time", lambda: clock[0])
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    with Progress(total=101, initial=0, name="transformer") as progress:
        with progress.aside("checking against eager", is_rare=True):
            clock[0] += 90
        for _ in range(1, 5):
            clock[0] += 1
            progress.advance()
        with progress.aside("evaluating"):
            clock[0] += 4
    drawn = stderr.getvalue().split("\r")
    assert any("checking against eager" in each for each in drawn)
    after_one = next(each for each in drawn if " 1/101" in each)
    assert "<01:40" in after_one and "checking" not in after_one
    assert "evaluating" in drawn[-3] + drawn[-2]


def test_a_terminal_that_does_not_say_its_size_is_as_wide_as_most(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    with Status("compiling"):
        pass
    assert stderr.getvalue() == "\r\x1b[K"


def drawn_until(terminal: Terminal, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in terminal.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_something_turns_while_nothing_else_is_to_be_told(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    with Status("loading torch"):
        drawn_until(stderr, "\\ loading torch")
    lines = stderr.getvalue().split("\r\x1b[K")
    assert [line[:15] for line in lines[1:5]] == [f"{each} loading torch" for each in "|/-\\"]
    assert lines[-1] == "", "nothing is left of it"


def test_nothing_turns_without_a_terminal_that_clears_a_line(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    for stderr in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setenv("TERM", "dumb" if stderr.isatty() else "xterm")
        with Status("loading torch") as status:
            time.sleep(2 * status.PERIOD_S)
        assert stderr.getvalue() == ""


def test_what_is_printed_stands_on_lines_of_its_own(tmp_path, monkeypatch):
    """A warning stood behind the line that told of a stage, and half a line that was printed was drawn over."""
    both = Terminal()
    monkeypatch.setattr("sys.stderr", both)
    monkeypatch.setattr("sys.stdout", both)
    with copied_to(tmp_path / "log.txt"), Status("compiling") as status:
        drawn_until(both, "| compiling")
        print("half", end="", flush=True)
        time.sleep(2 * status.PERIOD_S)
        print(" and half")
        drawn_until(both, "and half\n\r")
    assert "compiling, 0 s\r\x1b[Khalf and half\n\r\x1b[K" in both.getvalue()
    assert both.getvalue().endswith("\r\x1b[K") and (tmp_path / "log.txt").read_text() == "half and half\n"


def test_an_interrupted_import_leaves_no_line(tmp_path):
    """Of the command line in a terminal; the task stands for one whose import takes long."""
    (tmp_path / "slow.py").write_text("import time\nfor _ in range(3000): time.sleep(0.01)\n")
    script = "import sys; from aottrain.cli.command import _turning\nwith _turning('loading torch'): import slow"
    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stderr=follower, stdout=follower, cwd=tmp_path,
                               env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TERM": "xterm"})  # fmt: skip
    os.close(follower)
    shown = b""
    while b"/ loading torch" not in shown:
        shown += os.read(leader, 1000)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # what a terminal without a process says
        while more := os.read(leader, 1000):
            shown += more
    process.wait(20)
    assert b"\r\x1b[KTraceback" in shown and shown.rstrip().endswith(b"KeyboardInterrupt")


def test_a_status_says_how_far_its_stage_is():
    status = Status("compiling")
    assert status.line(2.0) == "compiling, 2 s"
    status.tell("trace_joint")
    status.count("operations", 1234, None)
    assert status.line(3.4) == "compiling: trace_joint, 1,234 operations, 3 s"
    status.tell("make_kernels")
    assert status.line(4.0) == "compiling: make_kernels, 4 s"
    status.count("kernels", 12, 37)
    assert status.line(5.0) == f"compiling: make_kernels, {bar(12, 37)} 12/37 kernels, 5 s"
    assert Status("eager", lambda: "step 3/4").line(1.0) == "eager: step 3/4, 1 s"


def test_a_bar_is_empty_at_first_and_full_at_last():
    shown = [bar(done, 3) for done in range(4)]
    assert shown[0] == f"[{'.' * BAR_CELLS}]" and shown[-1] == f"[{'#' * BAR_CELLS}]" == bar(0, 0).replace(".", "#")
    assert all(len(each) == BAR_CELLS + 2 for each in shown) and shown == sorted(shown, key=lambda x: x.count("#"))


def test_what_is_counted_is_heard_inside_and_by_nobody_after():
    heard = []
    with counts_told(lambda *told: heard.append(told)):
        assert list(counted("calls", "ab")) == ["a", "b"]
        tell("plans", 7)
    tell("plans", 8)
    assert heard == [("calls", 0, 2), ("calls", 1, 2), ("calls", 2, 2), ("plans", 7, None)]


def test_a_compile_tells_its_operations_and_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    native._loaded.clear()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Tanh())
    heard = []
    with counts_told(lambda *told: heard.append(told)):
        step = aottrain.compile(model, capture="trace", kernel="cpp")
        step(torch.randn(4, 8)).sum().backward()
    of = {what: [told[1:] for told in heard if told[0] == what] for what, *_ in heard}
    operations = [done for done, _ in of["operations"]]
    assert operations[0] == 1 and max(operations) > 5 and all(total is None for _, total in of["operations"])
    totals = {total for _, total in of["kernels ready"]}
    record = step.report.graphs[0]
    assert of["kernels ready"][0][0] == 0 and max(totals) >= 1
    for total in totals:
        assert (total, total) in of["kernels ready"], "it ends when all are there"
    assert sum(len(each.names) for each in record.kernel_records) >= max(totals)


def test_the_newest_line_of_a_log(tmp_path):
    log = tmp_path / "log.txt"
    assert last_line(log) == ""
    log.write_text("step 1\n" + "x" * 5000 + "\nstep 2\n\n", encoding="utf-8")
    assert last_line(log) == "step 2"


def test_a_file_gets_lines_and_no_bar(capsys):
    train()
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "step 2/4  loss 1.5000  lr 1.00e-03  1,234 tokens/s",
        "step 3/4  loss 1.5000  lr 1.00e-03  1,234 tokens/s",
    ]


def test_samples_are_counted_where_there_are_no_tokens():
    assert describe({"perf/samples_per_s": 12.3}) == ["12 samples/s"]
    assert describe({"perf/samples_per_s": 12.3, "perf/tokens_per_s": 1234.5}) == ["1,234 tokens/s"]


def test_the_time_of_a_step_is_in_a_unit_that_fits():
    times = {0.4567: "457 us", 9.4: "9.40 ms", 336.2: "336 ms", 137_166.5: "2 min 17 s"}
    assert {ms: describe({"step": 1, "perf/step_ms": ms}) for ms in times} == {ms: [t] for ms, t in times.items()}
