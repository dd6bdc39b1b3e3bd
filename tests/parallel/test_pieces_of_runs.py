"""Whole runs that write their checkpoints in pieces: they go on with as many processes or others, bit by bit as from
whole ones; every task reads them; and a process that is killed within a save leaves nothing that is read by half."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aottrain.trainer.checkpoint import CheckpointFolder, load
from tests.parallel.groups import ended as end_of
from tests.parallel.groups import run_together, started
from tests.parallel.in_threads import state_of, whole_job
from tests.parallel.killed_in_a_save import OF_THE_FIRST, POINTS
from tests.parallel.test_pieces import parts_of
from tests.parallel.test_runs import SMALL
from tests.sampling import WHOLE
from tests.trainer.test_run import same

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

LINE = [*SMALL, "engine=eager", "logger=csv", "trainer.ema=0.9", "trainer.save_every=2", "trainer.keep_best=true",
        "parallel=shard", "trainer.eval_batches=1", "hydra.run.dir=out"]  # fmt: skip
FORMS = ("whole", "parts")


def left_by(folder: Path, line: list[str], size: int) -> Path:
    folder.mkdir()
    ended = run_together(line, folder, size)
    assert [each.code for each in ended] == [0] * size, ended[-1].err
    return folder / "out"


def losses(folder: Path) -> list[str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [row["train/loss"] for row in csv.DictReader(file)]


def end(folder: Path, step: int) -> dict:
    return load(folder / "checkpoints" / f"step_{step:08d}.pt").state


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Four steps of two processes in each form."""
    folder = tmp_path_factory.mktemp("begun")
    return {form: left_by(folder / form, [*LINE, f"parallel.checkpoints={form}"], 2) for form in FORMS}


KEYS = ("model", "optimizer", "averages", "random", "losses")


def test_both_forms_are_of_the_same_state(begun):
    whole, parts = (end(begun[form], 4) for form in FORMS)
    assert all(same(whole[key], parts[key]) for key in (*KEYS, "random_of_others", "patience", "identity"))
    folder = begun["parts"] / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best", "latest.json", "step_00000002", "step_00000002.pt", "step_00000004", "step_00000004.pt",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [pytest.param(2, marks=WHOLE), 3])
def test_a_run_goes_on_with_as_many_or_others_bit_by_bit_as_from_a_whole_checkpoint(begun, size, tmp_path):
    """2 -> 2, or 2 -> 3 -> 1; those that go on write in the form of the run before, but for one process."""
    ends = {}
    for form in FORMS:
        line = ["-m", "aottrain", f"resume={begun[form]}", "trainer.steps=6", "hydra.run.dir=out"]
        ends[form] = left_by(tmp_path / f"{form}{size}", line, size)
        assert (ends[form] / "checkpoints" / "step_00000006").is_dir() == (form == "parts")
    states = [end(ends[form], 6) for form in FORMS]
    assert losses(ends["whole"]) == losses(ends["parts"]) and all(same(states[0][key], states[1][key]) for key in KEYS)
    for form in FORMS if size == 3 else ():
        line = ["-m", "aottrain", f"resume={ends[form]}", "trainer.steps=8", "hydra.run.dir=out"]
        ends[form] = left_by(tmp_path / f"{form}1", line, 1)
        states.append(end(ends[form], 8))
    assert losses(ends["whole"]) == losses(ends["parts"]) and all(same(states[-2][k], states[-1][k]) for k in KEYS)


def test_two_processes_go_on_from_the_one_before_damaged_pieces_as_if_nothing_had_happened(begun, tmp_path):
    """By resume=auto, all alike; of what is named itself the damage is one line."""
    (tmp_path / "named").mkdir()
    out = Path(shutil.copytree(begun["parts"], tmp_path / "out", symlinks=True))
    piece = out / "checkpoints" / "step_00000004" / "part_00002_of_00002.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1])
    line = ["-m", "aottrain", f"resume={piece.parent}", "trainer.steps=6", "hydra.run.dir=own"]
    first, _ = run_together(line, tmp_path / "named")
    assert first.code == 2 and "the checksum of a piece of it" in first.err and "Traceback" not in first.err
    again = run_together([*LINE, "parallel.checkpoints=parts", "resume=auto"], tmp_path)
    assert [each.code for each in again] == [0, 0], again[1].err
    assert "passing over a damaged checkpoint" in again[0].out and "going on after step 2" in again[0].out
    states = [end(folder, 4) for folder in (begun["parts"], out)]
    assert losses(out) == losses(begun["parts"]) and all(same(states[0][key], states[1][key]) for key in KEYS)


