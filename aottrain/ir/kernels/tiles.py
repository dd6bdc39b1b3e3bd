"""How a float32 product in pieces of bfloat16 divides its work and memory: what `ops.native.tiles` makes its C++ of."""

from __future__ import annotations

# A block of the result is SIDE by SIDE; a step of it takes STEP terms of each sum. Of a panel of TALL rows, and of WIDE
# columns, DEEP terms are packed at a time: together they stay in a core's second cache (2 MiB where there are tiles).
SIDE, STEP = 32, 32
TALL, WIDE, DEEP = 128, 512, 1024
# Of a float32 number, of which each has eight bits of the significand.
PIECES = 3
_BYTES = 2


def right_bytes(columns: int, terms: int) -> int:
    """Of a part of the right operand, which all threads read. A multiple of 64."""
    return min(_padded(columns, SIDE), WIDE) * _depth(terms) * PIECES * _BYTES


def left_bytes(rows: int, terms: int, threads: int) -> int:
    """Of a panel of the left operand, of one thread. A multiple of 64."""
    return panel_rows(rows, threads) * _depth(terms) * PIECES * _BYTES


def panel_rows(rows: int, threads: int) -> int:
    """So many that each thread has a panel, where there are enough."""
    return min(_padded(-(-rows // threads), SIDE), TALL)


def product_scratch_bytes(rows: int, terms: int, columns: int, threads: int) -> int:
    """Of (rows, terms) times (terms, columns), of all threads together."""
    return right_bytes(columns, terms) + threads * left_bytes(rows, terms, threads)


def _depth(terms: int) -> int:
    return min(_padded(terms, STEP), DEEP)


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
