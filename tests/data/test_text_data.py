"""The text, its held-out end, and batches that depend on (seed, step) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aottrain.data.batches import MadeBatches, Source, SourceBatches
from aottrain.data.order import step_generator
from aottrain.data.tokens.text import builtin_text, load_text, read_text
from aottrain.data.tokens.windows import Windows
from aottrain.errors import ConfigError

CPU = torch.device("cpu")


def batches_of(accumulate=1, batch_size=4, seed=0, context=16):
    text = load_text(None, held_out=0.1, context=context, vocab_size=256)
    return SourceBatches(text, batch_size, accumulate, seed, CPU)


def tokens_of(examples):
    (tokens,) = examples.parts
    return tokens


def test_the_builtin_text_is_english_and_the_same_each_time():
    text = builtin_text()
    assert text == builtin_text() and len(text) > 300_000
    assert b" the " in text and text.count(b" ") > len(text) / 20


def test_the_end_is_held_out():
    text = load_text(None, held_out=0.1, context=16, vocab_size=256)
    whole = tokens_of(text.train).tobytes() + tokens_of(text.held_out).tobytes()
    assert whole == builtin_text()
    assert len(tokens_of(text.held_out)) == int(len(whole) * 0.1)
    assert tokens_of(text.train).dtype == np.uint8


def test_targets_are_the_next_bytes():
    batches = batches_of()
    ((inputs, targets),) = batches.at(1)
    assert inputs.shape == targets.shape == (4, 16) and inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes([*inputs[0].tolist(), targets[0, -1].item()]) in tokens_of(batches.source.train).tobytes()


def test_a_step_sees_the_same_whenever_it_is_asked_for():
    first, second = batches_of(), batches_of()
    later = second.at(7)
    for step in range(1, 7):
        first.at(step)
    assert torch.equal(first.at(7)[0][0], later[0][0])
    assert not torch.equal(first.at(8)[0][0], later[0][0])
    assert not torch.equal(batches_of(seed=1).at(7)[0][0], later[0][0])


def test_drawing_data_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    batches_of().at(3), batches_of().held_out(2)
    assert torch.equal(before, torch.get_rng_state())


def test_micro_batches_are_a_batch_in_parts():
    (whole,) = batches_of(accumulate=1, batch_size=8).at(5)
    parts = batches_of(accumulate=4, batch_size=2).at(5)
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole[0])


def test_held_out_batches_are_fixed_and_never_trained_on():
    batches = batches_of()
    held_out = tokens_of(batches.source.held_out).tobytes()
    for (inputs, targets), (again, _) in zip(batches.held_out(3), batches.held_out(3), strict=True):
        assert torch.equal(inputs, again)
        assert all(bytes([*row.tolist(), last]) in held_out for row, last in zip(inputs, targets[:, -1], strict=True))
    starts = {bytes(row.tolist()) for inputs, _ in batches.held_out(3) for row in inputs}
    assert len(starts) == 12


def test_every_position_can_be_drawn():
    """A text of one example more than one has two positions: the last target is the last byte."""
    parts = [Windows((np.arange(size, dtype=np.uint8),), 16) for size in (18, 17)]
    batches = SourceBatches(Source(*parts, "", tokens_per_example=16), 64, 1, 0, CPU)
    (inputs, targets) = batches.at(1)[0]
    assert set(inputs[:, 0].tolist()) == {0, 1} and targets.max() == 17
    assert batches.held_out(1)[0][1].max() == 16


def test_neighbouring_seeds_and_steps_draw_unlike():
    firsts = {torch.rand(1, generator=step_generator(seed, step)).item() for seed in range(20) for step in range(20)}
    assert len(firsts) == 400
    step_generator(2**63 - 1, 2**62)


def test_a_recipe_can_make_its_own_batches():
    batches = MadeBatches(lambda size, generator: (torch.randn(size, 3, generator=generator),), 4, 2, 0, CPU)
    first, second = batches.at(1)
    assert first[0].shape == (4, 3) and not torch.equal(first[0], second[0])
    assert torch.equal(batches.at(1)[1][0], second[0])
    held_out = batches.held_out(2)
    assert torch.equal(held_out[1][0], batches.held_out(2)[1][0])
    trained = [batch for step in range(3) for (batch,) in batches.at(step)]
    assert not any(torch.equal(known, batch) for (known,) in held_out for batch in trained)


def test_a_folder_is_read_in_order_and_only_its_text(tmp_path):
    files = {"b.md": "two", "a.txt": "one", "sub/c.rst": "three", "d.bin": "no", ".git/e.txt": "no", "f.txt": ""}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read_text(str(tmp_path)) == b"one\n\ntwo\n\nthree"


def test_a_single_file_may_have_any_name(tmp_path):
    (tmp_path / "corpus é (2)").write_bytes(b"\xffbytes")
    assert read_text(str(tmp_path / "corpus é (2)")) == b"\xffbytes"


def unreadable(tmp_path, monkeypatch):
    path = tmp_path / "unreadable.txt"
    path.write_text("text")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    return path


def empty(tmp_path, monkeypatch):
    path = tmp_path / "empty.txt"
    path.touch()
    return path


def missing(tmp_path, monkeypatch):
    return tmp_path / "missing.txt"


def folder_without_text(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_bytes(b"x")
    return tmp_path / "folder"


def short(tmp_path, monkeypatch):
    path = tmp_path / "short.txt"
    path.write_text("x" * 16)
    return path


def short_held_out(tmp_path, monkeypatch):
    path = tmp_path / "short.txt"
    path.write_text("x" * 160)
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (unreadable, "Permission denied"),
        (empty, "is empty"),
        (missing, "no such file"),
        (folder_without_text, "no file that ends in"),
        (short, "needs 17"),
        (short_held_out, "16 are its held-out part"),
    ],
)
def test_bad_paths_are_named(tmp_path, monkeypatch, make, reason):
    path = make(tmp_path, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        load_text(str(path), held_out=0.1, context=16, vocab_size=256)
    assert str(path) in str(caught.value) and reason in str(caught.value)


def test_bytes_beyond_the_vocabulary_are_found_at_once(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc\x80" * 100)
    with pytest.raises(ConfigError, match="has byte 128, but the model's vocab_size is 128"):
        load_text(str(path), held_out=0.1, context=16, vocab_size=128)
    assert len(load_text(str(path), held_out=0.1, context=16, vocab_size=129).train) == 360 - 16
