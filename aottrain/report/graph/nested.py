"""Where everything of a folded program lies: modules within modules, each laid out in layers by itself."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx

from aottrain.explain.records import IS_SAVED
from aottrain.ir.units import format_bytes
from aottrain.report.graph.folding import Folded, Group, Leaf, Line
from aottrain.report.graph.layered import Edge, Item, Points, lay_out

_CHARACTER, _SMALL = 6.7, 5.9  # width of one, in the two sizes of text
_HEIGHT, _PADDING, _HEADER = 36.0, 14.0, 22.0
LONGEST = 34  # characters of a label
TO_NEXT, FROM_PREVIOUS = "to the next one", "from the one before"


@dataclass(frozen=True)
class Box:
    """A step, or the frame of a module."""

    x: float
    y: float
    width: float
    height: float
    leaf: Leaf | None = None
    group: Group | None = None
    note: str = ""
    """Of a stub, at which lines between folded blocks end: what stands there."""
    is_turned: bool = False
    """Upside down: a frame's label stands at its lower border."""


@dataclass(frozen=True)
class Stroke:
    """A piece of one or more lines, which come from the same leaf."""

    points: Points
    start: Leaf
    fate: str
    num_bytes: int
    ends: Leaf | None
    """The leaf that it leads to; None where it goes on."""


@dataclass
class Placed:
    """A picture's parts."""

    width: float = 0.0
    height: float = 0.0
    boxes: list[Box] = field(default_factory=list)
    strokes: list[Stroke] = field(default_factory=list)


Child = Leaf | Group | str
Key = tuple[str, int]
"""("out" or "in", the id of the leaf that a line comes from)."""


@dataclass
class _Frame:
    """What is known of one group while it is laid out."""

    edges: dict[tuple[int, Hashable, int, Hashable], tuple[Leaf, str, int, Leaf | None, bool]] = field(
        default_factory=dict
    )
    """From a child or a border to another, with what is drawn: source, fate, bytes, the leaf reached, and whether the
    line goes upwards."""
    top: dict[Key, Item] = field(default_factory=dict)
    bottom: dict[Key, Item] = field(default_factory=dict)
    stubs: dict[tuple[int, str], Item] = field(default_factory=dict)


def place(folded: Folded) -> Placed:
    """Boxes and lines with their coordinates; the origin is the upper left corner."""
    return _Nested(folded).placed()


def size_of(leaf: Leaf) -> tuple[float, float]:
    """Width and height of its box."""
    first, second = texts_of(leaf)
    width = max(_CHARACTER * len(first), _SMALL * len(second)) + 26
    return max(width, 70.0), _HEIGHT


def texts_of(leaf: Leaf) -> tuple[str, str]:
    """The two lines in a box."""
    step = leaf.step
    size = f"{format_bytes(step.num_bytes)}" if step.kind == "saved" and step.num_bytes else ""
    second = ", ".join(filter(None, [size, step.type]))
    return _cut(f"{leaf.within}: {step.label}" if leaf.within else step.label), _cut(second)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}\u2026"


