"""What this machine can do: arithmetic by dtype, memory traffic, the fixed cost of a call. Measured once, kept on disk.

AOTTRAIN_RATES=default takes fixed figures instead, so that plans are the same on every machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from aottrain.runtime.cache import Table, table
from aottrain.runtime.calls import environment, free_bytes, quiet
from aottrain.runtime.timings import seconds_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # larger than caches are; on a CPU first touching it takes longest
_SIDES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192, 16384)}
_PRODUCT_SECONDS = 0.01
_NUM_SMALL_OPS = 200


@dataclass(frozen=True)
class Rates:
    """Of a two-core CPU in float32, where nothing is measured; only their ratio decides between plans."""

    bytes_per_s: float = 20e9
    op_overhead_s: float = 2e-6
    flops_by_dtype: Mapping[torch.dtype, float] = field(default_factory=lambda: {torch.float32: 180e9})

    def flops_per_s(self, dtype: torch.dtype | None) -> float:
        """Of matrix products; float32's for a dtype that was not measured."""
        found = self.flops_by_dtype.get(dtype) if dtype is not None else None
        return self.flops_by_dtype[torch.float32] if found is None else found


DEFAULT_RATES = Rates()
_known: dict[str, Rates] = {}


def rates_for(device: torch.device) -> Rates:
    """The rates of a device under the present settings (threads, precision); DEFAULT_RATES where it has none."""
    if os.environ.get("AOTTRAIN_RATES") == "default" or device.type not in _COPIED_BYTES:
        return DEFAULT_RATES
    name = f"rates-{hashlib.sha256(environment(device).encode()).hexdigest()[:16]}"
    if name not in _known:
        kept = table(name)
        if kept.get("bytes_per_s") is None:
            with quiet() as allowed:
                if not allowed:
                    return DEFAULT_RATES  # for this time
                _measure(kept, device)
        _known[name] = _rates(kept)
    return _known[name]


def _rates(kept: Table) -> Rates:
    figures = {name: kept.get(name) for name in ("bytes_per_s", "op_overhead_s", *map(str, _DTYPES))}
    if not all(figures[name] for name in ("bytes_per_s", "op_overhead_s", "torch.float32")):
        return DEFAULT_RATES
    by_dtype = {dtype: rate for dtype in _DTYPES if (rate := figures[str(dtype)])}
    return Rates(figures["bytes_per_s"], figures["op_overhead_s"], by_dtype)  # type: ignore[arg-type]


def _measure(kept: Table, device: torch.device) -> None:
    runs: dict[str, Callable[[], float]] = {str(dtype): partial(_product_rate, dtype, device) for dtype in _DTYPES}
    runs |= {"bytes_per_s": partial(_copy_rate, device), "op_overhead_s": partial(_overhead, device)}
    found: dict[str, float] = {}
    for name, run in runs.items():
        with suppress(RuntimeError):  # too little memory, or a dtype without a kernel
            found[name] = run()
    kept.add(found)


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of square matrix products, up to one that takes long enough to be timed: the best of all sizes."""
    best = 0.0
    for side in _SIDES[device.type]:
        a = torch.ones(side, side, dtype=dtype, device=device)
        seconds = _best(partial(torch.mm, a, a), device)
        best = max(best, 2 * side**3 / seconds)
        if seconds >= _PRODUCT_SECONDS:
            break
    return best


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written in a second."""
    num_bytes = min(_COPIED_BYTES[device.type], free_bytes(device) // 8)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    return 2 * num_bytes / _best(partial(torch.empty_like(source).copy_, source), device)


def _overhead(device: torch.device) -> float:
    one = torch.ones(1, device=device)
    return _best(lambda: [one.neg() for _ in range(_NUM_SMALL_OPS)], device) / _NUM_SMALL_OPS


def _best(run: Callable[[], object], device: torch.device) -> float:
    return min(seconds_of(run, device, max_runs=8, max_seconds=0.04))
