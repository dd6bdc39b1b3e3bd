"""Single ops through their lowering: one-call graphs, scheduled, run by `evaluate` and as C++, many in one library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from aottrain.compiler.codegen.evaluation import evaluate, memory_of
from aottrain.compiler.link.programs import FLAGS, cpp_units
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.kernels.columns import scratch_bytes
from aottrain.ir.kernels.kernel import draw_numbers
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.runtime.executor import Runner
from aottrain.runtime.launch import Launch, cpp_launch, scheduled_runner
from aottrain.toolchain.native import Source, load_all
from tests.numerics.tolerance import RTOL_ATOL


@dataclass
class Case:
    """One call of one overload. pointwise: errors are counted in units in the last place of each element.

    reference: what gives eager's results where this machine has no kernel of it. cancelled: how large what the formula
    adds up is where its sum is small, in units of the result."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    what: str = ""
    pointwise: bool = True
    reference: Callable[..., Any] | None = None
    cancelled: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.what}"

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        tree_map(lambda value: found.append(value) if isinstance(value, Tensor) else None, (self.args, self.kwargs))
        return found


@dataclass
class Planned:
    case: Case
    graph: fx.Graph
    schedule: Schedule
    outputs: int

    @property
    def lowered(self) -> bool:
        return bool(self.schedule.kernels)


def graph_of(case: Case) -> tuple[fx.Graph, int]:
    """The call as a graph, and the number of its results."""
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes: dict[int, fx.Node] = {}

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(nodes)}")
        node.meta["val"] = mode.from_tensor(value)
        nodes[len(nodes)] = node
        return node

    args, kwargs = tree_map(given, (case.args, case.kwargs))
    node = graph.call_function(case.op, args, kwargs)
    with mode:
        fakes = tree_map(lambda v: v.meta["val"] if isinstance(v, fx.Node) else v, (args, kwargs))
        value = node.meta["val"] = case.op(*fakes[0], **fakes[1])
    results = [node]
    if isinstance(value, (tuple, list)):
        import operator

        results = []
        for i, item in enumerate(value):
            if item is not None:
                part = graph.call_function(operator.getitem, (node, i))
                part.meta["val"] = item
                results.append(part)
    graph.output(results)
    return graph, len(results)


def plan(case: Case, number: int) -> Planned:
    graph, count = graph_of(case)
    planned = schedule(graph)
    calls = tuple(
        replace(call, kernel=replace(call.kernel, name=f"case_{number}_{call.kernel.name}"))
        if isinstance(call, KernelCall)
        else call
        for call in planned.calls
    )
    return Planned(case, graph, replace(planned, calls=calls), count)


def link(planned: Sequence[Planned]) -> dict[str, Launch]:
    return linked([call for one in planned for call in one.schedule.kernels])


def linked(kernels: Sequence[KernelCall]) -> dict[str, Launch]:
    """What runs each of them, compiled together."""
    if not kernels:
        return {}
    units, functions = cpp_units(kernels)
    libraries = load_all([Source(text, FLAGS) for text in units])
    found = {}
    for call in kernels:
        unit, name = functions[call.kernel.name]
        library = libraries[unit]
        assert library is not None, "the generated C++ does not compile"
        function = getattr(library.functions, name)
        found[call.kernel.name] = cpp_launch(function, scratch_bytes(call.kernel), draw_numbers(call.kernel))
    return found


def evaluated(planned: Planned) -> dict[str, Launch]:
    def launch(call: KernelCall) -> Launch:
        def run(buffers: Sequence[Tensor]) -> None:
            evaluate(call.kernel, [memory_of(b, p.span) for b, p in zip(buffers, call.kernel.parameters, strict=True)])

        return run

    return {call.kernel.name: launch(call) for call in planned.schedule.kernels}


def run(planned: Planned, launches: dict[str, Launch]) -> list[Tensor]:
    runner: Runner = scheduled_runner(planned.graph, planned.schedule, launches)
    return runner(list(planned.case.tensors))


def eager(case: Case, change: Callable[[Tensor], Tensor] = lambda value: value) -> list[Tensor]:
    args, kwargs = tree_map(lambda v: change(v) if isinstance(v, Tensor) else v, (case.args, case.kwargs))
    found = (case.reference or case.op)(*args, **kwargs)
    return [found] if isinstance(found, Tensor) else [item for item in found if item is not None]


