"""What a person sees while it trains: a bar on a terminal, plain lines anywhere else (a file, a pipe, CI)."""

from __future__ import annotations

import sys

from tqdm import tqdm

from aottrain.metrics.sinks import Row


class Progress:
    """A tqdm bar on stderr that is off when stderr is not a terminal; then each log step prints one line to stdout."""

    def __init__(self, *, total: int, initial: int, name: str):
        self.total = total
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=name,
            unit="step",
            disable=None,
            dynamic_ncols=True,
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
        figures = describe(row)
        if self._bar.disable:
            print("  ".join((f"step {row['step']:>{len(str(self.total))}}/{self.total}", *figures)), flush=True)
            return
        self._bar.set_postfix_str(", ".join(figures), refresh=False)
        if row.get("val/loss") is not None:
            self.say(f"step {row['step']}: held-out loss {row['val/loss']:.4f}")

    def say(self, line: str) -> None:
        """One line that does not tear the bar."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line, file=sys.stdout)


def describe(row: Row) -> list[str]:
    """The figures of a row that a person follows, each with its name."""
    formats = (
        ("train/loss", "loss {:.4f}"),
        ("val/loss", "held-out {:.4f}"),
        ("train/grad_norm", "norm {:.3f}"),
        ("train/lr", "lr {:.2e}"),
        ("perf/step_ms", "{:.0f} ms"),
        ("perf/tokens_per_s", "{:,.0f} tokens/s"),
    )
    return [text.format(row[key]) for key, text in formats if row.get(key) is not None]
