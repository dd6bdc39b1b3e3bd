"""Data as people have it: archives that promise much, folders that may not be entered, files of other systems."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from aottrain.cli import main
from aottrain.data.array_files import is_gzip
from aottrain.data.tokens.text import read_files
from aottrain.errors import ConfigError
from tests.data.making import OfImages, OfTargets, class_folder, images, npz, read, rows, tokens, write

TEXT = "some words of English, " * 30
LINE = '{"text": "' + TEXT + '"}'
X, Y = np.arange(120.0).reshape(60, 2), np.arange(60) % 3
PICTURES = pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="PIL is not installed")
TABLES = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "cache"))


def refused(says: str, name: str, path: Path, *arguments, **changes) -> None:
    """One line that names the path says it."""
    with pytest.raises(ConfigError) as caught:
        read(name, path, *arguments, **changes)
    (line,) = caught.value.mistakes
    assert says in line and line.startswith("data.path=") and "\n" not in line, line


def archive(path: Path, **members: bytes) -> Path:
    """A zip file; of a name that ends in _npy the member ends in .npy."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name.replace("_npy", ".npy"), content)
    return path


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def head(shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize("size", [10**15, 10**30, -3])
def test_an_array_that_promises_more_than_there_is(tmp_path, size):
    path = archive(tmp_path / "a.npz", x_npy=head((size, 2)), y_npy=npy(Y))
    refused("cannot be read as an .npz file: ", "arrays", path)


def test_what_is_no_array_in_an_archive(tmp_path):
    refused("x in it is no array", "arrays", archive(tmp_path / "a.npz", x=b"hello", y_npy=npy(Y)))
    damaged = b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000
    refused("cannot be read as an .npz file", "arrays", archive(tmp_path / "b.npz", x_npy=damaged, y_npy=npy(Y)))
    refused("has no array x (it has none)", "arrays", archive(tmp_path / "c.npz"))
    refused("cannot be read as an .npz file: it is none", "arrays", write(tmp_path / "d.npz", b"some text\n"))


@pytest.mark.parametrize(("local", "central", "value"), [(6, 8, 1), (8, 10, 77)], ids=["encrypted", "another method"])
def test_an_archive_that_numpy_cannot_open(tmp_path, local, central, value):
    content = bytearray(archive(tmp_path / "a.npz", x_npy=npy(X), y_npy=npy(Y)).read_bytes())
    for mark, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        place = content.find(mark)
        while place >= 0:
            content[place + offset] = value
            place = content.find(mark, place + 4)
    refused("cannot be read as an .npz file: ", "arrays", write(tmp_path / "b.npz", bytes(content)))


def test_objects_are_not_unpickled(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    assert pickle.loads(pickle.dumps(Hostile())) is None and (tmp_path / "ran").exists()  # it would run
    (tmp_path / "ran").unlink()
    path = npz(tmp_path / "a.npz", x=np.array([Hostile()] * 3, dtype=object), y=np.arange(3))
    refused("Object arrays cannot be loaded", "arrays", path)
    refused("Object arrays cannot be loaded", "images", path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": X, "y": np.float64(1)}, "y is of type float64 and shape []"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "x has no row"),
        ({"x": np.zeros(0), "y": np.zeros(0)}, "x has no row"),
        ({"x": X.astype(complex), "y": Y}, "x is of type complex128"),
        ({"x": np.zeros(60, [("a", "f4"), ("b", "f4")]), "y": Y}, "x is of type [('a', '<f4'), ('b', '<f4')]"),
        ({"x": X * 1e300, "y": Y}, "feature 0 is 2e+300 in row 1 (from 0); finite numbers of float32 are needed"),
        ({"x": X, "y": np.full(60, 2**63, np.uint64)}, "y is 9223372036854775808 at 0 (from 0)"),
        ({"x": X, "y": Y * 1e30}, "y is 1e+30 at 1 (from 0); labels are whole numbers up to 2**53"),
        ({"x": X, "y": Y / 2}, "y is 0.5 at 1 (from 0); labels are whole numbers"),
    ],
)
def test_numbers_that_cannot_be_trained_on(tmp_path, arrays, says):
    refused(says, "arrays", npz(tmp_path / "a.npz", **arrays))


def test_a_target_beyond_float32(tmp_path):
    refused("y is 1e+39 in row 2", "arrays", npz(tmp_path / "a.npz", x=X, y=np.where(Y == 2, 1e39, 0)), OfTargets())


def test_pixels_beyond_float32(tmp_path):
    pixels, labels = images(30)
    wrong = pixels.astype(np.float64)
    wrong[7, 3, 3] = 1e39
    refused(
        "x has a value in image 7 (from 0) that is not finite in float32",
        "images",
        npz(tmp_path / "a.npz", x=wrong, y=labels),
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,b,y\n1_0,2,0\n", "line 2, column a: '1_0' is no finite number"),
        ("a;b;y\n1;2;0\n", "line 2, column a;b;y: '1;2;0' is no finite number"),
        ('a,b,y\n"1,5",2,0\n', "line 2, column a: '1,5' is no finite number"),
        ('a,b,y\n"1,2,0\n1,2,0\n', "line 3 has 1 cells; there are 3 columns"),
        ("a,b,y\n\n\n1,NA,0\n", "line 4, column b: 'NA' is no finite number"),
        ("\n\na,b,y\n1,2,0\n1,,0\n", "line 5, column b: '' is no finite number"),
        ("\n \n\n", "is empty"),
        ("a,b,y\n" + "1" * 200_000 + ",2,0\n", "field larger than field limit"),
        ("a,b,y\n1,2,0\n".encode("utf-16"), "is no text: "),
        ("a,b,y\n1e39,2,0\n", "a is 1e+39 in row 0 (from 0); finite numbers of float32 are needed"),
    ],
)
def test_tables_of_other_programs(tmp_path, content, says):
    refused(says, "arrays", write(tmp_path / "a.csv", content))