def exact(case: Case) -> list[Tensor]:
    """The same in float64: of floats, or of integers where no tensor is a float."""
    kwargs = case.kwargs
    if kwargs.get("dtype") in (torch.float32, torch.bfloat16, torch.float16):
        case = replace(case, kwargs={**kwargs, "dtype": torch.float64})
    floats = any(value.is_floating_point() for value in case.tensors)
    return eager(case, lambda v: v if v.dtype is torch.bool or (floats and not v.is_floating_point()) else v.double())


# Units in the last place by which a result may be off where eager's own error is smaller: eager rounds some functions
# correctly, and a result of low precision may fall on the other side of a tie.
# Sums are counted in those of sqrt(n) times their largest operand, about what adding n of them in any order loses.
ULPS = {torch.float32: 3.0, torch.bfloat16: 1.0, torch.float16: 1.0}
SUM_ULPS = {torch.float32: 8.0, torch.bfloat16: 1.0, torch.float16: 1.0}
RATIO = 1.5


def differences(case: Case, got: Sequence[Tensor]) -> list[str]:
    """What is wrong with results: types, layouts, special values, or an error that is too far above eager's."""
    wanted = eager(case)
    precise = exact(case) if any(value.is_floating_point() for value in wanted) else wanted
    found: list[str] = []
    for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append(f"result {i}: {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}")
        elif not a.dtype.is_floating_point:
            if not torch.equal(a, b):
                found.append(_shown(f"result {i}", case, a, b, a != b))
        else:
            found += _float_differences(case, i, a, b, precise[i])
    return found


def _float_differences(case: Case, i: int, a: Tensor, b: Tensor, precise: Tensor) -> list[str]:
    precise = precise.double()
    # NaN, inf, 0 and -0 where eager has them, or where float64 does.
    odd = _special(b, a) & _special(b, precise)
    if not case.pointwise:
        odd &= b != 0
    if bool(odd.any()):
        return [_shown(f"result {i}", case, a, b, odd)]
    plain = a.isfinite() & b.isfinite() & precise.isfinite()
    if not bool(plain.any()):
        return []
    if a.dtype is torch.float64:
        near = torch.isclose(a, b, *RTOL_ATOL[a.dtype], equal_nan=True) | ~plain
        return [] if bool(near.all()) else [_shown(f"result {i}", case, a, b, ~near)]
    scale = ulp(precise, a.dtype) if case.pointwise else ulp(_magnitude(case, precise[plain]), a.dtype)
    if case.cancelled is not None:
        # What float32 rounds before it cancels, as many units of it as a float32 result may be off by, is the result's
        # error in whatever type that then is.
        lost = case.cancelled(*(v.double() for v in case.tensors)).nan_to_num() * torch.finfo(torch.float32).eps
        scale += lost * ULPS[torch.float32] / ULPS[a.dtype]
    mine = torch.where(plain, (b.double() - precise).abs() / scale, 0)
    theirs = torch.where(plain, (a.double() - precise).abs() / scale, 0)
    bound = max(RATIO * float(theirs.max()), (ULPS if case.pointwise else SUM_ULPS)[a.dtype])
    if float(mine.max()) <= bound:
        return []
    text = f"result {i}: {float(mine.max()):.3g} ulps off, eager {float(theirs.max()):.3g}"
    return [_shown(text, case, a, b, mine > bound)]


def _magnitude(case: Case, result: Tensor) -> Tensor:
    largest = max((v for v in case.tensors if v.is_floating_point()), key=Tensor.numel, default=result).double()
    largest = largest[largest.isfinite()]
    operand = largest.abs().max() if largest.numel() else result.abs().max()
    return torch.maximum(result.abs().max(), operand * max(largest.numel() / result.numel(), 1.0) ** 0.5)


def _special(got: Tensor, wanted: Tensor) -> Tensor:
    """Where one of them is NaN, infinite or a zero, and the other is not the same."""
    nan = got.isnan() | wanted.isnan()
    zero = (got == 0) & (wanted == 0)
    differ = torch.where(nan, got.isnan() != wanted.isnan(), (got.isinf() | wanted.isinf()) & (got.double() != wanted))
    return torch.where(zero, got.signbit() != wanted.signbit(), differ)


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of a type around a float64 value."""
    limits = torch.finfo(dtype)
    magnitude = value.abs().nan_to_num(1.0, limits.max, limits.max).clamp(limits.tiny, limits.max)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * limits.eps


def _shown(text: str, case: Case, a: Tensor, b: Tensor, where: Tensor) -> str:
    places = where.nonzero()
    first = tuple(places[0].tolist())
    given = [value[first].item() for value in case.tensors if value.shape == a.shape]
    return f"{text}: {len(places)} of {a.numel()} differ; at {first} of {given} eager {a[first]} got {b[first]}"
