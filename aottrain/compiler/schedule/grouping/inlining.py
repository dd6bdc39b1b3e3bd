"""inline: calls whose elements are computed where they are read, instead of being stored.

A concatenation, the gradient of a slice, padding and their like read their operands at other places than a loop nest
computes them, so these must be in memory before. Where such an operand is cheap pointwise work on values that are in
memory anyway, as the halves of a rotary embedding are, its elements are computed at the places where they are read.
Such calls may follow one another: the gradient of a slice reads that of a rotary embedding, which concatenates halves.
Numbers that are the same everywhere, as zeros, are constants of whatever reads them. And a kernel computes a value
where its loops are, instead of reading it, from what it reads anyway: the gradient of a relu after a batch norm reads
the relu's result to know where that is zero, and the norm's gradient reads what it is made from. Each rounds as the
call itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from torch import fx

from aottrain.compiler.graphs.rewriting import producer_of
from aottrain.compiler.lowering import Operand, Rule, rules_for
from aottrain.compiler.schedule.demand import needed, read_by
from aottrain.compiler.schedule.grouping.cheap import VIEWS, cheap_rule, is_gone_through, read_beside, shared_sources
from aottrain.compiler.schedule.grouping.computed import Made, Read, read_for, with_made
from aottrain.compiler.schedule.grouping.tiles import tiled
from aottrain.compiler.schedule.grouping.view_index import as_whole, places_of, view_of
from aottrain.compiler.schedule.layouts import layout_of
from aottrain.ir.graph import calls, info, readers_of, required_spec, results, storage_bytes, storage_root
from aottrain.ir.ops import OpKind
from aottrain.ir.sizes.polynomials import UndecidedError, likely

_MOST_STEPS = 48
# What is smaller is in a cache when it is read again.
_WORTH_COMPUTING = 1 << 16
# A value of so small a part of another's elements is as well stored for it.
_SMALL_PART = 4
# Bytes read instead, of those that the value has: it would be written and read.
_MOST_READ = 2.25


@dataclass(frozen=True)
class Inlining:
    """What is computed where it is read."""

    rules: Mapping[fx.Node, tuple[Rule, ...]] = field(default_factory=dict)
    """Of calls that compute an operand themselves."""
    needed: frozenset[fx.Node] = frozenset()
    """Calls that run; what nothing reads any more does not."""
    readers: Mapping[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    """Of values that are read otherwise than the graph says by what they are: calls, and the graph's output."""
    has_mixed: bool = False
    """Whether a concatenation computes some of its parts and reads others, which one loop nest could all write."""

    def rules_of(self, node: fx.Node) -> list[Rule]:
        """As `rules_for`."""
        return list(self.rules[node]) if node in self.rules else rules_for(node)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """What the call reads."""
        if node not in self.rules:
            return list(read_by(node))
        return list(dict.fromkeys(operand.node for operand in self.rules[node][0].operands))


def inline(
    graph: fx.Graph, again: Mapping[fx.Node, Mapping[fx.Node, Set[fx.Node]]] | None = None, mixed: bool = True
) -> Inlining:
    """What of a graph is better computed where it is read. Between both no matrix product or the like runs, so that
    what is read instead lives hardly longer. again: what calls compute besides, as `again.py` finds. mixed: whether
    concatenations may compute some of their parts and read others."""
    finder = _Finder(graph)
    rules: dict[fx.Node, tuple[Rule, ...]] = {}
    has_mixed = False
    for node in calls(graph):
        if info(node).kind in VIEWS:
            continue
        if tiles := tiled(node):
            rules[node] = tuple(tiles)
            continue
        given = rules_for(node)
        made = finder.made_by(node, given[0].operands) if given and not is_gone_through(given) else {}
        if made and len(made) < len({o.node for o in given[0].operands}) and any(rule.in_parts for rule in given):
            has_mixed, made = True, made if mixed else {}
        made |= finder.made_anew_by(node, given[0]) if len(given) == 1 else {}
        if again and node in again:
            made |= finder.made_again(given[0], again[node])
        if made and (len(made) < len({o.node for o in given[0].operands}) or read_for(made.values())):
            rules[node] = tuple(with_made(rule, made) for rule in given if _may_make(rule, made))
    return replace(_without_unread(graph, rules), has_mixed=has_mixed)


def _may_make(rule: Rule, made: Mapping[fx.Node, Made]) -> bool:
    """Whether a rule reads these operands as the one does for which they were found."""
    return not rule.in_parts and not any(operand.at_hand and operand.node in made for operand in rule.operands)


