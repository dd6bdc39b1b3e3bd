"""What of recipe=hf holds without the package transformers: its data, its keys, and what is said without it."""

from __future__ import annotations

import sys

import pytest
import torch

from aottrain.cli import main
from aottrain.config.documentation import model_keys
from aottrain.data.batches import PreparedBatches, SourceBatches
from aottrain.data.tokens.text import load_text
from recipes import _hf_data as data
from recipes import hf


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_without_the_package_a_line_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.chdir(tmp_path)
    assert main(["recipe=hf", "debug=fast"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1].endswith("is not installed: pip install 'aottrain[hf]'")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"context": 1}, "context=1: must be a whole number of at least 2"),
        ({"num_classes": True}, "num_classes=True: must be a whole number of at least 2"),
        ({"dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1, or null"),
        ({"task": "regression"}, "task=regression: must be one of causal, masked, seq2seq, image, audio, or null"),
        ({"config": 7}, "config=7: give its keys one by one, as config.hidden_size=256"),
    ],
)
def test_wrong_options_are_named_before_the_package_is_asked(options, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert hf.Options(**options).check() == [text]


def test_options_of_another_package_have_a_type_in_words():
    assert model_keys("hf")["recipe.model.config"].allowed == "keys of its own or null"
    assert model_keys("hf")["recipe.model.type"].allowed == "text or null"


def test_keys_of_another_package_are_let_through_for_this_recipe_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["recipe=transformer", "recipe.model.config.hidden_size=3"]) == 2
    assert "recipe.model.config" in capsys.readouterr().err
    assert main(["recipe=hf", "recipe.model.config.hidden_size=3", "recipe.model.contxt=3"]) == 2
    error = capsys.readouterr().err
    assert "did you mean recipe.model.context?" in error and "config.hidden_size" not in error


def test_a_part_of_each_row_is_hidden():
    tokens = torch.randint(1, 256, (40, 64), generator=generator())
    hidden, where = data.hide(tokens, 0, generator())
    assert where.any(dim=1).all() and 0.13 < where.float().mean() < 0.17
    assert (hidden[where] == 0).all() and torch.equal(hidden[~where], tokens[~where])
    assert torch.equal(data.hide(tokens, 0, generator())[0], hidden)
    assert data.hide(torch.ones(50, 1, dtype=torch.int64), 0, generator())[1].all()


def test_text_is_prepared_by_draws_of_the_step_alone():
    text = load_text(None, held_out=0.1, context=16, vocab_size=256)

    def prepare(batch, draws):
        return (torch.rand(batch[0].shape, generator=draws),)

    def batches(accumulate=2):
        inner = SourceBatches(text, 3, accumulate, 1, torch.device("cpu"))
        return PreparedBatches(inner, prepare, 1)

    first, again, second = batches().at(1), batches().at(1), batches().at(2)
    assert torch.equal(first[1][0], again[1][0]) and not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], second[0][0])
    assert torch.equal(batches().held_out(2)[1][0], batches().held_out(2)[1][0])
    assert batches().tokens_per_batch == 48 and batches().batch_size == 3
    assert batches().fingerprint == text.fingerprint and batches().notes == text.notes


def test_images_and_sounds_tell_their_class():
    labels = torch.tensor([0, 1] * 20)
    sounds = data.sounds(labels, 2, generator())
    pitch = torch.fft.rfft(sounds).abs().argmax(dim=1)
    assert sounds.shape == (40, data.SAMPLES) and (pitch[labels == 0] < 40).all() and (pitch[labels == 1] > 200).all()
    loud = data.spectrograms(labels, 2, 20, 16, generator()).mean(dim=1).argmax(dim=1)
    assert (loud[labels == 0] < 8).all() and (loud[labels == 1] >= 8).all()
    images = data.images(labels, 2, 3, (16, 24), generator())
    across, down = images.diff(dim=3).square().mean(dim=(1, 2, 3)), images.diff(dim=2).square().mean(dim=(1, 2, 3))
    assert images.shape == (40, 3, 16, 24)
    assert (across > down)[labels == 0].float().mean() > 0.9 and (across < down)[labels == 1].float().mean() > 0.9