def test_a_table_is_read_whatever_its_quotes_and_ending(tmp_path):
    plain = read("arrays", rows(tmp_path / "a.csv"))
    lines = (tmp_path / "a.csv").read_text().splitlines()
    quoted = "\ufeff\n\n" + "\r\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in lines)
    assert read("arrays", write(tmp_path / "A.CSV", quoted)).fingerprint == plain.fingerprint
    path = npz(tmp_path / "a.npz", x=X, y=Y)
    assert (
        read("arrays", path.rename(tmp_path / "A.NPZ")).fingerprint == read("arrays", npz(path, x=X, y=Y)).fingerprint
    )


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([LINE, LINE, '{"text": "cut', LINE], "line 3 is no JSON: "),
        ([LINE, "[" * 200_000], "line 2 is no JSON: "),
        ([LINE, '{"text": "x", "n": ' + "9" * 9000 + "}"], "line 2 is no JSON: "),
        ([LINE, '{"text": null}'], "line 2 has no text under data.key=text, but NoneType under it"),
        ([LINE, '{"text": ["a"]}'], "line 2 has no text under data.key=text, but list under it"),
    ],
)
def test_a_line_of_json_that_is_wrong(tmp_path, lines, says):
    refused(says, "text", write(tmp_path / "a.jsonl", "\n".join(lines)))


def test_lines_of_json_with_a_mark_and_other_ends(tmp_path):
    plain = read("text", write(tmp_path / "a.jsonl", "\n".join([LINE] * 9)))
    marked = write(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + "\r\n".join([LINE] * 9).encode())
    assert read("text", marked).fingerprint == plain.fingerprint


@TABLES
@pytest.mark.parametrize(
    ("column", "says"),
    [
        ([], "is empty"),
        ([{"body": TEXT}], "row 1 has no text under data.key=text, but dict under it"),
        ([TEXT, None], "row 2 has no text under data.key=text, but NoneType under it"),
        ([TEXT.encode()], "row 1 has no text under data.key=text, but bytes under it"),
    ],
)
def test_columns_of_a_table_that_are_no_text(tmp_path, column, says):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": pyarrow.array(column)}), tmp_path / "a.parquet")
    refused(says, "text", tmp_path / "a.parquet")


