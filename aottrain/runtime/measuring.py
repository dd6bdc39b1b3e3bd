"""The clock that decisions are made by: candidates run in turns, round after round, until two quiet rounds agree.

Other processes only ever add to a time, so the best run of a round counts; but on a busy machine even that may be any
number. So a round in which the processor was taken away from us too often counts for nothing, and where no two rounds
agree nothing is decided. No other module reads a clock for a choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from aottrain.ir.decisions import Timing
from aottrain.runtime.calls import synchronize

try:
    import resource
except ImportError:  # not a Unix: agreement alone tells whether the machine is busy
    resource = None  # type: ignore[assignment]

# Two rounds agree where of no candidate the best times differ by more than this share.
AGREEMENT = 0.1
MAX_ROUNDS = 5
_MAX_DISTURBED = 3
# Runs of each candidate in a round: fewer where they take long.
_RUNS = 3
_ROUND_SECONDS = 0.05
# A busy machine takes the processor from a thread, or lets it wait for another that lost its own, about a hundred times
# a second; a quiet one a few times.
SWITCHES_PER_SECOND = 25.0
_FEW_SWITCHES = 3
# A kept time that a run of today is so many times away from, up or down, is measured again.
CONTRADICTION = 2.0
# For so long a machine that was busy is taken to be so still.
BUSY_SECONDS = 60.0

now = time.monotonic


@dataclass(frozen=True)
class Run:
    """Something to time; units: how much of what is counted (bytes, operations, calls) one run does."""

    call: Callable[[], object]
    units: float = 1.0


def in_turns(runs: Mapping[str, Run], device: torch.device) -> tuple[dict[str, Timing], bool]:
    """For each candidate the time of one unit, and whether the machine was busy: then the times say little."""
    for run in runs.values():
        run.call()
    synchronize(device)
    before: dict[str, list[float]] | None = None
    found: dict[str, list[float]] = {}
    num_disturbed = 0
    for _ in range(MAX_ROUNDS):
        found, disturbed = _round(runs, device)
        num_disturbed += disturbed
        if num_disturbed == _MAX_DISTURBED:
            break
        if before is not None and not disturbed and _agree(before, found):
            together = {name: before[name] + found[name] for name in runs}
            return {name: _timing(together[name], run.units) for name, run in runs.items()}, False
        before = None if disturbed else found
    return {name: _timing(found[name], run.units) for name, run in runs.items()}, True


def contradicts(run: Run, kept: Timing, device: torch.device) -> bool:
    """Whether some runs now, undisturbed, are more than CONTRADICTION away from what was kept."""
    run.call()
    synchronize(device)
    found, disturbed = _round({"": run}, device)
    ratio = _timing(found[""], run.units).seconds / max(kept.seconds, 1e-12)
    return not disturbed and not 1 / CONTRADICTION <= ratio <= CONTRADICTION


def _round(runs: Mapping[str, Run], device: torch.device) -> tuple[dict[str, list[float]], bool]:
    """Times of each candidate, one after the other in turns, and whether too many switches fell into them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    switches, start = _switches(), time.perf_counter()
    for _ in range(_RUNS):
        for name, run in runs.items():
            if not times[name] or sum(times[name]) < _ROUND_SECONDS:
                times[name].append(_seconds(run, device))
    taken = _switches() - switches
    return times, taken > _FEW_SWITCHES + SWITCHES_PER_SECOND * (time.perf_counter() - start)


def _seconds(run: Run, device: torch.device) -> float:
    start = time.perf_counter()
    run.call()
    synchronize(device)
    return time.perf_counter() - start


def _agree(before: Mapping[str, list[float]], found: Mapping[str, list[float]]) -> bool:
    pairs = [(min(before[name]), min(found[name])) for name in found]
    return all(max(pair) <= (1 + AGREEMENT) * min(pair) for pair in pairs)


def _timing(times: list[float], units: float) -> Timing:
    best = min(times)
    return Timing(best / units, max(times) / best - 1 if best else 0.0)


def _switches() -> int:
    """How often the processor was taken from this thread, and how often it waited for something, so far."""
    if resource is None:
        return 0
    used = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return used.ru_nivcsw + used.ru_nvcsw
