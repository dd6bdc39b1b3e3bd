"""Which forward values the backward gets to read, and why: each strategy is a function Demand -> PartitionPlan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from aottrain.compiler.graphs.algorithms.min_cut import min_vertex_cut
from aottrain.compiler.graphs.rewriting import producer_of
from aottrain.compiler.partition.again.chains import condenses, ends_chain, ends_of_chains
from aottrain.compiler.partition.again.outputs import reading_least
from aottrain.compiler.partition.again.reach import far_reaching
from aottrain.compiler.partition.blocks import Block, find_blocks, repeated_blocks
from aottrain.compiler.partition.budget.strategy import WRITTEN_INPUT, Family, find_family, plan_of
from aottrain.compiler.partition.checkpoint_marks import edges_of_regions, effective_marks
from aottrain.compiler.partition.comparisons import decided_once
from aottrain.compiler.partition.costs.kernel_cost import FusionModel
from aottrain.compiler.partition.policy import Policy, ask, policy_name
from aottrain.compiler.partition.stored import fitted
from aottrain.ir.analysis.reach import ancestors, descendants
from aottrain.ir.graph import (
    PRIMALS,
    InputKind,
    JointGraph,
    Mark,
    Marks,
    OutputKind,
    calls,
    info,
    is_size,
    is_tuple,
    marks_of,
    spec_of,
    storage_bytes,
    storage_root,
    view_source,
)
from aottrain.ir.ops import ZEROS, OpKind, is_pure, packet_name
from aottrain.ir.plan import PartitionPlan, StoredPlan
from aottrain.ir.settings.budget import Budget


@dataclass(frozen=True)
class Demand:
    """What a partition has to decide: the forward values that the backward could need."""

    order: dict[fx.Node, int]
    """The position of each node in the joint graph."""
    demanded: tuple[fx.Node, ...]
    """Values that the backward's own nodes read."""
    region: frozenset[fx.Node]
    """Those and all that they are made from, inputs too."""
    copied: frozenset[fx.Node]
    """Inputs whose storage the step updates, or that the caller may: they may only be read through a saved copy."""
    outputs: frozenset[fx.Node]
    """Values that the caller gets. They are alive anyway, and where eager would save one, a later write to it has to
    raise as in eager."""
    marks: Mapping[fx.Node, Mark]
    """What the user's checkpoints, or what a strategy puts in their place, say of values."""
    edges: frozenset[fx.Node]
    """Values that enter or leave a checkpointed region."""
    notes: Mapping[fx.Node, str]
    """For marked values and edges, who says so."""
    forward: frozenset[fx.Node]
    """Values from which the forward's results follow, whether the backward needs them or not."""
    once: frozenset[fx.Node] = frozenset()
    """Values that may not be computed a second time, though their ops are pure."""

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)


def find_demand(joint: JointGraph, blocks: Mapping[fx.Node, Block] | None = None) -> Demand:
    """Law 1, structurally: the backward is what depends on tangents; all else may be saved or computed again.

    blocks: treated as if each ran under torch.utils.checkpoint.
    """
    late = descendants(joint.inputs_of(InputKind.TANGENT))
    gradients = joint.outputs_of(OutputKind.GRADIENT)
    effects, late_effects = joint.effects()
    demanded = {node for node in gradients if node not in late}
    for node in ancestors([*gradients, *late_effects]) & late:
        demanded.update(source for source in node.all_input_nodes if source not in late and not is_size(source))
    order = {node: i for i, node in enumerate(joint.graph.nodes)}
    primals = joint.inputs_of(*PRIMALS)
    copied = {node for node, spec in zip(primals, joint.signature.inputs, strict=False) if spec.copied}
    demanded_nodes = tuple(sorted(demanded, key=order.__getitem__))
    given = joint.outputs_of(OutputKind.OUTPUT, OutputKind.REPLACEMENT)
    returned = frozenset(node for node in given if node in demanded and _may_save(node))
    region = frozenset(node for node in ancestors(demanded) if not is_size(node))
    results = joint.outputs_of(OutputKind.OUTPUT, OutputKind.REPLACEMENT, OutputKind.UPDATE)
    forward = frozenset(ancestors([*results, *effects]))
    once = decided_once(joint)
    demand = Demand(order, demanded_nodes, region, frozenset(copied), returned, {}, frozenset(), {}, forward, once)
    return _with_regions(demand, joint.graph, late, blocks or {})


