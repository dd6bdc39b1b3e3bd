"""How a product by tiles of bfloat16 divides its work and memory, of float32 in pieces or of bfloat16 as it is: what
`ops.native.tiles` makes its C++ of."""

from __future__ import annotations

import torch

# A block of the result is SIDE by SIDE; a step of it takes STEP terms of each sum. Of a panel of TALL rows, and of WIDE
# columns, DEEP terms are packed at a time: together they stay in a core's second cache (2 MiB where there are tiles).
SIDE, STEP = 32, 32
TALL, WIDE, DEEP = 128, 512, 1024
# The same of bfloat16, which is not taken apart.
DEEPER = 2048
# Steps of float32 that tiles add up before their sum is added to the others.
FEW = 8
# Of a float32 number, of which each has eight bits of the significand.
PIECES = 3
_BYTES = 2


def num_pieces(dtype: torch.dtype) -> int:
    """Of which an operand is the sum."""
    return 1 if dtype == torch.bfloat16 else PIECES


def right_bytes(columns: int, terms: int, pieces: int) -> int:
    """Of a part of the right operand, which all threads read. A multiple of 64."""
    return part_columns(columns, terms, pieces) * _depth(terms, pieces) * pieces * _BYTES


def left_bytes(rows: int, terms: int, threads: int, pieces: int) -> int:
    """Of a panel of the left operand, of one thread. A multiple of 64."""
    return panel_rows(rows, threads) * _depth(terms, pieces) * pieces * _BYTES


def part_columns(columns: int, terms: int, pieces: int) -> int:
    """Of the right operand, packed at a time: of bfloat16 with few terms as many more as take as much memory."""
    wide = WIDE if pieces > 1 else WIDE * max(1, DEEP // _depth(terms, pieces))
    return min(_padded(columns, SIDE), wide)


def sums_bytes(rows: int, terms: int, columns: int, narrow: bool) -> int:
    """Of float32 sums beside a result of bfloat16, where they take more than one pass. A multiple of 64."""
    return 4 * _padded(rows, SIDE) * part_columns(columns, terms, 1) if narrow and terms > DEEPER else 0


def panel_rows(rows: int, threads: int) -> int:
    """So many that each thread has a panel, where there are enough."""
    return min(_padded(-(-rows // threads), SIDE), TALL)


def product_scratch_bytes(
    rows: int, terms: int, columns: int, threads: int, pieces: int = PIECES, narrow: bool = False
) -> int:
    """Of (rows, terms) times (terms, columns), of all threads together. pieces: 1 of bfloat16 operands, whose product
    is bfloat16 too where it is narrow."""
    packed = right_bytes(columns, terms, pieces) + threads * left_bytes(rows, terms, threads, pieces)
    return packed + sums_bytes(rows, terms, columns, narrow)


def loss_head_scratch_bytes(rows: int, width: int, classes: int, threads: int, dtype: torch.dtype) -> int:
    """Of the products of so many rows with a linear layer's weight (classes, width): logits and both gradients, that of
    the weight in float32."""
    pieces, halves = num_pieces(dtype), dtype == torch.bfloat16
    products = (rows, width, classes, halves), (rows, classes, width, halves), (classes, rows, width, False)
    return max(product_scratch_bytes(m, k, n, threads, pieces, narrow) for m, k, n, narrow in products)


def _depth(terms: int, pieces: int) -> int:
    return min(_padded(terms, STEP), DEEPER if pieces == 1 else DEEP)


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
