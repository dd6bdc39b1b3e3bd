"""A bar for a terminal, lines for everything else."""

from __future__ import annotations

import io

from aottrain.trainer.progress import Progress, Status, describe

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


def test_a_terminal_that_does_not_say_its_size_is_as_wide_as_most(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    with Status("compiling"):
        pass
    assert stderr.getvalue() == "\r\x1b[K"


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
