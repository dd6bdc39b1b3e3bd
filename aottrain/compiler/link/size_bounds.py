"""A budget of bytes for symbolic sizes: for which it is planned, up to which it holds, and what the peak is at others.

It is planned for the largest sizes that are known: those that the caller named (`mark_dynamic(..., max=)`), else those
of the call that is traced. From there the sizes are scaled up while the predicted peak is within the budget, and what
is found becomes guards of the program. A larger call is compiled anew, planned for its own sizes, or BudgetError says
that no plan fits. Where it is not proven that no value shrinks as sizes grow, as what is padded up to a length does, a
program is for one size. A fraction of the peak bounds no bytes: it is of the plans for the call that was traced.

What libraries take within themselves is measured for the call that is traced, and taken to grow as the operands and
results of the call do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from aottrain.compat import tree_flatten
from aottrain.compiler.graphs.measured_calls import Workspace, workspaces_of
from aottrain.compiler.graphs.symbols import size_facts, symbols_of
from aottrain.compiler.link.backends import KernelPlan
from aottrain.compiler.link.retention import keep_memory
from aottrain.compiler.link.timeline import trace_memory
from aottrain.compiler.options import CompileOptions
from aottrain.errors import BudgetError, CompilerError
from aottrain.ir.graph import JointGraph, PartitionedGraph, storage_bytes, value_of
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.settings.budget import unmet
from aottrain.ir.sizes.expressions import SizeExpression, hint, is_symbolic, size_of
from aottrain.ir.sizes.polynomials import SizeFacts, sizes_at
from aottrain.ir.sizes.rising import rises
from aottrain.ir.units import format_bytes

# How far beyond the planned sizes a budget is tried, and how close to the last size that fits.
_MOST_TIMES, _CLOSE = 256.0, 1.03

Sizes = Mapping[str, int]


@contextmanager
def at_planned_sizes(joint: JointGraph, options: CompileOptions) -> Iterator[None]:
    """Inside, under a budget of bytes, symbolic sizes are the largest that are known. BudgetError then names them."""
    facts = size_facts(joint.graph) if _bounds_bytes(options) else None
    if facts is None or not facts.hints.keys() >= set(_sized(joint.graph)):
        yield
        return
    sizes = _planned(joint.graph, facts)
    try:
        with sizes_at(sizes):
            yield
    except BudgetError as error:
        assert error.lowest_bytes is not None
        text = _text(sizes, list(sizes))
        raise unmet(error.budget, error.lowest_bytes, error.lowest_of_kernels, text) from error


def bound_sizes(
    joint: JointGraph, plan: PartitionPlan, parts: PartitionedGraph, kernels: KernelPlan, options: CompileOptions
) -> tuple[str, ...]:
    """Guards the sizes up to which a budget of bytes holds; gives what the report says of sizes, a line each.

    parts: for the tangents that are expected.
    """
    facts = size_facts(joint.graph)
    sized = [] if facts is None else _sized(joint.graph)
    if facts is None or not sized:
        return ()
    symbols = {name: symbol for name, symbol in symbols_of(parts.forward).items() if name in sized}
    if not facts.hints.keys() >= set(sized):  # as where a view starts, which is no input: nothing is known of others
        for name, symbol in symbols.items() if _bounds_bytes(options) else ():
            _require(symbol == facts.hints[name])
        return ()

    measured = workspaces_of(joint.graph, measured=options.counts_workspaces)
    workspace, lengths = _growing(measured, facts), _lengths(joint.graph)

    def peak(sizes: Sizes) -> float:
        """In bytes; infinite where the program has no such sizes, as it divides by a difference that is 0 there, or
        multiplies what does not fit, or as a window is larger than what it slides over."""
        try:
            with sizes_at(sizes):
                if any(hint(length) < 0 for length in lengths):
                    return math.inf
                kept = kernels.memories and keep_memory(parts, kernels.planned, workspace)
                schedules = [schedule for _, _, schedule in kernels.planned]
                return trace_memory(parts, options.reserved_bytes, workspace, schedules, kept or ()).peak_bytes
        except (ZeroDivisionError, AssertionError):  # the latter are torch's, of a product's sizes
            return math.inf

    scaled = [_scaled(facts.hints, factor, facts) for factor in (0.5, 1.0, 2.0)]
    found = [(sizes, peak(sizes)) for sizes in scaled]
    peaks = {_text(sizes, sized): format_bytes(int(size)) for sizes, size in found if size < math.inf}
    lines = [f"predicted peak {', '.join(f'{size} at {sizes}' for sizes, size in peaks.items())}"]
    if _bounds_bytes(options) and (limit := plan.limit) is not None:
        grows, bounds = _grows(joint.graph, facts), dict(facts.hints)
        if grows:
            bounds = _largest(_planned(joint.graph, facts), facts, sized, lambda sizes: peak(sizes) <= limit)
        for name, symbol in symbols.items():
            _require(symbol <= bounds[name] if grows else symbol == bounds[name])
        held = f"{'up to' if grows else 'for'} {_text(bounds, sized)}"
        lines.append(f"the budget of {format_bytes(limit)} holds {held}; another call is compiled anew")
    return tuple(lines)


def _bounds_bytes(options: CompileOptions) -> bool:
    return options.partition == "budget" and not isinstance(options.budget, float)


def _require(condition: Any) -> None:
    """A guard of the program: `condition` is symbolic. It holds for the call that is traced."""
    if not bool(condition):
        raise CompilerError("a budget is bounded by sizes that are smaller than those of the call that is traced")


def _planned(graph: fx.Graph, facts: SizeFacts) -> dict[str, int]:
    """The greatest value of each symbol where the caller named one, else that of the call that is traced."""
    if not _grows(graph, facts):
        return dict(facts.hints)
    return _greatest(facts)


def _greatest(facts: SizeFacts) -> dict[str, int]:
    return {name: facts.hints[name] if most is None else most for name, (_, most) in facts.ranges.items()}


def _growing(measured: Workspace, facts: SizeFacts) -> Workspace:
    """Inside `sizes_at`, what calls take within themselves there."""

    def workspace(node: fx.Node) -> int:
        with sizes_at(facts.hints):
            num_bytes, before = measured(node), _touched_bytes(node)
        return -(-num_bytes * max(_touched_bytes(node), before) // max(before, 1)) if num_bytes else 0

    return workspace


def _touched_bytes(node: fx.Node) -> int:
    return storage_bytes(node) + sum(map(storage_bytes, node.all_input_nodes))


def _scaled(sizes: Sizes, factor: float, facts: SizeFacts) -> dict[str, int]:
    """Within the ranges of the symbols; a size is not scaled to 0, at which a program is another."""
    scaled = {}
    for name, size in sizes.items():
        least, most = facts.ranges[name]
        value = max(int(size * factor), least, min(size, 1))
        scaled[name] = value if most is None else min(value, most)
    return scaled


def _largest(planned: Sizes, facts: SizeFacts, names: Sequence[str], fits: Callable[[Sizes], bool]) -> dict[str, int]:
    """Sizes up to which all fit: the planned ones, or a multiple, and then each as much larger as it may be beside the
    others. Where the planned ones do not, by what libraries take in larger calls, from those of the traced call on."""
    start = planned if fits(planned) else facts.hints
    factor = _most(lambda factor: fits(_scaled(start, factor, facts)), _MOST_TIMES)
    sizes = _scaled(start, factor, facts)
    for name in names:
        sizes = _widened(sizes, name, facts, fits)
    return sizes


def _widened(sizes: Sizes, name: str, facts: SizeFacts, fits: Callable[[Sizes], bool]) -> dict[str, int]:
    def grown(factor: float) -> dict[str, int]:
        return {**sizes, name: _scaled(sizes, factor, facts)[name]}

    return grown(_most(lambda factor: fits(grown(factor)), 4.0))


def _most(fits: Callable[[float], bool], most: float) -> float:
    """A factor from 1, which is known to fit, to about `most` that fits where hardly a larger one does."""
    good, bad = 1.0, 2.0
    while bad < most and fits(bad):
        good, bad = bad, 2 * bad
    while bad / good > _CLOSE:
        middle = (good * bad) ** 0.5
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _grows(graph: fx.Graph, facts: SizeFacts) -> bool:
    """Whether all values are proven to be no smaller where a size is larger, so that a peak is not, either."""
    least = {name: least for name, (least, _) in facts.ranges.items()}
    return all(rises(num_bytes, least) for num_bytes in _storage_sizes(graph))


def _sized(graph: fx.Graph) -> list[str]:
    """The symbols that the bytes of some value follow from. Others, as a number of steps, bound no memory."""
    return sorted({name for size in _storage_sizes(graph) for name in size.names})


def _storage_sizes(graph: fx.Graph) -> set[SizeExpression]:
    """Of all values, in bytes, where these are symbolic."""
    sizes = {size_of(tensor.untyped_storage().nbytes()) for tensor in _dense(graph)}
    return {size for size in sizes if isinstance(size, SizeExpression)}


def _lengths(graph: fx.Graph) -> list[Any]:
    """The symbolic sizes of all values' dimensions, each once."""
    sizes: dict[str, Any] = {str(size): size for tensor in _dense(graph) for size in tensor.shape if is_symbolic(size)}
    return list(sizes.values())


def _dense(graph: fx.Graph) -> list[torch.Tensor]:
    leaves = [leaf for node in graph.nodes for leaf in tree_flatten(value_of(node))[0]]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def _text(sizes: Sizes, shown: Sequence[str]) -> str:
    return ", ".join(f"{name}={sizes[name]}" for name in shown)
