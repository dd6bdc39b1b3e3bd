"""Checkpoints that several processes write, each what it holds: whole when read, by others as many or not, or not at
all."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import pickle
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from aottrain.config.folders import INDEX, no_checkpoint
from aottrain.config.run import TrainerConfig
from aottrain.errors import CheckpointError, ConfigError, ParallelError, ResumeError
from aottrain.metrics.memory import watch_cpu_peak
from aottrain.trainer.checkpoint import BEST, CheckpointFolder, find, load
from aottrain.trainer.parallel import pieces as in_pieces
from aottrain.trainer.parallel.pieces import FolderOfPieces, check_types, shared_folder, state_in_pieces
from aottrain.trainer.parallel.together import part_of_state
from aottrain.trainer.preparing import restore
from aottrain.trainer.reliability.identity import Changes
from aottrain.trainer.reliability.saving import Saving
from aottrain.trainer.weights import pieces
from tests.parallel.in_threads import InThread, part_job, save_steps, state_of, together, whole_job
from tests.trainer.test_checkpoint import Hostile, cut, flip
from tests.trainer.test_damage import harm
from tests.trainer.test_run import same

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is without gloo")

PARTS = ("model", "optimizer", "averages", "patience")


def parts_of(state):
    return {key: dict(state[key]) for key in PARTS}


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (3, 1), (5, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["odd", "tied"])
def test_what_is_read_is_what_one_process_would_have_written(size, replicas, kind, tmp_path):
    """With rows that no number of processes divides, a number, fewer rows than processes, tied weights."""
    save_steps(tmp_path, [10], size, kind=kind, replicas=replicas)
    loaded = load(tmp_path / "step_00000010.pt")
    wanted = state_of(whole_job(10, kind))
    assert same(parts_of(loaded.state), parts_of(wanted)) and list(loaded.state["model"]) == list(wanted["model"])
    assert loaded.state["model"]._metadata == wanted["model"]._metadata
    assert loaded.state["random"] == (1, [2.5]) and "pieces" not in loaded.state
    files = sorted((tmp_path / "step_00000010").iterdir())
    count = size // replicas
    assert [path.name for path in files] == [
        f"part_{part:05d}_of_{count:05d}.safetensors" for part in range(1, count + 1)
    ]
    held = [sum(value.numel() for value in load_file(path).values()) for path in files]
    total = sum(value.numel() for value in {id(v): v for v in tensors_of(wanted)}.values())
    assert max(held) < 1.3 * total / count + 3 * 24 and sum(held) == total


def tensors_of(state):
    """Each once that is in parts."""
    model = {value.data_ptr(): value for value in state["model"].values()}
    states = [value for each in state["optimizer"]["state"].values() for key, value in each.items() if key != "step"]
    return [*model.values(), *states, *state["averages"]["values"].values()]


@pytest.mark.parametrize(("wrote", "reads"), [(2, 2), (2, 3), (3, 2), (3, 5)])
def test_each_process_reads_its_own_rows_and_no_file_without_them(wrote, reads, tmp_path, monkeypatch):
    save_steps(tmp_path, [10], wrote)
    opened, real = {}, pieces.opened

    def noted(path: Path):
        opened.setdefault(threading.get_ident(), set()).add(path.name)
        return real(path)

    monkeypatch.setattr(pieces, "opened", noted)

    def read(world):
        world.gather(None)  # each has a thread of its own
        job = part_job(77, world)
        found = part_of_state(job, load(tmp_path / "step_00000010.pt", lazily=True, checks=world.is_first)).state
        assert same(parts_of(found), parts_of(state_of(part_job(10, world)))), world.rank
        return opened[threading.get_ident()]

    rows = {value.shape[0] if value.ndim else 1 for value in tensors_of(state_of(whole_job(10)))}

    def overlap(count: int, part: int, other: int) -> bool:
        (first, end), (begin, last) = pieces.rows_held(count, part, reads), pieces.rows_held(count, other, wrote)
        return max(first, begin) < min(end, last)

    assert together(reads, read) == [
        {pieces.file_name(other, wrote) for other in range(wrote) if any(overlap(n, part, other) for n in rows)}
        for part in range(reads)
    ]


def test_torch_s_own_reader_reads_the_folder(tmp_path):
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as dcp_load

    save_steps(tmp_path, [10], 3)
    wanted = whole_job(10).module.model.state_dict()
    values = {f"model.{name}": torch.zeros(value.shape or (1,)) for name, value in wanted.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(values, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step_00000010")))
    assert all(torch.equal(values[f"model.{name}"].view(value.shape), value) for name, value in wanted.items())


def test_no_process_holds_more_than_its_part_and_one_tensor(tmp_path):
    """By the allocator's bytes: of three times the weights that a whole checkpoint has, none are taken."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    rows = {f"{index}": weight.detach()[:128] for index, weight in enumerate(model.parameters())}
    shapes = {name: (256, 256) for name in rows}
    written = []
    with watch_cpu_peak() as peak:
        pieces.write_pieces(lambda data: written.append(len(data)), rows, shapes, 0, 2)
    assert sum(written) > num_bytes / 2 and peak.num_bytes < num_bytes / 16
    with (tmp_path / pieces.file_name(0, 2)).open("wb") as file:
        pieces.write_pieces(file.write, rows, shapes, 0, 2)
    with (tmp_path / pieces.file_name(1, 2)).open("wb") as file:
        pieces.write_pieces(file.write, rows, shapes, 1, 2)
    stored = pieces.stored_in(tmp_path, pieces.index_of(rows, shapes, 2))
    with watch_cpu_peak() as peak:
        parts = [tensor.rows(128, 32) for tensor in stored.values()]
    mapped = (tmp_path / pieces.file_name(1, 2)).stat().st_size  # which is the system's, but counted here
    assert len(parts) == 8 and num_bytes / 8 <= peak.num_bytes - mapped < num_bytes / 4


