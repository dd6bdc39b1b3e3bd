"""trainer.save=background: the same checkpoints, written while steps go on; and what ends them half-way."""

from __future__ import annotations

import csv
import errno
import os
import signal
import threading
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from aottrain.cli import main
from aottrain.errors import CheckpointError, Interrupted
from aottrain.tasks import train
from aottrain.toolchain.threads import Thread
from aottrain.trainer import checkpoint, loop
from aottrain.trainer.checkpoint import CheckpointFolder, load
from aottrain.trainer.reliability.saving import Copier, Saving, copy_bytes
from tests.trainer.test_run import same
from tests.trainer.test_saving_on_request import SMALL, WRITTEN, signalling

STATE = {"model": {"weight": torch.arange(1000.0), "more": torch.ones(300)}, "random": (1, [2.5, None])}


def background(folder: CheckpointFolder, said: list[str]) -> Saving:
    return Saving(folder, True, said.append)


def file_of(config, step: int) -> Path:
    return Path(config.output_dir, "checkpoints", f"step_{step:08d}.pt")


@pytest.mark.parametrize("engine", ["eager", "aot"])
def test_files_are_those_that_are_written_at_once_and_a_run_goes_on_from_one_bitwise(tiny, left_by, tmp_path, engine):
    more = {"lr_schedule": {"total_steps": 6}, "decisions": "default"}
    trainer = {"steps": 6, "save_every": 2, "keep_last": 9, "ema": 0.9}
    now = tiny(engine, trainer=trainer, output_dir=str(tmp_path / "now"), **more)
    later = tiny(engine, trainer={**trainer, "save": "background"}, **more)
    assert train.run(now) == train.run(later) == 0
    for step in (2, 4, 6):
        wanted, got = (load(file_of(config, step)) for config in (now, later))
        parts = wanted.state.keys() - {"decisions"}  # which say where each came from, too
        assert parts >= {"model", "losses"} and all(same(wanted.state[part], got.state[part]) for part in parts)
        assert got.state["model"]._metadata == wanted.state["model"]._metadata
        sizes = [file_of(config, step).stat().st_size for config in (now, later)]
        assert sizes[0] == sizes[1] or engine == "aot" and abs(sizes[0] - sizes[1]) < 100
    again = tiny(engine, trainer={**trainer, "save": "background"}, resume=str(file_of(later, 2)),
                 output_dir=str(tmp_path / "again"), **more)  # fmt: skip
    assert train.run(again) == 0
    wanted, got = (load(file_of(config, 6)).state for config in (now, again))
    assert all(same(wanted[part], got[part]) for part in ("model", "optimizer", "random", "averages"))
    assert left_by(later).summary["checkpoint"] == str(file_of(later, 6))


def test_a_copy_shares_what_its_tensors_share_and_nothing_else():
    weight = torch.arange(12.0)
    ordered = OrderedDict(first=weight, second=weight.view(3, 4).t(), empty=torch.empty(0))
    ordered._metadata = {"": {"version": 2}}
    state = {"model": ordered, "other": [torch.ones(12), (weight[3:5], "text")]}
    copier = Copier()
    copy, wait = copier.copy(state)
    wait()
    assert same(copy, state) and copy["model"]._metadata == ordered._metadata
    assert copy["model"]["second"].stride() == (1, 4)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in (copy["model"]["first"], copy["other"][1][0])}
    assert len(addresses) == 1 and addresses != {weight.untyped_storage().data_ptr()}
    weight.zero_()
    assert copy["model"]["first"][11] == 11 and copy["model"]["second"][3, 2] == 11 and copy["other"][1][0][0] == 3
    again, _ = copier.copy(state)
    assert again["model"]["first"].data_ptr() == copy["model"]["first"].data_ptr()  # the same blocks, with new values
    assert same(again, state)


def test_what_is_one_object_is_one_in_the_copy():
    """An optimizer's groups share their betas with its defaults, and a file holds them once."""
    betas, groups = (0.9, 0.95), [1, {"weight": torch.ones(2)}]
    state = {"first": {"betas": betas, "groups": groups}, "second": [betas, groups]}
    copy, _ = Copier().copy(state)
    assert copy["first"]["betas"] is copy["second"][0] and copy["first"]["groups"] is copy["second"][1]
    assert same(copy, state) and copy["second"][1] is not groups and copy["second"][1][1] is not groups[1]