def _with_regions(demand: Demand, graph: fx.Graph, late: set[fx.Node], blocks: Mapping[fx.Node, Block]) -> Demand:
    numbers = {block: -1 - i for i, block in enumerate(sorted(set(blocks.values())))}

    def marked(node: fx.Node) -> Marks:
        block = blocks.get(node)
        return marks_of(node) if block is None else ((numbers[block], Mark.MUST_RECOMPUTE), *marks_of(node))

    marks = effective_marks(graph, late, marked)
    edges = edges_of_regions(demand.in_order(demand.region), marks, late, marked)
    notes = {node: _MARKED if marks_of(node) else f"within {blocks[node]}" for node in marks}
    for node, inside in edges.items():
        if inside is not None and inside in blocks:
            notes[node] = f"enters {blocks[inside]}"
        else:
            notes[node] = f"leaves {blocks[node]}" if inside is None and node in blocks else _EDGE
    return replace(demand, marks=marks, edges=frozenset(edges), notes=notes)


def plan_partition(
    joint: JointGraph,
    strategy: str | Policy | StoredPlan = "min_cut",
    budget: Budget | None = None,
    reserved_bytes: int = 0,
    cost: str = "roofline",
    modules: Sequence[str] = (),
    fusion: FusionModel | None = None,
) -> PartitionPlan:
    """The plan of one strategy, which is a name or a function ForwardValue -> "save" | "recompute" | "free".

    budget: of the strategy "budget": a fraction (float) between the lowest peak of any plan and that of min_cut, the
    bytes (int) that the peak may have, or "auto". reserved_bytes: those of the peak that others take.
    cost: what recompute is priced by: "roofline", or "measured" times. modules: paths of the blocks of "checkpoint".
    fusion: given where the plan will run as generated kernels: a budget's recompute is priced as fused, the plan is one
    whose kernels peak within the budget, where there is one, and min_cut runs no library call twice. And where it talks
    to other processes: a budget's plan leaves room for what is under way, where the step is faster so.

    Raises BudgetError where no plan's peak is that low, ConfigError where the program has no such blocks or the
    function answers something else.
    """
    if isinstance(strategy, StoredPlan):
        return fitted(strategy, joint)
    if strategy == "budget":
        assert budget is not None
        return plan_of(plan_family(joint, reserved_bytes, cost, fusion), budget, fusion)
    if strategy == "checkpoint":
        return checkpoint(joint, modules)
    demand = find_demand(joint)
    if strategy == "min_cut" and (plan := _of_kernels(demand, fusion)) is not None:
        return plan
    return by_policy(demand, strategy) if callable(strategy) else _STRATEGIES[strategy](demand)


def plan_family(
    joint: JointGraph, reserved_bytes: int = 0, cost: str = "roofline", fusion: FusionModel | None = None
) -> Family:
    """Every plan that a budget may choose from; cost, fusion: how recompute is priced, as in `plan_partition`."""
    demand = find_demand(joint)
    others = [strategy(demand) for strategy in (min_cut, save_all, recompute_all)]
    blocks = repeated_blocks(_early(joint))
    others += [min_cut(find_demand(joint, blocks), "checkpoint")] if blocks else []
    return find_family(joint, others, dict(demand.marks), reserved_bytes, cost, fusion, _of_kernels(demand, fusion))