STEPS = (10, 20, 30)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save_steps(directory, STEPS)
    return directory


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    return CheckpointFolder(tmp_path / "checkpoints", TrainerConfig(keep_last=3))


def zeros(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    path.write_bytes(content)


def exchange(path: Path, other: Path) -> None:
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def of_step(path: Path, step: int) -> Path:
    return path.parents[1] / f"step_{step:08d}" / path.name


def another_s(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: value + 1 for name, value in tensors.items()}, path)


OF_A_PIECE: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip,
    "first byte": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "zero bytes": zeros,
    "truncated": lambda path: cut(path, 0.6),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: cut(path, 0),
    "gone": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "of the step before": lambda path: shutil.copy(of_step(path, 20), path),
    "the other process's": lambda path: shutil.copy(path.with_name(pieces.file_name(0, 2)), path),
    "the same tensors of another run": another_s,
    "text": lambda path: path.write_text("no tensors"),
}  # fmt: skip
OF_THE_FOLDER: dict[str, Callable[[Path], object]] = {
    "all pieces gone": lambda path: shutil.rmtree(path.parent),
    "the folder is that of another step": lambda path: (
        shutil.rmtree(path.parent), shutil.copytree(of_step(path, 20).parent, path.parent)
    ),
    "pieces exchanged": lambda path: exchange(path, path.with_name(pieces.file_name(0, 2))),
    "the other file flipped": lambda path: flip(path.parent.with_suffix(".pt")),
    "the other file gone": lambda path: path.parent.with_suffix(".pt").unlink(),
    "the other file truncated": lambda path: cut(path.parent.with_suffix(".pt"), 0.8),
    "the other file of the step before": lambda path: shutil.copy(
        of_step(path, 20).parent.with_suffix(".pt"), path.parent.with_suffix(".pt")
    ),
}  # fmt: skip