def test_what_gzip_wrote_is_named(tmp_path):
    content = gzip.compress(tokens(3000).tobytes())
    assert is_gzip(content[:4096]) and not is_gzip(b"\x1f\x8b" + tokens(3000).tobytes())
    path = write(tmp_path / "a.bin", content + b"\0" * (len(content) % 2))
    refused("is compressed by gzip; gunzip unpacks it", "tokens", path)
    (note,) = (note for note in read("text", path).notes if "warning" in note)
    assert note.endswith("is compressed by gzip (gunzip unpacks it); its bytes are learned as they are")


def test_tokens_of_another_byte_order(tmp_path):
    refused("the model's vocab_size is 256", "tokens", write(tmp_path / "a.bin", tokens(1000).astype(">u2").tobytes()))


@PICTURES
def test_pictures_of_16_bits_keep_their_shades(tmp_path):
    from PIL import Image

    shades = (np.arange(64).reshape(8, 8) * 1040).astype(np.uint16)
    for number in range(12):
        path = write(tmp_path / "in" / "abc"[number % 3] / f"{number}.png", b"")
        Image.fromarray(shades).save(path)
    for channels in (1, 3):
        source = read("images", tmp_path / "in", OfImages(channels=channels), held_out=0.3)
        (pixels,) = source.train.images.pixels.at(np.array([0]))
        assert all((channel == np.round(shades / 257)).all() for channel in pixels)


@PICTURES
@pytest.mark.parametrize("mode", ["P", "1", "LA", "RGBA", "CMYK"])
def test_pictures_of_other_modes_are_converted(tmp_path, mode):
    from PIL import Image

    suffix = ".jpg" if mode == "CMYK" else ".PNG"
    for number in range(12):
        path = write(tmp_path / "in" / "abc"[number % 3] / f"{number}{suffix}", b"")
        Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(path)
    source = read("images", tmp_path / "in", OfImages(channels=3), held_out=0.3)
    assert (source.train.images.pixels.at(np.arange(3)) == 255).all()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int) -> bytes:
    shape = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", shape) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@PICTURES
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (png(0, 8), "is no picture: "),
        (png(60_000, 60_000), "is no picture: "),
        (b"hello", "is no picture: of no kind that Pillow knows"),
        ("flipped", "is no picture: "),
    ],
    ids=["of no width", "larger than memory", "a text", "a bit flipped"],
)
def test_one_picture_that_is_none(tmp_path, content, says):
    path = class_folder(tmp_path / "in", count=30) / "b" / "010.png"
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 0xFF
    write(path, bytes(damaged) if content == "flipped" else content)
    refused(says, "images", tmp_path / "in", mean=(0.0,), std=(1.0,))


@PICTURES
def test_what_a_system_leaves_beside_pictures_is_passed_over(tmp_path):
    plain = read("images", class_folder(tmp_path / "in", count=30))
    write(tmp_path / "in" / "a" / "._000.png", b"\0\5\x16\7")
    write(tmp_path / "in" / ".DS_Store", b"x")
    write(tmp_path / "in" / "b" / ".thumbnails" / "x.png", b"x")
    (tmp_path / "in" / "a" / "up").symlink_to("..")
    (tmp_path / "in" / "self").symlink_to("self")
    assert read("images", tmp_path / "in").fingerprint == plain.fingerprint


@PICTURES
def test_a_picture_whose_name_is_no_utf8(tmp_path):
    path = class_folder(tmp_path / "in", count=30) / "a" / "000.png"
    os.replace(path, os.fsencode(path.parent) + b"/\xff.png")
    source = read("images", tmp_path / "in")
    assert len(source.train) == 27 and read("images", tmp_path / "in").fingerprint == source.fingerprint