def test_steps_go_on_while_one_is_written_and_a_second_one_waits(tiny, monkeypatch):
    """The first write lasts until step 3 has been taken, which could not be if that waited for it."""
    save, rate, events = CheckpointFolder.save, loop.learning_rate, []
    third = threading.Event()

    def slow(self, step, *given):
        events.append(("begins", step))
        assert step != 2 or third.wait(60)
        path = save(self, step, *given)
        events.append(("ends", step))
        return path

    def stepping(step, *given):
        events.append(("step", step))
        if step == 4:
            third.set()
        return rate(step, *given)

    monkeypatch.setattr(CheckpointFolder, "save", slow)
    monkeypatch.setattr(loop, "learning_rate", stepping)
    assert train.run(tiny(trainer={"steps": 5, "save_every": 2, "save": "background"})) == 0
    assert events.index(("step", 4)) < events.index(("ends", 2)) < events.index(("begins", 4))
    assert events[-2:] == [("begins", 5), ("ends", 5)] and events.index(("ends", 4)) < events.index(("begins", 5))


@pytest.mark.parametrize("way", ["now", "background"])
def test_before_a_checkpoint_is_there_metrics_has_all_steps_up_to_it(tiny, monkeypatch, way):
    """A run that is killed right after it goes on behind them: who has not written them then never does."""
    save, seen = CheckpointFolder.save, {}
    config = tiny(trainer={"steps": 6, "save_every": 2, "log_every": 5, "save": way})

    def looking(self, step, *given):
        with (Path(config.output_dir) / "metrics.csv").open(newline="") as file:
            seen[step] = [int(row["step"]) for row in csv.DictReader(file) if int(row["step"]) <= step]
        return save(self, step, *given)

    monkeypatch.setattr(CheckpointFolder, "save", looking)
    assert train.run(config) == 0
    assert seen == {step: list(range(1, step + 1)) for step in (2, 4, 6)}


def test_a_full_disk_is_one_line_and_the_run_goes_on(tiny, left_by, monkeypatch, capsys):
    save = CheckpointFolder._write_file

    def full(self, content, path):
        if content["step"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, content, path)

    monkeypatch.setattr(CheckpointFolder, "_write_file", full)
    config = tiny(trainer={"steps": 6, "save_every": 2, "save": "background"})
    assert train.run(config) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "without a checkpoint" in line]
    assert len(lines) == 1 and lines[0].endswith("step_00000002.pt: cannot be written: No space left on device")
    assert left_by(config).summary["status"] == "finished" and file_of(config, 4).exists()


def test_another_error_of_the_thread_ends_the_run(tiny, monkeypatch):
    def broken(self, content, path):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(CheckpointFolder, "_write_file", broken)
    with pytest.raises(ZeroDivisionError, match="planted"):
        train.run(tiny(trainer={"steps": 6, "save_every": 2, "save": "background"}))


@pytest.mark.parametrize("ends_by", [ZeroDivisionError("planted"), None], ids=["an error", "SIGTERM"])
def test_the_end_of_a_run_waits_for_what_is_written(tiny, left_by, monkeypatch, ends_by):
    save, rate, released = CheckpointFolder.save, loop.learning_rate, threading.Event()

    def slow(self, step, *given):
        assert step != 2 or released.wait(60)
        time.sleep(0.05 * (step == 2))
        return save(self, step, *given)

    def stepping(step, *given):
        if step == 3:
            released.set()
            if ends_by is not None:
                raise ends_by
            signal.raise_signal(signal.SIGTERM)
        return rate(step, *given)

    monkeypatch.setattr(CheckpointFolder, "save", slow)
    monkeypatch.setattr(loop, "learning_rate", stepping)
    config = tiny(trainer={"steps": 9, "save_every": 2, "save": "background"})
    if ends_by is None:
        assert train.run(config) == 128 + signal.SIGTERM
    else:
        with pytest.raises(ZeroDivisionError):
            train.run(config)
    last = 2 if ends_by else 3
    assert left_by(config).summary["checkpoint"] == str(file_of(config, last)) and load(file_of(config, 2)).step == 2


