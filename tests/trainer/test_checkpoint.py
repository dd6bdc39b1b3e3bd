"""Checkpoints that are damaged, missing, hostile or cut off: never loaded, never in a good one's way."""

from __future__ import annotations

import os
import random
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from aottrain.config.folders import INDEX
from aottrain.errors import CheckpointError, ResumeError
from aottrain.trainer import checkpoint
from aottrain.trainer.checkpoint import CheckpointFolder, find, load
from aottrain.trainer.reliability.streams import random_state, set_random_state


def values(step: int) -> dict:
    return {"model": {"weight": torch.full((1000,), float(step))}}


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints, of steps 10 and 20."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (10, 20):
        folder.save(step, values(step))
    return folder


@pytest.fixture
def said():
    return []


def cut(path: Path, length: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * length)])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_the_newest_is_found_and_old_ones_go(folder, said):
    folder.save(30, values(30))
    loaded = folder.newest(said.append)
    assert loaded.step == 30 and loaded.state["model"]["weight"][0] == 30 and not said
    assert sorted(path.name for path in folder.directory.iterdir()) == [
        "latest.json", "step_00000020.pt", "step_00000020.safetensors", "step_00000030.pt", "step_00000030.safetensors",
    ]  # fmt: skip


def test_a_new_run_in_an_old_folder_is_the_one_that_counts(folder, said):
    folder.save(5, values(5))
    assert folder.newest(said.append).step == 5
    assert [path.name for path in folder.directory.glob("*.pt")] == ["step_00000005.pt"]


@pytest.mark.parametrize(
    "damage",
    [lambda path: cut(path, 0), lambda path: cut(path, 0.5), lambda path: cut(path, 0.999), flip, Path.unlink],
    ids=["empty", "half", "almost whole", "one bit", "gone"],
)
def test_a_damaged_one_is_passed_over_and_named(folder, said, damage):
    newest = folder.directory / "step_00000020.pt"
    damage(newest)
    assert folder.newest(said.append).step == 10
    assert len(said) == 1 and str(newest) in said[0]
    with pytest.raises(CheckpointError, match="step_00000020.pt"):
        load(newest)


def test_all_damaged_is_an_error(folder, said):
    for path in folder.directory.glob("*.pt"):
        flip(path)
    with pytest.raises(CheckpointError, match="none of its 2"):
        folder.newest(said.append)


def test_a_lost_index_loses_nothing(folder, said):
    (folder.directory / "latest.json").write_text("{")
    assert folder.newest(said.append).step == 20


@pytest.mark.parametrize("point", ["torch.save", "os.fsync", "os.replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "killed"])
def test_a_save_that_fails_leaves_the_old_ones(folder, said, monkeypatch, point, error):
    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(point, fail)
        with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
            folder.save(30, values(30))
    assert folder.newest(said.append).step == 20 and not said
    assert not list(folder.directory.glob("*.tmp"))
    folder.save(30, values(30))
    assert folder.newest(said.append).step == 30


@pytest.mark.parametrize("point", ["torch.save", "os.fsync", "os.replace"])
def test_a_save_that_fails_leaves_the_one_of_its_own_step(folder, said, monkeypatch, point):
    """A run that goes on from step 10 writes step 20 again."""

    def fail(*given):
        if point == "torch.save":
            given[1].write(b"begun")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(point, fail)
        with pytest.raises(CheckpointError):
            folder.save(20, values(99))
    loaded = folder.newest(said.append)
    assert loaded.step == 20 and loaded.state["model"]["weight"][0] == 20 and not said


def test_a_disk_that_is_full_is_called_so(folder):
    """torch's writer says "unexpected pos 576 vs 534" for it."""
    before = {path.name for path in folder.directory.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step_00000030.pt: cannot be written: File too large$"):
            folder.save(30, {**values(30), "large": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name for path in folder.directory.iterdir()} == before  # what is left would keep the disk full


def test_what_stands_where_the_list_should_be_is_named(folder):
    (folder.directory / INDEX).unlink()
    (folder.directory / INDEX).mkdir()
    with pytest.raises(CheckpointError, match=f"{INDEX}: cannot be written: Is a directory$"):
        folder.save(30, values(30))


def test_a_save_without_its_index_entry_does_not_count(folder, said, monkeypatch):
    write, calls = checkpoint.write_whole, []

    def write_once(path, content):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_whole", write_once)
    with pytest.raises(KeyboardInterrupt):
        folder.save(30, values(30))
    assert folder.newest(said.append).step == 20


def test_what_resume_can_name(folder, said, tmp_path):
    assert find(None, folder, said.append) is None
    assert find("auto", folder, said.append).step == 20
    assert find("auto", CheckpointFolder(tmp_path / "none"), said.append) is None
    assert find(str(folder.directory / "step_00000010.pt"), folder, said.append).step == 10
    other = CheckpointFolder(tmp_path / "other" / "checkpoints")
    assert find(str(folder.directory), other, said.append).step == 20
    assert find(str(tmp_path), other, said.append).step == 20


@pytest.mark.parametrize("name", ["nowhere", "nowhere/step_00000001.pt", "empty"])
def test_what_resume_cannot_name(folder, said, tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=name):
        find(str(tmp_path / name), folder, said.append)


def test_a_folder_of_runs_is_answered_with_the_newest_of_them(folder, said, tmp_path):
    """Who types a folder too few is told which one is meant."""
    run = tmp_path / "recipe" / "2026-01-01"
    run.mkdir(parents=True)
    folder.directory.rename(run / folder.directory.name)
    (tmp_path / "recipe" / "2026-01-02").mkdir()
    with pytest.raises(ResumeError, match=f"no checkpoint; the newest run in it that has one is {run}$"):
        find(str(run.parent), folder, said.append)


class Hostile:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def test_no_code_in_a_file_runs(tmp_path):
    canary = tmp_path / "canary"
    torch.save({"format": 1, "step": 1, "model": Hostile(canary)}, tmp_path / "step_00000001.pt")
    with pytest.raises(CheckpointError):
        load(tmp_path / "step_00000001.pt")
    assert not canary.exists()


@pytest.mark.parametrize("content", [{"model": {}}, [1, 2], {"format": 99, "step": 1}])
def test_another_programs_file_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="is not a checkpoint of aottrain"):
        load(tmp_path / "other.pt")


def test_every_random_stream_goes_on(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()

    random.gauss(0, 1), np.random.randn()  # each keeps a second normal number for its next call
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {"random": random_state()})
    expected = [draw() for _ in range(3)]
    set_random_state(folder.newest(print).state["random"])
    assert [draw() for _ in range(3)] == expected
