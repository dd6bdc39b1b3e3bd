"""A terminal that is closed: its signal ends a run with a checkpoint, however often it comes, and what cannot be shown
any more is no error. And a pipe that nobody reads any more."""

from __future__ import annotations

import os
import pty
import signal
import sys

import pytest

from aottrain.cli import jobs
from aottrain.errors import Interrupted
from aottrain.tasks import train
from aottrain.trainer import console, loop
from aottrain.trainer.console import copied_to, outliving_terminals, screen
from aottrain.trainer.reliability.signals import graceful_stop, interruptible


@pytest.fixture
def hangs_up():
    """SIGHUP as a terminal has it, also where the suite itself runs under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield lambda: signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


def test_it_ends_the_run_after_its_step_with_a_checkpoint(tiny, left_by, monkeypatch, hangs_up):
    """The kernel and the shell send one each, and a manager of sessions SIGTERM as well."""
    config, learning_rate = tiny(trainer={"steps": 6}), loop.learning_rate

    def interrupting(step, *arguments):
        if step == 3:
            hangs_up()
            hangs_up()
        return learning_rate(step, *arguments)

    monkeypatch.setattr(loop, "learning_rate", interrupting)
    monkeypatch.setattr(train, "_say_results", lambda *_: hangs_up())
    assert train.run(config) == 128 + signal.SIGHUP
    summary = left_by(config).summary
    assert (summary["status"], summary["steps"]) == ("interrupted", 3)
    assert summary["checkpoint"].endswith("step_00000003.pt")
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_beside_it_another_signal_is_the_first(hangs_up):
    with graceful_stop() as stop:
        hangs_up()
        signal.raise_signal(signal.SIGTERM)
        hangs_up()
    assert stop.exit_code == 128 + signal.SIGTERM
    with pytest.raises(Interrupted), graceful_stop():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_what_ends_by_it_is_not_ended_by_a_second_one(hangs_up):
    ended = []
    with pytest.raises(Interrupted) as caught, interruptible():
        try:
            hangs_up()
        finally:
            hangs_up()
            ended.append(True)
    assert ended and caught.value.signum == signal.SIGHUP


def test_under_nohup_it_is_ignored(hangs_up):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible(), graceful_stop() as stop, jobs._signals(jobs.Running()) as running:
        hangs_up()
    assert stop.exit_code == 0 and running.signum is None


def test_a_sweep_tells_its_jobs(hangs_up):
    with jobs._signals(jobs.Running()) as running:
        hangs_up()
    assert running.signum == signal.SIGHUP


def test_what_is_printed_on_a_closed_terminal_goes_to_the_log_alone(monkeypatch, tmp_path):
    master, slave = pty.openpty()
    with open(slave, "w", encoding="utf-8") as file:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, file)
        with outliving_terminals():
            os.close(master)
            with copied_to(tmp_path / "log"):
                print("step 1", flush=True)
                screen().write("a bar")
                screen().flush()
                sys.stderr.writelines(["step 2\n"])
            print("the end", flush=True)
        assert sys.stdout is file
    assert (tmp_path / "log").read_text() == "step 1\nstep 2\n"


def test_output_that_nobody_reads_any_more_ends_the_run_with_a_checkpoint(tiny, left_by, monkeypatch, tmp_path):
    config, learning_rate = tiny(trainer={"steps": 6}), loop.learning_rate
    read, write = os.pipe()

    def leaving(step, *arguments):
        if step == 3:
            os.close(read)
        return learning_rate(step, *arguments)

    monkeypatch.setattr(loop, "learning_rate", leaving)
    with open(write, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with copied_to(tmp_path / "log"):
            assert train.run(config) == 128 + signal.SIGPIPE
    summary = left_by(config).summary
    assert summary["status"] == "interrupted" and 3 <= summary["steps"] < 6
    assert summary["checkpoint"].endswith(f"step_0000000{summary['steps']}.pt")


def test_a_signal_that_ends_who_reads_our_output_as_well_is_the_one_that_ended_the_run():
    """Of Ctrl-C in `... | tee`, in either order; neither ends it at once."""
    for first, second in ((signal.SIGINT, None), (None, signal.SIGINT)):
        with graceful_stop() as stop:
            for signum in (first, second):
                if signum is None:
                    console.unread[-1]()
                else:
                    signal.raise_signal(signum)
        assert stop.exit_code == 128 + signal.SIGINT
