"""The two pictures of the compile report, as inline SVG: a stacked bar with its legend, and bars under one another.

Shapes carry CSS classes only; the colours are in style.py, so that light and dark need no second drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

NUM_COLOURS = 8
WIDTH = 1000


def stacked_bar(parts: Sequence[tuple[str, float, str]], *, title: str) -> str:
    """One bar of (label, value, value as text) parts and a legend. Parts beyond the eighth share the last colour."""
    total = sum(value for _, value, _ in parts)
    if total <= 0:
        return '<p class="dim">nothing to show</p>'
    rectangles, legend, left = [], [], 0.0
    for index, (label, value, text) in enumerate(parts):
        colour = f"c{min(index, NUM_COLOURS - 1)}"
        width = WIDTH * value / total
        caption = f"<title>{escape(label)}: {escape(text)}</title>"
        rectangles.append(f'<rect class="{colour}" x="{left:.2f}" width="{width:.2f}" height="28">{caption}</rect>')
        legend.append(f'<li><span class="key {colour}"></span>{escape(label)} <b>{escape(text)}</b></li>')
        left += width
    svg = (
        f'<svg class="bar" viewBox="0 0 {WIDTH} 28" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(rectangles)}</svg>'
    )
    return f'{svg}<ul class="legend">{"".join(legend)}</ul>'


def bars(rows: Sequence[tuple[str, float, str]], *, emphasised: str) -> str:
    """Horizontal bars of (label, value, value as text) on one scale; the row labelled `emphasised` stands out."""
    largest = max((value for _, value, _ in rows), default=0) or 1
    lines = []
    for label, value, text in rows:
        mark = "strong" if label == emphasised else "weak"
        rectangle = f'<rect class="{mark}" width="{WIDTH * value / largest:.2f}" height="10"/>'
        lines.append(
            f'<div class="row {mark}"><span>{escape(label)}</span>'
            f'<svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" aria-hidden="true">{rectangle}</svg>'
            f"<b>{escape(text)}</b></div>"
        )
    return f'<div class="bars">{"".join(lines)}</div>'