def _without_unread(graph: fx.Graph, rules: Mapping[fx.Node, tuple[Rule, ...]]) -> Inlining:
    """With what runs, and with the readers of values that others read than the graph says."""
    found = Inlining(rules)
    run = needed(graph, found.sources)
    outputs = {storage_root(node) for node in results(graph) if node is not None}
    readers: dict[fx.Node, set[fx.Node]] = {root: {graph.output_node()} for root in outputs}
    changed: set[fx.Node] = set()
    for node in calls(graph):
        if info(node).kind in VIEWS:
            continue
        before = set(map(storage_root, node.all_input_nodes))
        now = set(map(storage_root, found.sources(node))) if node in run else set()
        changed |= before ^ now
        for root in now:
            readers.setdefault(root, set()).add(node)
    kept = {node: made for node, made in rules.items() if node in run}
    return Inlining(kept, run, {root: frozenset(readers.get(root, ())) for root in changed})


class _Finder:
    """Finds what can be computed where it is read, with what is known of a graph."""

    def __init__(self, graph: fx.Graph):
        self.products: dict[fx.Node, int] = {}  # how many library calls come before each call
        self.settled = {storage_root(node) for node in results(graph) if node is not None}  # in memory anyway
        self.makers: dict[fx.Node, tuple[Rule, int] | None] = {}
        self.movers: dict[fx.Node, tuple[Rule, int] | None] = {}
        count = 0
        for node in graph.nodes:
            self.products[node] = count
            if node.op != "call_function" or info(node).kind in VIEWS:
                continue
            rules = rules_for(node)
            if not rules:
                items = [user for user in node.users if storage_root(user) is user and user.op == "call_function"]
                items = [user for user in items if info(user).kind is OpKind.STRUCTURE]
                self.settled.update((node, *items, *map(storage_root, node.all_input_nodes)))
                count += info(node).kind is OpKind.COMPUTE
            free = {storage_root(o.node): o for rule in rules[:1] for o in rule.operands if o.free}
            self.settled.update(root for root, o in free.items() if not o.moved or self._mover(root) is None)
        self.settled |= shared_sources(graph, self.settled)

    def made_by(self, reader: fx.Node, operands: Sequence[Operand]) -> dict[fx.Node, Made]:
        """Those of a call's operands that it better computes than reads: all that it can, or each that by itself moves
        less memory so."""
        try:
            made = {o.node: m for o in operands if (m := self._made(reader, o)) is not None}
        except UndecidedError:
            return {}
        kept = [operand for operand in operands if operand.free and operand.node not in made]
        beside = read_beside(reader) if made else set()
        if _reads_too_much(made, kept, beside):
            made = {node: one for node, one in made.items() if not _reads_too_much({node: one}, [], beside)}
        return made

    def _made(self, reader: fx.Node, operand: Operand) -> Made | None:
        """The operand as its reader can compute it; None where it cannot, or would read what need not be in memory."""
        root = storage_root(operand.node)
        known = self._mover(root)
        if known is None or root in self.settled:
            return None
        if self._maker(root) is not None and not known[0].operands:
            return Made(known[0], (), (), ()) if layout_of(operand.node) is not None else None
        if not operand.moved or self.products[root] != self.products[reader]:
            return None
        dims = tuple(range(len(operand.dims)))
        made, _ = self._expanded(operand, dims, required_spec(operand.node).numel, _MOST_STEPS)
        return made if isinstance(made, Made) else None

    def made_anew_by(self, reader: fx.Node, rule: Rule) -> dict[fx.Node, Made]:
        """Those of a call's operands that are in memory, and cheaper to compute from what its kernel reads anyway; or
        that need not be in memory if it computes them, from as many bytes more as they have."""
        found: dict[fx.Node, Made] = {}
        for operand in rule.operands:
            value = operand.node
            if operand.free or value.op != "call_function" or _is_small(value) or self._maker(value) is None:
                continue
            beside = {each for each in _read_in_place(rule) if each is not value}
            if value in self.settled:
                beside.update(*(_read_in_place(each) for user in readers_of(reader) for each in rules_for(user)[:1]))
            elif not _is_summed_before(value, reader):
                continue
            made = self._anew(operand, beside, _MOST_STEPS)
            large = {leaf.node for leaf in read_for([made]) if not _is_small(leaf.node)} if made else set()
            more = sum(likely(storage_bytes(leaf)) for leaf in large - beside)
            if made is not None and more <= (0 if value in self.settled else likely(storage_bytes(value))):
                found[value] = made
        return found

    def made_again(self, rule: Rule, values: Mapping[fx.Node, Set[fx.Node]]) -> dict[fx.Node, Made]:
        """These operands of a call, each from what is read for it."""
        operands = [(operand, as_whole(operand)) for operand in rule.operands if operand.node in values]
        made = {o.node: self._anew(value, values[o.node], _MOST_STEPS, True) for o, value in operands}
        return {node: one for node, one in made.items() if one is not None}

    def _anew(self, operand: Operand, beside: Set[fx.Node], steps: int, dear: bool = False) -> Made | None:
        """The operand computed where its reader's loops are, from what is read beside, or else is in memory. dear: as
        of `cheap_rule`."""
        known = cheap_rule(operand.node, True) if dear else self._maker(operand.node)
        if known is None or known[1] > steps or required_spec(operand.node).shape != known[0].shape:
            return None
        parts: list[Made | Read] = []
        for inner in known[0].operands:
            dims = tuple(None if d is None else operand.dims[d] for d in inner.dims)
            read = Operand(inner.node, dims)
            root = storage_root(inner.node)
            made = None if {inner.node, root} & beside else self._anew(as_whole(read), beside, steps - known[1], dear)
            is_there = inner.node.op != "call_function" or root in self.settled or root in beside
            if made is None and not is_there and inner.node not in beside and not _is_small(inner.node):
                return None
            parts.append(Read(read, ()) if made is None else made)
        return Made(known[0], (), (), tuple(parts))

    def _expanded(
        self, operand: Operand, dims: tuple[int | None, ...], size: int, steps: int
    ) -> tuple[Made | Read | None, int]:
        """The operand computed or, where that has no way, read; None where it would have to be stored for that. And
        how many of the steps are left. What is smaller than the whole, of that size, and read where the loops are, as
        a row's sum, is an operand like others."""
        root = storage_root(operand.node)
        read = Read(replace(operand, moved=False), dims)
        spec = required_spec(operand.node)
        in_place = not operand.moved and all(
            d is not None or size == 1 for d, size in zip(operand.dims, spec.shape, strict=True)
        )
        if in_place and 2 * spec.numel <= size:
            return replace(read, operand=replace(operand, free=False)), steps
        known, view = self._mover(root), view_of(root, operand.node, splits=True)
        if known is None or view is None or known[1] > steps or root in self.settled:
            is_there = (
                root in self.settled or root.op != "call_function" or _SMALL_PART * required_spec(root).numel <= size
            )
            return (read if is_there else None), steps
        rule, cost = known
        steps -= cost
        places = places_of(operand, view, required_spec(root).shape)
        parts: list[Made | Read] = []
        for inner in rule.operands:
            inner_dims = tuple(None if d is None else places[d] for d in inner.dims)
            if inner.free and not inner.moved:  # others read it so as well, or it is read often: it is in memory
                parts.append(Read(Operand(inner.node, free=True), ()))
                continue
            looked_up = Operand(inner.node, inner_dims, True, inner.moved)
            part, steps = self._expanded(looked_up, inner.dims, size, steps)
            if part is None:
                return None, steps
            parts.append(part)
        return Made(rule, dims, view, tuple(parts)), steps

    def _maker(self, root: fx.Node) -> tuple[Rule, int] | None:
        """The rule of a cheap pointwise call, and how many steps it takes."""
        if root not in self.makers:
            self.makers[root] = cheap_rule(root)
        return self.makers[root]

    def _mover(self, root: fx.Node) -> tuple[Rule, int] | None:
        """As `_maker`, also of a call that reads elsewhere than where it is, as a concatenation, for its only reader:
        of several each would read what it is made from."""
        if root not in self.movers:
            one = len(readers_of(root)) == 1
            self.movers[root] = self._maker(root) or (cheap_rule(root, moves=True) if one else None)
        return self.movers[root]