def test_links_that_lead_back_are_not_followed(tmp_path):
    folder = write(tmp_path / "in" / "a.txt", TEXT).parent
    (folder / "up").symlink_to("..")
    assert list(read_files(str(folder))) == [folder / "a.txt"]


@pytest.mark.parametrize(("kind", "name"), [("text", "a.txt"), ("tokens", "a.bin")])
@pytest.mark.parametrize("leads_to", ["gone", "itself"])
def test_a_link_that_leads_nowhere_is_no_file_less(tmp_path, kind, name, leads_to):
    content = TEXT if kind == "text" else tokens(1000).tobytes()
    folder = write(tmp_path / "in" / name, content).parent
    link = folder / f"b{Path(name).suffix}"
    link.symlink_to(link.name if leads_to == "itself" else "gone")
    refused(f"{link}: is a link that leads nowhere", kind, folder)


def test_a_part_that_names_of_files_decide_is_no_fraction(tmp_path):
    folder = write(tmp_path / "in" / "train.bin", tokens(5).tobytes()).parent
    write(folder / "val.bin", tokens(1000).tobytes())
    refused("has 1005 tokens, of which 5 are its training part; one example", "tokens", folder)


def closed(monkeypatch, folder: Path) -> None:
    """Whoever lists the folder or looks into it is refused, as everybody but root is by its mode."""

    def refusing(call):
        def refuse(path=".", *arguments, **keywords):
            is_within = isinstance(path, str | os.PathLike) and folder in (Path(path), *Path(path).parents)
            if is_within and (call is not os.stat or Path(path) != folder):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *arguments, **keywords)

        return refuse

    for name in ("scandir", "listdir", "stat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))


def test_no_folder_is_left_out_because_it_may_not_be_read(tmp_path, monkeypatch):
    write(tmp_path / "in" / "a.txt", TEXT)
    write(tmp_path / "in" / "sub" / "b.txt", TEXT)
    closed(monkeypatch, tmp_path / "in" / "sub")
    refused(f"{tmp_path / 'in' / 'sub'}: cannot be read: Permission denied", "text", tmp_path / "in")


def test_a_path_that_may_not_be_looked_at_is_one_line(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "in" / "a.txt", TEXT)
    closed(monkeypatch, tmp_path / "in")
    assert main([f"data.path={path}"]) == 2
    assert f"data.path={path}: cannot be read (permission denied)" in capsys.readouterr().err
    assert main([f"resume={tmp_path / 'in' / 'run'}"]) == 2
    assert "cannot be looked at: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["data.path", "resume", "decisions"])
def test_a_name_that_is_too_long(key, capsys):
    assert main([f"{key}={'a' * 5000}"]) == 2
    assert "too long" in capsys.readouterr().err.lower()


def test_pipes_devices_and_links_to_themselves(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    says = {tmp_path / "pipe": "is neither a file nor a folder", Path("/dev/zero"): "is neither a file nor a folder"}
    for path, text in {**says, tmp_path / "loop": "too many levels of symbolic links"}.items():
        assert main([f"data.path={path}"]) == 2
        assert text in capsys.readouterr().err


@PICTURES
def test_data_that_becomes_wrong_under_a_run_fails_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = class_folder(tmp_path / "in", count=60) / "a" / "000.png"
    write(path, path.read_bytes()[:33] + chunk(b"IDAT", b"\x78\x9c" + b"\xff" * 40) + chunk(b"IEND", b""))
    model = ["num_blocks=1", "width=4", "image_size=8", "channels=1", "num_classes=3"]
    given = [f"data.path={tmp_path / 'in'}", "data=images", "data.mean=[0]", "data.std=[1]", "trainer.steps=40"]
    line = ["recipe=resnet", *(f"recipe.model.{text}" for text in model), *given, "debug=fast", "engine=eager"]
    assert main([*line, "hydra.run.dir=run"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("aottrain: after step ") and f"data.path={path}: cannot be decoded: " in err
