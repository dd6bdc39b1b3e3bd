"""The clock that decisions are made by: candidates run in turns, round after round, until two quiet rounds agree.

Other processes only ever add to a time, so the best run of a round counts, and of each candidate the two best rounds
are those that must agree. On a busy machine even they may be any number, and half of what a program asks might be
answered before it is noticed. So the machine is looked at first, a round in which our threads waited for a processor
counts for nothing, and where a candidate has no two rounds that agree nothing is decided. No other module reads a clock
for a choice.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aottrain.compat_dispatch import wait_on_device
from aottrain.ir.settings.decisions import Timing
from aottrain.measure.calls import synchronize

try:
    import resource
except ImportError:  # not a Unix: agreement alone tells whether the machine is busy
    resource = None  # type: ignore[assignment]

# Two rounds of a candidate agree where its best times in them differ by no more than this share.
AGREEMENT = 0.1
MAX_ROUNDS = 8
_MAX_DISTURBED = 3
# Runs of each candidate in a round: fewer where they take long; one is as many calls as fill a time that can be told.
_RUNS = 2
_ROUND_SECONDS = 0.05
_RUN_SECONDS, _MAX_CALLS = 0.001, 1000
# Of a time, the share for which threads of ours may be ready to run and have no processor. Beside one busy process two
# threads of a product on two processors wait for half of the time and more, alone for a hundredth of it.
MOST_LOST = 0.1
# Where the system does not tell how long threads wait, the times are counted that the processor is taken from a thread:
# thirty to a hundred a second beside others, a few alone, but as many as there are wake-ups of a logger or a display.
SWITCHES_PER_SECOND = 25.0
_FEW_SWITCHES = 3
_TASKS = Path("/proc/self/task")
_LOOK_SECONDS = 0.1
# A kept time that a run of today is so many times away from, up or down, is measured again.
CONTRADICTION = 2.0
# For so long a machine is taken to be as busy, or as quiet, as it was.
BUSY_SECONDS = 60.0
# For so long after a run, in whichever process, no other is held against what was kept.
HELD_SECONDS = 3600.0

# How much longer than the host took to queue some calls, and for how many seconds at most, a device waits for it to do
# so again.
_LEAD, _LONGEST_LEAD = 1.5, 0.1

_CPU = torch.device("cpu")
_seen: list[tuple[float, bool]] = []  # when the machine was last looked at, and whether it was busy
_undisturbed: list[tuple[float, int]] = []  # when fewer threads were last tried, and how many of them nobody disturbed
_begun: list[_Watch] = []  # over the work of this process
now = time.monotonic
epoch = time.time


@dataclass(frozen=True)
class Run:
    """Something to time."""

    call: Callable[[], object]
    units: float = 1.0
    """How much of what is counted (bytes, operations, calls) one run does."""


def in_turns(runs: Mapping[str, Run], device: torch.device) -> tuple[dict[str, Timing], bool]:
    """For each candidate the time of one unit, and whether the machine was busy: then the times say little."""
    num_calls = {name: _first_calls(run, device)[0] for name, run in runs.items()}
    times: dict[str, list[float]] = {}
    rounds: list[dict[str, list[float]]] = []
    num_disturbed = 0
    for _ in range(MAX_ROUNDS):
        times, disturbed = _round(runs, num_calls, device)
        num_disturbed += disturbed
        if num_disturbed == _MAX_DISTURBED:
            _seen[:] = [(now(), True)]
            break
        rounds += [] if disturbed else [times]
        settled = {name: _agreeing([round_times[name] for round_times in rounds]) for name in runs}
        if all(settled.values()):
            return {name: _timing(settled[name], run.units) for name, run in runs.items()}, False
    return {name: _timing(times[name], run.units) for name, run in runs.items()}, True


def by_fewer_threads(runs: Mapping[str, Run]) -> dict[str, Timing]:
    """The times on a busy processor: by half of the threads of this process, a quarter, and so on, until each of them
    has a processor to itself. They compare candidates, and are no figures of what all threads do. Empty where not even
    one thread is left alone."""
    threads = torch.get_num_threads()
    known = [count for when, count in _undisturbed if now() - when < BUSY_SECONDS]
    count = min(known[0] if known else threads // 2, threads)
    try:
        while count:
            torch.set_num_threads(count)
            times, disturbed = in_turns(runs, _CPU)
            if not disturbed:
                return times
            count //= 2
        return {}
    finally:
        torch.set_num_threads(threads)
        _undisturbed[:] = [(now(), count)]


@contextlib.contextmanager
def work_watched() -> Iterator[None]:
    """What this thread does inside tells `is_busy` whether others want the processor: nothing is done for that alone.
    It must not wait for anything before it asks."""
    is_first = not _begun
    _begun[:] = _begun or [_Watch()]
    try:
        yield
    finally:
        if is_first:
            _begun.clear()


def is_busy() -> bool:
    """Whether other processes want the processor, too: seen once in BUSY_SECONDS, by the work that was watched, or by
    working for a moment."""
    if not _seen or now() - _seen[0][0] >= BUSY_SECONDS:
        watches = [watch for watch in _begun if watch.tells()] or [_Watch()]
        if watches[0] not in _begun:
            _work(_LOOK_SECONDS)
        _seen[:] = [(now(), watches[0].is_disturbed(_CPU))]
        if _seen[0][1]:  # not even this one thread was left alone
            _undisturbed[:] = [(now(), 0)]
    return _seen[0][1]


def _work(seconds: float) -> None:
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        pass


def contradicts(run: Run, kept: Timing, device: torch.device) -> bool:
    """Whether a call now, and several runs that nobody disturbs, are more than CONTRADICTION away from what was
    kept."""
    num_calls, seconds = _first_calls(run, device)
    if num_calls == 1 and _is_near(seconds / run.units, kept):
        return False
    times, disturbed = _round({"": run}, {"": num_calls}, device)
    return not disturbed and not _is_near(_timing(times[""], run.units).seconds, kept)


def _is_near(seconds: float, kept: Timing) -> bool:
    return 1 / CONTRADICTION <= seconds / max(kept.seconds, 1e-12) <= CONTRADICTION


def _first_calls(run: Run, device: torch.device) -> tuple[int, float]:
    """How many calls make a run, and the seconds of one, after one that is not timed."""
    run.call()
    synchronize(device)
    seconds = _seconds(run, 1, device)
    return min(max(round(_RUN_SECONDS / max(seconds, 1e-9)), 1), _MAX_CALLS), seconds


def _round(
    runs: Mapping[str, Run], num_calls: Mapping[str, int], device: torch.device
) -> tuple[dict[str, list[float]], bool]:
    """Times of each candidate's call, one after the other in turns, and whether too many switches fell into them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    watch = _Watch()
    for _ in range(_RUNS):
        for name, run in runs.items():
            if not times[name] or sum(times[name]) < _ROUND_SECONDS:
                times[name].append(_seconds(run, num_calls[name], device) / num_calls[name])
    return times, watch.is_disturbed(device)


