"""Whatever happens to the files of a checkpoint, what is loaded is what was saved; else that is said."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from aottrain.config.folders import INDEX, no_checkpoint
from aottrain.config.run import TrainerConfig
from aottrain.errors import ResumeError
from aottrain.tasks import train
from aottrain.trainer.checkpoint import BEST, CheckpointFolder, find, load, load_model, load_optimizer
from tests.trainer.test_checkpoint import Hostile, cut, flip
from tests.trainer.test_run import same

STEPS = (10, 20, 30)


def state_of(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    model = {f"layer{index}.weight": torch.randn(7, 5, generator=generator) for index in range(3)}
    return {"model": model, "random": {"torch": generator.get_state()[:64]}, "identity": {"seed": 1}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of three checkpoints and a best one, to be copied and damaged."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("saved"), TrainerConfig(keep_last=3, keep_best=True))
    for step in STEPS:
        folder.save(step, state_of(step), step / 10)
    return folder.directory


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints", symlinks=True)
    return CheckpointFolder(tmp_path / "checkpoints")


def newest(folder: CheckpointFolder) -> Path:
    return folder.directory / "step_00000030.pt"


def zero_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 3 + 64] = bytes(64)
    path.write_bytes(content)


def swap_with_the_one_before(path: Path) -> None:
    other = path.with_name("step_00000020.pt")
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)


def of_another_run(path: Path) -> None:
    other = CheckpointFolder(path.parent / "other")
    shutil.move(other.save(30, state_of(99)), path)


DAMAGES = {
    "flipped bit": flip,
    "truncated": lambda path: cut(path, 0.7),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zero bytes": zero_bytes,
    "empty": lambda path: cut(path, 0),
    "swapped": swap_with_the_one_before,
    "of another run": of_another_run,
    "gone": Path.unlink,
    "text": lambda path: path.write_text("no checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_taken_and_that_is_one_line_but_what_is_named_itself_is_an_error(folder, damage):
    DAMAGES[damage](newest(folder))
    said = []
    loaded = find("auto", folder, said.append)
    wanted = 10 if damage == "swapped" else 20
    assert loaded.step == wanted and same(loaded.state["model"], state_of(wanted)["model"])
    assert len(said) == (2 if damage == "swapped" else 1) and all("\n" not in line for line in said)
    assert said[0].startswith(f"passing over a damaged checkpoint: {newest(folder)}: ")
    with pytest.raises(ResumeError) as caught:
        find(str(newest(folder)), folder, said.append)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("of another run", "gone")])
@pytest.mark.parametrize("index", ["gone", "{", "null", '{"checkpoints": [1]}', '{"checkpoints": [{"step": 30}]}'])
def test_without_a_list_a_damaged_file_is_seen_too(folder, damage, index):
    """Its members have checksums of their own, and its name has its step."""
    (folder.directory / INDEX).write_text(index) if index != "gone" else (folder.directory / INDEX).unlink()
    assert find("auto", folder, pytest.fail).step == 30
    DAMAGES[damage](newest(folder))
    said = []
    loaded = find("auto", folder, said.append)
    assert loaded.step == (10 if damage == "swapped" else 20)
    assert same(loaded.state["model"], state_of(loaded.step)["model"])
    assert said[0].startswith(f"passing over a damaged checkpoint: {newest(folder)}: ")


def harm(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    kind = draw.choice(["bit", "bytes", "zeros", "cut", "longer", "moved"])
    if kind == "bit":
        content[at] ^= 1 << draw.randrange(8)
    elif kind in ("bytes", "zeros"):
        end = min(len(content), at + draw.randrange(1, 200))
        content[at:end] = bytes(end - at) if kind == "zeros" else draw.randbytes(end - at)
    elif kind == "cut":
        del content[at:]
    elif kind == "longer":
        content[at:at] = draw.randbytes(draw.randrange(1, 50))
    else:
        del content[at : at + draw.randrange(1, 100)]
    path.write_bytes(content)


def test_no_random_damage_is_loaded_without_a_word(folder, saved, whole):
    """Of any file, one or two of them, with the list and without: what is loaded is what was saved, and where it is not
    the newest, that is said."""
    draw = random.Random(0)
    names = sorted(path.name for path in saved.iterdir() if not path.is_symlink())
    pristine = {name: (saved / name).read_bytes() for name in names}
    counts = {"newest": 0, "before": 0, "none": 0}
    for _ in range(200 if whole else 60):
        for name in names:
            (folder.directory / name).write_bytes(pristine[name])
        if draw.random() < 0.3:
            (folder.directory / INDEX).unlink()
        present = [name for name in names if (folder.directory / name).exists()]
        harmed = draw.sample(present, draw.choice([1, 1, 2]))
        for name in harmed:
            harm(folder.directory / name, draw)
        said = []
        try:
            loaded = find("auto", folder, said.append)
        except ResumeError:
            counts["none"] += 1
            continue
        assert all(same(loaded.state[part], value) for part, value in state_of(loaded.step).items()), harmed
        assert loaded.step == 30 or newest(folder).name in said[0], harmed
        changed = newest(folder).read_bytes() != pristine[newest(folder).name]
        if changed and INDEX in present and INDEX not in harmed:
            assert loaded.step != 30, harmed
        counts["newest" if loaded.step == 30 else "before"] += 1
    assert min(counts["newest"], counts["before"]) >= 10


def pickled(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps(Hostile(canary), 2))


def old_format(path: Path, canary: Path) -> None:
    content = {"format": 1, "step": 30, "model": Hostile(canary)}
    torch.save(content, path, _use_new_zipfile_serialization=False)


def within_the_archive(path: Path, canary: Path) -> None:
    """All is as it was but for the archive's pickle."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, pickle.dumps(Hostile(canary), 2) if name.endswith("/data.pkl") else content)
    path.write_bytes(target.getvalue())


