"""Pictures of programs on a page, with what zooms and searches them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from aottrain.explain.records import BACKWARD, Diagram
from aottrain.ir.units import format_count
from aottrain.report.graph.picture import draw
from aottrain.report.page import folded, heading, joined

_KEYS = (
    ("kernel", "generated kernel"),
    ("library", "library call"),
    ("module", "a module's steps together"),
    ("saved", "saved for the backward: thick lines, with sizes"),
    ("recomputed", "computed again in the backward: dashed"),
)
RULES = """svg.graph { font-size: 12px; }
.graph text { fill: var(--ink); text-anchor: middle; }
.graph text.small { fill: var(--dim); font-size: 10.5px; }
.graph .frame { fill: var(--card); fill-opacity: .55; stroke: var(--dim); stroke-opacity: .45; }
.graph text.name { text-anchor: start; font-weight: 600; }
.graph .times { fill: var(--strong); }
.graph .step > :is(rect, polygon) { fill: var(--card); stroke: var(--dim); }
.graph .kernel > rect { stroke: var(--strong); }
.graph .kernel > rect.bar { fill: var(--strong); }
.graph .saved > :is(rect, polygon) { stroke: var(--m-saved); stroke-width: 2.5; }
.graph .recomputed > :is(rect, polygon):not(.bar) { stroke-dasharray: 5 3; stroke-width: 1.5; }
.graph .flow { fill: none; stroke: var(--dim); stroke-opacity: .55; stroke-width: 1.2; }
.graph .flow.saved { stroke: var(--m-saved); stroke-opacity: .85; }
.graph .flow.recomputed { stroke-dasharray: 6 4; }
.graph .head { fill: var(--dim); }
.graph .head.saved { fill: var(--m-saved); }
.graph .stub text { fill: var(--dim); font-style: italic; font-size: 10.5px; }
.graph text.size { text-anchor: start; font-size: 11px; paint-order: stroke; stroke: var(--page); stroke-width: 3; }
.graph .step { cursor: pointer; }
.graph .step.match > :is(rect, polygon):not(.bar) { stroke: var(--alarm); stroke-width: 3; stroke-dasharray: none; }
.graph .step.hot > :is(rect, polygon):not(.bar) { stroke: var(--ink); stroke-width: 3; stroke-dasharray: none; }
.graph .flow.hot { stroke: var(--ink); stroke-opacity: 1; }
.graph.chosen .flow:not(.hot), .graph.searching .step:not(.match, .hot) { opacity: .3; }
"""
_RULES = """
.canvas { overflow: auto; max-height: 80vh; background: var(--page); border: 1px solid var(--line); border-radius: 8px;
  cursor: grab; }
.canvas.held { cursor: grabbing; user-select: none; }
.canvas:focus-visible, .picture :is(button, input):focus-visible { outline: 2px solid var(--strong);
  outline-offset: 2px; }
figure.picture { margin: .4em 0; min-width: 0; }
.picture .tools { display: flex; flex-wrap: wrap; gap: .5em .8em; align-items: center; font-size: .9em;
  margin: .4em 0; }
.picture .tools label { display: inline-flex; gap: .5em; align-items: center; }
.picture .tools :is(input, button) { font: inherit; color: inherit; background: var(--card);
  border: 1px solid var(--dim); border-radius: 6px; padding: .25em .6em; min-width: 0; }
.picture .tools button { cursor: pointer; min-width: 2.3em; }
figure svg.graph { display: block; margin: 0 auto; }
.picture .told { min-height: 2.9em; font-size: .88em; color: var(--dim); overflow-wrap: anywhere; }
.legend .sign { width: 2.6em; height: 1.1em; margin-right: .4em; vertical-align: -.2em; }
.sign :is(rect, polygon, path) { fill: var(--card); stroke: var(--dim); stroke-width: 1.5; }
.sign.kernel rect { stroke: var(--strong); }
.sign.kernel rect + rect { fill: var(--strong); }
.sign.saved path { stroke: var(--m-saved); stroke-width: 5; }
.sign.recomputed path { stroke-dasharray: 6 4; }
"""
STYLE = f".aottrain {{{RULES}{_RULES}}}\n"
_SIGNS = {
    "kernel": '<rect x="1" y="2" width="36" height="13"/><rect x="1" y="2" width="4" height="13"/>',
    "library": '<rect x="1" y="2" width="36" height="13" rx="6.5"/>',
    "module": '<rect x="1" y="2" width="36" height="13" rx="3"/>',
    "saved": '<path d="M1,8H37"/>',
    "recomputed": '<path d="M1,8H37"/>',
}
_HINT = "Choose a step to read what it does. Arrow keys go from step to step, + and \u2212 zoom, 0 fits the width."


def pictures(diagrams: Sequence[Diagram], name: str) -> str:
    """All pictures of one program, the first of them open. name: the program's, for the page's identifiers."""
    if not diagrams:
        return ""
    note = "repeated blocks are drawn once, with their count"
    drawn = [
        folded(each.title, figure(each, f"{name}-{i}"), f"{format_count(len(each.steps))} steps", open_=i == 0)
        for i, each in enumerate(diagrams)
    ]
    return joined([heading("The program as a picture", note), *drawn])


def figure(diagram: Diagram, name: str) -> str:
    """One picture with its tools and its legend."""
    title = escape(diagram.title, quote=True)
    tools = (
        f'<div class="tools"><label>Search <input type="search" aria-label="Search {title}" '
        f'placeholder="op, module, line"></label>'
        '<button type="button" data-zoom="1.3" aria-label="zoom in">+</button>'
        '<button type="button" data-zoom="0.77" aria-label="zoom out">\u2212</button>'
        '<button type="button" data-zoom="0">fit</button><output></output></div>'
    )
    canvas = f'<div class="canvas" tabindex="0" role="group" aria-label="{title}">{draw(diagram, name)}</div>'
    told = f'<p class="told" aria-live="polite">{_HINT}</p>'
    return f'<figure class="picture">{tools}{canvas}{told}{_legend(diagram)}</figure>'


def _legend(diagram: Diagram) -> str:
    shown = {*diagram.kinds, *diagram.fates}
    keys = [
        f'<li><svg class="sign {key}" viewBox="0 0 38 17" aria-hidden="true">{_SIGNS[key]}</svg>{text}</li>'
        for key, text in _KEYS
        if key in shown
    ]
    halves = {step.half for step in diagram.steps}
    if len(halves) > 1 and BACKWARD in halves:
        keys.append("<li>left: the forward, downwards; right: the backward, upwards</li>")
    return f'<ul class="legend">{"".join(keys)}</ul>'
