"""scripts/chaos.py: what it damages is damaged, and what it compares is told apart."""

from __future__ import annotations

import random

import pytest
import torch

from aottrain.errors import ResumeError
from aottrain.trainer.checkpoint import CheckpointFolder, load
from scripts.chaos import damage, same


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
