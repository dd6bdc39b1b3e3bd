"""Every source by the one view: the same examples at any step whenever it is asked for."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from aottrain.data.ahead import STEPS_AHEAD, ReadAhead
from aottrain.data.batches import Source, SourceBatches
from aottrain.data.images import augmented
from aottrain.data.tokens import token_files
from aottrain.data.tokens.windows import Windows
from aottrain.errors import ConfigError
from aottrain.toolchain.cache import forget_tables
from tests.data.making import (
    OfImages,
    OfTargets,
    OfTokens,
    class_folder,
    header,
    idx,
    images,
    mnist,
    npz,
    read,
    rows,
    tokens,
    write,
)

CPU = torch.device("cpu")
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    forget_tables()


def needs(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def a_text(folder):
    return read("text", write(folder / "a.txt", TEXT), order="epochs")


def a_bpe(folder):
    needs("tokenizers")
    return read("text", write(folder / "a.txt", TEXT), OfTokens(vocab_size=300), tokenizer="bpe")


def a_token_file(folder):
    return read("tokens", write(folder / "a.bin", tokens(3000).tobytes()))


def shards(folder):
    for number in range(3):
        write(folder / "in" / f"part_train_{number}.bin", header(500) + (tokens(500) + number).tobytes())
    write(folder / "in" / "part_val_0.bin", header(300) + tokens(300).tobytes())
    return read("tokens", folder / "in", order="epochs")


def an_npz(folder):
    pixels, labels = images(60)
    return read("images", npz(folder / "a.npz", x=pixels, y=labels), pad=2, flip=True)


def read_in_threads(folder):
    return dataclasses.replace(an_npz(folder), is_decoded=True)


def a_mnist(folder):
    mnist(folder / "in", "train", 60, zipped=True)
    mnist(folder / "in", "t10k", 20)
    return read("images", folder / "in")


def a_class_folder(folder):
    needs("PIL")
    return read("images", class_folder(folder / "in", 40), pad=1, flip=True)


def a_csv(folder):
    return read("arrays", rows(folder / "a.csv", 60))


SOURCES = [a_text, a_bpe, a_token_file, shards, an_npz, read_in_threads, a_mnist, a_class_folder, a_csv]


def view(source: Source, order: str = "epochs", batch_size: int = 4, accumulate: int = 2, seed: int = 5):
    kind = ReadAhead if source.is_decoded else SourceBatches
    return kind(source, batch_size, accumulate, seed, CPU, order)


def same(left, right) -> bool:
    return all(torch.equal(a, b) for one, two in zip(left, right, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("order", ["random", "epochs"])
@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_a_run_that_goes_on_anywhere_sees_the_same(tmp_path, make, order):
    source = make(tmp_path)
    straight = view(source, order)
    seen = {step: straight.at(step) for step in range(1, 13)}
    for start in (2, 7, 12):
        resumed = view(source, order)
        assert all(same(resumed.at(step), seen[step]) for step in range(start, 13))
    assert same(view(make(tmp_path), order).at(9), seen[9])
    assert not same(view(source, order, seed=6).at(9), seen[9])
    (whole,) = view(source, order, batch_size=8, accumulate=1).at(9)
    parts = zip(*seen[9], strict=True)
    assert all(torch.equal(torch.cat(part), wanted) for part, wanted in zip(parts, whole, strict=True))
    assert same(straight.held_out(2), resumed.held_out(2))
    assert make(tmp_path).fingerprint == source.fingerprint


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_what_is_held_out_is_never_trained_on(tmp_path, make):
    source = make(tmp_path)
    assert len(source.held_out) and len(source.train)
    if hasattr(source.train, "images"):
        train, rest = source.train.images, source.held_out.images
        if train.pixels is rest.pixels:
            assert not set(train.part) & set(rest.part)
        else:
            assert not np.shares_memory(train.pixels.images, rest.pixels.images)
    elif hasattr(source.train, "part"):
        assert not set(source.train.part) & set(source.held_out.part)
    else:
        for part in source.train.parts:
            assert not any(np.shares_memory(part, other) for other in source.held_out.parts)


def test_an_epoch_has_each_example_once(tmp_path):
    batches = view(a_csv(tmp_path), batch_size=9, accumulate=2)
    assert batches.examples_per_epoch == 54 and batches.notes[-1] == "an epoch is 54 examples, 3.0 steps"
    epochs = [torch.cat([x[:, 1] for step in range(first, first + 3) for x, _ in batches.at(step)]) for first in (1, 4)]
    assert all(len(set(epoch.tolist())) == 54 for epoch in epochs) and not torch.equal(*epochs)
    assert view(a_csv(tmp_path), "random").examples_per_epoch == 0


def test_windows_of_an_epoch_lie_side_by_side():
    windows = Windows((np.arange(33), np.arange(100, 117), np.arange(5)), context=16, stride=16)
    inputs, targets = windows.read(np.arange(len(windows)), None)
    assert inputs[:, 0].tolist() == [0, 16, 100] and targets[:, -1].tolist() == [16, 32, 116]


def test_held_out_windows_of_a_large_corpus_lie_within_it():
    """Of more than 2^24 windows float32 cannot tell the last one's number from the next."""
    size = (1 << 24) + 8
    source = Source(Windows((np.zeros(9, np.uint8),), 4), Windows((np.zeros(size, np.uint8),), 4), "")
    assert view(source).held_out(3)[0][0].shape == (4, 4)