@pytest.mark.parametrize("list_", ["right", "gone"])
@pytest.mark.parametrize("lazily", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("damage", [*OF_A_PIECE, *OF_THE_FOLDER])
def test_the_one_before_is_taken_and_that_is_one_line_but_what_is_named_itself_is_an_error(
    folder, damage, list_, lazily
):
    if list_ == "gone":
        (folder.directory / INDEX).unlink()
    newest = folder.directory / "step_00000030"
    {**OF_A_PIECE, **OF_THE_FOLDER}[damage](newest / pieces.file_name(1, 2))
    said = []
    loaded = find("auto", folder, said.append, lazily=lazily)
    assert loaded.step == 20
    if not lazily:
        assert same(parts_of(loaded.state), parts_of(state_of(whole_job(20))))
    if list_ == "right" or damage != "the other file gone":
        (line,) = said
        assert line.startswith(f"passing over a damaged checkpoint: {newest}.pt: ")
    with pytest.raises(ResumeError) as caught:
        find(f"{newest}.pt", folder, said.append, lazily=lazily)
    assert "\n" not in str(caught.value)


def test_no_random_damage_is_loaded_without_a_word(folder, saved, whole):
    """Of any piece, other file or list, one or two of them."""
    draw = random.Random(0)
    names = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    pristine = {name: (saved / name).read_bytes() for name in names}
    wanted = {step: parts_of(state_of(whole_job(step))) for step in STEPS}
    seen = Counter()
    for _ in range(200 if whole else 40):
        for name in names:
            (folder.directory / name).write_bytes(pristine[name])
        is_listed = draw.random() < 0.7
        if not is_listed:
            (folder.directory / INDEX).unlink()
        present = [name for name in names if (folder.directory / name).exists()]
        harmed = draw.sample(present, draw.choice([1, 1, 2]))
        for name in harmed:
            harm(folder.directory / name, draw)
        said = []
        loaded = find("auto", CheckpointFolder(folder.directory), said.append, lazily=draw.random() < 0.3)
        seen[loaded.step] += 1
        newest = [name for name in harmed if "30" in name and (folder.directory / name).read_bytes() != pristine[name]]
        assert (loaded.step != 30) == bool(said), harmed
        if is_listed and INDEX not in harmed:  # else what no checksum covers may be another, as padding of an archive
            assert bool(said) == bool(newest), harmed
        again = load(loaded.path)
        assert same(parts_of(again.state), wanted[loaded.step]), harmed
    assert min(seen[30], seen[20]) > 5


def test_a_folder_of_pieces_names_its_checkpoint(folder):
    path = folder.directory / "step_00000020"
    assert find(str(path), folder, pytest.fail).step == 20 and no_checkpoint(path) == ""
    assert find(str(folder.directory), folder, pytest.fail).step == 30


def pickled(canary: Path) -> bytes:
    return pickle.dumps(Hostile(canary), 2)


def archived(canary: Path) -> bytes:
    stream = io.BytesIO()
    torch.save(Hostile(canary), stream)
    return stream.getvalue()


def rewrite(folder: CheckpointFolder, change: Callable[[dict], object]) -> Path:
    """The other file of the newest, with other content and all checksums right."""
    path = folder.directory / "step_00000030.pt"
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    listed = json.loads((folder.directory / INDEX).read_text())
    listed["checkpoints"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder.directory / INDEX).write_text(json.dumps(listed))
    return path


@pytest.mark.parametrize("hostile", [pickled, archived])
@pytest.mark.parametrize("what", ["piece", "other file", "list", ".metadata"])
def test_no_file_runs_anything(folder, hostile, what, tmp_path):
    """Not even where all checksums are those of the hostile file, and where torch's own format has a pickle."""
    canary, piece = tmp_path / "canary", folder.directory / "step_00000030" / pieces.file_name(1, 2)
    content = hostile(canary)
    target = {"piece": piece, "other file": piece.parent.with_suffix(".pt"), "list": folder.directory / INDEX}
    target.get(what, piece.with_name(".metadata")).write_bytes(content)
    if what == "piece":
        digest = hashlib.sha256(content).hexdigest()
        rewrite(folder, lambda content: content["pieces"]["files"].update({piece.name: digest}))
    said = []
    assert find("auto", folder, said.append).step == (20 if what in ("piece", "other file") else 30)
    assert not canary.exists()
    os.mkdir(canary)
    with pytest.raises(FileExistsError):
        pickle.loads(pickled(canary))


FIRST = "model.embedding.weight"
LIES: dict[str, Callable[[dict], object]] = {
    "the folder above": lambda pieces: pieces.update(folder=".."),
    "a folder elsewhere": lambda pieces: pieces.update(folder="../step_00000020"),
    "a file elsewhere": lambda pieces: pieces["files"].update({"../step_00000020.pt": "0" * 64}),
    "a file without a checksum": lambda pieces: pieces["files"].pop("part_00002_of_00002.safetensors"),
    "more rows than there are": lambda pieces: pieces["index"][FIRST].update(
        shape=(1 << 50, 23), pieces=[("part_00001_of_00002.safetensors", 0, 1 << 50)]
    ),
    "rows that nobody has": lambda pieces: pieces["index"][FIRST]["pieces"].pop(),
    "rows twice": lambda pieces: pieces["index"][FIRST]["pieces"].append(pieces["index"][FIRST]["pieces"][1]),
    "another type": lambda pieces: pieces["index"][FIRST].update(dtype=torch.int32),
    "another tensor's rows": lambda pieces: pieces["index"].update({FIRST: pieces["index"]["model.head.weight"]}),
    "no place": lambda pieces: pieces["places"].append((("nowhere", "at", "all"), FIRST)),
    "no tensor": lambda pieces: pieces["places"].append((("model", "x"), "y")),
    "more than it has": lambda pieces: pieces.update(more=1),
    "no index": lambda pieces: pieces.pop("index"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_fit_together_is_damaged(folder, lie):
    if lie == "another tensor's rows":
        path = rewrite(folder, lambda content: content["pieces"]["index"][FIRST].update(shape=(19, 24)))
    else:
        path = rewrite(folder, lambda content: LIES[lie](content["pieces"]))
    with pytest.raises(ResumeError, match="is damaged, or no checkpoint of aottrain"):
        load(path)


def test_weights_of_another_shape_are_refused_though_parts_have_as_many_rows(saved):
    """Whether they are read whole or by rows."""
    for lazily in (False, True):
        loaded = load(saved / "step_00000030.pt", lazily=lazily)

        def read(world, loaded=loaded):
            job = part_job(30, world)
            job.module.shards.shapes["embedding.weight"] = torch.Size([20, 23])
            part_of_state(job, loaded)

        with pytest.raises(ResumeError, match=r"embedding.weight is \[19, 23\] there, \[20, 23\] in this model"):
            together(2, read)


def test_an_optimizer_that_begins_anew_may_have_its_parameters_in_another_order(saved):
    def read(world):
        job = part_job(77, world)
        weights = list(job.module.model.parameters())
        job.optimizer = torch.optim.SGD(weights[::-1])
        job.load_state_beside = lambda state: None
        loaded = load(saved / "step_00000030.pt", lazily=True)
        with pytest.raises(ResumeError, match="is of another model"):
            restore(job, loaded)
        restore(job, loaded, Changes(optimizer_begins_anew=True))
        assert not job.optimizer.state
        return same(dict(job.module.model.state_dict()), dict(part_job(30, world).module.model.state_dict()))

    assert together(2, read) == [True, True]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step_*"))


def both(*steps: int) -> list[str]:
    return sorted(name for step in steps for name in (f"step_{step:08d}", f"step_{step:08d}.pt"))


def test_folders_of_old_ones_go_and_those_that_are_kept_stay(tmp_path):
    keep = TrainerConfig(keep_last=1, keep_every=40, keep_best=True, save_every=10)
    (tmp_path / "step_00000010").mkdir()  # of a save that was killed: files of others may be in it
    (tmp_path / "step_00000010" / "part_00009_of_00009.safetensors").write_bytes(b"begun")
    (tmp_path / "stepping").mkdir()
    save_steps(tmp_path, [10, 20, 30, 40, 50, 60], keep=keep, losses=[4.0, 1.0, 3.0, 2.0, 2.0, 2.0])
    assert names_in(tmp_path) == both(20, 40, 60) and (tmp_path / "stepping").is_dir()
    assert (tmp_path / BEST).resolve().name == "step_00000020.pt" and load(tmp_path / BEST).step == 20
    CheckpointFolder(tmp_path, TrainerConfig(keep_last=1)).save(70, {"model": {"weight": torch.ones(3)}})
    assert names_in(tmp_path) == ["step_00000070.pt", "step_00000070.safetensors"]
    save_steps(tmp_path, [80], keep=TrainerConfig(keep_last=1))
    assert names_in(tmp_path) == both(80)


def test_the_same_step_again_takes_another_folder_until_it_is_whole(tmp_path):
    save_steps(tmp_path, [10, 20])

    def fails(world):
        folder = FolderOfPieces(tmp_path, TrainerConfig(), world)
        folder.begin(20, False)
        if world.is_first:
            folder._write_file = lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        return folder.save(20, state_in_pieces(part_job(99, world)))

    with pytest.raises(CheckpointError, match="No space left on device"):
        together(2, fails)
    loaded = find("auto", CheckpointFolder(tmp_path), pytest.fail)
    assert loaded.step == 20 and same(parts_of(loaded.state), parts_of(state_of(whole_job(20))))
    save_steps(tmp_path, [20])
    assert find("auto", CheckpointFolder(tmp_path), pytest.fail).step == 20 and len(names_in(tmp_path)) == 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_one_process_is_one_line_that_names_it(victim, tmp_path, monkeypatch):
    save_steps(tmp_path, [10])
    write = in_pieces.write_pieces

    def full(send, rows, shapes, part, count):
        if part == victim:
            raise OSError(28, "No space left on device")
        write(send, rows, shapes, part, count)

    monkeypatch.setattr(in_pieces, "write_pieces", full)
    with pytest.raises(CheckpointError, match=f"process {victim}: No space left on device") as caught:
        save_steps(tmp_path, [20])
    assert "\n" not in str(caught.value)
    assert find("auto", CheckpointFolder(tmp_path), pytest.fail).step == 10
    assert not list(tmp_path.glob("step_00000020*"))  # which would keep the disk full
    monkeypatch.undo()
    save_steps(tmp_path, [20], keep=TrainerConfig(keep_last=1))
    assert len(names_in(tmp_path)) == 2


@pytest.mark.parametrize("in_one", [False, True], ids=["in all", "no memory for a copy in one"])
def test_in_the_background_each_thread_writes_a_copy(in_one, tmp_path, monkeypatch):
    """Where one process cannot, all write at once."""

    def save(world):
        said, folder = [], FolderOfPieces(tmp_path, TrainerConfig(keep_last=9), world)
        job = part_job(10, world)
        with Saving(folder, True, said.append) as saving:
            if in_one and world.rank == 1:
                saving._copy = lambda state: None
            saving.save(10, state_in_pieces(job), None, said.append, must=False)
            background = saving._current is not None
            saving.wait()
            for weight in job.module.model.parameters():
                weight.data.zero_()
            saving.save(20, state_in_pieces(part_job(20, world)), None, said.append, must=True)
        return background, said

    found = together(2, save)
    assert [background for background, _ in found] == [not in_one] * 2
    assert found[0][1] == [tmp_path / "step_00000010.pt", tmp_path / "step_00000020.pt"]
    for step in (10, 20):
        state = load(tmp_path / f"step_{step:08d}.pt").state
        assert same(parts_of(state), parts_of(state_of(whole_job(step))))


@pytest.mark.parametrize("ends_by", [ParallelError("lost"), KeyboardInterrupt()], ids=["another's end", "a signal"])
def test_a_piece_that_never_comes_is_not_waited_for_where_the_run_ends(ends_by, tmp_path):
    said = []

    def save(world):
        world.timeout = timedelta(seconds=2)
        folder = FolderOfPieces(tmp_path, TrainerConfig(), world)
        state = state_in_pieces(part_job(10, world))
        if not world.is_first:
            folder.begin(10, True)
            return
        with pytest.raises(type(ends_by)), Saving(folder, True, said.append) as saving:
            saving.save(10, state, None, said.append, must=False)
            raise ends_by

    together(2, save)
    assert said == [f"going on without a checkpoint: {tmp_path}/step_00000010.pt: cannot be written: the run has ended"]
    assert CheckpointFolder(tmp_path).newest(said.append) is None


def test_a_folder_that_one_process_does_not_see_is_refused_before_any_work(tmp_path, monkeypatch):
    def look(world):
        return shared_folder(world, tmp_path / str(world.rank))

    assert together(2, look) == [tmp_path / "0"] * 2 and not list((tmp_path / "0").iterdir())
    gather = InThread.gather
    monkeypatch.setattr(InThread, "gather", lambda world, value: gather(world, value if world.rank == 0 else False))
    with pytest.raises(ConfigError, match=r"parallel.checkpoints=parts: process 1 does not see .*/0; give"):
        together(2, look)


def test_weights_that_the_files_have_no_place_for_are_refused():
    def look(world):
        job = part_job(10, world)
        check_types(job)
        job.module.model.norm.weight = torch.nn.Parameter(torch.ones(23, dtype=torch.complex64))
        check_types(job)

    with pytest.raises(ConfigError, match=r"no place for torch.complex64, of which norm.weight is; use parallel"):
        together(2, look)


def test_rows_are_those_that_parts_hold():
    for rows, count in itertools.product(range(8), range(1, 6)):
        held = [pieces.rows_held(rows, part, count) for part in range(count)]
        assert [row for first, end in held for row in range(first, end)] == list(range(rows))