def save_all(demand: Demand) -> PartitionPlan:
    """Every value that the backward reads is saved, through the storage that it lives in. Zeros made of nothing are
    made again: what is saved tells `undefined.py` not that it is zeros."""
    saved: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [*demand.demanded, *demand.outputs]
    while stack:
        node = storage_root(stack.pop())
        if node in seen:
            continue
        seen.add(node)
        if _are_zeros(node):
            continue
        if _may_save(node) and not (_is_dropped(node, demand) and not _must_save(node, demand)):
            saved.add(node)
        else:  # an item of a tuple, or marked: it follows from what it is made of
            stack.extend(node.all_input_nodes)
    return _plan("save_all", demand, saved, lambda node: "read by the backward")


def recompute_all(demand: Demand) -> PartitionPlan:
    """Nothing is saved but what may not be computed again: everything follows from the inputs and the seed."""
    must = {node for node in demand.region if _must_save(node, demand)}
    must |= {node for node in demand.region if demand.marks.get(node) is Mark.PREFER_SAVE and _may_save(node)}
    return _plan("recompute_all", demand, must, lambda node: _must_reason(node, demand))


def min_cut(demand: Demand, strategy: str = "min_cut", alone: Callable[[fx.Node], bool] | None = None) -> PartitionPlan:
    """The fewest bytes such that no matrix product, convolution or attention is computed twice, nor a long chain of
    reductions, and nothing is from many saved values. alone: where all else runs as kernels, what does not, and is as
    little computed twice; nor are a group or batch norm's statistics, two more passes over its rows."""
    once = {node for node in demand.region if _runs_once(node, demand)}
    work = {node for node in demand.region - once if alone is not None and _is_work(node, demand)}
    few = {node for node in work if condenses(node)}
    again = {node for node in work if alone is not None and alone(node)} | few
    ended = once | set(filter(ends_chain, again))
    ends = {node for node in _chain_ends(demand, ended) if node not in demand.marks}
    saved, wide = _cut(demand, once | again | ends), set[fx.Node]()
    while more := _far_reaching(demand, saved) - once - again - ends - wide:
        wide |= more
        saved = _cut(demand, once | again | ends | wide)

    def reason(node: fx.Node) -> str:
        producer = producer_of(node)
        if producer in again and not _must_save(node, demand):
            few_bytes = "few bytes, for which all that it reads would be gone through again"
            return f"{info(producer).label}: {few_bytes if producer in few else 'no cheap part of a kernel'}"
        if node in wide and not _must_save(node, demand):
            return "bounds recompute: it would be made again from many values, which are read for it"
        return _cut_reason(node, demand, once | ends)

    return _plan(strategy, demand, saved, reason)


def _of_kernels(demand: Demand, fusion: FusionModel | None) -> PartitionPlan | None:
    """min_cut where plans run as generated kernels; None elsewhere."""
    if fusion is None or fusion.fits is None:
        return None

    def is_quick(nodes: Sequence[fx.Node]) -> bool:
        again = all(_is_work(node, demand) and _is_repeatable(node, demand) for node in nodes)
        return again and fusion.is_quick(nodes, demand.forward)

    plan, region, demanded = min_cut(demand, alone=fusion.alone), demand.in_order(demand.region), set(demand.demanded)
    return reading_least(plan, region, demand.outputs, demanded, demand.copied, is_quick, fusion.moved_bytes)


def _is_work(node: fx.Node, demand: Demand) -> bool:
    """Neither a view nor what follows from no value at all, and nothing that a checkpoint has marked."""
    if node.op != "call_function" or info(node).kind is not OpKind.CHEAP or not node.all_input_nodes:
        return False
    return not any(result in demand.marks for result in (node, *(node.users if is_tuple(node) else ())))


def _chain_ends(demand: Demand, banned: set[fx.Node]) -> set[fx.Node]:
    nodes = demand.in_order(demand.forward)
    once = {node for node in nodes if node in banned or producer_of(node) in banned or _must_save(node, demand)}
    return {node for node in ends_of_chains(nodes, demand.region, once) if _may_save(node)}