def test_nanogpt_s_files_are_mapped_and_read_through_once(tmp_path, monkeypatch):
    folder = tmp_path / "in"
    write(folder / "train.bin", tokens(2000).tobytes()), write(folder / "val.bin", tokens(500).tobytes())
    source = read("tokens", folder)
    assert all(isinstance(part, np.memmap) for part in (*source.train.parts, *source.held_out.parts))
    (inputs, targets) = source.train.read(np.array([0, 1983]), None)
    assert inputs[0].tolist() == tokens(16).tolist() and targets[1, -1] == tokens(2000)[-1]
    looked, inspect = [], token_files.inspect
    monkeypatch.setattr(token_files, "inspect", lambda file, *rest: looked.append(file.name) or inspect(file, *rest))
    forget_tables()
    assert read("tokens", folder).fingerprint == source.fingerprint and looked == []
    changed = tokens(2000)
    changed[5] = 251
    write(folder / "train.bin", changed.tobytes())
    assert read("tokens", folder).fingerprint != source.fingerprint and looked == ["train.bin"]


@pytest.mark.parametrize("damaged", [{}, {"largest": 1}, {"largest": "1", "at": 0, "sha256": "a"}, 5, [], None])
@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_a_kept_look_at_files_that_is_damaged_is_taken_anew(tmp_path, kind, damaged):
    if kind == "tokens":
        write(tmp_path / "in" / "a.bin", tokens(2000).tobytes())
    else:
        needs("PIL")
        class_folder(tmp_path / "in", count=30)
    source = read(kind, tmp_path / "in")
    (kept,) = (tmp_path / "cache").glob("*_f*.json")
    values = json.loads(kept.read_text())
    kept.write_text(json.dumps(dict.fromkeys(values, damaged)))
    forget_tables()
    assert read(kind, tmp_path / "in").fingerprint == source.fingerprint
    assert json.loads(kept.read_text()) == values


def test_a_file_larger_than_a_piece_is_inspected_whole(tmp_path, monkeypatch):
    values = tokens(1000)
    values[900:] += 1
    path = write(tmp_path / "a.bin", values.tobytes())
    whole = token_files.inspect(path, "<u2", 0)
    monkeypatch.setattr(token_files, "CHUNK_TOKENS", 7)
    assert token_files.inspect(path, "<u2", 0) == whole
    assert (whole["largest"], whole["at"]) == (values.max(), values.argmax())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system says of no process what it may use")
def test_a_corpus_of_2_gb_is_not_resident(tmp_path, monkeypatch):
    """However long a run is: 4,000 windows, drawn from all of a file that takes no disk (its zeros are a hole)."""
    path = write(tmp_path / "a.bin", tokens(5000).tobytes())
    os.truncate(path, 2_000_000_000)
    known = {"largest": 249, "at": 107, "sha256": ""}  # reading through it takes seconds, and a piece at a time
    monkeypatch.setattr(token_files, "inspect", lambda *_: known)
    source, generator = read("tokens", path), np.random.default_rng(0)
    before = resident_bytes()
    for _ in range(250):
        inputs, _ = source.train.read(generator.integers(0, len(source.train), 16), None)
    assert inputs.shape == (16, 16) and len(source.train) > 890_000_000
    assert resident_bytes() - before < 100e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_tokens_of_each_type(tmp_path, dtype):
    kind = "<u2" if dtype == "uint16" else "<u4"
    source = read("tokens", write(tmp_path / "a.bin", tokens(3000, dtype=kind).tobytes()), dtype=dtype)
    assert source.train.read(np.array([7]), None)[0].tolist() == [tokens(3000)[7:23].tolist()]


def test_lines_of_json_are_documents(tmp_path):
    lines = [json.dumps({"body": text}) for text in ("Größe", "", "two\nlines" * 50)]
    write(tmp_path / "in" / "a.jsonl", "\n".join(lines))
    write(tmp_path / "in" / "b.txt", "plain")
    source = read("text", tmp_path / "in", key="body")
    whole = b"".join(part.tobytes() for examples in (source.train, source.held_out) for part in examples.parts)
    assert whole == b"\n\n".join(["Größe".encode(), b"two\nlines" * 50, b"plain"])


