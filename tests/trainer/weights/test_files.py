"""The weights of a checkpoint are a safetensors file: other tools open it, and nothing else is taken for it."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from aottrain.config.folders import INDEX, no_checkpoint
from aottrain.config.run import TrainerConfig
from aottrain.errors import ResumeError
from aottrain.tasks import train
from aottrain.trainer.checkpoint import CheckpointFolder, find, load
from aottrain.trainer.weights.files import _TYPES
from tests.trainer.test_checkpoint import Hostile
from tests.trainer.test_run import same


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


def odd_state() -> OrderedDict:
    """All that a state_dict may hold, and more than the format can."""
    base = torch.arange(24.0).view(4, 6)
    values = OrderedDict(
        transposed=base.t(), strided=base[:, ::2], whole=base, again=base, expanded=torch.ones(1).expand(5),
        channels_last=torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), scalar=torch.tensor(3.5),
        empty=torch.empty(0, 3), complex=torch.tensor([1 + 2j]), sparse=torch.eye(3).to_sparse(),
        extra={"a": [1, "text"]}, nothing=None, __metadata__=torch.ones(2),
    )  # fmt: skip
    for dtype in _TYPES:
        values[f"of {dtype}"] = torch.tensor([[0, 1, 2], [3, 1, 0]]).to(dtype)
    values._metadata = {"": {"version": 2}}
    return values


def weights_of(path: Path) -> Path:
    return path.with_suffix(".safetensors")


def test_others_open_it_and_tied_weights_are_there_once(tmp_path):
    model, again = Tied(), Tied()
    model.norm.running_mean.fill_(3.0)
    path = CheckpointFolder(tmp_path).save(7, {"model": model.state_dict()})
    tensors = load_file(weights_of(path))
    assert tensors.keys() == model.state_dict().keys() - {"head.weight"}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in tensors.items())
    with safe_open(weights_of(path), "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7", "head.weight": "embedding.weight"}
    load_model(again, weights_of(path))
    assert same(dict(again.state_dict()), dict(model.state_dict())) and again.head.weight is again.embedding.weight
    assert load(weights_of(path)).path == path and no_checkpoint(weights_of(path)) == ""
    assert "embedding" not in str(torch.load(path, weights_only=True)["model"]["embedding.weight"])


def test_all_that_a_state_dict_holds_comes_back(tmp_path):
    state = odd_state()
    path = CheckpointFolder(tmp_path).save(7, {"model": state, "random": (1, None)})
    model = load(path).state["model"]
    assert list(model) == list(state) and model._metadata == state._metadata and load(path).state["random"] == (1, None)
    for name, value in state.items():
        if name == "sparse":
            assert torch.equal(model[name].to_dense(), value.to_dense())
        elif isinstance(value, torch.Tensor):
            assert model[name].dtype == value.dtype and torch.equal(
                model[name].to(torch.complex128), value.to(torch.complex128)
            )
        else:
            assert model[name] == value
    tensors = load_file(weights_of(path))
    left_out = {"again", "complex", "sparse", "extra", "nothing", "__metadata__"}
    assert tensors.keys() == state.keys() - left_out
    assert all(same(tensors[name], state[name].contiguous()) for name in ("transposed", "strided", "channels_last"))


def test_a_checkpoint_of_the_format_before_goes_on_bitwise(tiny, tmp_path):
    """One file, with the weights in it, and a list that tells of no other."""
    settings = {"lr_schedule": {"total_steps": 6}, "trainer": {"steps": 6, "save_every": 2, "keep_last": 9, "ema": 0.9}}
    first = tiny(**settings)
    assert train.run(first) == 0
    old = tmp_path / "old" / "checkpoints"
    old.mkdir(parents=True)
    content = {**load(Path(first.output_dir, "checkpoints", "step_00000002.pt")).state, "format": 1}
    torch.save(content, old / "step_00000002.pt")
    digest = hashlib.sha256((old / "step_00000002.pt").read_bytes()).hexdigest()
    entry = {"file": "step_00000002.pt", "step": 2, "sha256": digest, "held_out_loss": None}
    (old / INDEX).write_text(json.dumps({"checkpoints": [entry]}))
    again = tiny(**settings, resume="auto", output_dir=str(old.parent))
    assert train.run(again) == 0
    states = [load(Path(run.output_dir, "checkpoints", "step_00000006.pt")).state for run in (first, again)]
    assert all(same(states[0][part], states[1][part]) for part in ("model", "optimizer", "random", "averages"))


@pytest.fixture
def folder(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", TrainerConfig(keep_last=3))
    for step in (10, 20, 30):
        folder.save(step, {"model": {"weight": torch.full((500,), float(step)), "bias": torch.ones(3) * step}})
    return folder


def swap(path: Path) -> None:
    shutil.copy(path.with_name("step_00000010.safetensors"), path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "another's": swap,
    "one bit": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("list_", ["right", "gone"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_of_another_checkpoint_are_never_loaded(folder, damage, list_):
    """Nor damaged ones; and what no list tells of is told by the other file."""
    if list_ == "gone":
        (folder.directory / INDEX).unlink()
    DAMAGES[damage](folder.directory / "step_00000030.safetensors")
    said = []
    assert find("auto", folder, said.append).state["model"]["weight"][0] == 20
    (line,) = said
    assert "step_00000030.pt: is damaged: " in line and "step_00000030.safetensors" in line
    with pytest.raises(ResumeError, match="is damaged"):
        find(str(folder.directory / "step_00000030.safetensors"), folder, print)


def hostile_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


HOSTILE = {
    "a pickle": lambda canary: pickle.dumps(Hostile(canary), 2),
    "too long a header": lambda canary: (1 << 60).to_bytes(8, "little") + b"{}",
    "outside": lambda canary: hostile_header(b'{"weight":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'),
    "overlapping": lambda canary: (
        hostile_header(
            b'{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        )
        + bytes(4)
    ),
    "not JSON": lambda canary: hostile_header(b"{" * 64),
    "other names": lambda canary: hostile_header(b"{}"),
}


def written_with(folder: CheckpointFolder, content: bytes, file: str = "step_00000030.safetensors") -> None:
    """Its checksum is right everywhere."""
    path = folder.directory / "step_00000030.pt"
    state = torch.load(path, weights_only=True)
    (folder.directory / file).write_bytes(content)
    state["weights"].update(file=file, sha256=hashlib.sha256(content).hexdigest())
    torch.save(state, path)
    (folder.directory / INDEX).unlink()


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_file_of_weights_runs_code_or_reads_elsewhere(folder, tmp_path, hostile):
    written_with(folder, HOSTILE[hostile](tmp_path / "canary"))
    said = []
    assert find("auto", folder, said.append).step == 20 and len(said) == 1
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "other.safetensors"])
def test_a_checkpoint_names_no_file_but_its_own(folder, file):
    written_with(folder, b"x", "step_00000030.safetensors")
    path = folder.directory / "step_00000030.pt"
    state = torch.load(path, weights_only=True)
    for weights in (
        {**state["weights"], "file": file},
        {"file": 3},
        None,
        {**state["weights"], "names": {"weight": "x"}},
    ):
        torch.save({**state, "weights": weights}, path)
        with pytest.raises(ResumeError):
            load(path)


@pytest.mark.parametrize("ends_before", [1, 2], ids=["the weights are renamed", "the rest is renamed"])
def test_a_save_that_ends_between_its_files_leaves_the_one_of_its_own_step(folder, monkeypatch, ends_before):
    """A run that goes on from step 20 with other settings writes step 30 again."""
    replace, calls = os.replace, []

    def ending(*given):
        calls.append(given)
        if len(calls) == ends_before:
            raise KeyboardInterrupt
        replace(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", ending)
        folder.save(30, {"model": {"weight": torch.full((500,), 99.0)}})
    assert folder.newest(pytest.fail).state["model"]["weight"][0] == 30
    folder.save(30, {"model": {"weight": torch.full((500,), 99.0)}})
    assert folder.newest(pytest.fail).state["model"]["weight"][0] == 99
    assert len(list(folder.directory.glob("*30*.safetensors"))) == 1
    folder.save(40, {"model": {"weight": torch.full((500,), 40.0)}})
    assert len(list(folder.directory.glob("*.safetensors"))) == len(list(folder.directory.glob("*.pt"))) == 3


def test_without_a_list_no_weights_are_removed_that_are_needed(folder):
    (folder.directory / INDEX).write_text("{")
    folder.save(40, {"model": {"weight": torch.zeros(2)}})
    assert [load(folder.directory / f"step_000000{step}.pt").step for step in (20, 30, 40)] == [20, 30, 40]
    assert not (folder.directory / "step_00000010.safetensors").exists()