class _Nested:
    def __init__(self, folded: Folded):
        self.root = folded.root
        self.chains: dict[int, list[Group]] = {}
        self.items: dict[int, Item] = {}
        self.frames: dict[int, _Frame] = {}
        self.lines: dict[int, dict[int, list[Points]]] = {}
        self._enter(folded.root, [])
        inner = [line for line in folded.lines if not line.to_next]
        self._arrange(inner)
        for line in inner:
            self._route(line)
        for line in folded.lines:
            if line.to_next:
                self._stub(line)

    def _enter(self, group: Group, chain: list[Group]) -> None:
        chain = [*chain, group]
        self.frames[id(group)] = _Frame()
        for item in group.items:
            if isinstance(item, Group):
                self.items[id(item)] = Item(0, 0)
                self._enter(item, chain)
            else:
                self.items[id(item)] = Item(*size_of(item))
                self.chains[id(item)] = chain

    def _fork(self, line: Line) -> tuple[int, list[Child], list[Child]]:
        """How many groups hold both ends, and the ways from the outermost to each."""
        ways = [[*self.chains[id(leaf)], leaf] for leaf in (line.start, line.end)]
        depth = 0
        while depth < min(map(len, ways)) and ways[0][depth] is ways[1][depth]:
            depth += 1
        return depth, *ways

    def _arrange(self, lines: Iterable[Line]) -> None:
        """Put the items of each group into an order that as few lines as possible go against."""
        between: dict[int, nx.DiGraph] = {}
        for line in lines:
            depth, start, end = self._fork(line)
            graph = between.setdefault(id(start[depth - 1]), nx.DiGraph())
            graph.add_edge(id(start[depth]), id(end[depth]))
        self.order: dict[int, int] = {}
        self._order_items(self.root, between)

    def _order_items(self, group: Group, between: dict[int, nx.DiGraph]) -> None:
        position = {id(item): i for i, item in enumerate(group.items)}
        graph = between.get(id(group), nx.DiGraph())
        graph.add_nodes_from(position)
        whole = nx.condensation(graph)
        first = {number: min(position[i] for i in data["members"]) for number, data in whole.nodes(data=True)}
        rank = {}
        for number in nx.lexicographical_topological_sort(whole, key=first.__getitem__):
            for each in sorted(whole.nodes[number]["members"], key=position.__getitem__):
                rank[each] = len(rank)
        self.order |= rank
        group.items.sort(key=lambda item: rank[id(item)])
        for item in group.items:
            if isinstance(item, Group):
                self._order_items(item, between)

    def _route(self, line: Line) -> None:
        """From the leaf outwards through the borders of its groups, and inwards to the other one."""
        depth, start, end = self._fork(line)
        up = self.order[id(start[depth])] > self.order[id(end[depth])]
        leaving: Key = ("out", id(line.start))
        entering: Key = ("in", id(line.start))
        drawn = line.start, line.fate, line.num_bytes
        for group, child in zip(start[depth:-1], start[depth + 1 :], strict=True):
            side = self._border(group, leaving, not up)
            self._join(group, (child, leaving), (side, None), (*drawn, None, up))
        reached = line.end if len(end) == depth + 1 else None
        self._join(start[depth - 1], (start[depth], leaving), (end[depth], entering), (*drawn, reached, up))
        for group, child in zip(end[depth:-1], end[depth + 1 :], strict=True):
            side = self._border(group, entering, up)
            reached = line.end if child is line.end else None
            self._join(group, (side, None), (child, entering), (*drawn, reached, up))

    def _border(self, group: Child, key: Key, at_bottom: bool) -> Item:
        frame = self.frames[id(group)]
        return (frame.bottom if at_bottom else frame.top).setdefault(key, Item(2.0, 0.0))

    def _join(
        self,
        group: Child,
        start: tuple[Child | Item, Hashable],
        end: tuple[Child | Item, Hashable],
        drawn: tuple[Leaf, str, int, Leaf | None, bool],
    ) -> None:
        """Note a line from one place of the group to another; one that saves is drawn so, whatever else it does."""
        key = (*self._place(start), *self._place(end))
        known = self.frames[id(group)].edges.get(key)
        if known is not None:
            fate = IS_SAVED if IS_SAVED in (known[1], drawn[1]) else known[1] or drawn[1]
            drawn = (drawn[0], fate, max(known[2], drawn[2]), known[3] or drawn[3], drawn[4])
        self.frames[id(group)].edges[key] = drawn

    def _place(self, place: tuple[Child | Item, Hashable]) -> tuple[int, Hashable]:
        where, key = place
        if isinstance(where, Item):
            self.items.setdefault(id(where), where)
            return id(where), None
        return id(where), key if isinstance(where, Group) else None

    def _stub(self, line: Line) -> None:
        """Where a line goes from block to block, the one that is drawn has an end for each."""
        for leaf, note, at_end in ((line.start, TO_NEXT, False), (line.end, FROM_PREVIOUS, True)):
            group = next((group for group in reversed(self.chains[id(leaf)]) if group.count > 1), self.root)
            chain = self.chains[id(leaf)]
            way: list[Child] = [*chain[chain.index(group) + 1 :], leaf]
            frame, key = self.frames[id(group)], ("in" if at_end else "out", id(line.start))
            stub = frame.stubs.setdefault((id(line.start), note), Item(_SMALL * len(note) + 16, 20.0))
            for outer, child in zip([group, *way[:-1]], way, strict=True):
                side = stub if outer is group else self._border(outer, key, not at_end)
                reached = leaf if at_end and child is leaf else None
                ends = ((side, None), (child, key)) if at_end else ((child, key), (side, None))
                self._join(outer, *ends, (line.start, line.fate, line.num_bytes, reached, False))

    def placed(self) -> Placed:
        self._lay_out(self.root)
        placed = Placed()
        self._collect(self.root, 0.0, 0.0, placed)
        return placed

    def _lay_out(self, group: Group) -> None:
        """The innermost first. A group's own item then has its size, and where each line crosses its border."""
        for item in group.items:
            if isinstance(item, Group):
                self._lay_out(item)
        frame = self.frames[id(group)]
        upper = [stub for (_, note), stub in frame.stubs.items() if note == FROM_PREVIOUS]
        lower = [stub for (_, note), stub in frame.stubs.items() if note == TO_NEXT]
        items = [*upper, *(self.items[id(item)] for item in group.items), *lower]
        edges: list[Edge] = []
        for (start, key, end, other), (*_, up) in frame.edges.items():
            ends = (self.items[start], key, self.items[end], other)
            edges.append((*ends[2:], *ends[:2]) if up else ends)
        top, bottom = list(frame.top.values()), list(frame.bottom.values())
        lines, width, height = lay_out(items, edges, top, bottom)
        self.lines[id(group)] = lines
        label = _CHARACTER * (len(group.label) + (8 if group.count > 1 else 0)) + 20
        width = max(width + 2 * _PADDING, label if group is not self.root else 0)
        height += 2 * _PADDING + (_HEADER if group.label else 0)
        own = self.items.setdefault(id(group), Item(0, 0))
        own.width, own.height = width, height
        for borders in (frame.top, frame.bottom):
            for key, item in borders.items():
                own.offsets[key] = item.x + 1.0 + _PADDING

    def _collect(self, group: Group, x: float, y: float, placed: Placed) -> None:
        """Boxes, outer ones first, and strokes, in the coordinates of the whole."""
        frame = self.frames[id(group)]
        x, y = x + _PADDING, y + _PADDING + (_HEADER if group.label else 0)
        own = self.items[id(group)]
        reach = {id(i): (-_PADDING - (_HEADER if group.label else 0)) for i in frame.top.values()}
        reach |= {id(i): _PADDING for i in frame.bottom.values()}
        for number, (key, drawn) in enumerate(frame.edges.items()):
            start, fate, num_bytes, ends, up = drawn
            pieces = self.lines[id(group)][number]
            joined: list[Points] = []
            for points in pieces:
                joined.append([(x + px, y + py) for px, py in points])
            first, last = (key[2], key[0]) if up else (key[0], key[2])
            if joined and first in reach:
                joined[0].insert(0, (joined[0][0][0], joined[0][0][1] + reach[first]))
            if joined and last in reach:
                joined[-1].append((joined[-1][-1][0], joined[-1][-1][1] + reach[last]))
            for i, points in enumerate(joined):
                tip = ends if ends is not None and i == (0 if up else len(joined) - 1) else None
                placed.strokes.append(Stroke(points[::-1] if up else points, start, fate, num_bytes, tip))
        for (_, note), stub in frame.stubs.items():
            placed.boxes.append(Box(x + stub.x, y + stub.y, stub.width, stub.height, note=note))
        for item in group.items:
            at = self.items[id(item)]
            if isinstance(item, Group):
                placed.boxes.append(Box(x + at.x, y + at.y, at.width, at.height, group=item))
                self._collect(item, x + at.x, y + at.y, placed)
            else:
                placed.boxes.append(Box(x + at.x, y + at.y, at.width, at.height, leaf=item))
        placed.width, placed.height = max(placed.width, own.width), max(placed.height, own.height)


