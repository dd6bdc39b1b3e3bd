"""Where memory begins that no two threads shall share a cache line of."""

CACHE_LINE = 64  # bytes: of a processor's cache, and of its widest vector


def aligned(num_bytes: int) -> int:
    """Up to the next cache line."""
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE
