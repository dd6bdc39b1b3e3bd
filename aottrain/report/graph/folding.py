"""A program's steps grouped by module, repeated blocks folded into one: what is drawn of a diagram."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from aottrain.explain.records import SAVED, Diagram, Flow, Step

_DIGITS = re.compile(r"\d+")
MOST_LEAVES = 600  # beyond them the innermost modules are a box each


@dataclass(eq=False)
class Leaf:
    """One step, which stands for those of `count` folded blocks; or a module whose steps are not drawn."""

    step: Step
    number: int
    """Of the step in its diagram."""
    count: int = 1
    num_steps: int = 1
    within: str = ""
    """The module that does nothing else, which has no frame then."""


@dataclass(eq=False)
class Group:
    """One module's calls, or `count` that are alike, of which the first is drawn."""

    label: str
    count: int = 1
    items: list[Leaf | Group] = field(default_factory=list)
    path: str = ""
    half: str = ""

    def leaves(self) -> Iterator[Leaf]:
        for item in self.items:
            if isinstance(item, Leaf):
                yield item
            else:
                yield from item.leaves()


@dataclass(frozen=True)
class Line:
    """From leaf to leaf; `count` flows of the program, of `num_bytes` each."""

    start: Leaf
    end: Leaf
    num_bytes: int
    fate: str
    count: int
    to_next: bool = False
    """It leads from one of the folded blocks into another one of them."""


@dataclass(frozen=True)
class Folded:
    """What is drawn."""

    root: Group
    lines: tuple[Line, ...]


def fold(diagram: Diagram) -> Folded:
    """The diagram with each block that is like others folded into the first of these."""
    folding = _Folding(diagram)
    root = Group("")
    for half, numbers in _by_half(diagram.steps):
        inner = folding.group(numbers, 0, Group(half, half=half))
        if len({step.half for step in diagram.steps}) > 1:
            root.items.append(inner)
        else:
            root.items += inner.items
    _shut(root)
    return Folded(root, tuple(_lines(diagram.flows, folding, root)))


def _by_half(steps: Sequence[Step]) -> list[tuple[str, list[int]]]:
    halves: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        halves.setdefault(step.half, []).append(number)
    return list(halves.items())


class _Folding:
    """Which step stands for which."""

    def __init__(self, diagram: Diagram):
        self.steps = steps = diagram.steps
        self.reads: dict[int, list[str]] = {}
        """Of a step of the backward, what becomes of the values of the forward that it reads."""
        for flow in diagram.flows:
            if steps[flow.start].half != steps[flow.end].half:
                self.reads.setdefault(flow.end, []).append(flow.fate)
        self.stands_for: dict[int, int] = {}
        """Of a step of a folded block that of the block that is drawn, which may be folded in turn."""
        self.block: dict[int, dict[int, int]] = {}
        """Of a step, by the number of a fold, in which of its blocks it is."""
        self.num_folds = 0

    def group(self, numbers: Sequence[int], depth: int, group: Group) -> Group:
        """The steps, all within the same `depth` outermost modules, as items of the group."""
        children: dict[tuple[str, int], list[int]] = {}
        alone: list[int] = []
        for number in numbers:
            modules = self.steps[number].modules
            if len(modules) > depth:
                children.setdefault(modules[depth], []).append(number)
            else:
                alone.append(number)
        entries: list[tuple[int, Leaf | Group]] = [(n, Leaf(self.steps[n], n, group.count)) for n in alone]
        for alike in self._alike(children, depth):
            first = children[alike[0]]
            if len(alike) > 1:
                self._fold([children[key] for key in alike])
            count = len(alike) * group.count
            inner = Group(_name(alike, group.path), count, path=alike[0][0], half=group.half)
            entries.append((first[0], _unframed(self.group(first, depth + 1, inner), group.count)))
        group.items = [item for _, item in sorted(entries, key=lambda entry: entry[0])]
        return group

    def _alike(self, children: dict[tuple[str, int], list[int]], depth: int) -> list[list[tuple[str, int]]]:
        """The modules, those together that are repeated and do the same to values of the same types."""
        found: dict[object, list[tuple[str, int]]] = {}
        for key, numbers in children.items():
            contents = tuple(self._kind(number, depth + 1) for number in numbers)
            found.setdefault((_DIGITS.sub("#", key[0]), contents), []).append(key)
        return list(found.values())

    def _kind(self, number: int, depth: int) -> object:
        step = self.steps[number]
        modules = tuple(path.rpartition(".")[2] for path, _ in step.modules[depth:])
        label = "" if step.kind == SAVED else step.label
        return step.kind, label, step.type, step.fate, tuple(self.reads.get(number, ())), modules

    def _fold(self, blocks: Sequence[Sequence[int]]) -> None:
        self.num_folds += 1
        for i, numbers in enumerate(blocks):
            for number, first in zip(numbers, blocks[0], strict=True):
                self.block.setdefault(number, {})[self.num_folds] = i
                if i:
                    self.stands_for[number] = first

    def drawn(self, number: int) -> tuple[int, dict[int, int]]:
        """The step that is drawn for this one, and the blocks that this one is in."""
        blocks: dict[int, int] = {}
        while True:
            blocks = self.block.get(number, {}) | blocks
            if number not in self.stands_for:
                return number, blocks
            number = self.stands_for[number]


