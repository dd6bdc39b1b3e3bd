"""scripts/chaos.py: what it damages is damaged, what it ends is ended there, what it compares is told apart."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aottrain.config.choices import SAVES
from aottrain.errors import ResumeError
from aottrain.trainer import engines
from aottrain.trainer.checkpoint import CheckpointFolder, load
from aottrain.trainer.engines import LossModule
from aottrain.trainer.reliability.saving import Saving
from scripts import chaos
from scripts.chaos import same
from scripts.chaos_faults import damage, plant_nan
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
            model = {name: torch.full((3000,), float(step)) for name in ("first", "second")}
            saves.save(step, {"model": model, "random": torch.zeros(3000)}, None, lambda path: None, must=False)


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
@pytest.mark.parametrize("point", POINTS)
def test_at_each_point_of_a_save_it_is_ended_and_the_one_before_stays(tmp_path, point):
    """Ended in the fourth of six saves, of which the last two are kept, whoever writes it."""
    done = ("list renamed", "an old one removed", "the weights of an old one removed")
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
        assert newest.state["model"]["second"].unique().tolist() == [float(newest.step)]
        saving(folder, way, 5)  # and it goes on over what was left
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names[0] == "latest.json" and [name[:13] for name in names[1:]] == 2 * ["step_00000004"] + 2 * [
            "step_00000005"
        ]


def test_a_checkpoint_that_is_listed_and_damaged_is_told(tmp_path):
    saving(tmp_path, "now", 2)
    assert what_is_left(tmp_path) == ""
    assert damage(tmp_path, random.Random(0)) and "damaged" in what_is_left(tmp_path)


@pytest.mark.parametrize("is_loss", [True, False])
def test_what_is_planted_as_no_number_is_in_the_loss_or_in_a_gradient(monkeypatch, is_loss):
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(engines.ModuleStep, "__call__", engines.ModuleStep.__call__)
    module = LossModule(model, lambda model, batch: model(*batch).sum())
    plant_nan(SimpleNamespace(random=lambda: 0.0 if is_loss else 0.9, randrange=lambda *_: 2, choice=lambda of: of[0]))
    step = engines.ModuleStep("eager", module, tokens_per_batch=0, shares=module.shares, module=module)
    batch = (torch.ones(1, 2),)
    for number in range(1, 4):
        result = step([batch])
        bad = [bool(one.grad.isnan().any()) for one in model.parameters()]
        assert bool(result.loss.isnan()) == (is_loss and number == 2), number
        assert bad == ([True, is_loss] if number == 2 else [False, False]), number
        model.zero_grad()


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
def test_a_fault_that_ends_no_run_has_hit_one_all_the_same(tmp_path, monkeypatch):
    """With --rounds the script waited for ever that these did."""

    def ending(*_) -> int:
        return os.fork() or os._exit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chaos, "run_forked", ending)
    chance = random.Random(0)
    for said, end in (("memory ran out in the backward: a plan of less", "went on"), ("finished", "")):
        Path("output.txt").write_text(said, encoding="utf-8")
        assert chaos.one_fault(tmp_path, None, "oom", chaos.nothing, chance, 0.0) == (end, "")
    assert chaos.one_fault(tmp_path, None, "damage", chaos.nothing, chance, 0.0) == ("", "")
    saving(tmp_path, "now", 3)
    assert chaos.one_fault(tmp_path, None, "damage", chaos.nothing, chance, 0.0) == ("exit code 0", "")