@pytest.mark.parametrize(("task", "more", "file"), [
    ("eval", ["eval.batches=1"], "eval.json"),
    pytest.param("generate", ["generate.prompt=a"], "sample.txt", marks=WHOLE),
    ("export", ["export.format=weights", "export.path=model"], "model/weights.pt"),
])  # fmt: skip
def test_tasks_of_a_run_read_pieces(begun, task, more, file, tmp_path):
    found = []
    for form in FORMS:
        folder = tmp_path / form
        folder.mkdir()
        line = ["-m", "aottrain", f"task={task}", f"{task}.run={begun[form]}", *more, "hydra.run.dir=."]
        (ended,) = run_together(line, folder, 1)
        assert ended.code == 0, ended.err
        path = folder / file
        read = {".pt": torch.load, ".json": lambda path: json.loads(path.read_text())["loss"]}
        found.append(read.get(path.suffix, Path.read_text)(path))
    assert same(*found)


def test_files_are_written_in_the_background_too(begun, tmp_path):
    out = left_by(tmp_path / "run", [*LINE, "parallel.checkpoints=parts", "trainer.save=background"], 2)
    for step in (2, 4):
        states = [end(folder, step) for folder in (begun["parts"], out)]
        assert all(same(states[0][key], states[1][key]) for key in KEYS)


SOME = [(1, "piece half written", "now"), (0, "piece told", "now"), (1, "piece renamed", "background"),
        (0, "list flushed", "background")]  # fmt: skip
EVERY = [(victim, point, way) for victim, points in enumerate((OF_THE_FIRST, POINTS)) for point in points
         for way in ("now", "background")]  # fmt: skip


@pytest.mark.parametrize(
    ("victim", "point", "way"), [pytest.param(*each, marks=() if each in SOME else WHOLE) for each in EVERY]
)
def test_what_a_killed_save_leaves_is_never_read_by_half(victim, point, way, tmp_path):
    line = [str(Path(__file__).with_name("killed_in_a_save.py")), str(victim), point, way]
    with started(line, tmp_path) as processes:
        ended = end_of(processes, tmp_path)
    assert ended[victim].code == -9 and ended[1 - victim].code == 1, ended
    assert "ParallelError: " in ended[1 - victim].err and "Traceback" not in ended[1 - victim].err
    said = []
    loaded = CheckpointFolder(tmp_path / "checkpoints").newest(said.append)
    is_listed = victim == 0 and point in ("list renamed", "an old one half removed")
    is_written = victim == 1 and point in ("piece renamed", "piece told")  # the first may have gone on with it
    assert loaded is not None and loaded.step in ((20,) if is_listed else (10, 20) if is_written else (10,))
    assert not said and same(parts_of(loaded.state), parts_of(state_of(whole_job(loaded.step))))
    (tmp_path / "checkpoints" / "latest.json").unlink()
    loaded = CheckpointFolder(tmp_path / "checkpoints").newest(said.append)
    assert same(parts_of(loaded.state), parts_of(state_of(whole_job(loaded.step))))


def test_with_one_process_or_whole_weights_it_is_said(tmp_path):
    """Weights that each process holds whole are in no parts: there is no such key. One process writes them whole."""
    (ended,) = run_together([*SMALL, "parallel.checkpoints=parts", "hydra.run.dir=out"], tmp_path, 1)
    assert ended.code == 2 and "parallel.checkpoints" in ended.err and not (tmp_path / "out").exists(), ended.err
    (ended,) = run_together([*LINE, "trainer.steps=2", "parallel.checkpoints=parts"], tmp_path, 1)
    assert ended.code == 0 and "parallel.checkpoints=parts have no effect: this is the only" in ended.out, ended.out
    assert (tmp_path / "out" / "checkpoints" / "step_00000002.safetensors").is_file()
