"""Where memory begins that no two threads shall share a cache line of."""

from aottrain.ir.sizes.polynomials import is_open

CACHE_LINE = 64  # bytes: of a processor's cache, and of its widest vector


def aligned(num_bytes: int) -> int:
    """Up to the next cache line; of a size that each call has its own of, at most one line beyond that."""
    if is_open(num_bytes):
        return num_bytes + CACHE_LINE
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE
