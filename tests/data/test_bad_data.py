"""Whatever is wrong with data is one line that names the file, said before any work."""

from __future__ import annotations

import importlib.util
import json
import os
import re

import numpy as np
import pytest

from aottrain.data.tokens.token_files import load_tokens
from aottrain.errors import ConfigError
from tests.data.making import (
    OfImages,
    OfRows,
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "cache"))


def has(name: str):
    """A library of the extra aottrain[data], without which a case cannot be tried."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


TEXT = "some words of English, " * 30
LINES = [json.dumps({"text": TEXT, "number": 1})] * 3
BAD: dict[str, tuple] = {}


def bad(name: str, says: str, library: str | None = None):
    """A case: a function of an empty folder that reads wrong data; `says` is a part of the line that answers it."""

    def add(case):
        BAD[name] = pytest.param(case, says, marks=[has(library)] if library else [], id=name)
        return case

    return add


@bad("text: missing", "no such file or folder")
def _(folder):
    read("text", folder / "none.txt")


@bad("text: empty", "is empty")
def _(folder):
    read("text", write(folder / "a.txt", b""))


@bad("text: folder of other files", "no file that ends in .txt")
def _(folder):
    read("text", write(folder / "in" / "a.bin", b"x").parent)


@bad("text: shorter than an example", "one example needs 17")
def _(folder):
    read("text", write(folder / "a.txt", b"x" * 16))


@bad("text: short held-out part", "of which 16 are its held-out part")
def _(folder):
    read("text", write(folder / "a.txt", b"x" * 160))


@bad("text: beyond the vocabulary", "has byte 195, but the model's vocab_size is 128")
def _(folder):
    read("text", write(folder / "a.txt", "Größe" * 99), OfTokens(vocab_size=128))


@bad("jsonl: no JSON", "line 3 is no JSON: Expecting")
def _(folder):
    read("text", write(folder / "a.jsonl", "\n".join([*LINES[:2], "{no", LINES[0]])))


@bad("jsonl: no object", "line 2 is no JSON object: list")
def _(folder):
    read("text", write(folder / "a.jsonl", LINES[0] + "\n[1]"))


@bad("jsonl: not UTF-8", "line 1 is no JSON")
def _(folder):
    read("text", write(folder / "a.jsonl", '{"text": "Größe"}'.encode("latin-1")))


@bad("jsonl: no such key", "line 1 has no text under data.key=body, but the keys text, number")
def _(folder):
    read("text", write(folder / "a.jsonl", "\n".join(LINES)), key="body")


@bad("jsonl: no text", "line 1 has no text under data.key=number, but int under it")
def _(folder):
    read("text", write(folder / "a.jsonl", "\n".join(LINES)), key="number")


@bad("jsonl: empty texts", "is empty")
def _(folder):
    read("text", write(folder / "a.jsonl", '{"text": ""}\n\n{"text": ""}\n'))


@bad("bpe: not UTF-8", "is not UTF-8: byte 700 is 0xff; data.tokenizer=bytes learns any bytes", "tokenizers")
def _(folder):
    path = write(folder / "a.txt", b"word\n" * 140 + b"\xff" + b"word\n" * 140)
    read("text", path, OfTokens(vocab_size=300), tokenizer="bpe")


@bad("bpe: nothing to learn", "needs a larger recipe.model.vocab_size", "tokenizers")
def _(folder):
    read("text", write(folder / "a.txt", TEXT), OfTokens(vocab_size=256), tokenizer="bpe")


@bad("tokenizer: missing", "there is no such file", "tokenizers")
def _(folder):
    read("text", write(folder / "a.txt", TEXT), tokenizer=str(folder / "t.json"))


@bad("tokenizer: something else", "is no tokenizer", "tokenizers")
def _(folder):
    read("text", write(folder / "a.txt", TEXT), tokenizer=str(write(folder / "t.json", "{}")))


@bad("tokenizer: more tokens than the model", "tokens, but the model's vocab_size is 100", "tokenizers")
def _(folder):
    from aottrain.data.tokens.tokenizer import trained_bpe

    made = trained_bpe(TEXT.encode(), 300, "text")
    kept = write(folder / "t.json", made.to_str())
    read("text", write(folder / "a.txt", TEXT), OfTokens(vocab_size=100), tokenizer=str(kept))


@bad("parquet: something else", "cannot be read as a table", "pyarrow")
def _(folder):
    read("text", write(folder / "a.parquet", b"PAR1" + b"x" * 100))


@bad("parquet: no such column", "has no column data.key=text (columns: body)", "pyarrow")
def _(folder):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": [TEXT]}), folder / "a.parquet")
    read("text", folder / "a.parquet")


@bad("dataset: no split to train on", "has no split train (test)", "pyarrow")
def _(folder):
    read("text", write(folder / "in" / "dataset_dict.json", json.dumps({"splits": ["test"]})).parent)


@bad("dataset: a file is missing", "cannot be read as a table", "pyarrow")
def _(folder):
    read("text", write(folder / "in" / "state.json", json.dumps({"_data_files": [{"filename": "a.arrow"}]})).parent)


@bad("tokens: no path", "needs a file of tokens")
def _(folder):
    read("tokens", None)


@bad("tokens: missing", "no such file or folder")
def _(folder):
    read("tokens", folder / "none.bin")


@bad("tokens: empty", "is empty")
def _(folder):
    read("tokens", write(folder / "a.bin", b""))


@bad("tokens: cut short", "1,999 bytes are no whole number of uint16")
def _(folder):
    read("tokens", write(folder / "a.bin", tokens(1000).tobytes()[:-1]))


@bad("tokens: cut short, uint32", "2,002 bytes are no whole number of uint32")
def _(folder):
    read("tokens", write(folder / "a.bin", tokens(1001).tobytes()), dtype="uint32")


@bad("tokens: a file of numpy", "is a file of numpy's")
def _(folder):
    np.save(folder / "a.npy", tokens(1000))
    read("tokens", folder / "a.npy")


@bad("tokens: another magic", "magic 20240521 and version 1")
def _(folder):
    read("tokens", write(folder / "a.bin", header(1000, magic=20240521) + tokens(1000).tobytes()))


@bad("tokens: another version", "magic 20240520 and version 2")
def _(folder):
    read("tokens", write(folder / "a.bin", header(1000, version=2) + tokens(1000).tobytes()))


@bad("tokens: shorter than the header says", "promises 1,000 tokens")
def _(folder):
    read("tokens", write(folder / "a.bin", header(1000) + tokens(999).tobytes()))


@bad("tokens: a header alone", "its header promises no tokens")
def _(folder):
    read("tokens", write(folder / "a.bin", header(0)))


@bad("tokens: uint32 for uint16", "every second uint16 is 0")
def _(folder):
    read("tokens", write(folder / "a.bin", tokens(1000, dtype="<u4").tobytes()))


@bad("tokens: beyond the vocabulary", "vocab_size is 256 (its numbers are read as uint16: data.dtype)")
def _(folder):
    values = tokens(1000)
    values[777] = 5000
    read("tokens", write(folder / "a.bin", values.tobytes()))


@bad("tokens: folder of other files", "no file that ends in .bin")
def _(folder):
    read("tokens", write(folder / "in" / "a.txt", TEXT).parent)


@bad("tokens: shorter than an example", "its training part")
def _(folder):
    read("tokens", write(folder / "a.bin", tokens(12).tobytes()))


@bad("tokens: all held out", "every file is held out")
def _(folder):
    read("tokens", write(folder / "in" / "val.bin", tokens(1000).tobytes()).parent)


@bad("tokens: of another tokenizer", "but the data has token 249", "tokenizers")
def _(folder):
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    kept = write(folder / "t.json", made.to_str())
    read("tokens", write(folder / "a.bin", tokens(5000).tobytes()), tokenizer=str(kept))


@bad("images: missing", "no such file or folder")
def _(folder):
    read("images", folder / "none.npz")


@bad("images: of no known kind", "is no folder of a folder for each class, no .npz file")
def _(folder):
    read("images", write(folder / "a.txt", TEXT))


@bad("npz: something else", "cannot be read as an .npz file")
def _(folder):
    read("images", write(folder / "a.npz", b"x" * 1000))


@bad("npz: cut short", "cannot be read as an .npz file")
def _(folder):
    pixels, labels = images(30)
    content = npz(folder / "b.npz", x=pixels, y=labels).read_bytes()
    read("images", write(folder / "a.npz", content[: len(content) // 2]))


@bad("npz: objects", "cannot be read as an .npz file: Object arrays")
def _(folder):
    read("images", npz(folder / "a.npz", x=np.array([{}, {}], dtype=object), y=np.arange(2)))


@bad("npz: other names", "has neither x and y nor x_train, y_train, x_test, y_test")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", images=pixels, labels=labels))


@bad("npz: no such name", "has no array targets (it has images, labels)")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", images=pixels, labels=labels), x=("images",), y="targets")


@bad("images: another shape", "x is of shape [30, 64]")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", x=pixels.reshape(30, 64), y=labels))


@bad("images: another type", "x is of type int64; images are uint8 or float")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", x=pixels.astype(np.int64), y=labels))


@bad("images: not finite", "x has a value in image 7 (from 0) that is not finite")
def _(folder):
    pixels, labels = images(30)
    wrong = pixels.astype(np.float32)
    wrong[7, 3, 3] = np.nan
    read("images", npz(folder / "a.npz", x=wrong, y=labels))


@bad("images: none", "x is empty")
def _(folder):
    read("images", npz(folder / "a.npz", x=np.zeros((0, 8, 8), np.uint8), y=np.zeros(0, np.int64)))


@bad("images: another size", "images are 9 x 9 with 1 channel; recipe.model.image_size=8, recipe.model.channels=1")
def _(folder):
    pixels, labels = images(30, size=9)
    read("images", npz(folder / "a.npz", x=pixels, y=labels))


@bad("images: other channels", "images are 8 x 8 with 3 channels")
def _(folder):
    pixels, labels = images(30, channels=3)
    read("images", npz(folder / "a.npz", x=pixels, y=labels))


@bad("images: not square", "they must be square; scale or cut them first")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", x=pixels[:, :, :5], y=labels))


@bad("labels: beyond the classes", "image 2 (from 0) has label 2; recipe.model.num_classes=2")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", x=pixels, y=labels), OfImages(num_classes=2))


@bad("labels: too few", "y is of shape [29]; there are 30 examples")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", x=pixels, y=labels[:29]))


@bad("labels: no whole numbers", "labels are whole numbers")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", x=pixels, y=labels + 0.5))


@bad("images: fewer than a step takes", "has 4 examples to train on, fewer than a step takes (8)")
def _(folder):
    pixels, labels = images(5)
    read("images", npz(folder / "a.npz", x=pixels, y=labels), held_out=0.2)


@bad("images: none held out", "no example is held out (data.held_out=0.1)")
def _(folder):
    pixels, labels = images(9)
    read("images", npz(folder / "a.npz", x=pixels, y=labels))


@bad("images: means of other channels", "data.mean=[0.1,0.2]: the images have 1 channels")
def _(folder):
    pixels, labels = images(30)
    read("images", npz(folder / "a.npz", x=pixels, y=labels), mean=(0.1, 0.2))


@bad("idx: several files", "has several files of images (extra-images-idx3-ubyte, train-images-idx3-ubyte); name one")
def _(folder):
    for name in ("train", "extra"):
        mnist(folder / "in", name, 30)
    read("images", folder / "in")


@bad("idx: another magic", "is no idx file: it begins with 010208")
def _(folder):
    mnist(folder / "in", "train", 30)
    write(folder / "in" / "train-images-idx3-ubyte", b"\1\2\x08\3" + b"x" * 100)
    read("images", folder / "in")


@bad("idx: cut short", "is cut short or damaged: its header promises 1,936 bytes, it has 1,935")
def _(folder):
    mnist(folder / "in", "train", 30)
    write(folder / "in" / "train-images-idx3-ubyte", idx(images(30)[0])[:-1])
    read("images", folder / "in")


@bad("idx: a header cut short", "is cut short or damaged")
def _(folder):
    mnist(folder / "in", "train", 30)
    write(folder / "in" / "train-images-idx3-ubyte", idx(images(30)[0])[:9])
    read("images", folder / "in")


@bad("idx: damaged gzip", "cannot be read: ")
def _(folder):
    mnist(folder / "in", "train", 30, zipped=True)
    path = folder / "in" / "train-images-idx3-ubyte.gz"
    write(path, path.read_bytes()[:200])
    read("images", folder / "in")


@bad("idx: no labels", "there is no train-labels-idx1-ubyte")
def _(folder):
    mnist(folder / "in", "train", 30)
    (folder / "in" / "train-labels-idx1-ubyte").unlink()
    read("images", folder / "in")


@bad("folder: a class without pictures", "the class has no file that ends in .png", "PIL")
def _(folder):
    (class_folder(folder / "in") / "d").mkdir()
    read("images", folder / "in")


@bad("folder: no picture", "is no picture: ", "PIL")
def _(folder):
    write(class_folder(folder / "in") / "a" / "x.png", b"x" * 50)
    read("images", folder / "in")


@bad("folder: an empty file", "x.png: is empty", "PIL")
def _(folder):
    write(class_folder(folder / "in") / "a" / "x.png", b"")
    read("images", folder / "in")


@bad("folder: cut short", "is cut short: the end of the picture is missing", "PIL")
def _(folder):
    path = class_folder(folder / "in") / "a" / "000.png"
    write(path, path.read_bytes()[:-20])
    read("images", folder / "in")


@bad("folder: two sizes", "all must be alike", "PIL")
def _(folder):
    path = class_folder(folder / "other", size=9) / "b" / "001.png"
    write(class_folder(folder / "in") / "b" / "001.png", path.read_bytes())
    read("images", folder / "in")


@bad("folder: fewer classes than the model", "has 3 classes; recipe.model.num_classes=4", "PIL")
def _(folder):
    read("images", class_folder(folder / "in"), OfImages(num_classes=4), held_out=0.4, step=2)


@bad("folder: a class in one part", "class c is in only one of train and val", "PIL")
def _(folder):
    for part in ("train", "val"):
        class_folder(folder / "in" / part)
    for path in (folder / "in" / "val" / "c").iterdir():
        path.unlink()
    (folder / "in" / "val" / "c").rmdir()
    read("images", folder / "in")


@bad("arrays: no path", "needs a .csv or .npz file")
def _(folder):
    read("arrays", None)


@bad("arrays: another ending", "must end in .csv or .npz")
def _(folder):
    read("arrays", write(folder / "a.txt", TEXT))


@bad("csv: no such column", "has no column c (it has a, b, y)")
def _(folder):
    read("arrays", rows(folder / "a.csv"), x=("a", "c"))


@bad("csv: no target", "has no column target")
def _(folder):
    read("arrays", rows(folder / "a.csv"), y="target", x=("a", "b"))


@bad("csv: NaN", "line 3, column b: 'nan' is no finite number")
def _(folder):
    read("arrays", write(folder / "a.csv", "a,b,y\n1,2,0\n1,nan,0\n"))


@bad("csv: a word", "line 2, column a: 'one' is no finite number")
def _(folder):
    read("arrays", write(folder / "a.csv", "a,b,y\none,2,0\n"))


@bad("csv: nothing in a cell", "line 2, column b: '' is no finite number")
def _(folder):
    read("arrays", write(folder / "a.csv", "a,b,y\n1,,0\n"))


@bad("csv: a short line", "line 3 has 2 cells; there are 3 columns")
def _(folder):
    read("arrays", write(folder / "a.csv", "a,b,y\n1,2,0\n1,2\n"))


@bad("csv: no row", "has names of columns but no row")
def _(folder):
    read("arrays", write(folder / "a.csv", "a,b,y\n"))


@bad("csv: empty", "is empty")
def _(folder):
    read("arrays", write(folder / "a.csv", ""))


@bad("csv: a column twice", "has two columns a")
def _(folder):
    read("arrays", write(folder / "a.csv", "a,a,y\n1,2,0\n"))


@bad("csv: no text", "is no text: ")
def _(folder):
    read("arrays", write(folder / "a.csv", b"a,b,y\n\xff\xfe,1,2\n"))


@bad("arrays: other features", "x has 2 columns; recipe.model.num_features=3")
def _(folder):
    read("arrays", rows(folder / "a.csv"), OfRows(num_features=3))


@bad("arrays: beyond the classes", "row 2 (from 0) has class 2; recipe.model.num_classes=2")
def _(folder):
    read("arrays", rows(folder / "a.csv"), OfRows(num_classes=2))


@bad("arrays: rows that do not match", "x has 30 rows, y 29")
def _(folder):
    read("arrays", npz(folder / "a.npz", x=np.zeros((30, 2)), y=np.zeros(29)))


@bad("arrays: parts that do not match", "x_train has 2 columns, x_test 3")
def _(folder):
    arrays = {"x_train": np.ones((9, 2)), "y_train": np.zeros(9), "x_test": np.zeros((3, 3)), "y_test": np.ones(3)}
    read("arrays", npz(folder / "a.npz", **arrays))


@bad("arrays: infinite", "feature 1 is inf in row 4 (from 0)")
def _(folder):
    values = np.zeros((30, 2))
    values[4, 1] = np.inf
    read("arrays", npz(folder / "a.npz", x=values, y=np.zeros(30)))


@bad("arrays: texts", "x is of type <U1")
def _(folder):
    read("arrays", npz(folder / "a.npz", x=np.array(["a", "b"]), y=np.zeros(2)))


@bad("kinds: images for text", "data=images: the recipe takes data=text or data=tokens")
def _(folder):
    read("images", write(folder / "a.npz", b""), OfTokens())


@bad("kinds: text for images", "data=text: the recipe takes data=images")
def _(folder):
    read("text", None, OfImages())


@pytest.mark.parametrize(("case", "says"), BAD.values())
def test_what_is_wrong_is_one_line(tmp_path, case, says):
    with pytest.raises(ConfigError) as caught:
        case(tmp_path)
    (line,) = caught.value.mistakes
    assert says in line and "\n" not in line
    assert line.startswith(("data.path=", "data.tokenizer=", "data.mean=", "data=")), line


def test_there_are_many_kinds():
    assert len(BAD) > 80


def test_a_token_file_that_is_written_to_under_a_run_is_named_by_a_token_that_it_had_not(tmp_path):
    """Beyond the vocabulary a lookup would raise an error of torch's, which says nothing of a file."""
    path = tmp_path / "train.bin"
    np.tile(np.arange(100, dtype=np.uint16), 1000).tofile(path)
    source = load_tokens(str(path), context=16, vocab_size=256, held_out=0.1)
    with path.open("r+b") as file:
        file.write(b"\xff" * 200_000)
    told = f"data.path={path}: was written to while it was trained on: has token 65535 now, and had none above 99"
    for part in (source.train, source.held_out):
        with pytest.raises(ConfigError, match=re.escape(told)):
            part.read(np.array([0]), None)


def test_a_token_file_that_shrinks_under_a_run_is_an_error_and_not_the_end_of_the_process(tmp_path):
    """Reading a mapping beyond the end of its file is SIGBUS, which leaves no word and no checkpoint."""
    path = tmp_path / "train.bin"
    np.tile(np.arange(100, dtype=np.uint16), 1000).tofile(path)
    source = load_tokens(str(path), context=16, vocab_size=100, held_out=0.1)
    numbers = np.array([80_000, 85_000])
    assert source.train.read(numbers, None)[0].shape == (2, 16)
    os.truncate(path, 50_000)
    told = f"data.path={path}: has become shorter while it was trained on: 50,000 of 200,000 bytes are left"
    for part in (source.train, source.held_out):
        with pytest.raises(ConfigError, match=re.escape(told)):
            part.read(np.array([0]), None)