def test_a_saved_dataset_and_parquet_are_documents(tmp_path):
    needs("pyarrow")
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": [f"document {number}" for number in range(99)]})
    want = "\n\n".join(table["text"].to_pylist()).encode()
    parquet.write_table(table, tmp_path / "a.parquet")
    folder = tmp_path / "saved" / "train"
    write(folder / "state.json", json.dumps({"_data_files": [{"filename": "0.arrow"}, {"filename": "1.arrow"}]}))
    write(folder.parent / "dataset_dict.json", json.dumps({"splits": ["train", "test"]}))
    for number, rows_of in enumerate((table[:40], table[40:])):
        with pyarrow.ipc.new_stream(str(folder / f"{number}.arrow"), table.schema) as stream:
            stream.write_table(rows_of)
    for path in (tmp_path / "a.parquet", folder, folder.parent):
        source = read("text", path)
        assert b"".join(p.tobytes() for e in (source.train, source.held_out) for p in e.parts) == want


def test_byte_pairs_are_learned_once_and_give_the_text_back(tmp_path, monkeypatch):
    source = a_bpe(tmp_path)
    codec, parts = source.codec, [source.train.parts[0], source.held_out.parts[0]]
    assert "".join(codec.decode(part.tolist()) for part in parts) == TEXT
    assert max(int(part.max()) for part in parts) < 300 and len(parts[0]) < len(TEXT) / 2
    assert codec.decode(codec.encode(" Größe\n")) == " Größe\n"
    assert codec.bytes_per_token == pytest.approx(int(len(TEXT) * 0.1) / len(parts[1]), rel=0.01)
    import tokenizers

    monkeypatch.delattr(tokenizers.Tokenizer, "train_from_iterator")
    again = a_bpe(tmp_path)
    assert again.fingerprint == source.fingerprint and again.notes[-1].startswith("tokenizer bpe: ")
    kept = write(tmp_path / "t.json", again.codec.implementation.to_str())
    other = read("text", tmp_path / "a.txt", OfTokens(vocab_size=300), tokenizer=str(kept))
    assert np.array_equal(other.train.parts[0], parts[0])


def test_byte_pairs_are_the_same_when_they_are_learned_again(tmp_path, monkeypatch):
    first = a_bpe(tmp_path).fingerprint
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "another"))
    assert a_bpe(tmp_path).fingerprint == first


