"""Runs on each kind of data: stopped and gone on with, what they say of it, and recipes that do not take it."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch

from aottrain.config.extensions.recipes import load_recipe
from aottrain.config.run import DataConfig, RecipeConfig
from aottrain.data.batches import MadeBatches
from aottrain.errors import CheckpointError, ConfigError
from aottrain.tasks import train
from aottrain.tasks.building import build
from aottrain.tasks.building.samples import sampler
from tests.data.making import images, npz, tokens, write


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def on_tokens(tiny, tmp_path):
    path = write(tmp_path / "a.bin", tokens(3000).tobytes())
    return lambda **changes: tiny(data={"name": "tokens", "path": str(path), "order": "epochs"}, **changes)


@pytest.fixture
def on_images(tiny, tmp_path):
    pixels, labels = images(60)
    path = npz(tmp_path / "a.npz", x=pixels, y=labels)
    data = {"name": "images", "path": str(path), "order": "epochs", "pad": 1, "flip": True}
    model = load_recipe("resnet").Options(width=4, num_blocks=1, num_classes=3, image_size=8, channels=1)

    def make(**changes):
        config = tiny(data={**data, **changes.pop("data", {})}, **changes)
        return dataclasses.replace(config, recipe=RecipeConfig(name="resnet", model=model))

    return make


@pytest.mark.parametrize("kind", ["on_tokens", "on_images"])
def test_a_run_goes_on_bitwise(kind, request, left_by, tmp_path):
    make = request.getfixturevalue(kind)
    straight = make(trainer={"steps": 6}, output_dir=str(tmp_path / "straight"))
    assert train.run(straight) == 0
    assert train.run(make(trainer={"steps": 3}, lr_schedule={"total_steps": 6})) == 0
    resumed = make(trainer={"steps": 6}, resume="auto")
    assert train.run(resumed) == 0
    assert left_by(resumed).losses == left_by(straight).losses
    examples = 2699 // 16 if kind == "on_tokens" else 54
    assert left_by(resumed).summary["epochs"] == 24 / examples


def test_other_data_is_another_run(on_images, tmp_path):
    assert train.run(on_images()) == 0
    pixels, labels = images(60)
    npz(tmp_path / "a.npz", x=pixels, y=(labels + 1) % 3)
    with pytest.raises(CheckpointError, match="data.fingerprint"):
        train.run(on_images(resume="auto"))
    with pytest.raises(CheckpointError, match="data.pad"):
        train.run(on_images(resume="auto", data={"pad": 2}))


def test_what_was_read_is_said_and_counted(on_images, left_by, capsys):
    config = on_images()
    assert train.run(config) == 0
    printed = capsys.readouterr().out
    assert "8 x 8 with 1 channel, 54 trained on, 6 held out" in printed and "0.30 epochs" in printed
    assert left_by(config).summary["val_bits_per_byte"] is None


def test_a_loss_of_bytes_is_told_in_bits(tiny, left_by):
    config = tiny()
    assert train.run(config) == 0
    summary = left_by(config).summary
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / math.log(2))
    assert summary["epochs"] is None


def test_learned_byte_pairs_are_shown_as_text(tiny, left_by, tmp_path):
    if importlib.util.find_spec("tokenizers") is None:
        pytest.skip("tokenizers is not installed")
    path = write(tmp_path / "a.txt", "The lazy dog sleeps, the quick fox does not. " * 60)
    data = {"path": str(path), "tokenizer": "bpe"}
    config = tiny(data=data, model={"vocab_size": 300, "context": 8}, trainer={"sample_bytes": 40})
    assert train.run(config) == 0
    sample = (left_by(config).directory / "sample.txt").read_text(encoding="utf-8")
    summary = left_by(config).summary
    assert sample.startswith("The ")
    assert summary["val_bits_per_byte"] < summary["val_loss"] / math.log(2) / 2


def test_tokens_of_no_known_meaning_are_not_shown(on_tokens, left_by):
    config = on_tokens(trainer={"sample_bytes": 10})
    assert train.run(config) == 0
    assert not (left_by(config).directory / "sample.txt").exists()
    assert left_by(config).summary["val_bits_per_byte"] is None


def test_a_recipe_makes_its_own_data_unless_other_is_named(on_images):
    config = on_images()
    recipe, cpu = load_recipe("resnet"), torch.device("cpu")
    own = dataclasses.replace(config, data=DataConfig())
    assert isinstance(build.build_batches(own, recipe, config.recipe.model, cpu), MadeBatches)
    assert build.build_batches(config, recipe, config.recipe.model, cpu).at(1)[0][0].shape == (4, 1, 8, 8)
    wrong = dataclasses.replace(config, data=dataclasses.replace(config.data, name="tokens"))
    with pytest.raises(ConfigError, match="data=tokens: the recipe takes data=images"):
        build.build_batches(wrong, recipe, config.recipe.model, cpu)


def test_a_sample_of_what_is_written_needs_a_codec():
    recipe = SimpleNamespace(generate=None)
    assert sampler(recipe, SimpleNamespace(), torch.nn.Identity(), 0, None, "fp32") is None
