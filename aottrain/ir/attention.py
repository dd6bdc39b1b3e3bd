"""Memory that attention by a function of our own needs beside its operands and results."""

from __future__ import annotations

# At least what `ops.native.attention` has on any processor: lanes of a vector, and the sides of its blocks.
_LANES, _KEYS, _QUERIES, _FORWARD_KEYS, _FORWARD_QUERIES = 16, 32, 64, 128, 32


def scratch_floats(queries: int, keys: int, width: int, backward: bool) -> int:
    """Of one thread, which has one head at a time: (queries, width) meets (keys, width). A multiple of 16."""
    wide, tall, all_keys = _padded(width, _LANES), _padded(queries, _QUERIES), _padded(keys, _KEYS)
    if not backward:
        return 2 * (all_keys + _FORWARD_QUERIES) * wide + _FORWARD_QUERIES * _FORWARD_KEYS
    return (3 * tall + 5 * all_keys) * wide + 2 * _QUERIES * _KEYS + 3 * tall


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
