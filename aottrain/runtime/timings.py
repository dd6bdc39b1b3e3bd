"""How long single calls take on this machine: measured once for each distinct call, kept on disk."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence

import torch

from aottrain.ir.ops import op_info
from aottrain.runtime.cache import Table, table
from aottrain.runtime.calls import OpCall, distinct, environment, quiet, synchronize

_MIN_RUNS, _MAX_RUNS = 3, 10
_MAX_SECONDS = 0.02  # for one call


def call_seconds(calls: Sequence[OpCall]) -> tuple[float | None, ...]:
    """The time of each call on made-up inputs, the best of a few: other processes only ever add to it. 0 for views;
    None where it cannot be measured.

    Processes that share a machine and a cache folder agree on the figures, and so on what is decided from them.
    """
    for call in distinct(calls):
        known = _table(call.device)
        if not op_info(call.target).is_free and known.get(call.text or "") is None and call.may_run:
            seconds = _measure(call)
            if seconds is not None:
                known.add({call.text or "": seconds})
    return tuple(0.0 if op_info(call.target).is_free else _table(call.device).get(call.text or "") for call in calls)


def measures() -> bool:
    """Whether calls are timed at all: not under AOTTRAIN_RATES=default, where plans are the same on all machines."""
    return os.environ.get("AOTTRAIN_RATES") != "default"


def seconds_of(run: Callable[[], object], device: torch.device, max_runs: int, max_seconds: float) -> list[float]:
    """Times of one run after another, the first left out."""
    run()
    synchronize(device)
    times: list[float] = []
    while len(times) < _MIN_RUNS or (len(times) < max_runs and sum(times) < max_seconds):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def _table(device: torch.device) -> Table:
    return table(f"seconds-{hashlib.sha256(environment(device).encode()).hexdigest()[:16]}")


def _measure(call: OpCall) -> float | None:
    with quiet() as allowed:
        if not allowed:
            return None
        try:
            args, kwargs = call.arguments()
            times = seconds_of(lambda: call.target(*args, **kwargs), call.device, _MAX_RUNS, _MAX_SECONDS)
        except Exception:  # whatever it is: these inputs were none that a program would give
            return None
    return min(times)
