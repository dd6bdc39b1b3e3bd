"""What this machine can do: arithmetic by dtype, memory traffic, the fixed cost of a call.

Plans hang on the ratios of these figures, and a plan should not turn on the last few percent of one: they are taken in
steps of a factor of two from those of a fixed model, which stand where nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from aottrain.ir.settings.decisions import OVERHEAD, TRAFFIC, Timing
from aottrain.ir.settings.devices import Target
from aottrain.measure.calls import free_bytes
from aottrain.measure.decisions import decide, planned_for
from aottrain.measure.stopwatch import Run
from aottrain.measure.timings import timed

_COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # larger than caches are; on a CPU first touching it takes longest
# Of the square products that are timed; on a CPU for each of these numbers of threads and more, float32 alone.
_SIDES = {"cpu": {1: 512, 8: 1024, 32: 2048}, "cuda": {1: 8192}}
_SIDE_OF_OTHERS = {"cpu": 128, "cuda": 8192}  # a type that a CPU has no instructions for takes a hundred times as long
_OTHERS = (torch.bfloat16, torch.float16)
_NUM_SMALL_OPS = 200


@dataclass(frozen=True)
class Rates:
    """Of a two-core CPU in float32, where nothing is measured; only their ratio decides between plans."""

    bytes_per_s: float = 20e9
    op_overhead_s: float = 2e-6
    flops_by_dtype: Mapping[torch.dtype, float] = field(default_factory=lambda: {torch.float32: 180e9})
    attention: float = 1.0
    """What fused attention reaches of the rate of matrix products."""

    def flops_per_s(self, dtype: torch.dtype | None) -> float:
        """Of matrix products; float32's for a dtype that was not measured."""
        measured = self.flops_by_dtype.get(dtype) if dtype is not None else None
        return self.flops_by_dtype[torch.float32] if measured is None else measured


DEFAULT_RATES = Rates()


def rates_for(device: torch.device) -> Rates:
    """The rates of a device under the present settings (threads, precision); DEFAULT_RATES where it has none."""
    if (target := planned_for()) is not None:
        return rates_of(target)
    if device.type not in _COPIED_BYTES:
        return DEFAULT_RATES
    measure = partial(timed, "rates", "rates", partial(rate_runs, device), device)
    figures = decide("rates", device.type, _figures(DEFAULT_RATES), measure, _prefer).choice
    assert isinstance(figures, Mapping)
    return _rates(figures)


def rates_of(target: Target) -> Rates:
    """What a device reaches by its specification, in full and not in steps: nobody's clock is in it."""
    flops = {getattr(torch, dtype): rate * target.products for dtype, rate in target.flops.items()}
    return Rates(target.bytes_per_s * target.traffic, target.gap_s, flops, target.attention / target.products)


def _figures(rates: Rates) -> dict[str, float]:
    by_dtype = {str(dtype): rate for dtype, rate in rates.flops_by_dtype.items()}
    return {TRAFFIC: rates.bytes_per_s, OVERHEAD: rates.op_overhead_s, **by_dtype}


_DEFAULT_FIGURES = _figures(DEFAULT_RATES)


def _rates(figures: Mapping[str, float]) -> Rates:
    """Of figures by name; the fixed model's where one is missing that every device has."""
    if figures == _DEFAULT_FIGURES or not all(figures.get(name) for name in _DEFAULT_FIGURES):
        return DEFAULT_RATES
    by_dtype = {dtype: rate for dtype in (torch.float32, *_OTHERS) if (rate := figures.get(str(dtype)))}
    return Rates(figures[TRAFFIC], figures[OVERHEAD], by_dtype)


def _prefer(times: Mapping[str, Timing]) -> dict[str, float]:
    figures = {}
    for name, timing in times.items():
        model = _DEFAULT_FIGURES.get(name, _DEFAULT_FIGURES[str(torch.float32)])
        figure = timing.seconds if name == OVERHEAD else 1 / max(timing.seconds, 1e-18)
        figures[name] = stepped(figure, model)
    return figures


def stepped(figure: float, model: float) -> float:
    """The figure in steps of two from the model's, which stands for all that is less than a whole step away: most
    machines are near it, and none shall fall on either side of a border from one day to the next."""
    steps = math.log2(max(figure, 1e-30) / model)
    return model * 2.0 ** (round(steps) if abs(steps) >= 1 else 0)


def rate_runs(device: torch.device) -> dict[str, Run]:
    """By the figures' names. The float32 product first, which is held against kept figures: it takes little time."""
    side = max(side for threads, side in _SIDES[device.type].items() if torch.get_num_threads() >= threads)
    runs = {str(torch.float32): _product(torch.float32, side, device)}
    for dtype in _OTHERS:
        with suppress(RuntimeError):  # a dtype without a kernel
            runs[str(dtype)] = _product(dtype, _SIDE_OF_OTHERS[device.type], device)
    num_bytes = min(_COPIED_BYTES[device.type], free_bytes(device) // 8)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    one = torch.ones(1, device=device)
    runs[TRAFFIC] = Run(partial(torch.empty_like(source).copy_, source), 2 * num_bytes)
    runs[OVERHEAD] = Run(lambda: [one.neg() for _ in range(_NUM_SMALL_OPS)], _NUM_SMALL_OPS)
    return runs


def attention_run(device: torch.device) -> tuple[torch.dtype, Run]:
    """Fused attention, in operations, and the type of its numbers: halves on a device."""
    is_cpu = device.type == "cpu"
    dtype = torch.float32 if is_cpu else torch.bfloat16
    shape = (1, 4, 512, 64) if is_cpu else (4, 16, 4096, 128)
    query = torch.ones(shape, dtype=dtype, device=device)
    batch, heads, time, width = shape
    return dtype, Run(
        partial(F.scaled_dot_product_attention, query, query, query), 4.0 * batch * heads * time**2 * width
    )


def _product(dtype: torch.dtype, side: int, device: torch.device) -> Run:
    a = torch.ones(side, side, dtype=dtype, device=device)
    torch.mm(a, a)
    return Run(partial(torch.mm, a, a), 2.0 * side**3)
