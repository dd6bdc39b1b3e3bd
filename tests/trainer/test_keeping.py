"""Which checkpoints stay, and that an old one goes only when the new one is on the disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from aottrain.cli import main
from aottrain.config.folders import INDEX
from aottrain.config.run import TrainerConfig
from aottrain.tasks import train
from aottrain.trainer.checkpoint import BEST, CheckpointFolder, find, load
from tests.trainer.test_run import same

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: 4.0, 60: 5.0}


def kept_in(folder: CheckpointFolder) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.directory.glob("step_*.pt"))


def saved(directory: Path, losses: dict = LOSSES, **keep) -> CheckpointFolder:
    folder = CheckpointFolder(directory, TrainerConfig(**keep))
    for step, loss in losses.items():
        folder.save(step, {"weight": torch.tensor(float(step))}, loss)
    return folder


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        ({}, [50, 60]),
        ({"keep_last": 1}, [60]),
        ({"keep_last": 4}, [30, 40, 50, 60]),
        ({"keep_every": 30}, [30, 50, 60]),
        ({"keep_best": True}, [20, 50, 60]),
        ({"keep_last": 1, "keep_every": 20, "keep_best": True}, [20, 40, 60]),
    ],
    ids=str,
)
def test_what_stays(tmp_path, keep, steps):
    folder = saved(tmp_path, **keep)
    assert kept_in(folder) == steps
    assert [entry["step"] for entry in json.loads((tmp_path / INDEX).read_text())["checkpoints"]] == steps[::-1]
    assert all(load(path).step in steps for path in tmp_path.glob("step_*.pt"))
    assert (tmp_path / BEST).is_symlink() == keep.get("keep_best", False)


def test_the_best_is_the_earliest_of_the_lowest_and_can_be_named(tmp_path):
    folder = saved(tmp_path / "checkpoints", keep_best=True)
    assert find(str(folder.directory / BEST), folder, print).step == 20
    folder.save(70, {}, 0.5)
    assert find(str(folder.directory / BEST), folder, print).step == 70 and kept_in(folder) == [60, 70]
    folder.save(80, {}, 0.6)
    folder.save(90, {}, None)
    assert load(folder.directory / BEST).step == 70


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_never_the_best(tmp_path, loss):
    folder = saved(tmp_path, {10: 2.0, 20: loss, 30: 3.0, 40: 4.0}, keep_best=True)
    assert load(tmp_path / BEST).step == 10 and kept_in(folder) == [10, 30, 40]
    assert "NaN" not in (tmp_path / INDEX).read_text()
    alone = saved(tmp_path / "alone", {10: loss}, keep_best=True)
    assert kept_in(alone) == [10] and not (tmp_path / "alone" / BEST).is_symlink()


def test_a_damaged_best_is_an_error_not_another_checkpoint(tmp_path):
    folder = saved(tmp_path, keep_best=True)
    content = bytearray((tmp_path / BEST).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / BEST).resolve().write_bytes(content)
    with pytest.raises(Exception, match="step_00000020.pt: is damaged"):
        find(str(tmp_path / BEST), folder, print)


def test_the_best_is_known_again_by_a_run_that_goes_on_and_forgotten_with_what_is_taken_back(tmp_path):
    saved(tmp_path, keep_best=True)
    folder = CheckpointFolder(tmp_path, TrainerConfig(keep_best=True))
    folder.save(70, {}, 2.0)
    assert load(tmp_path / BEST).step == 20 and kept_in(folder) == [20, 60, 70]
    folder.save(15, {}, 9.0)  # a run that begins anew in this folder
    assert load(tmp_path / BEST).step == 15 and kept_in(folder) == [15]
    CheckpointFolder(tmp_path).save(25, {}, 8.0)
    assert not os.path.lexists(tmp_path / BEST)


def test_an_old_one_goes_only_when_the_new_one_its_list_and_its_link_are_on_the_disk(tmp_path, monkeypatch):
    folder = saved(tmp_path, {10: 2.0}, keep_last=1, keep_best=True)
    events = []

    def note(name, call):
        def noted(*given, **options):
            done = call(*given, **options)
            what = os.readlink(f"/proc/self/fd/{given[0]}") if name == "fsync" else str(given[-1])
            events.append((name, Path(what).name))
            return done

        return noted

    monkeypatch.setattr(os, "fsync", note("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", note("replace", os.replace))
    monkeypatch.setattr(Path, "unlink", note("unlink", Path.unlink))
    folder.save(20, {}, 1.0)
    done = [event for event in events if event[0] != "unlink" or event[1].endswith(".pt")]
    whole = [("fsync", "{}.tmp"), ("replace", "{}"), ("fsync", tmp_path.name)]
    wanted = [(what, name.format(file)) for file in ("step_00000020.pt", INDEX) for what, name in whole]
    wanted += [("replace", BEST), ("fsync", tmp_path.name), ("unlink", "step_00000010.pt")]
    assert done == wanted


def test_what_cannot_be_removed_is_said_once_and_saving_goes_on(tmp_path):
    said = []
    folder = saved(tmp_path, {10: 1.0}, keep_last=1)
    (tmp_path / "step_00000010.pt").unlink()
    (tmp_path / "step_00000010.pt").mkdir()
    (tmp_path / "step_00000005.pt.tmp").write_text("of a save that was killed")
    for step in (20, 30):
        folder.save(step, {}, say=said.append)
    (line,) = said
    assert line.startswith(f"warning: {tmp_path}/step_00000010.pt: an old checkpoint cannot be removed: ")
    assert line.endswith("; going on") and kept_in(folder) == [10, 30] and not list(tmp_path.glob("*.tmp"))
    assert folder.newest(said.append).step == 30 and len(said) == 1


def test_what_somebody_else_called_best_stays(tmp_path):
    said = []
    (tmp_path / BEST).write_text("mine")
    folder = CheckpointFolder(tmp_path, TrainerConfig(keep_best=True))
    folder.save(10, {}, 1.0, said.append)
    assert (tmp_path / BEST).read_text() == "mine" and "cannot be linked to step_00000010.pt" in said[0]
    assert folder.newest(said.append).step == 10


def test_a_run_keeps_what_it_was_told_and_goes_on_from_its_best(tiny, left_by, tmp_path):
    """And no key of this changes the run: whatever is kept, and wherever it goes on, its parameters are the same."""
    schedule = {"total_steps": 8}
    keep = {"save_every": 2, "keep_last": 1, "keep_every": 4, "keep_best": True}
    straight = tiny(trainer={"steps": 8}, lr_schedule=schedule, output_dir=str(tmp_path / "straight"))
    first = tiny(trainer={"steps": 6, **keep}, lr_schedule=schedule)
    assert train.run(straight) == train.run(first) == 0
    folder = CheckpointFolder(Path(first.output_dir) / "checkpoints")
    best = folder.directory / BEST
    losses = {int(row["step"]): float(row["val/loss"]) for row in left_by(first).rows if row["val/loss"]}
    lowest = min(losses, key=losses.get)
    assert sorted(losses) == [2, 4, 6] and load(best).step == lowest and kept_in(folder) == sorted({4, 6, lowest})
    again = tiny(trainer={"steps": 8}, lr_schedule=schedule, resume=str(best), output_dir=str(tmp_path / "again"))
    assert train.run(again) == 0
    wanted, got = (load(Path(run.output_dir, "checkpoints", "step_00000008.pt")).state for run in (straight, again))
    assert all(same(wanted[part], got[part]) for part in ("model", "optimizer", "random"))


@pytest.mark.parametrize(
    "wrong",
    [
        {
            "trainer.keep_last=0": "must be a whole number >= 1",
            "trainer.keep_every=-1": "must be a whole number >= 0",
            "trainer.keep_best=1": "must be true or false",
            "trainer.on_nonfinite=stop": "must be one of raise, skip, rollback",
            "trainer.max_skips=0": "must be a whole number >= 1",
        },
        {"trainer.keep_every=3": "must be a multiple of trainer.save_every=2, the steps that have a checkpoint, or 0"},
    ],
)
def test_a_wrong_value_is_one_line(wrong, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*wrong, "trainer.save_every=2"]) == 2
    lines = [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip().startswith("trainer.")]
    assert sorted(lines) == sorted(f"{given}: {text}" for given, text in wrong.items())
