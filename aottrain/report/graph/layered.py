"""A drawing of a directed graph in layers: ranks by the longest path, orders by barycentres, places by least squares.

After K. Sugiyama, S. Tagawa and M. Toda, "Methods for visual understanding of hierarchical system structures", IEEE
Transactions on Systems, Man, and Cybernetics 11 (1981); places within a layer by the pool-adjacent-violators algorithm.
Where Graphviz is installed, its orders and places are taken if fewer lines cross by them, without detours.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from aottrain.report.graph import graphviz

GAP_X, GAP_Y = 18.0, 30.0
_SWEEPS, _PLACINGS = 8, 40
_CROSSING = 100.0  # of two lines, as much as this way aside
_STRAIGHT = 6.0  # how much more a bend in a long line weighs than a step aside of a box


@dataclass(eq=False)
class Item:
    """A box, an end of a line at the border of the drawing, or a place that a line passes on its way."""

    width: float
    height: float
    offsets: dict[Hashable, float] = field(default_factory=dict)
    """Where a line of that key meets the box, from its left; the middle where it is not named."""
    rank: int = 0
    x: float = 0.0
    y: float = 0.0
    """Of the top left corner, in the end."""
    weight: float = 1.0

    def at(self, key: Hashable) -> float:
        return self.x + self.offsets.get(key, self.width / 2)


Edge = tuple[Item, Hashable, Item, Hashable]
"""From the lower border of the first to the upper one of the second, and where each is met."""
Points = list[tuple[float, float]]


def lay_out(
    items: Sequence[Item], edges: Sequence[Edge], top: Sequence[Item] = (), bottom: Sequence[Item] = ()
) -> tuple[dict[int, list[Points]], float, float]:
    """Place the items, which stand in an order that no edge goes against; `top` and `bottom` lie at the borders.

    Gives for each edge, by its number, the pieces of its line (a piece that several share is with the first), the
    width and the height.
    """
    layers = _ranked(items, edges, top, bottom)
    pieces: dict[int, list[tuple[Item, Hashable, Item, Hashable]]] = {}
    chains: dict[tuple[int, Hashable], list[Item]] = {}
    for number, (upper, key, lower, other) in enumerate(edges):
        chain = chains.setdefault((id(upper), key), [])
        last, last_key, begun = upper, key, upper.rank + len(chain)
        drawn = pieces.setdefault(number, [])
        for rank in range(upper.rank + 1, lower.rank):
            if rank > begun:
                passed = Item(2.0, 0.0, rank=rank, weight=_STRAIGHT)
                chain.append(passed)
                layers[rank].append(passed)
                drawn.append((last, last_key, passed, None))
            last, last_key = chain[rank - upper.rank - 1], None
        drawn.append((last, last_key, lower, other))
    joints = [piece for drawn in pieces.values() for piece in drawn]
    _order(layers, joints)
    width = _place(layers, joints)
    few = sum(map(len, layers)) <= graphviz.MOST_ITEMS
    if few and graphviz.is_there() and _crossings(joints):
        width = _placed_better(layers, joints, width)
    height = _stack(layers)
    heights = {id(item): max(i.height for i in layer) for layer in layers for item in layer}
    lines = {number: [_points(piece, heights) for piece in drawn] for number, drawn in pieces.items()}
    return lines, width, height


def _ranked(
    items: Sequence[Item], edges: Sequence[Edge], top: Sequence[Item], bottom: Sequence[Item]
) -> list[list[Item]]:
    """The layers; a box that nothing leads to stands just above the first that it leads to."""
    first, tops, bottoms = int(bool(top)), set(map(id, top)), set(map(id, bottom))
    above: dict[int, list[Item]] = {id(item): [] for item in (*items, *top, *bottom)}
    below: dict[int, list[Item]] = {id(item): [] for item in (*items, *top, *bottom)}
    for upper, _, lower, _ in edges:
        above[id(lower)].append(upper)
        below[id(upper)].append(lower)
    for item in top:
        item.rank = 0
    for item in items:
        item.rank = max((upper.rank + 1 for upper in above[id(item)]), default=first)
    last = max((item.rank for item in items), default=first)
    for item in reversed(items):
        lower = [each.rank for each in below[id(item)] if id(each) not in bottoms]
        if lower and not [each for each in above[id(item)] if id(each) not in tops]:
            item.rank = max(min(lower) - 1, first)
    for item in bottom:
        item.rank = last + 1
    layers: list[list[Item]] = [[] for _ in range(last + 1 + bool(bottom))]
    for item in (*top, *items, *bottom):
        layers[item.rank].append(item)
    return layers


def _order(layers: list[list[Item]], joints: Sequence[Edge]) -> None:
    """Each layer by the barycentres of the neighbours in the layer before, down and up in turns."""
    above: dict[int, list[tuple[Item, Hashable]]] = {}
    below: dict[int, list[tuple[Item, Hashable]]] = {}
    for upper, key, lower, other in joints:
        above.setdefault(id(lower), []).append((upper, key))
        below.setdefault(id(upper), []).append((lower, other))
    for layer in layers:
        _spread(layer)
    for sweep in range(_SWEEPS):
        neighbours, order = (above, layers) if sweep % 2 == 0 else (below, layers[::-1])
        for layer in order:
            wanted = {}
            for item in layer:
                found = [near.at(key) for near, key in neighbours.get(id(item), ())]
                wanted[id(item)] = sum(found) / len(found) if found else item.x + item.width / 2
            layer.sort(key=lambda item: wanted[id(item)])
            _spread(layer)


def _placed_better(layers: list[list[Item]], joints: Sequence[Edge], width: float) -> float:
    """As Graphviz places the items, where lines cross less often by it and do not lead much farther aside. Gives the
    width."""
    items = list(itertools.chain(*layers))
    numbers = {id(item): number for number, item in enumerate(items)}
    ends = [((numbers[id(upper)], numbers[id(lower)]), upper.weight * lower.weight) for upper, _, lower, _ in joints]
    found = graphviz.places([[(item.width, item.height) for item in layer] for layer in layers], ends, GAP_X)
    if found is None:
        return width
    before, cost = [item.x for item in items], (_disorder(joints), width)
    for item, x in zip(items, found, strict=True):
        item.x = x - min(found)
    for layer in layers:
        layer.sort(key=lambda item: item.x)
        _isotonic(layer, [item.x for item in layer])  # nothing overlaps, whatever was answered
    left = min(item.x for item in items)
    for item in items:
        item.x -= left
    wide = max(item.x + item.width for item in items)
    if (_disorder(joints), wide) < cost:
        return wide
    for item, x in zip(items, before, strict=True):
        item.x = x
    for layer in layers:
        layer.sort(key=lambda item: item.x)
    return width


def _crossings(joints: Sequence[Edge]) -> int:
    """How many pairs of lines between the same two layers cross."""
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for upper, key, lower, other in joints:
        by_rank.setdefault(upper.rank, []).append((upper.at(key), lower.at(other)))
    pairs = itertools.chain.from_iterable(itertools.combinations(lines, 2) for lines in by_rank.values())
    return sum((a - c) * (b - d) < 0 for (a, b), (c, d) in pairs)


def _disorder(joints: Sequence[Edge]) -> int:
    """How far lines lead aside, and what crossings weigh."""
    aside = sum(abs(upper.at(key) - lower.at(other)) for upper, key, lower, other in joints)
    return round(aside + _CROSSING * _crossings(joints))


def _spread(layer: Sequence[Item]) -> None:
    """One beside the other around 0."""
    x = -sum(item.width + GAP_X for item in layer) / 2
    for item in layer:
        item.x = x
        x += item.width + GAP_X


def _place(layers: list[list[Item]], joints: Sequence[Edge]) -> float:
    """Move each item to where its lines are straight, as far as its neighbours let it. Gives the width."""
    ends: dict[int, list[tuple[Item, Hashable, Hashable]]] = {}
    for upper, key, lower, other in joints:
        ends.setdefault(id(lower), []).append((upper, key, other))
        ends.setdefault(id(upper), []).append((lower, other, key))
    for sweep in range(_PLACINGS):
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            wanted = []
            for item in layer:
                aims = [
                    (near.at(key) - (item.at(own) - item.x), near.weight) for near, key, own in ends.get(id(item), ())
                ]
                total = sum(weight for _, weight in aims)
                wanted.append(sum(aim * weight for aim, weight in aims) / total if aims else item.x)
            _isotonic(layer, wanted)
    left = min((item.x for layer in layers for item in layer), default=0.0)
    right = max((item.x + item.width for layer in layers for item in layer), default=0.0)
    for item in itertools.chain(*layers):
        item.x -= left
    return right - left


def _isotonic(layer: Sequence[Item], wanted: Sequence[float]) -> None:
    """The places in order, `GAP_X` apart, of which the squared distances to the wanted ones are least."""
    shift, blocks = 0.0, list[list[float]]()  # of each block: the sum of weighted places, the weight, how many
    shifts = []
    for item, place in zip(layer, wanted, strict=True):
        shifts.append(shift)
        blocks.append([item.weight * (place - shift), item.weight, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, weight, count = blocks.pop()
            blocks[-1] = [blocks[-1][0] + total, blocks[-1][1] + weight, blocks[-1][2] + count]
        shift += item.width + GAP_X
    places = [total / weight for total, weight, count in blocks for _ in range(int(count))]
    for item, place, by in zip(layer, places, shifts, strict=True):
        item.x = place + by


def _stack(layers: Sequence[Sequence[Item]]) -> float:
    """One layer below the other; gives the height."""
    y = 0.0
    for layer in layers:
        height = max((item.height for item in layer), default=0.0)
        for item in layer:
            item.y = y + (height - item.height) / 2
        y += height + GAP_Y
    return y - GAP_Y


def _points(piece: Edge, heights: dict[int, float]) -> Points:
    """From the lower border of one to the upper one of the other; where a line passes a layer, to that layer's end."""
    upper, key, lower, other = piece
    points = [(upper.at(key), upper.y + upper.height), (lower.at(other), lower.y)]
    if not upper.height and upper.weight == _STRAIGHT:
        points[0] = (upper.at(key), upper.y + heights[id(upper)] / 2)
    if not lower.height and lower.weight == _STRAIGHT:
        half = heights[id(lower)] / 2
        points = [points[0], (lower.at(other), lower.y - half), (lower.at(other), lower.y + half)]
    return points
