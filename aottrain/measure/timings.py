"""How long single calls take on this machine: measured once for each distinct one, kept on disk with what they hang on.

Processes that share a machine and a cache folder agree on the times, and so on what is decided from them. What is kept
is held against a run of today once an hour, by the process that needs it first: where kernels are kept, too, to do so
in each process is a good part of compiling.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cached_property, partial
from typing import Any

import torch

from aottrain.counted import counted, tell
from aottrain.ir.ops import op_info
from aottrain.ir.settings.decisions import Timing
from aottrain.measure import stopwatch
from aottrain.measure.calls import OpCall, environment, own_code, quiet
from aottrain.measure.decisions import Timed, decide
from aottrain.measure.machine import boot, machine_description
from aottrain.measure.stopwatch import Run
from aottrain.toolchain.cache import Table, table

_ABOUT = "measured on"
_checked: set[tuple[str, str]] = set()  # kept times that a run of this process has been held against
_num_timed = itertools.count(1)
_busy: dict[tuple[str, str], tuple[float, Timed]] = {}


def timed(
    kind: str, key: str, make: Callable[[], Mapping[str, Run]], device: torch.device, compares: bool = False
) -> Timed:
    """The times of candidates for one purpose: those that are kept unless a run of today contradicts them, else
    measured in turns. make: gives the runs, the first of which is held against what is kept. compares: only which is
    the faster matters, so that where others use the processor, too, fewer threads may tell."""
    store = _table(kind, device)
    kept, name = _times(store.get(key)), (store.path.name, key)
    if kept and (name in _checked or _was_held(name, device)):
        return Timed(kept, "cache")
    if name in _busy and stopwatch.now() - _busy[name][0] < stopwatch.BUSY_SECONDS:
        return _busy[name][1]
    with quiet() as allowed:
        if not allowed:  # a profiler of the caller's records
            return Timed(kept, "cache" if kept else "model")
        try:
            runs = make() if kept else None
            # A run that agrees with what is kept says more than a look at the machine, which takes 25 ms.
            if runs is not None and set(kept) == set(runs) and not _is_contradicted(runs, kept, device):
                _hold(name, device)
                return Timed(kept, "cache")
            is_busy, may_share = stopwatch.is_busy(), compares and device.type == "cpu"
            if is_busy and (kept or not may_share):
                return Timed(kept, "cache" if kept else "busy")
            runs = runs or make()
            tell("calls timed", next(_num_timed))
            times, is_busy = ({}, True) if is_busy else stopwatch.in_turns(runs, device)
            shared = stopwatch.by_fewer_threads(runs) if is_busy and may_share and not kept else {}
        except Exception:  # whatever it is: these inputs were none that a program would give
            return Timed()
    if is_busy:
        if kept:
            return Timed(kept, "cache")
        _busy[name] = stopwatch.now(), Timed(shared, "shared") if shared else Timed(times, "busy")
        return _busy[name][1]
    return _keep(store, key, times, device)


def calls_timed(candidates: Mapping[str, OpCall], compares: bool = True) -> Timed:
    """Of calls that stand in for each other, on made-up inputs, in turns. compares: as `timed` has it."""
    calls = list(candidates.values())
    texts = [call.text for call in calls]
    if None in texts or not all(call.may_run for call in calls):
        return Timed()
    key = " | ".join(f"{name}: {text}" for name, text in zip(candidates, texts, strict=True))
    make = partial(_runs, candidates)
    return timed("calls", key, make, calls[0].device, compares)


def sums_timed(choices: Mapping[str, Sequence[OpCall]]) -> Timed:
    """Of several calls each, the sum of their times; all calls take turns."""
    numbered = {f"{name} {i}": call for name, calls in choices.items() for i, call in enumerate(calls)}
    measured = calls_timed(numbered)
    known = choices if measured.times else {}
    times = {name: [measured.times[f"{name} {i}"] for i in range(len(choices[name]))] for name in known}
    spreads = {name: max(time.spread for time in timings) for name, timings in times.items()}
    sums = {name: Timing(sum(time.seconds for time in timings), spreads[name]) for name, timings in times.items()}
    return Timed(sums, measured.source)


def call_seconds(calls: Sequence[OpCall]) -> tuple[float | None, ...]:
    """The time of each call on made-up inputs; 0 for views, None where it cannot be measured, or shall not be."""
    return tuple(0.0 if op_info(call.target).is_free else _price(call) for call in counted("calls timed", calls))


def _price(call: OpCall) -> float | None:
    if call.plain_text is None:
        return None
    measure = partial(calls_timed, {"alone": call}, compares=False)
    choice = decide("seconds", call.plain_text, None, measure, lambda times: times["alone"].seconds).choice
    return choice if isinstance(choice, (int, float)) else None


def _runs(candidates: Mapping[str, OpCall]) -> dict[str, Run]:
    runs: dict[str, _Made] = {}
    for name, call in candidates.items():
        alike = (made for made in runs.values() if (made.call.args, made.call.kwargs) == (call.args, call.kwargs))
        runs[name] = _Made(call, next(alike, None))
    return {name: Run(made) for name, made in runs.items()}


class _Made:
    """A call on made-up inputs. They are made when they are first asked for, once for calls with the same: for large
    ones that takes longer than the call."""

    def __init__(self, call: OpCall, like: _Made | None):
        self.call, self._like = call, like

    def __call__(self) -> object:
        args, kwargs = self.arguments
        return self.call.target(*args, **kwargs)

    @cached_property
    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        return self.call.arguments() if self._like is None else self._like.arguments


def _is_contradicted(runs: Mapping[str, Run], kept: Mapping[str, Timing], device: torch.device) -> bool:
    first = next(iter(runs))
    return stopwatch.contradicts(runs[first], kept[first], device)


def _hold(name: tuple[str, str], device: torch.device) -> None:
    """Remember that these times are those of a run of now."""
    _checked.add(name)
    _table("held", device).add({"\0".join(name): {"at": stopwatch.epoch(), "boot": boot()}}, replacing=True)


def _was_held(name: tuple[str, str], device: torch.device) -> bool:
    """Whether a process of this machine has done so lately."""
    entry = _table("held", device).get("\0".join(name))
    at = entry.get("at") if isinstance(entry, dict) and entry.get("boot") == boot() else None
    return isinstance(at, (int, float)) and 0 <= stopwatch.epoch() - at < stopwatch.HELD_SECONDS


def _keep(store: Table, key: str, times: Mapping[str, Timing], device: torch.device) -> Timed:
    """What another process has kept meanwhile goes before; a damaged or contradicted entry does not."""
    entry = {"times": {name: [time.seconds, time.spread] for name, time in times.items()}}
    entries = {key: {**entry, "date": date.today().isoformat()}, _ABOUT: machine_description(device)}
    store.add(entries, replacing=store.get(key) is not None)
    _hold((store.path.name, key), device)
    stored = _times(store.get(key)) or times
    return Timed(stored, "measured" if stored == times else "cache")


def _times(entry: Any) -> dict[str, Timing]:
    """Of an entry in the file; empty where there is none, or it is damaged."""
    try:
        times = {str(name): Timing(float(seconds), float(spread)) for name, (seconds, spread) in entry["times"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}
    sound = all(0 <= figure < float("inf") for time in times.values() for figure in (time.seconds, time.spread))
    return times if sound else {}


def _table(kind: str, device: torch.device) -> Table:
    conditions = "\0".join((environment(device), own_code()))
    return table(f"{kind}-{hashlib.sha256(conditions.encode()).hexdigest()[:16]}")
