"""What the model of a run writes: at its end, and at each evaluation where it was asked to."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from aottrain.ir.settings.files import text_of
from aottrain.report.page import folded, heading, joined, pre
from aottrain.report.runs.reading import SAMPLE, number

SAMPLES = "samples.jsonl"
_NUM_SAMPLES = 20
_MOST_CHARACTERS, _MOST_ON_THE_WAY = 20_000, 4000


def render_samples(folder: Path) -> str:
    """Nothing of a file that is not there."""
    try:
        written = escape(text_of(folder / SAMPLE)[:_MOST_CHARACTERS])
    except OSError:
        written = ""
    last = f"{heading('What the model writes')}{pre(written, 'sample')}" if written else ""
    return joined([last, _on_the_way(folder)])


def _on_the_way(folder: Path) -> str:
    """The newest first; of a step that was repeated the last."""
    try:
        lines = text_of(folder / SAMPLES).splitlines()
    except OSError:
        return ""
    texts: dict[float, str] = {}
    for line in lines:
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):  # a crash in the middle of a line
            continue
        step = number(told.get("step")) if isinstance(told, dict) else None
        if step is not None:
            texts[step] = escape(str(told.get("text"))[:_MOST_ON_THE_WAY])
    steps = sorted(texts, reverse=True)[:_NUM_SAMPLES]
    if not steps:
        return ""
    shown = "".join(f"<h4>Step {step:,.0f}</h4>{pre(texts[step], 'sample')}" for step in steps)
    note = f"the last {len(steps)} of {len(texts)}" if len(texts) > len(steps) else f"{len(texts)}"
    return folded("What it wrote at each evaluation", shown, note)
