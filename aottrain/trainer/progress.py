"""What a person sees while it trains: a bar on a terminal, plain lines anywhere else (a file, a pipe, CI)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from tqdm import tqdm

from aottrain.metrics.sinks import Row

DEFAULT_COLUMNS, DEFAULT_ROWS = 100, 24
FIGURES = {
    "train/loss": "loss {:.4f}",
    "val/loss": "held-out {:.4f}",
    "train/grad_norm": "norm {:.3f}",
    "train/lr": "lr {:.2e}",
    "perf/step_ms": "{:.0f} ms",
    "perf/tokens_per_s": "{:,.0f} tokens/s",
    "perf/samples_per_s": "{:,.0f} samples/s",
}
ON_THE_BAR = ("train/loss", "perf/tokens_per_s", "perf/samples_per_s")


class Progress:
    """A tqdm bar on stderr that is off when stderr is not a terminal; then each log step prints one line to stdout."""

    def __init__(self, *, total: int, initial: int, name: str):
        self.total = total
        sized = _has_size()
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=name,
            unit="step",
            disable=None,
            dynamic_ncols=sized,
            ncols=None if sized else DEFAULT_COLUMNS,
            nrows=None if sized else DEFAULT_ROWS,
            mininterval=0.5,
            smoothing=0.05,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self) -> None:
        self._bar.update()

    def log(self, row: Row) -> None:
        """Figures of one step that has been read; an evaluation gets a line of its own above the bar."""
        if self._bar.disable:
            step = f"step {row['step']:>{len(str(self.total))}}/{self.total}"
            print("  ".join((step, *describe(row))), flush=True)
            return
        self._bar.set_postfix_str(", ".join(describe(row, ON_THE_BAR)), refresh=False)
        if row.get("val/loss") is not None:
            self.say(f"step {row['step']}: held-out loss {row['val/loss']:.4f}")

    def say(self, line: str) -> None:
        """One line that does not tear the bar."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line, file=sys.stdout)


def _has_size() -> bool:
    """Whether the terminal says its size; some (`script`, containers, CI) say 0 by 0, where tqdm would draw nothing."""
    try:
        return min(os.get_terminal_size(sys.stderr.fileno())) > 0
    except (OSError, ValueError):
        return False


def describe(row: Row, names: Iterable[str] = tuple(FIGURES)) -> list[str]:
    """Those of the named figures that a row has, each as a person reads it; samples only where there are no tokens."""
    shown = [name for name in names if row.get(name) is not None]
    if "perf/tokens_per_s" in shown:
        shown = [name for name in shown if name != "perf/samples_per_s"]
    return [FIGURES[name].format(row[name]) for name in shown]
