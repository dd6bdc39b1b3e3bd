"""A small model of a GPU's registers, by those of an H100's multiprocessor: how many values of a row they hold.

What a kernel keeps of a row beyond that goes to memory and comes back (it spills), which costs more than to read the
row again.
"""

from __future__ import annotations

# Of a multiprocessor; of a thread at most; of a thread those that hold no element of a row: addresses, and what is on
# the way from one value to the next.
_REGISTERS, _MOST_OF_A_THREAD, _SPARE = 65536, 255, 48
# Programs that keep a GPU's memory busy: two for each of an H100's 132 multiprocessors, so that all run at once.
BUSY_PROGRAMS = 264
# Elements of a row that are held. A row that is longer is computed again in each pass.
LONGEST_HELD = 16384


def warps_of(elements: int) -> int:
    """Of a program: eight elements a thread, more for long rows: a power of two up to 16."""
    return max(1, min(16, elements // 256))


def values_that_fit(elements: int, warps: int) -> int:
    """How many values of so many elements the registers of a program hold, at least one."""
    threads = 32 * warps
    registers = min(_MOST_OF_A_THREAD, _REGISTERS // threads) - _SPARE
    return max(1, registers // max(1, elements // threads))