class _Watch:
    """What happens to the threads of this process from now on."""

    def __init__(self) -> None:
        self._start, self._waited = time.perf_counter(), _waited_seconds()
        self._lost, self._switches = _lost_seconds(), _switches()

    def tells(self) -> bool:
        """Whether it has watched long enough, and waiting for a lock is not taken for waiting for a processor."""
        return self._waited is not None and time.perf_counter() - self._start >= _LOOK_SECONDS

    def is_disturbed(self, device: torch.device) -> bool:
        """Whether others took more of the processor than they do where there is enough for all. A thread that waits for
        another device has lost nothing."""
        seconds, switches = time.perf_counter() - self._start, _switches() - self._switches
        waited = _waited_seconds()
        if waited is not None and self._waited is not None:
            return waited - self._waited > MOST_LOST * seconds
        lost = _lost_seconds() - self._lost if device.type == "cpu" else 0.0
        return lost > MOST_LOST * seconds or switches > _FEW_SWITCHES + SWITCHES_PER_SECOND * seconds


def _seconds(run: Run, num_calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        return _seconds_of_device(run, num_calls, device)
    start = time.perf_counter()
    for _ in range(num_calls):
        run.call()
    synchronize(device)
    return time.perf_counter() - start


def _seconds_of_device(run: Run, num_calls: int, device: torch.device) -> float:
    """That the device works on the calls: it begins when the host has queued them all, which of small calls takes
    longer than the work, and in a step goes on beside it."""
    start = time.perf_counter()
    for _ in range(num_calls):
        run.call()
    queued = time.perf_counter() - start
    synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        wait_on_device(min(_LEAD * queued, _LONGEST_LEAD))
        begin.record()
        for _ in range(num_calls):
            run.call()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _agreeing(rounds: Sequence[list[float]]) -> list[float]:
    """All times of the two rounds that were the best; none where these do not agree."""
    if len(rounds) < 2:
        return []
    one, other = sorted(rounds, key=min)[:2]
    return one + other if min(other) <= (1 + AGREEMENT) * min(one) else []


def _timing(times: list[float], units: float) -> Timing:
    best = min(times)
    return Timing(best / units, max(times) / best - 1 if best else 0.0)


def _waited_seconds() -> float | None:
    """For how long threads of this process were ready to run and had no processor, together, as the scheduler counts
    it (`schedstat` in Linux's proc(5): run time, wait time in ns, slices); None where it does not."""
    waited, counts = 0, False
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended meanwhile
                run, wait = (task / "schedstat").read_text(encoding="ascii").split()[:2]
                waited, counts = waited + int(wait), counts or int(run) > 0
    return waited / 1e9 if counts else None


def _lost_seconds() -> float:
    """Time that has passed without this thread having a processor; only differences mean anything."""
    return time.perf_counter() - time.thread_time()


def _switches() -> int:
    """How often the processor was taken from this thread, and how often it waited for something, so far."""
    if resource is None:
        return 0
    used = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return used.ru_nivcsw + used.ru_nvcsw