@pytest.mark.parametrize("hostile", [pickled, old_format, within_the_archive])
@pytest.mark.parametrize("name", [*(f"step_{step:08d}.pt" for step in STEPS), INDEX, BEST])
@pytest.mark.parametrize("list_", ["right", "gone"])
def test_no_file_of_a_checkpoint_runs_code(folder, tmp_path, hostile, name, list_):
    """Not even where the list has its checksum."""
    canary, path = tmp_path / "canary", (folder.directory / name).resolve()
    if name == INDEX:
        pickled(path, canary)
    else:
        hostile(path, canary)
        listed = json.loads((folder.directory / INDEX).read_text())
        for entry in listed["checkpoints"]:
            entry["sha256"] = hashlib.sha256((folder.directory / entry["file"]).read_bytes()).hexdigest()
        (folder.directory / INDEX).write_text(json.dumps(listed))
        if list_ == "gone":
            (folder.directory / INDEX).unlink()
        with pytest.raises(ResumeError):
            find(str(folder.directory / name), folder, print)
    assert find("auto", folder, lambda line: None).step in STEPS
    assert not canary.exists()
    os.mkdir(canary)  # and this is how one would be seen: the same object runs where anything may
    with pytest.raises(FileExistsError):
        pickle.loads(pickle.dumps(Hostile(canary)))


@pytest.mark.parametrize("name", ["step_00000040.pt", "step_00000040.safetensors", INDEX, BEST])
def test_nothing_is_written_where_a_link_leads(folder, tmp_path, name):
    other = tmp_path / "other"
    other.write_bytes(b"another's")
    (folder.directory / f"{name}.tmp").symlink_to(other)
    CheckpointFolder(folder.directory, TrainerConfig(keep_best=True)).save(40, state_of(40), 1.0)
    assert other.read_bytes() == b"another's"
    assert find("auto", folder, pytest.fail).step == 40


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
@pytest.mark.parametrize("name", ["step_00000030.pt", "step_00000030.safetensors", INDEX])
@pytest.mark.parametrize("list_", ["right", "gone"])
def test_a_pipe_or_device_is_not_read(folder, make, name, list_):
    if list_ == "gone":
        (folder.directory / INDEX).unlink()
    (folder.directory / name).unlink(missing_ok=True)
    make(folder.directory / name)
    said = []
    assert find("auto", folder, said.append).step == (30 if name == INDEX else 20)
    if name.endswith(".pt"):
        with pytest.raises(ResumeError, match="is no file"):
            load(folder.directory / name)
        assert no_checkpoint(folder.directory / name) == "is no file"


def test_a_checkpoint_of_another_model_or_optimizer_is_one_line(folder):
    loaded = load(newest(folder))
    for load_into, owner in (
        (load_model, torch.nn.Linear(2, 2)),
        (load_optimizer, torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)),
    ):
        with pytest.raises(ResumeError, match=r"step_00000030.pt: is not of this (model|optimizer): ") as caught:
            load_into(owner, loaded)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("resume", ["auto", "the folder"])
def test_one_that_was_passed_over_is_neither_kept_nor_the_best(folder, resume):
    flip(newest(folder))
    again = CheckpointFolder(folder.directory, TrainerConfig(keep_last=2, keep_best=True))
    assert find("auto" if resume == "auto" else str(folder.directory.parent), again, lambda line: None).step == 20
    again.save(40, state_of(40), 2.5)
    left = [f"step_000000{step}.{suffix}" for step in (10, 20, 40) for suffix in ("pt", "safetensors")]
    assert sorted(path.name for path in folder.directory.glob("step_*")) == left
    flip(folder.directory / "step_00000040.pt")
    assert find("auto", CheckpointFolder(folder.directory), lambda line: None).step == 20


def test_from_a_run_s_newest_but_one_it_goes_on_bitwise(tiny, left_by, tmp_path, capsys):
    settings = {"lr_schedule": {"total_steps": 6}}
    straight = tiny(trainer={"steps": 6}, output_dir=str(tmp_path / "straight"), **settings)
    assert train.run(straight) == train.run(tiny(trainer={"steps": 4, "save_every": 2}, **settings)) == 0
    config = tiny(trainer={"steps": 6}, resume="auto", **settings)
    damaged = Path(config.output_dir, "checkpoints", "step_00000004.pt")
    flip(damaged)
    capsys.readouterr()
    assert train.run(config) == 0
    printed = capsys.readouterr().out
    assert printed.count("damaged") == 1 + printed.count("is damaged") and "going on after step 2" in printed
    assert left_by(config).losses == left_by(straight).losses
    states = [load(Path(run.output_dir, "checkpoints", "step_00000006.pt")).state for run in (straight, config)]
    assert all(same(states[0][part], states[1][part]) for part in ("model", "optimizer", "random"))