def _unframed(group: Group, around: int) -> Group | Leaf:
    """Without the frame of a module that holds nothing but one other, or one step; one that is repeated within the
    `around` blocks that it lies in keeps it."""
    while len(group.items) == 1 and isinstance(group.items[0], Group) and group.items[0].count == group.count:
        (inner,) = group.items
        label = inner.label if inner.path.startswith(group.path) else f"{group.label}.{inner.label}"
        group = Group(label, inner.count, inner.items, inner.path, inner.half)
    only = group.items[0] if len(group.items) == 1 else None
    if isinstance(only, Leaf) and only.count == around and not only.within:
        only.within = group.label
        return only
    return group


def _name(alike: Sequence[tuple[str, int]], within: str) -> str:
    """`blocks.0-11` of blocks.0 to blocks.11; runs of one module by their numbers."""
    paths = list(dict.fromkeys(path for path, _ in alike))
    first = paths[0].removeprefix(f"{within}.") if within else paths[0]
    runs = sorted({run + 1 for _, run in alike})
    suffix = f", runs {_ranges(runs)}" if len(runs) > 1 else f", run {runs[0]}" if runs[0] > 1 else ""
    if len(paths) == 1:
        return first + suffix
    numbers = [_DIGITS.findall(path) for path in paths]
    differing = [i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(differing) != 1:
        return f"{first} and {len(paths) - 1} alike{suffix}"
    place = differing[0] - (len(numbers[0]) - len(_DIGITS.findall(first)))
    matches = list(_DIGITS.finditer(first))
    if not 0 <= place < len(matches):
        return f"{first} and {len(paths) - 1} alike{suffix}"
    values = sorted(int(row[differing[0]]) for row in numbers)
    return f"{first[: matches[place].start()]}{_ranges(values)}{first[matches[place].end() :]}{suffix}"


def _ranges(values: Sequence[int]) -> str:
    """`0-2, 5` of 0, 1, 2 and 5."""
    parts = []
    for _, run in itertools.groupby(enumerate(values), lambda pair: pair[1] - pair[0]):
        numbers = [value for _, value in run]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}\u2013{numbers[-1]}")
    return ", ".join(parts) if len(parts) <= 4 else f"{', '.join(parts[:3])}, \u2026 {parts[-1]}"


def _shut(root: Group) -> None:
    """Draw the innermost modules as a box each, until no more than `MOST_LEAVES` are left."""
    while sum(1 for _ in root.leaves()) > MOST_LEAVES:
        depth, deepest = max(_depths(root), default=(0, 0))
        if depth < 2:
            return
        _shut_at(root, depth - 1)


def _depths(group: Group, depth: int = 1) -> Iterator[tuple[int, int]]:
    for i, item in enumerate(group.items):
        if isinstance(item, Group):
            yield depth, i
            yield from _depths(item, depth + 1)


def _shut_at(group: Group, depth: int) -> None:
    for i, item in enumerate(group.items):
        if isinstance(item, Group) and depth:
            _shut_at(item, depth - 1)
        elif isinstance(item, Group):
            group.items[i] = _box(item)


def _box(group: Group) -> Leaf:
    leaves = list(group.leaves())
    first = leaves[0]
    num_steps = sum(leaf.num_steps for leaf in leaves)
    step = Step(group.path, "module", group.label, first.step.modules, first.step.half, type=f"{num_steps} steps")
    return Leaf(step, first.number, group.count, num_steps)


def _lines(flows: Iterable[Flow], folding: _Folding, root: Group) -> Iterator[Line]:
    by_number = _owners(root, folding.steps)
    found: dict[tuple[Leaf, Leaf, bool], Line] = {}
    for flow in flows:
        (start, blocks), (end, others) = folding.drawn(flow.start), folding.drawn(flow.end)
        a, b = by_number.get(start), by_number.get(end)
        if a is None or b is None:
            continue
        half = a.step.half == b.step.half
        to_next = half and any(others.get(fold_, block) != block for fold_, block in blocks.items())
        if a is b and not to_next:
            continue
        known = found.get((a, b, to_next))
        fate, num_bytes = flow.fate or (known.fate if known else ""), flow.num_bytes
        if known is not None:
            num_bytes = max(num_bytes, known.num_bytes)
        found[a, b, to_next] = Line(a, b, num_bytes, fate, 1 + (known.count if known else 0), to_next)
    return iter(found.values())


def _owners(root: Group, steps: Sequence[Step]) -> dict[int, Leaf]:
    """Of each step that is drawn, its leaf; of those of a module that is a box, the box."""
    boxes = {(leaf.step.name, leaf.step.half): leaf for leaf in root.leaves() if leaf.step.kind == "module"}
    owners = {leaf.number: leaf for leaf in root.leaves() if leaf.step.kind != "module"}
    if boxes:
        for number, step in enumerate(steps):
            for path, _ in step.modules:
                if number not in owners and (path, step.half) in boxes:
                    owners[number] = boxes[path, step.half]
    return owners