def test_byte_pairs_that_are_kept_are_learned_anew_where_a_bit_is_flipped(tmp_path):
    first = a_bpe(tmp_path).fingerprint
    (kept,) = (path for path in (tmp_path / "cache").rglob("*") if path.parent.name == "tokenizers")
    whole = kept.read_bytes()
    for place in range(40, len(whole), len(whole) // 20):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        kept.write_bytes(damaged)
        assert a_bpe(tmp_path).fingerprint == first and kept.read_bytes() == whole


def test_pixels_are_normalised_by_what_is_trained_on(tmp_path):
    source = read("images", npz(tmp_path / "a.npz", x=images(60, channels=3)[0], y=images(60)[1]), OfImages(channels=3))
    shown = source.train.read(np.arange(54), None)[0]
    assert shown.shape == (54, 3, 8, 8) and shown.dtype == torch.float32 and shown.is_contiguous()
    assert shown.mean(dim=(0, 2, 3)).abs().max() < 1e-5 and (shown.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-3
    plain = read("images", tmp_path / "a.npz", OfImages(channels=3), mean=(0, 0, 0), std=(1, 1, 1))
    pixels = torch.from_numpy(images(60, channels=3)[0][plain.train.images.part[:5]]).permute(0, 3, 1, 2) / 255
    assert torch.equal(plain.train.read(np.arange(5), None)[0], pixels)


def test_an_image_is_moved_and_turned_by_its_own_key():
    pixels = np.random.default_rng(0).random((64, 3, 8, 8), dtype=np.float32)
    keys = np.arange(64, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    moved = augmented(pixels, keys, pad=2, flip=True)
    assert all(np.array_equal(augmented(pixels[i : i + 1], keys[i : i + 1], 2, True)[0], moved[i]) for i in range(64))
    padded = np.pad(pixels, ((0, 0), (0, 0), (2, 2), (2, 2)))
    places = {
        (down, right, turned)
        for image, result in zip(padded, moved, strict=True)
        for turned in (False, True)
        for down in range(5)
        for right in range(5)
        if np.array_equal(result[..., ::-1] if turned else result, image[:, down : down + 8, right : right + 8])
    }
    assert len({place[:2] for place in places}) > 15 and {turned for *_, turned in places} == {False, True}
    assert np.array_equal(augmented(pixels, keys, 0, False), pixels)


def test_files_of_mnist_keep_their_own_split(tmp_path):
    source = a_mnist(tmp_path)
    assert (len(source.train), len(source.held_out)) == (60, 20)
    assert source.train.images.labels.tolist() == images(60)[1].tolist()
    alone = read("images", tmp_path / "in" / "train-images-idx3-ubyte.gz")
    assert (len(alone.train), len(alone.held_out)) == (54, 6)


def test_an_npz_may_have_a_split_of_its_own(tmp_path):
    (pixels, labels), (others, more) = images(30), images(9)
    path = npz(tmp_path / "a.npz", x_train=pixels, y_train=labels, x_test=others, y_test=more)
    assert [len(part) for part in (read("images", path).train, read("images", path).held_out)] == [30, 9]


def test_idx_of_other_types_is_read(tmp_path):
    mnist(tmp_path, "train", 30)
    write(tmp_path / "train-images-idx3-ubyte", idx(np.ones((30, 8, 8), dtype=">f4"), 0x0D))
    assert read("images", tmp_path).train.read(np.arange(2), None)[0].dtype == torch.float32


def test_pictures_are_found_by_class_and_looked_at_once(tmp_path, monkeypatch):
    source = a_class_folder(tmp_path)
    chosen = source.train.images.part
    assert source.is_decoded and sorted(source.train.images.labels.tolist()) == sorted(images(40)[1].tolist())
    pixels = source.train.images.pixels.at(chosen[:3])
    number = [int(source.train.images.pixels.files[i].stem) for i in chosen[:3]]
    assert np.array_equal(pixels[:, 0], images(40)[0][number])
    monkeypatch.setattr("aottrain.data.image_folder._size_of", None)
    forget_tables()
    assert a_class_folder_again(tmp_path).fingerprint == source.fingerprint


def a_class_folder_again(folder):
    return read("images", folder / "in")


def test_folders_may_say_what_is_held_out(tmp_path):
    needs("PIL")
    class_folder(tmp_path / "in" / "train", 30), class_folder(tmp_path / "in" / "val", 9)
    source = read("images", tmp_path / "in")
    assert (len(source.train), len(source.held_out)) == (30, 9)


def test_reading_ahead_begins_with_steps_in_order_and_leaves_no_thread(tmp_path):
    source = read_in_threads(tmp_path)
    batches = view(source)
    for _ in range(2):
        batches.at(1)
    assert not batches.reading
    batches.at(2)
    assert list(batches.reading) == list(range(3, 3 + STEPS_AHEAD))
    assert same(batches.at(3), view(source).at(3)) and list(batches.reading) == [4, 5]
    batches.at(9)
    assert not batches.reading
    for thread in threading.enumerate():
        if thread.name.startswith("aottrain"):
            thread.join(10)
            assert not thread.is_alive()


def test_a_picture_that_is_damaged_under_a_run_is_named(tmp_path):
    source = a_class_folder(tmp_path)
    batches = view(source)
    batches.at(1)
    for file in source.train.images.pixels.files:
        write(file, b"x")
    batches.reading.clear()
    with pytest.raises(ConfigError, match=r"\.png: cannot be decoded"):
        for step in range(2, 5):
            batches.at(step)


def test_columns_are_named_and_classes_whole(tmp_path):
    x, y = a_csv(tmp_path).train.read(np.arange(3), None)
    assert x.dtype == torch.float32 and y.dtype == torch.int64 and x.shape == (3, 2)
    path = write(tmp_path / "b.csv", "\ufefftarget, b ,a\n" + "".join(f"{n / 2},{n},{-n}\n" for n in range(20)))
    source = read("arrays", path, OfTargets(), x=("a", "b"), y="target")
    x, y = source.train.read(np.arange(18), None)
    assert torch.equal(x[:, 0], -x[:, 1]) and torch.equal(y * 2, x[:, 1]) and y.dtype == torch.float32


def test_arrays_of_an_npz_are_put_side_by_side(tmp_path):
    path = npz(tmp_path / "a.npz", a=np.arange(20), b=np.arange(20) * 2, label=np.arange(20) % 3)
    x, y = read("arrays", path, x=("a", "b"), y="label").train.read(np.arange(5), None)
    assert torch.equal(x[:, 1], 2 * x[:, 0]) and torch.equal(y, x[:, 0].long() % 3)


def test_arrays_may_have_a_split_of_their_own(tmp_path):
    arrays = {"x_train": np.ones((9, 2)), "y_train": np.zeros(9), "x_test": np.zeros((3, 2)), "y_test": np.ones(3)}
    source = read("arrays", npz(tmp_path / "a.npz", **arrays))
    x, _ = source.train.read(np.arange(9), None)
    _, y = source.held_out.read(np.arange(3), None)
    assert x.min() == 1 and y.min() == 1


def test_digits_come_with_scikit_learn():
    needs("sklearn")
    source = read("images", None, OfImages(num_classes=10))
    assert len(source.train) + len(source.held_out) == 1797
