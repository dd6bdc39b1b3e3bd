"""Which calls of a program work in channels_last: the cheapest cut between those that do and those that do not.

Each convolution has a price in either layout; a call that takes any layout has none, and every other works on what
eager gives it. A value that is made in one layout and read in the other is copied once, however many read it
(Kolmogorov & Zabih, "What energy functions can be minimized via graph cuts?", 2004: two labels, no worse for agreeing).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from aottrain.compiler.graphs.algorithms.min_cut import min_edge_cut
from aottrain.compiler.passes.layouts.rewriting import (
    Rewriting,
    alike,
    channels_last,
    images_of,
    is_candidate,
    is_pointwise,
    same_strides,
    spread_number,
    takes_any_layout,
)
from aottrain.ir.graph import info, required_spec, results, spec_of, view_source
from aottrain.ir.ops import OpKind

# As eager has it, and in channels_last. None: there it does not work.
Prices = tuple[int | None, int | None]
# The two ends of a cut: what is as eager has it, and what is in channels_last.
_GIVEN, _LAID = 0, 1


def cheapest_regions(
    laid: Rewriting, prices: Mapping[fx.Node, Prices], copy_price: Callable[[fx.Node, bool], int]
) -> frozenset[fx.Node]:
    """The calls that work in channels_last.

    laid: the program with all calls in channels_last that can be. prices: of each convolution as eager has it and in
    channels_last. copy_price: of a value, into channels_last (True) or back.
    """
    # Of copies of one price that of the later value is taken: what is pointwise can write its result in the other
    # layout, while the second of two norms would read it in both.
    order = {node: i for i, node in enumerate(laid.source.nodes)}
    scale = len(order) + 1
    cut = _Cut(laid, lambda value, into: (copy_price(value, into) + 1) * scale - order[value] - 1)
    for node in laid.source.nodes:
        if node.op != "output" and not _is_part(node):
            cut.add_value_of(node)
    for node, pair in prices.items():
        given, in_channels_last = (price if price is None else price * scale for price in pair)
        cut.edges += [(cut.number(node), _LAID, given), (_GIVEN, cut.number(node), in_channels_last)]
    behind = min_edge_cut(cut.edges, _GIVEN, _LAID)[1]
    return frozenset(node for node in laid.source.nodes if cut.number(node) in behind)


@dataclass
class _Cut:
    """The network. A vertex behind the cut is in channels_last."""

    laid: Rewriting
    copy_price: Callable[[fx.Node, bool], int]
    edges: list[tuple[int, int, int | None]] = field(default_factory=list)
    _numbers: dict[fx.Node, int] = field(default_factory=dict)
    _next: int = _LAID + 1

    def number(self, node: fx.Node) -> int:
        """The vertex of a call: its own, that of the call whose item or view it is, or that of all that is as given."""
        if node not in self._numbers:
            self._numbers[node] = self._numbered(node)
        return self._numbers[node]

    def _numbered(self, node: fx.Node) -> int:
        if node.op != "call_function" or spread_number(node) is not None:
            return _GIVEN
        if _is_part(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return self.number(source)
        return self._vertex() if is_candidate(node) or takes_any_layout(node) else _GIVEN

    def _vertex(self) -> int:
        self._next += 1
        return self._next - 1

    def add_value_of(self, node: fx.Node) -> None:
        """What it costs that a value, or each item of it, is read in another layout than it is made in."""
        for value in _items(node):
            differs = not alike(self.laid.new[value], value)
            in_laid, in_given = set[int](), set[int]()
            for reader, wants_laid in self._readers(value):
                if differs or wants_laid:
                    in_laid.add(reader)
                if differs:
                    in_given.add(reader)
            home = self.number(value) if differs else _GIVEN
            self._add_copy(value, home, in_laid - {home}, in_given - {home})

    def _add_copy(self, value: fx.Node, home: int, in_laid: Collection[int], in_given: Collection[int]) -> None:
        """One copy for all readers in channels_last where the value is not, and one the other way."""
        if any(reader != _GIVEN for reader in in_laid):
            copied = self._vertex()
            self.edges.append((home, copied, self.copy_price(value, True)))
            self.edges += [(copied, reader, None) for reader in sorted(in_laid) if reader != _GIVEN]
        if in_given and home != _GIVEN:
            copied = self._vertex()
            self.edges.append((copied, home, self.copy_price(value, False)))
            self.edges += [(reader, copied, None) for reader in sorted(in_given)]

    def _readers(self, value: fx.Node) -> Iterator[tuple[int, bool]]:
        """The vertices of the calls that read the value or a view of it that any strides allow, and of each whether it
        wants in channels_last what is not so anyhow: a convolution, or what reads it element by element."""
        for user in value.users:
            if user.op == "output":
                inner = self.laid.inner
                if any(v is value and i not in inner for i, v in enumerate(results(self.laid.source))):
                    yield _GIVEN, False
            elif is_candidate(user):
                images = images_of(user)
                places = [i for i, arg in enumerate(user.args) if arg is value]
                if any(i in images for i in places):
                    spec = required_spec(self.laid.new[value])
                    yield self.number(user), not same_strides(spec, channels_last(spec.shape))
                if any(i not in images for i in places):
                    yield _GIVEN, False
            elif _is_part(user) and user.args[0] is value:
                yield from self._readers(user)
            else:
                yield self.number(user), _reads_across(self.laid, value, user)


def across_reads(laid: Rewriting, chosen: Collection[fx.Node] | None) -> list[fx.Node]:
    """Values that stay as eager has them and are read element by element beside images in channels_last, by calls that
    work so. chosen: those that do; None: all that can."""
    values = [value for node in laid.source.nodes if node.op != "output" for value in _items(node)]
    return [
        value
        for value in values
        if any(_reads_across(laid, value, user) and (chosen is None or user in chosen) for user in value.users)
    ]


def _reads_across(laid: Rewriting, value: fx.Node, user: fx.Node) -> bool:
    spec, result = spec_of(value), spec_of(user)
    if spec is None or result is None or spec.shape != result.shape or not is_pointwise(user):
        return False
    if len(spec.stride) < len(spec.shape) or any(s > 1 and not t for s, t in zip(spec.shape, spec.stride, strict=True)):
        return False  # sparse, or fewer elements than it shows
    changed = required_spec(laid.new[user])
    return alike(laid.new[value], value) and not alike(laid.new[user], user) and not same_strides(spec, changed.stride)


def _is_part(node: fx.Node) -> bool:
    """An item of a call's result, or a view of a value: in the layout of what it is a part of."""
    return node.op == "call_function" and (info(node).kind is OpKind.STRUCTURE or _is_view(node))


def _is_view(node: fx.Node) -> bool:
    """A view that any strides allow."""
    is_call = node.op == "call_function" and info(node).kind is not OpKind.STRUCTURE
    return is_call and takes_any_layout(node) and view_source(node) is not None and view_source(node) is node.args[0]


def _items(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call gives, as nodes."""
    if spec_of(node) is not None:
        return [node]
    return [user for user in node.users if user.op == "call_function" and info(user).kind is OpKind.STRUCTURE]