def _read_in_place(rule: Rule) -> list[fx.Node]:
    return [operand.node for operand in rule.operands if not operand.free]


def _is_small(value: fx.Node) -> bool:
    return likely(storage_bytes(value)) < _WORTH_COMPUTING


def _is_summed_before(value: fx.Node, reader: fx.Node) -> bool:
    """Whether only sums over all rows read a value, and calls that wait for these sums, of which the reader is one."""
    users = readers_of(value)
    sums = {user for user in users if any(rule.columns for rule in rules_for(user))}
    late = [user for user in users if user not in sums]
    return reader in late and all(sums.intersection(map(producer_of, user.all_input_nodes)) for user in late)


def _reads_too_much(made: Mapping[fx.Node, Made], kept: Sequence[Operand], beside: Set[fx.Node]) -> bool:
    """Whether a call moves more memory than if the values were stored. kept: what it reads in either case. beside: what
    its kernel reads."""
    leaves = [o for o in read_for(made.values()) if o.free and storage_root(o.node) not in beside]
    stored = sum(likely(required_spec(node).nbytes) for node, one in made.items() if one.parts)
    return _read_bytes([*leaves, *kept]) > _MOST_READ * stored + _read_bytes(kept)


def _read_bytes(operands: Iterable[Operand]) -> int:
    """Parts of one buffer count once."""
    read: dict[fx.Node, int] = {}
    for node in dict.fromkeys(operand.node for operand in operands):
        spec, source = required_spec(node), storage_root(node)
        sizes = [size for size, step in zip(spec.shape, spec.stride, strict=True) if step]
        read[source] = read.get(source, 0) + likely(math.prod(sizes)) * spec.dtype.itemsize
    return sum(min(size, storage_bytes(source)) for source, size in read.items())
