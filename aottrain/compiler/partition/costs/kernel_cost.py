"""What running an op of the forward again costs where the backward runs as generated kernels.

The rules of fusion decide. An op that shares a kernel with what reads it keeps its result in registers, and reads only
what that kernel does not read already. An op that feeds a matrix product writes its result, as it does op by op. Under
a budget no kernel reaches across a product, so neither does the price.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass

from torch import fx

from aottrain.compiler.graphs.repetition import Kinds
from aottrain.compiler.partition.costs.op_cost import vector_seconds
from aottrain.compiler.partition.costs.storages import StorageGraph
from aottrain.ir.graph import info, spec_of, storage_root, value_of
from aottrain.ir.ops import OpKind
from aottrain.ir.plan import PartitionPlan

# Whether two calls, of which the second reads the first's results, fit into one kernel.
Fits = Callable[[fx.Node, fx.Node], bool]


@dataclass(frozen=True)
class Way:
    """How collectives run beside the other calls of a plan's programs."""

    under_way: str
    """As of a PartitionPlan."""
    peak_bytes: Callable[[PartitionPlan], int]
    """As `FusionModel.peak_bytes`, with what is under way."""
    seconds: Callable[[PartitionPlan], float]
    """Of a step, with what it waits."""


@dataclass(frozen=True)
class FusionModel:
    """What planning asks of generated kernels, and of collectives."""

    fits: Fits | None
    """None: calls run one by one."""
    alone: Callable[[fx.Node], bool]
    """Whether a library does a call, or it reads a whole window for each result."""
    peak_bytes: Callable[[PartitionPlan], int]
    """At which a plan's programs peak as small kernels, where each collective is waited for as it starts."""
    least_bytes: Callable[[PartitionPlan], int] = lambda plan: 0
    """What that peak is at least, found without a schedule."""
    key: Callable[[], str] = lambda: ""
    """The same where those two are, for each plan; "" where that is not known."""
    is_quick: Callable[[Sequence[fx.Node], Set[fx.Node]], bool] = lambda nodes, forward: False
    """Whether a kernel runs these calls once more in the time in which it would read one of their results. The second
    argument has the values of the forward, whose reading them does not count."""
    moved_bytes: Callable[[PartitionPlan], int] = lambda plan: 0
    """What kernels and library calls of a plan's programs read and write, where nothing bounds their peak."""
    ways: tuple[Way, ...] = ()
    """Where processes talk to each other, those to be tried, first the one with most under way at once."""
    reference_bytes: Callable[[PartitionPlan], int] | None = None
    """There, the peak of a plan that runs op by op with all that is under way where nothing bounds it."""


def fused_prices(graph: StorageGraph, fits: Fits) -> list[float]:
    """Seconds of each op, run again; never above its cost."""
    rules = _Rules(graph, fits)
    prices = list(graph.costs)
    for i in graph.early:
        moved = _moved_bytes(graph, rules, i)
        if moved is not None:
            prices[i] = min(prices[i], vector_seconds(graph.ops[i].node, moved))
    return prices


def _moved_bytes(graph: StorageGraph, rules: _Rules, i: int) -> int | None:
    """What a kernel that does this op besides its own work reads and writes for it; None where there is no such kernel.

    It is made just before the first late op that needs it, or within what is made again for that one.
    """
    users = list(dict.fromkeys(user for storage in graph.writes[i] for user in rules.readers[storage]))
    late = [user for user in users if graph.ops[user].late]
    stretch = rules.stretches[late[0]] if late else None
    partners = rules.joined(i, late or users, stretch)
    moved = 0 if len(partners) == len(late or users) else graph.write_bytes[i]
    alone = not partners
    for storage in graph.reads[i]:
        producer = graph.producers[storage]
        if producer >= 0 and storage not in graph.demanded and rules.fits(producer, i):
            continue  # nothing but what is made again reads it: it is in a register
        if rules.joined(i, [user for user in rules.readers[storage] if graph.ops[user].late], stretch):
            alone = False
        else:
            moved += graph.sizes[storage]
    return None if alone else moved


class _Rules:
    """The rules of fusion, asked once for pairs of calls that are alike.

    readers: by storage; stretches: by op, how many products come before it in the backward.
    """

    def __init__(self, graph: StorageGraph, fits: Fits):
        self._graph, self._ask, self._kinds = graph, fits, Kinds()
        self._answers: dict[Hashable, bool] = {}
        self.readers: list[list[int]] = [[] for _ in graph.sizes]
        products = 0
        self.stretches = []
        for i, op in enumerate(graph.ops):
            for storage in op.reads:
                self.readers[storage].append(i)
            self.stretches.append(products)
            products += op.late and info(op.node).kind is OpKind.COMPUTE

    def joined(self, op: int, others: list[int], stretch: int | None) -> list[int]:
        """Those of the others, of one stretch (None: of any), that fit into the op's kernel."""
        return [other for other in others if stretch in (None, self.stretches[other]) and self.fits(op, other)]

    def fits(self, first: int, second: int) -> bool:
        one, other = self._graph.ops[first].node, self._graph.ops[second].node
        key = self._kinds.key(one), self._kinds.key(other)
        if None in key:
            return self._ask(one, other)
        whole = *key, _layouts([*one.all_input_nodes, one, *other.all_input_nodes])
        if whole not in self._answers:
            self._answers[whole] = self._ask(one, other)
        return self._answers[whole]


def _layouts(nodes: Iterable[fx.Node]) -> tuple[tuple[int, int], ...]:
    """Which of them lie in one storage, and where in it each starts."""
    numbers: dict[fx.Node, int] = {}
    layouts = []
    for node in nodes:
        start = 0 if spec_of(node) is None else int(value_of(node).storage_offset())
        layouts.append((numbers.setdefault(storage_root(node), len(numbers)), start))
    return tuple(layouts)
