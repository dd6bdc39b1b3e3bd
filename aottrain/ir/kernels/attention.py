"""How attention by a function of our own divides its work and memory: what `ops.native.attention` and
`ops.native.tile_attention` make their C++ of.

A thread has one head at a time. The memory that it needs beside operands and results is planned here and divided by the
C++; both read these tables, so what is written lies within what was planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


def _blocks(lanes: int, rows: int) -> dict[str, int]:
    """LANES: numbers of a vector; R: rows of a tile, which is summed in registers; the others: keys and queries of a
    block, in the backward and in the forward."""
    sides = {"KEYS": 2 * lanes, "QUERIES": 8 * rows, "FORWARD_KEYS": 8 * lanes, "FORWARD_QUERIES": 4 * rows}
    return {"LANES": lanes, "R": rows, **sides}


# By what the C++ compiler says of the processor; "" where it says nothing of that.
BLOCKS = {"__AVX512F__": _blocks(16, 8), "": _blocks(8, 4)}
# Plans are those of the largest blocks, so that they are the same on any processor.
_LARGEST = {name: max(blocks[name] for blocks in BLOCKS.values()) for name in BLOCKS[""]}

_THREADS = 4  # that are supposed where nothing is measured: the same on any machine

# Extents, each a size of the operands up to the next multiple of a block's.
PADDED = {"width": ("columns", "LANES"), "tall": ("queries", "QUERIES"), "all": ("keys", "KEYS")}


class Part(NamedTuple):
    """Pieces of a thread's memory that are as large as each other, one after the other."""

    names: tuple[str, ...]  # of variables in the C++
    rows: str  # how many: an extent, or a block's side
    columns: str = ""  # numbers of a row, likewise; one without a name
    type: str = "float"  # of the C++: or u16, of which two take the place of one number


FORWARD_MEMORY = (
    Part(("keys", "values"), "all", "width"),
    Part(("own", "sums"), "FORWARD_QUERIES", "width"),
    Part(("p",), "FORWARD_QUERIES", "FORWARD_KEYS"),
)
BACKWARD_MEMORY = (
    Part(("qs", "gs", "dqs"), "tall", "width"),
    Part(("ks", "keys", "values", "dks", "dvs"), "all", "width"),
    Part(("p", "ds"), "QUERIES", "KEYS"),
    Part(("logs", "rests", "deltas"), "tall"),
)

# Of heads of bfloat16 by a processor's tiles. A square of SIDE x SIDE results is made at a time; the others: keys that
# a square of queries meets at a time in the forward, and queries that a square of keys meets in the backward; a pair of
# squares.
TILE_BLOCKS = {"SIDE": 32, "PAIR": 64, "KEYS": 128, "QUERIES": 128}
TILE_PADDED = {"width": ("columns", "SIDE"), "tall": ("queries", "SIDE"), "all": ("keys", "SIDE")}
TILE_FORWARD_MEMORY = (
    Part(("keys", "values"), "all", "width", "u16"),
    Part(("own",), "SIDE", "width", "u16"),
    Part(("sums",), "SIDE", "width"),
    Part(("scores",), "KEYS", "SIDE"),
    Part(("p",), "KEYS", "SIDE", "u16"),
)
TILE_BACKWARD_MEMORY = (
    Part(("queries", "query_pairs", "grads", "grad_pairs"), "tall", "width", "u16"),
    Part(("keys", "turned_keys", "values"), "all", "width", "u16"),
    Part(("dqs",), "tall", "width"),
    Part(("dks", "dvs"), "all", "width"),
    Part(("scores", "dps"), "PAIR", "SIDE"),
    Part(("p", "ds", "ds_pairs"), "QUERIES", "SIDE", "u16"),
    Part(("logs", "rests", "deltas"), "tall"),
)


def scratch_floats(queries: int, keys: int, width: int, backward: bool, narrow: bool = False) -> int:
    """Of one thread, where (queries, width) meets (keys, width). A multiple of 16. narrow: of bfloat16, which either
    text may compute."""
    parts = BACKWARD_MEMORY if backward else FORWARD_MEMORY
    own = _floats(parts, PADDED, _LARGEST, queries, keys, width)
    return max(own, tile_floats(queries, keys, width, backward)) if narrow else own


def tile_floats(queries: int, keys: int, width: int, backward: bool) -> int:
    """The same of `ops.native.tile_attention` alone."""
    parts = TILE_BACKWARD_MEMORY if backward else TILE_FORWARD_MEMORY
    return _floats(parts, TILE_PADDED, TILE_BLOCKS, queries, keys, width)


def _floats(
    parts: Sequence[Part],
    padded: Mapping[str, tuple[str, str]],
    blocks: Mapping[str, int],
    queries: int,
    keys: int,
    width: int,
) -> int:
    sizes = {"queries": queries, "keys": keys, "columns": width}
    extents = {name: _padded(sizes[size], blocks[block]) for name, (size, block) in padded.items()}
    extents |= {"": 1, **blocks}
    share = {"float": 1, "u16": 2}
    return sum(len(part.names) * extents[part.rows] * extents[part.columns] // share[part.type] for part in parts)


def keeps_more_than_it_computes_in(query: Sequence[int], key: Sequence[int]) -> bool:
    """Whether the scores of all heads take more memory than the op that keeps none computes in.

    query, key: shapes, (batch, heads, queries or keys, width). Where that was so the op took 0.4 to 0.95 of the time of
    products and softmax, elsewhere 0.8 to 1.1 (sixteen shapes of 16 KiB to 32 MiB of scores, forward and backward, by
    one thread of an AMD EPYC with AVX-512)."""
    batch, heads, queries, width = query
    return batch * heads * queries * key[2] >= _THREADS * scratch_floats(queries, key[2], width, backward=True)


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
