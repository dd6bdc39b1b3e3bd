"""Orders and places of a drawing in layers by Graphviz's `dot`, where that is installed.

`dot` is given the layers as they are, with the places that long lines pass as points of their own, so that what it
answers is where each thing lies within its layer. Emden R. Gansner, Eleftherios Koutsofios, Stephen C. North and
Kiem-Phong Vo, "A technique for drawing directed graphs", IEEE Transactions on Software Engineering 19 (1993).
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

_TIMEOUT_S = 5.0
_INCH = 72.0
# Sizes for which it takes a moment; what is larger is laid out by us.
MOST_ITEMS = 400

Sizes = Sequence[Sequence[tuple[float, float]]]
"""For each layer, from the top, width and height of each thing in it."""
Ends = tuple[int, int]
"""The numbers of two things that a line joins, the upper one first; counted over all layers."""


def is_there() -> bool:
    """Whether `dot` is installed."""
    return _program() is not None


@cache
def _program() -> str | None:
    return shutil.which("dot")


def places(layers: Sizes, joints: Sequence[tuple[Ends, float]], gap: float) -> list[float] | None:
    """The left border of each thing, in the order in which they are given; None where `dot` gives no answer.

    joints: lines, each with its weight: how much it matters that it is straight. gap: between neighbours, at least.
    """
    program = _program()
    if program is None:
        return None
    command = [program, "-Tplain"]
    try:
        done = subprocess.run(
            command, input=_text(layers, joints, gap), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        return _read(done.stdout, layers) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return None


def _text(layers: Sizes, joints: Sequence[tuple[Ends, float]], gap: float) -> str:
    """The drawing in Graphviz's language. An invisible chain from layer to layer keeps these apart."""
    lines = [f"digraph {{ nodesep={gap / _INCH:.4f}; ranksep=0.5; node [shape=box, fixedsize=true]; edge [dir=none];"]
    number = 0
    for rank, layer in enumerate(layers):
        names = []
        for width, height in layer:
            lines.append(f"n{number} [width={width / _INCH:.4f}, height={max(height, 1.0) / _INCH:.4f}];")
            names.append(f"n{number};")
            number += 1
        lines.append(f"r{rank} [style=invis, width=0.01, height=0.01]; {{ rank=same; r{rank}; {' '.join(names)} }}")
    lines += [f"r{rank} -> r{rank + 1} [style=invis, weight=0];" for rank in range(len(layers) - 1)]
    lines += [f"n{upper} -> n{lower} [weight={max(round(weight), 1)}];" for (upper, lower), weight in joints]
    return "\n".join([*lines, "}"])


def _read(answer: str, layers: Sizes) -> list[float] | None:
    widths = [width for layer in layers for width, _ in layer]
    found: dict[int, float] = {}
    for words in map(str.split, answer.splitlines()):
        if len(words) > 3 and words[0] == "node" and words[1].startswith("n"):
            found[int(words[1][1:])] = float(words[2]) * _INCH
    places = [found[number] - width / 2 for number, width in enumerate(widths)]
    return places if all(map(math.isfinite, places)) else None