def test_a_second_signal_ends_what_is_being_written(tmp_path, monkeypatch):
    folder, said, begun = CheckpointFolder(tmp_path), [], threading.Event()
    folder.save(1, STATE)
    write = checkpoint._Watched.write

    def slow(self, data):
        begun.set()
        time.sleep(0.05)
        return write(self, data)

    monkeypatch.setattr(checkpoint._Watched, "write", slow)
    with pytest.raises(Interrupted), background(folder, said) as saving:
        saving.save(2, STATE, None, said.append, must=False)
        assert begun.wait(60)
        raise Interrupted(signal.SIGINT)
    line = f"going on without a checkpoint: {tmp_path}/step_00000002.pt: cannot be written: a signal has ended the run"
    assert said == [line]
    assert folder.newest(said.append).step == 1 and not list(tmp_path.glob("*.tmp")) and len(said) == 1
    monkeypatch.undo()
    assert folder.save(3, STATE) == tmp_path / "step_00000003.pt"


def test_the_answer_to_sigusr1_is_given_when_the_file_is_there(tiny, monkeypatch, capsys):
    signalling(monkeypatch, {2: [signal.SIGUSR1]})
    config = tiny(trainer={"steps": 4, "save": "background"})
    assert train.run(config) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "SIGUSR1" in line]
    assert lines == [f"{WRITTEN}2: {file_of(config, 2)}"] and load(file_of(config, 2)).step == 2


def test_without_memory_for_a_copy_it_is_written_at_once(tmp_path, monkeypatch):
    folder, said = CheckpointFolder(tmp_path), []

    def full(*given, **more):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: planted")

    with background(folder, said) as saving:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)
            saving.save(1, STATE, None, said.append, must=False)
        assert said[-1] == tmp_path / "step_00000001.pt" and load(said[-1]).step == 1
        saving.save(2, STATE, None, said.append, must=False)
        assert said[-1] == tmp_path / "step_00000002.pt"
    assert said[0].startswith("no memory for a copy: ") and len(said) == 3


def test_without_memory_for_a_thread_it_is_written_at_once(tmp_path, monkeypatch):
    folder, said = CheckpointFolder(tmp_path), []

    def full(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", full)
    with background(folder, said) as saving:
        saving.save(1, STATE, None, said.append, must=False)
        assert said[-1] == tmp_path / "step_00000001.pt" and load(said[-1]).step == 1
    assert said[0].startswith("no memory for a thread: ") and len(said) == 2


def test_the_last_one_is_raised_as_ever(tmp_path, monkeypatch):
    def full(self, content, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CheckpointFolder, "_write_file", full)
    with pytest.raises(CheckpointError, match="No space left"), background(CheckpointFolder(tmp_path), []) as saving:
        saving.save(1, STATE, None, print, must=True)


def test_what_the_copy_takes_is_said(tiny, fit_job, tmp_path, monkeypatch, capsys):
    config = tiny(trainer={"steps": 2, "save_every": 1, "save": "background"})
    job, _ = fit_job(config)
    state = [job.module.model.state_dict(), job.optimizer.state_dict()["state"]]
    tensors = [*state[0].values(), *(value for values in state[1].values() for value in values.values())]
    assert copy_bytes(job, config) == sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    assert copy_bytes(job, tiny()) == 0
    monkeypatch.chdir(tmp_path)
    line = ["engine=eager", "debug=fast", "trainer.save=background", "logger=csv", *SMALL]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "trainer.save=background: checkpoints are written from a copy, which takes " in printed
    assert "trainer.save=background has no effect but on what SIGUSR1 asks for: trainer.save_every=0" in printed


@pytest.mark.parametrize("way", ["now", "background"])
def test_how_long_saves_hold_steps_up_is_told(tiny, left_by, monkeypatch, capsys, way):
    """Of those on the way; in the background that is not the time of writing."""
    save = CheckpointFolder.save
    monkeypatch.setattr(CheckpointFolder, "save", lambda *given: (time.sleep(0.2), save(*given))[1])
    monkeypatch.setattr(loop, "learning_rate", lambda *_: time.sleep(0.15) or 1e-3)
    config = tiny(trainer={"steps": 5, "save_every": 2, "save": way})
    assert train.run(config) == 0
    assert (left_by(config).summary["save_ms"] >= 200) is (way == "now")
    assert "a save holds steps up for " in capsys.readouterr().out
    alone = tiny(trainer={"steps": 2, "save": way})
    assert train.run(alone) == 0 and left_by(alone).summary["save_ms"] is None
    assert "holds steps up" not in capsys.readouterr().out
