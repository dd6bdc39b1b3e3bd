"""SIGUSR1: a checkpoint after the step at hand, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aottrain.errors import CheckpointError
from aottrain.tasks import train
from aottrain.trainer import loop
from aottrain.trainer.checkpoint import CheckpointFolder, load
from aottrain.trainer.reliability.signals import NOTHING_TO_SAVE, graceful_stop, interruptible
from tests.trainer.test_run import same

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = "SIGUSR1: a checkpoint was written after step "
SMALL = ["recipe.model.num_layers=1", "recipe.model.width=16", "recipe.model.num_heads=2", "recipe.model.context=16"]


def signalling(monkeypatch, signals: dict[int, list[int]]) -> None:
    """Raise these signals as these steps begin."""
    learning_rate = loop.learning_rate

    def raising(step, *arguments):
        for signum in signals.get(step, ()):
            signal.raise_signal(signum)
        return learning_rate(step, *arguments)

    monkeypatch.setattr(loop, "learning_rate", raising)


def test_it_is_written_after_the_step_and_changes_nothing_of_the_run(tiny, left_by, tmp_path, monkeypatch, capsys):
    straight = tiny(trainer={"steps": 5}, output_dir=str(tmp_path / "straight"))
    config = tiny(trainer={"steps": 5})
    assert train.run(straight) == 0
    handler = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patch:
        signalling(patch, {2: [signal.SIGUSR1, signal.SIGUSR1]})
        assert train.run(config) == 0
    assert signal.getsignal(signal.SIGUSR1) is handler
    folder = Path(config.output_dir, "checkpoints")
    lines = [line for line in capsys.readouterr().out.splitlines() if "SIGUSR1" in line]
    assert lines == [f"{WRITTEN}2: {folder / 'step_00000002.pt'}"]
    assert sorted(path.name for path in folder.glob("*.pt")) == ["step_00000002.pt", "step_00000005.pt"]
    assert left_by(config).losses == left_by(straight).losses
    # and what was asked for can be gone on from
    again = tiny(trainer={"steps": 5}, resume=str(folder / "step_00000002.pt"), output_dir=str(tmp_path / "again"))
    assert train.run(again) == 0
    states = [load(Path(run.output_dir, "checkpoints", "step_00000005.pt")).state for run in (straight, config, again)]
    assert all(same(states[0][part], state[part]) for state in states[1:] for part in ("model", "optimizer", "random"))


def test_one_that_cannot_be_written_is_said_and_the_run_goes_on(tiny, monkeypatch, capsys):
    save = CheckpointFolder.save

    def fail_once(self, step, *given):
        if step == 2:
            raise CheckpointError("the disk is full")
        return save(self, step, *given)

    monkeypatch.setattr(CheckpointFolder, "save", fail_once)
    signalling(monkeypatch, {2: [signal.SIGUSR1]})
    assert train.run(tiny()) == 0
    printed = capsys.readouterr().out
    assert "going on without a checkpoint: the disk is full" in printed and WRITTEN not in printed


def test_where_no_step_is_in_progress_it_is_answered(capfd):
    with interruptible():
        signal.raise_signal(signal.SIGUSR1)
        assert capfd.readouterr().err == NOTHING_TO_SAVE + "\n"
        with graceful_stop() as stop:
            signal.raise_signal(signal.SIGUSR1)
            assert stop.signum is None and stop.takes_save() and not stop.takes_save()
        signal.raise_signal(signal.SIGUSR1)
    assert capfd.readouterr().err == NOTHING_TO_SAVE + "\n"


@pytest.mark.usefixtures("quick_children")
def test_a_process_that_is_sent_it_writes_one_and_goes_on(tmp_path):
    options = ["debug=fast", "engine=eager", "trainer.steps=1000000", "trainer.eval_every=0", "measure.memory=false"]
    command = [sys.executable, "-m", "aottrain", *options, *SMALL, "trainer.num_threads=1", f"hydra.run.dir={tmp_path}"]
    environment = {**os.environ, "AOTTRAIN_CACHE_DIR": str(tmp_path / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        try:
            lines = iter(process.stdout)
            next(line for line in lines if line.startswith("step "))
            process.send_signal(signal.SIGUSR1)
            line = next(line for line in lines if "SIGUSR1" in line)
            step = int(line.removeprefix(WRITTEN).partition(":")[0])
            written = load(Path(line.partition(": ")[2].partition(": ")[2].strip()))
            next(line for line in lines if line.startswith("step "))  # it goes on
            process.send_signal(signal.SIGTERM)
            rest = process.communicate()[0]
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM and "SIGUSR1" not in rest
    assert written.step == step
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["steps"] > step