def _far_reaching(demand: Demand, saved: set[fx.Node]) -> set[fx.Node]:
    nodes = demand.in_order(ancestors(demand.demanded, stop=saved) & demand.region)

    def may_save(node: fx.Node) -> bool:
        return _may_save(node) and node not in demand.marks and info(node).kind is not OpKind.RANDOM

    return far_reaching(nodes, saved, set(demand.demanded), may_save)


def checkpoint(joint: JointGraph, modules: Sequence[str] = ()) -> PartitionPlan:
    """What enters a block of the model is saved, what is computed within one is computed again; outside as min_cut.

    modules: paths of the blocks, as patterns; () finds them. Raises ConfigError where there are none.
    """
    trains = bool(joint.inputs_of(InputKind.TANGENT))
    return min_cut(find_demand(joint, find_blocks(_early(joint), modules) if trains else None), "checkpoint")


def _early(joint: JointGraph) -> list[fx.Node]:
    late = descendants(joint.inputs_of(InputKind.TANGENT))
    return [node for node in calls(joint.graph) if node not in late and not is_size(node)]


def by_policy(demand: Demand, policy: Policy) -> PartitionPlan:
    """The fewest bytes that follow a user's policy. What may not be computed a second time is saved against it."""
    nodes = [node for node in demand.in_order(demand.region) if _is_asked(node)]
    marks = ask(policy, nodes)
    notes = {node: f"{_ANSWERED[mark]} by {policy_name(policy)}" for node, mark in marks.items()}
    marked = replace(demand, marks={**demand.marks, **marks}, notes={**demand.notes, **notes})
    return min_cut(marked, "policy")


def _is_asked(node: fx.Node) -> bool:
    return node.op == "call_function" and spec_of(node) is not None and _may_save(node)


def _cut(demand: Demand, banned: set[fx.Node]) -> set[fx.Node]:
    """Minimum-byte set of values from which all demanded values follow without running a banned node again."""
    nodes = demand.in_order(demand.region)
    index = {node: i for i, node in enumerate(nodes)}
    must = {node for node in nodes if _must_save(node, demand)}
    # Among cuts of equal bytes take the one nearest to the backward: it recomputes least.
    scale = (len(nodes) + 1) ** 2
    weights: dict[int, int | None] = {}
    for node, i in index.items():
        savable = _may_save(node) and (demand.marks.get(node) is not Mark.MUST_RECOMPUTE or node in must)
        weights[i] = None if not savable else _weight(node, demand) * scale + len(nodes) - i
    edges = [(index[source], i) for node, i in index.items() for source in node.all_input_nodes if source in index]
    sources = [i for node, i in index.items() if node.op == "placeholder" or node in banned or node in must]
    sources += [i for node, i in index.items() if node.op == "call_function" and not is_pure(node.target)]
    _, cut = min_vertex_cut(weights, edges, sources, [index[node] for node in demand.demanded])
    return {nodes[i] for i in cut}


def _runs_once(node: fx.Node, demand: Demand) -> bool:
    """Whether min_cut never runs the op a second time: for its cost, or for what the user's checkpoints ask for."""
    if node.op != "call_function":
        return False
    mark = demand.marks.get(node)
    if mark is not None:
        return mark is Mark.PREFER_SAVE and view_source(node) is None
    again = is_tuple(node) and any(demand.marks.get(user) is Mark.MUST_RECOMPUTE for user in node.users)
    return not again and (info(node).kind is OpKind.COMPUTE or node in demand.edges)


def _is_dropped(node: fx.Node, demand: Demand) -> bool:
    return demand.marks.get(node) in (Mark.MUST_RECOMPUTE, Mark.PREFER_RECOMPUTE)


def _are_zeros(node: fx.Node) -> bool:
    return not node.all_input_nodes and packet_name(node.target) in ZEROS


