"""The memory traffic of a pattern's program, and the least that any program for it needs; nothing runs.

aottrain/compiler/traffic.py says what counts as moved, and what the least is; an optimizer's step is counted here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aottrain.compiler import traffic
from aottrain.compiler.optimizers.formulas import ADAMW, LION, SGD, Formula, Segment, optimizer_step
from aottrain.compiler.traffic import working
from aottrain.ir.graph import info
from aottrain.ir.kernels.kernel import Load
from aottrain.ir.kernels.multi_tensor import Base, MultiTensorIR
from tests.golden.programs import Golden
from tests.golden.texts import compiled
from tests.traffic.patterns import PATTERNS

BACKENDS = ("cpp", "triton")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, tuple[Formula, tuple[str, ...]]] = {
    "optimizer_adamw": (ADAMW, ("exp_avg", "exp_avg_sq")),
    "optimizer_sgd": (SGD, ("momentum_buffer",)),
    "optimizer_lion": (LION, ("exp_avg",)),
}
NAMES = (*PATTERNS, *OPTIMIZERS)


@dataclass(frozen=True)
class Traffic:
    """Of one program, in bytes."""

    moved: int
    least: int
    num_kernels: int
    library_calls: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.moved / self.least


def traffic_of(name: str, dtype: str, backend: str) -> Traffic:
    """Of a pattern's forward and backward, or of an optimizer's step."""
    if name in OPTIMIZERS:
        formula, states = OPTIMIZERS[name]
        return _of_optimizer(optimizer_step(formula, (Segment(DTYPES[dtype], states),)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        known = compiled(Golden(functools.partial(PATTERNS[name], DTYPES[dtype]), {"kernel": backend}))
    finally:
        torch.set_num_threads(threads)
    return _of_program(known)


def _of_program(known: dict[str, Any]) -> Traffic:
    schedules = [fused.schedule for fused in known["decided"].fused]
    calls = [call for schedule in schedules for call in working(schedule)]
    libraries = tuple(info(call).name for call in calls if isinstance(call, fx.Node))
    counted = traffic.traffic_of(known["built"]["joint"], known["built"]["parts"], schedules)
    return Traffic(*counted, len(calls) - len(libraries), libraries)


def _of_optimizer(program: MultiTensorIR) -> Traffic:
    """For an element of each tensor: lists are read once before the gradients' norm is known and once after."""
    moved, reads, writes = 0, dict[tuple[str, bool], int](), dict[str, int]()
    for number, stage in enumerate(program.stages):
        kernel = stage.kernel
        loaded = {load.buffer for load in kernel.body if isinstance(load, Load)}
        for place, (parameter, base) in enumerate(zip(kernel.parameters, stage.bases, strict=True)):
            if base is Base.LIST:
                size = parameter.dtype.itemsize
                moved += size * (place in loaded) + size * parameter.written
                if place in loaded:
                    reads[parameter.name, number < program.num_measuring] = size
                if parameter.written:
                    writes[parameter.name] = size
    return Traffic(moved, sum(reads.values()) + sum(writes.values()), len(program.stages))
