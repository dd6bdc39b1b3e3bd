"""scripts/chaos.py: what it damages is damaged, what it ends is ended there, what it compares is told apart."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

from aottrain.config.choices import SAVES
from aottrain.errors import ResumeError
from aottrain.trainer.checkpoint import CheckpointFolder, load
from aottrain.trainer.reliability.saving import Saving
from scripts.chaos import damage, same
from scripts.chaos_points import POINTS, plant, what_is_left


def test_the_newest_checkpoint_is_damaged_where_there_is_another(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(1, {"model": torch.ones(3)}, say=print)
    assert not damage(tmp_path, random.Random(0))
    folder.save(2, {"model": torch.ones(3)}, say=print)
    assert damage(tmp_path, random.Random(0))
    with pytest.raises(ResumeError):
        load(tmp_path / "checkpoints" / "step_00000002.pt")
    newest = folder.newest(print)
    assert newest is not None and newest.step == 1


def test_states_are_compared_bit_for_bit():
    state = {"model": [torch.ones(2), 3], "random": (1.5, None)}
    assert same(state, {"model": [torch.ones(2), 3], "random": (1.5, None)})
    assert not same(state, {"model": [torch.ones(2) + 1e-7, 3], "random": (1.5, None)})
    assert not same(state, {"model": [torch.ones(2)], "random": (1.5, None)})


def saving(folder: Path, way: str, steps: int) -> None:
    with Saving(CheckpointFolder(folder / "checkpoints"), way == "background", print) as saves:
        for step in range(1, steps + 1):
            saves.save(step, {"model": torch.full((3000,), float(step))}, None, lambda path: None, must=False)


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
@pytest.mark.parametrize("point", POINTS)
def test_at_each_point_of_a_save_it_is_ended_and_the_one_before_stays(tmp_path, point):
    """Ended in the fourth of six saves, of which the last two are kept, whoever writes it."""
    done = ("list renamed", "an old one removed")
    for way in SAVES:
        folder = tmp_path / way
        pid = os.fork()
        if pid == 0:
            try:
                plant(point, 4)
                saving(folder, way, 6)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert what_is_left(folder) == ""
        newest = CheckpointFolder(folder / "checkpoints").newest(pytest.fail)
        assert newest is not None and newest.step == (4 if point in done else 3)
        assert newest.state["model"].unique().tolist() == [float(newest.step)]
        saving(folder, way, 5)  # and it goes on over what was left
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names == ["latest.json", "step_00000004.pt", "step_00000005.pt"]


def test_a_checkpoint_that_is_listed_and_damaged_is_told(tmp_path):
    saving(tmp_path, "now", 2)
    assert what_is_left(tmp_path) == ""
    assert damage(tmp_path, random.Random(0)) and "damaged" in what_is_left(tmp_path)