def _may_save(node: fx.Node) -> bool:
    """Views are saved through their base; tuples through their items."""
    return view_source(node) is None and not is_tuple(node)


def _weight(node: fx.Node, demand: Demand) -> int:
    """Bytes that saving this value adds; outputs, and inputs that nothing writes to, are alive anyway."""
    if node in demand.outputs or (node.op == "placeholder" and node not in demand.copied):
        return 0
    if demand.marks.get(node) is Mark.MUST_SAVE:
        return 0  # it is saved in any case
    return storage_bytes(node)


def _must_save(node: fx.Node, demand: Demand) -> bool:
    """A second reading of what is written in between, or a second run of an impure op, would give another value."""
    if node in demand.outputs or (demand.marks.get(node) is Mark.MUST_SAVE and _may_save(node)):
        return True
    if node.op == "placeholder":
        return node in demand.copied
    return node.op == "call_function" and not _is_repeatable(node, demand) and not is_tuple(node)


def _is_repeatable(node: fx.Node, demand: Demand) -> bool:
    return is_pure(producer_of(node).target) and node not in demand.once


def _must_reason(node: fx.Node, demand: Demand) -> str:
    if node.op == "placeholder":
        return WRITTEN_INPUT
    if node in demand.once:
        return "must: compared with what was selected from it, which rounding could decide otherwise a second time"
    if not is_pure(producer_of(node).target):
        return "must: not repeatable" + (f", though {demand.notes[node]}" if _is_dropped(node, demand) else "")
    if node in demand.outputs:
        return "output: alive anyway" + (f", though {demand.notes[node]}" if _is_dropped(node, demand) else "")
    return demand.notes.get(node, _MARKED)


def _cut_reason(node: fx.Node, demand: Demand, banned: set[fx.Node]) -> str:
    if _must_save(node, demand):
        return _must_reason(node, demand)
    producer = producer_of(node)
    if demand.marks.get(node) is Mark.PREFER_SAVE or node in demand.edges:
        return demand.notes[node]
    if producer in banned and info(producer).kind is OpKind.COMPUTE:
        return info(producer).label
    if producer in banned:
        return "ends a chain of reductions, which would be computed again at once and held"
    return "cut edge: fewest bytes between what may not run twice and the backward"


_MARKED = "marked by torch.utils.checkpoint"
_EDGE = "enters or leaves a region of torch.utils.checkpoint"
_ANSWERED = {Mark.MUST_SAVE: "saved", Mark.MUST_RECOMPUTE: "recomputed"}
_RECOMPUTE = "cheaper to compute again than to keep"


def _plan(strategy: str, demand: Demand, saved: set[fx.Node], reason: Callable[[fx.Node], str]) -> PartitionPlan:
    kept = demand.in_order(node for node in saved if node.op != "placeholder" or node in demand.copied)
    reached = ancestors(demand.demanded, stop=saved)
    kept = [node for node in kept if node in reached]
    needed = reached - saved
    again = demand.in_order(node for node in needed if node.op == "call_function" and not is_size(node))
    reasons = {node.name: reason(node) for node in kept}
    for node in again:
        if info(node).kind is OpKind.VIEW or info(node).kind is OpKind.STRUCTURE:
            reasons[node.name] = "view of what is at hand" if view_source(node) is not None else "item of a tuple"
        elif info(node).kind is OpKind.RANDOM:
            reasons[node.name] = "drawn again from the saved seed"
        elif _is_dropped(node, demand):
            reasons[node.name] = demand.notes[node]
        else:
            reasons[node.name] = _RECOMPUTE
    total = sum({storage_root(node): storage_bytes(node) for node in kept}.values())
    return PartitionPlan(strategy, tuple(n.name for n in kept), tuple(n.name for n in again), reasons, total)


_STRATEGIES: dict[str, Callable[[Demand], PartitionPlan]] = {
    "save_all": save_all,
    "min_cut": min_cut,
    "recompute_all": recompute_all,
}