def flipped(placed: Placed) -> Placed:
    """Upside down: what ran first stands at the bottom."""
    high = placed.height
    boxes = [replace(box, y=high - box.y - box.height, is_turned=not box.is_turned) for box in placed.boxes]
    strokes = [replace(stroke, points=[(x, high - y) for x, y in stroke.points]) for stroke in placed.strokes]
    return Placed(placed.width, high, boxes, strokes)


def beside(left: Placed, right: Placed, gap: float) -> Placed:
    """Two pictures, their lower borders in one line."""
    high = max(left.height, right.height)
    placed = Placed(left.width + gap + right.width, high)
    for part, dx, dy in ((left, 0.0, high - left.height), (right, left.width + gap, high - right.height)):
        placed.boxes += [replace(box, x=box.x + dx, y=box.y + dy) for box in part.boxes]
        placed.strokes += [replace(each, points=[(x + dx, y + dy) for x, y in each.points]) for each in part.strokes]
    return placed


def crossing(lines: Sequence[Line], halves: Sequence[Group]) -> tuple[list[Line], list[Line]]:
    """The lines within one of the halves, and those between them."""
    half = {id(leaf): i for i, group in enumerate(halves) for leaf in group.leaves()}
    within = [line for line in lines if half[id(line.start)] == half[id(line.end)]]
    return within, [line for line in lines if half[id(line.start)] != half[id(line.end)]]
