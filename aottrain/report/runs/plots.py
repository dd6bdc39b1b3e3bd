"""The main plots of runs as PNG files, for papers and slides, by matplotlib (the extra `plots`)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from aottrain.errors import ConfigError
from aottrain.ir.settings.files import write_whole
from aottrain.report.runs.reading import HELD_OUT, LOSS, STEP_MS, Run
from aottrain.report.style import SERIES

_INCHES, _DPI = (6.0, 3.6), 200
_STYLES = ("-", "--", ":")
_LEGEND = 12  # runs that are named
_FIGURES = (("step_ms_median", "step time, median (ms)", 1.0), ("peak_bytes", "peak memory (MiB)", 2.0**20))


def check_installed() -> None:
    """ConfigError: matplotlib is not there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'aottrain[plots]'")


def write_plots(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Loss, held-out loss and step time by step, and a bar for each run's step time and peak: those that there are
    figures of. Gives the files' paths. Raises ConfigError without matplotlib, OSError where they cannot be written."""
    check_installed()
    from matplotlib.figure import Figure  # no window, no global state

    written = []
    for name, title in ((LOSS, "loss"), (HELD_OUT, "held-out loss"), (STEP_MS, "step time (ms)")):
        curves = [(run.name, run.metrics.get(name) or ()) for run in runs]
        if any(len(points) > 1 for _, points in curves):
            axes = _axes(Figure, "step", title)
            axes.xaxis.get_major_locator().set_params(integer=True)  # there is no step 2.5
            for i, (label, points) in enumerate(curves):
                _curve(axes, i, label, points, is_layered=name != STEP_MS)
            if name == STEP_MS:  # a height says how long, which it does from zero alone
                axes.set_ylim(bottom=0)
            if len(curves) > 1:
                axes.legend(frameon=False, fontsize=8)
            written.append(_save(axes, folder / f"{name.replace('/', '_')}.png"))
    for name, title, unit in _FIGURES:
        bars = [
            (run.name, value / unit, SERIES[i % len(SERIES)][0] if len(runs) <= _LEGEND else SERIES[0][0])
            for i, run in enumerate(runs)
            if (value := run.number(name)) is not None
        ]
        if len(bars) > 1:
            axes = _axes(Figure, title, "")
            axes.grid(visible=False, axis="y")
            labels, values, colours = zip(*bars, strict=True)
            drawn = axes.barh(labels, values, color=colours)
            if len(bars) <= _LEGEND:
                axes.bar_label(drawn, fmt=lambda value: f"{value:.3g}", padding=3, fontsize=8)
                axes.margins(x=0.1)
            axes.invert_yaxis()
            written.append(_save(axes, folder / f"{name}.png"))
    return written


def _axes(figure: Any, x: str, y: str) -> Any:
    """With its title: of curves by step, or where `y` has no name of a bar for each run."""
    axes = figure(figsize=_INCHES, dpi=_DPI, layout="constrained").add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    what, by = (y, "by step") if y else (x, "of each run")
    axes.set_title(f"{what.partition(' (')[0].capitalize()} {by}", loc="left")
    return axes


def _curve(axes: Any, i: int, label: str, points: Sequence[tuple[float, float]], *, is_layered: bool) -> None:
    """Colours as on the pages. Of losses, which lie on each other, the first curve is the widest, so that each is seen.
    A value that is not finite is a gap."""
    steps = [step for step, _ in points]
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    style = _STYLES[i // len(SERIES) % len(_STYLES)]
    shown = label if i < _LEGEND else "_nolegend_"
    width = max(4.0 - 1.2 * i, 1.0) if is_layered else 1.2
    axes.plot(steps, values, style, color=SERIES[i % len(SERIES)][0], linewidth=width, label=shown)


def _save(axes: Any, path: Path) -> Path:
    write = partial(axes.figure.savefig, format=path.suffix[1:], metadata={"Software": None})
    write_whole(path, write)
    return path
