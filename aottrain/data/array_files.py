"""Arrays in files: .npz (numpy), .csv with named columns, and idx, the format of MNIST (also gzipped)."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aottrain.data.order import Numbers
from aottrain.errors import ConfigError

IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
SHOWN_NAMES = 20


def read_npz(file: Path, names: Sequence[str]) -> dict[str, Numbers]:
    """Those of the named arrays that the file has; all if there are no names. ConfigError: it is not whole, or has
    objects, which would run code from the file, or what is no array."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in names or arrays.files if name in arrays.files}
    except Exception as error:  # numpy, zip files and the parser of an array's head have many for what is damaged
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "contains pickled" in reason:  # what numpy takes any other file for; it says how to run code from it
            reason = "it is none"
        raise ConfigError(f"data.path={file}: cannot be read as an .npz file: {reason}") from error
    for name, values in found.items():
        if not isinstance(values, np.ndarray):  # a file in the zip file that is none of numpy's
            raise ConfigError(f"data.path={file}: {name} in it is no array")
    return found


SPLIT = ("x_train", "y_train", "x_test", "y_test")


def has_split(arrays: dict[str, Numbers]) -> bool:
    """Whether they say themselves what is held out."""
    return set(SPLIT) <= arrays.keys()


def named(file: Path, names: Sequence[str]) -> dict[str, Numbers]:
    """The named arrays. ConfigError: one is not there."""
    arrays = read_npz(file, names)
    if missing := [name for name in names if name not in arrays]:
        raise ConfigError(f"data.path={file}: has no array {missing[0]} ({listed(read_npz(file, ()))})")
    return arrays


def listed(names: Sequence[str] | dict[str, Numbers]) -> str:
    shown = list(names)
    more = f" and {len(shown) - SHOWN_NAMES} more" if len(shown) > SHOWN_NAMES else ""
    return "it has " + ", ".join(map(str, shown[:SHOWN_NAMES])) + more if shown else "it has none"


def read_csv(file: Path, columns: Sequence[str], without: str) -> tuple[list[str], Numbers]:
    """(names, float64 of (rows, columns)) of the named columns, or of all but `without`, in the file's order.

    ConfigError: there is no such column, or a cell is no finite number; its line and column are named.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            lines = _rows(stream)
            header = [name.strip() for name in next(lines, (0, []))[1]]
            if not header:
                raise ConfigError(f"data.path={file}: is empty")
            if repeated := [name for name in header if header.count(name) > 1]:
                raise ConfigError(f"data.path={file}: has two columns {repeated[0]}")
            names = list(columns) or [name for name in header if name != without]
            for name in names:
                if name not in header:
                    raise ConfigError(f"data.path={file}: has no column {name} ({listed(header)})")
            indices = [header.index(name) for name in names]
            rows = [_numbers(file, line, cells, header, indices) for line, cells in lines]
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path={file}: is no text: {error.reason} at byte {error.start:,}") from error
    except (OSError, csv.Error) as error:
        raise ConfigError(f"data.path={file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not rows:
        raise ConfigError(f"data.path={file}: has names of columns but no row")
    return names, np.array(rows, dtype=np.float64).reshape(len(rows), len(names))


def _rows(stream):  # type: ignore[no-untyped-def]
    """(line of the file, cells), without empty lines."""
    reader = csv.reader(stream)
    for cells in reader:
        if any(cell.strip() for cell in cells):
            yield reader.line_num, cells


def _numbers(file: Path, line: int, cells: list[str], header: list[str], indices: Sequence[int]) -> list[float]:
    if len(cells) != len(header):
        raise ConfigError(f"data.path={file}: line {line:,} has {len(cells)} cells; there are {len(header)} columns")
    values = []
    for index in indices:
        try:
            values.append(float(cells[index]) if "_" not in cells[index] else np.nan)  # Python reads 1_0 as 10
        except ValueError:
            values.append(np.nan)
        if not np.isfinite(values[-1]):
            text = f"line {line:,}, column {header[index]}: '{cells[index]}' is no finite number"
            raise ConfigError(f"data.path={file}: {text}")
    return values


def is_gzip(content: bytes) -> bool:
    """Whether it begins as a file that gzip wrote."""
    if not content.startswith(b"\x1f\x8b"):
        return False
    try:
        zlib.decompressobj(wbits=31).decompress(content[:4096], 1)  # 31: with gzip's head
    except zlib.error:
        return False
    return True


def read_idx(file: Path) -> Numbers:
    """The array of an idx file (LeCun, Cortes & Burges, MNIST): two zero bytes, type, number of dimensions, each
    dimension as a big-endian uint32, values. ConfigError: it is no such file, or not whole."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"data.path={file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_TYPES or not content[3]:
        shown = content[:4].hex() or "nothing"
        raise ConfigError(f"data.path={file}: is no idx file: it begins with {shown}, not with 0000 and a known type")
    start = 4 + 4 * content[3]
    sizes = content[4:start]
    shape = tuple(int(size) for size in np.frombuffer(sizes[: len(sizes) // 4 * 4], dtype=">u4"))
    kind = np.dtype(IDX_TYPES[content[2]])
    expected = start + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(shape) != content[3] or len(content) != expected:
        text = f"its header promises {expected:,} bytes, it has {len(content):,}"
        raise ConfigError(f"data.path={file}: is cut short or damaged: {text}")
    return np.frombuffer(content, dtype=kind, offset=start).reshape(shape)
