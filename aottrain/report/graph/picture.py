"""A program's picture as SVG: modules as frames, kernels and calls as boxes, what is saved as thick lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from aottrain.explain.records import IS_RECOMPUTED, IS_SAVED, Diagram
from aottrain.ir.units import exact_bytes, format_bytes
from aottrain.report.graph.folding import Folded, Group, Leaf, Line, fold
from aottrain.report.graph.layered import Points
from aottrain.report.graph.nested import Box, Placed, Stroke, beside, crossing, flipped, place, texts_of

_GAP = 230.0  # between the forward and the backward, for what crosses
_SLOT = 17.0  # between two sizes that are written there
_MARGIN = 10.0


def draw(diagram: Diagram, name: str) -> str:
    """As an element of a page. name: of its own, for the arrow heads."""
    folded = fold(diagram)
    halves = [item for item in folded.root.items if isinstance(item, Group) and item.half == item.label and item.label]
    if len(halves) == 2:
        placed, across = _side_by_side(folded, halves)
    else:
        placed, across = place(folded), ""
    numbers = {id(leaf): i for i, leaf in enumerate(folded.root.leaves())}
    frames = "".join(_frame(box) for box in placed.boxes if box.group is not None)
    strokes = "".join(_stroke(stroke, name, numbers) for stroke in sorted(placed.strokes, key=_weight))
    boxes = "".join(_box(box, numbers) for box in placed.boxes if box.group is None)
    across = across.replace("@", name)
    width, height = placed.width + 2 * _MARGIN, placed.height + 2 * _MARGIN
    return (
        f'<svg class="graph" viewBox="{-_MARGIN:.0f} {-_MARGIN:.0f} {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(_summary(diagram, folded), quote=True)}">'
        f'{_heads(name)}<g class="view">{frames}<g class="flows">{strokes}{across}</g>{boxes}</g></svg>'
    )


def _summary(diagram: Diagram, folded: Folded) -> str:
    drawn = sum(1 for _ in folded.root.leaves())
    return f"{diagram.title}: {len(diagram.steps)} steps, drawn as {drawn}"


def _weight(stroke: Stroke) -> int:
    """What is drawn last lies on top."""
    return ("", IS_RECOMPUTED, IS_SAVED).index(stroke.fate)


def _side_by_side(folded: Folded, halves: Sequence[Group]) -> tuple[Placed, str]:
    """The forward from the top to the bottom, the backward beside it upwards, and what crosses between them."""
    within, between = crossing(folded.lines, halves)
    parts = []
    for group in halves:
        leaves = {id(leaf) for leaf in group.leaves()}
        lines = tuple(line for line in within if id(line.start) in leaves)
        parts.append(place(Folded(Group("", items=[group]), lines)))
    placed = beside(parts[0], flipped(parts[1]), _GAP)
    at = {id(box.leaf): box for box in placed.boxes if box.leaf is not None}
    numbers = {id(leaf): i for i, leaf in enumerate(folded.root.leaves())}
    return placed, _across(between, at, parts[0].width, numbers)


def _across(lines: Sequence[Line], at: dict[int, Box], left: float, numbers: dict[int, int]) -> str:
    """From the side of a box to the border, over the gap with the size written at its start, and to the other box."""
    by_start: dict[int, list[Line]] = {}
    for line in lines:
        by_start.setdefault(id(line.start), []).append(line)
    slots = _slots({key: at[key].y + at[key].height / 2 for key in by_start})
    drawn = []
    for key, each in sorted(by_start.items(), key=lambda entry: slots[entry[0]]):
        ends = [at[id(line.end)] for line in each]
        to = " ".join(str(numbers[id(line.end)]) for line in each)
        fate = IS_SAVED if any(line.fate == IS_SAVED for line in each) else each[0].fate
        num_bytes = max(line.num_bytes for line in each)
        kind, width = fate or "plain", _width(fate, num_bytes)
        path = _over_the_gap(at[key], slots[key], ends, left)
        drawn.append(
            f'<path class="flow {kind}" data-s="{numbers[key]}" data-e="{to}" style="stroke-width:{width:.1f}" '
            f'd="{path}" marker-end="url(#@-{kind})"/>'
        )
        if fate:
            times = f" \u00d7 {each[0].start.count}" if each[0].start.count > 1 else ""
            size = escape(format_bytes(num_bytes) + times)
            drawn.append(f'<text class="size" x="{left + 8:.0f}" y="{slots[key] - 4:.0f}">{size}</text>')
    return "".join(drawn)


def _over_the_gap(start: Box, y: float, ends: Sequence[Box], left: float) -> str:
    """From a box to the height `y` in the gap, which begins at `left`, and on to each of the boxes behind it."""
    middle, bend = start.y + start.height / 2, left - 20
    path = [
        f"M{start.x + start.width:.0f},{middle:.0f}C{bend:.0f},{middle:.0f} {bend:.0f},{y:.0f} {left + 4:.0f},{y:.0f}"
    ]
    begin, x = left + 104, left + _GAP - 6
    for end in ends:
        to, half = end.y + end.height / 2, (begin + x) / 2
        curve = f"C{half:.0f},{y:.0f} {half:.0f},{to:.0f} {x:.0f},{to:.0f}"
        path.append(f"M{left + 4:.0f},{y:.0f}H{begin:.0f}{curve}H{end.x:.0f}")
    return "".join(path)


def _slots(wanted: dict[int, float]) -> dict[int, float]:
    """Heights in the same order, so far apart that a line of text fits between two."""
    order, last, found = sorted(wanted, key=wanted.__getitem__), -math.inf, {}
    for key in order:
        found[key] = last = max(wanted[key], last + _SLOT)
    return found


def _heads(name: str) -> str:
    heads = "".join(
        f'<marker id="{name}-{kind}" class="head {kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0L8,4L0,8Z"/></marker>'
        for kind in ("plain", IS_SAVED, IS_RECOMPUTED)
    )
    return f"<defs>{heads}</defs>"


def _width(fate: str, num_bytes: int) -> float:
    """Of a line: what is saved is drawn the thicker the larger it is, a unit for each factor of four."""
    if fate != IS_SAVED:
        return 1.2
    return min(2.5 + max(math.log(max(num_bytes, 1) / 4096, 4), 0) * 0.75, 9.0)


def _stroke(stroke: Stroke, name: str, numbers: dict[int, int]) -> str:
    kind = stroke.fate or "plain"
    end = f' marker-end="url(#{name}-{kind})"' if stroke.ends is not None else ""
    to = f' data-e="{numbers[id(stroke.ends)]}"' if stroke.ends is not None else ""
    style = f' style="stroke-width:{_width(stroke.fate, stroke.num_bytes):.1f}"' if stroke.fate == IS_SAVED else ""
    start = numbers[id(stroke.start)]
    return f'<path class="flow {kind}" data-s="{start}"{to}{style} d="{_path(stroke.points)}"{end}/>'


def _path(points: Points) -> str:
    """Curves that leave and arrive upright."""
    (x, y), *rest = points
    drawn = [f"M{x:.0f},{y:.0f}"]
    for to_x, to_y in rest:
        if abs(to_x - x) < 0.5:
            drawn.append(f"V{to_y:.0f}")
        else:
            middle = (y + to_y) / 2
            drawn.append(f"C{x:.0f},{middle:.0f} {to_x:.0f},{middle:.0f} {to_x:.0f},{to_y:.0f}")
        x, y = to_x, to_y
    return "".join(drawn)


def _frame(box: Box) -> str:
    group = box.group
    assert group is not None
    shape = f'x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="8"'
    behind = "".join(
        f'<rect class="frame" x="{box.x + by:.0f}" y="{box.y + by:.0f}" width="{box.width:.0f}" '
        f'height="{box.height:.0f}" rx="8"/>'
        for by in ((6, 3) if group.count > 1 else ())
    )
    times = f'<tspan class="times" dx="6">\u00d7 {group.count}</tspan>' if group.count > 1 else ""
    title = f"<title>{escape(group.path or group.label)}{f', {group.count} alike' if group.count > 1 else ''}</title>"
    y = box.y + (box.height - 9 if box.is_turned else 17)
    label = f'<text class="name" x="{box.x + 10:.0f}" y="{y:.0f}">{escape(group.label)}{times}</text>'
    return f'<g>{title}{behind}<rect class="frame" {shape}/>{label}</g>'


def _box(box: Box, numbers: dict[int, int]) -> str:
    if box.leaf is None:
        middle = box.x + box.width / 2
        return f'<g class="stub"><text x="{middle:.0f}" y="{box.y + 14:.0f}">{escape(box.note)}</text></g>'
    step = box.leaf.step
    first, second = texts_of(box.leaf)
    middle = box.x + box.width / 2
    heights = (box.y + 15, box.y + 29) if second else (box.y + 22,)
    lines = "".join(
        f'<text class="{kind}" x="{middle:.0f}" y="{y:.0f}">{escape(text)}</text>'
        for kind, text, y in zip(("first", "small"), (first, second), heights, strict=False)
    )
    fate = f" {step.fate}" if step.fate else ""
    return (
        f'<g class="step {step.kind}{fate}" data-i="{numbers[id(box.leaf)]}"><title>{escape(told(box.leaf))}</title>'
        f"{_shape(box, step.kind)}{lines}</g>"
    )


def told(leaf: Leaf) -> str:
    """All that is known of a step, a line."""
    step = leaf.step
    module = step.modules[-1][0] if step.modules else ""
    fates = {IS_SAVED: "saved for the backward", IS_RECOMPUTED: "computed again in the backward"}
    parts = [f"{step.name}: {step.label}", step.type, exact_bytes(step.num_bytes) if step.num_bytes else ""]
    parts += [f"in {module}" if module else "", step.source, fates.get(step.fate, "")]
    parts += [f"one of {leaf.count} alike"] if leaf.count > 1 else []
    return "; ".join(filter(None, parts))


def _shape(box: Box, kind: str) -> str:
    """A generated kernel is a box with corners, a library call a rounded one, a saved value has slanted sides."""
    x, y, w, h = box.x, box.y, box.width, box.height
    if kind in ("saved", "input", "given"):
        points = [(x + 8, y), (x + w, y), (x + w - 8, y + h), (x, y + h)]
        if kind == "saved":
            upper, lower = [(x + 9, y), (x + w - 9, y)], [(x + w - 9, y + h), (x + 9, y + h)]
            points = [*upper, (x + w, y + h / 2), *lower, (x, y + h / 2)]
        return f'<polygon points="{" ".join(f"{px:.0f},{py:.0f}" for px, py in points)}"/>'
    radius = {"kernel": 0, "module": 6}.get(kind, h / 2)
    bar = f'<rect class="bar" x="{x:.0f}" y="{y:.0f}" width="5" height="{h:.0f}"/>' if kind == "kernel" else ""
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="{radius:.0f}"/>{bar}'
