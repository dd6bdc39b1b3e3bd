"""What a person sees while it trains: lines, and on a terminal a bar below them, or what is being done right now."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from aottrain.ir.units import format_seconds
from aottrain.metrics.sinks import OWN, Row, is_own
from aottrain.toolchain.threads import Thread
from aottrain.trainer.console import SCREEN, making_way, screen

DEFAULT_COLUMNS, DEFAULT_ROWS = 100, 24
BAR_CELLS = 16
TURNS = "|/-\\"  # what turns, in characters that every terminal has
HELD_OUT = f"{OWN}loss"
FIGURES: dict[str, Callable[[Any], str]] = {
    "train/loss": "loss {:.4f}".format,
    HELD_OUT: "held-out {:.4f}".format,
    "train/grad_norm": "norm {:.3f}".format,
    "train/lr": "lr {:.2e}".format,
    "perf/step_ms": lambda value: format_seconds(value / 1e3),
    "perf/tokens_per_s": "{:,.0f} tokens/s".format,
    "perf/samples_per_s": "{:,.0f} samples/s".format,
}
ON_THE_BAR = ("train/loss", "perf/tokens_per_s", "perf/samples_per_s")


class Progress:
    """Each log step prints one line to stdout; where stderr is a terminal, a tqdm bar stays below the lines."""

    def __init__(self, *, total: int, initial: int, name: str):
        self.total = total
        self._figures = ""
        terminal = screen()
        sized = _has_size(terminal)
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=name,
            unit="step",
            file=terminal,
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

    @contextmanager
    def aside(self, what: str, *, is_rare: bool = False) -> Iterator[None]:
        """Inside, the bar says what is done beside the steps. is_rare: its clock stands still meanwhile, because the
        steps to come will not take so long: a check of the first one may take as long as a hundred steps."""
        start_s = time.time()  # tqdm's own clock
        self._bar.set_postfix_str(what)
        try:
            yield
        finally:
            self._bar.set_postfix_str(self._figures, refresh=False)
            if is_rare and not self._bar.disable:
                beside_s = time.time() - start_s
                self._bar.start_t += beside_s
                self._bar.last_print_t += beside_s

    def go_back_to(self, step: int) -> None:
        """Some steps are to come again."""
        self._bar.n = step
        self._bar.refresh()

    def log(self, row: Row) -> None:
        """Figures of one step that has been read."""
        self._figures = ", ".join(describe(row, ON_THE_BAR))
        self._bar.set_postfix_str(self._figures, refresh=False)
        step = f"step {row['step']:>{len(str(self.total))}}/{self.total}"
        self.say("  ".join((step, *describe(row))))

    def say(self, line: str) -> None:
        """One line that does not tear the bar."""
        self._bar.clear()  # nothing where there is no bar
        print(line, flush=True)
        self._bar.refresh()


class Status:
    """What is being done right now and for how long, on a terminal's last line, which is empty again after it.

    look: asked for the newest word on it as often as the line is drawn. Nothing is written where stderr is no terminal,
    or one that cannot clear a line (TERM=dumb, as within an editor).
    """

    PERIOD_S = 0.2

    def __init__(self, title: str, look: Callable[[], str] = lambda: ""):
        self.title, self.stage, self.counted, self._look = title, "", "", look
        self._terminal = screen()
        self._ended = threading.Event()
        self._ticker: Thread | None = None
        self._is_drawn = self._waits = False

    def __enter__(self) -> Status:
        if self._terminal.isatty() and os.environ.get("TERM") != "dumb":
            self._start_s = time.perf_counter()
            making_way.append(self._make_way)
            self._ticker = Thread(target=self._tick, daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ticker is not None:
            self._ended.set()
            self._ticker.join()
            making_way.remove(self._make_way)
            self._draw("")

    def _make_way(self, text: str) -> None:
        """What others print begins on an empty line, and its line is whole before this one is drawn again."""
        if self._is_drawn:
            self._draw("")
        self._waits = not text.endswith("\n")

    def tell(self, stage: str) -> None:
        """The part of it that begins now."""
        self.stage, self.counted = stage, ""

    def count(self, what: str, done: int, total: int | None) -> None:
        """How far that part is."""
        self.counted = f"{done:,} {what}" if total is None else f"{bar(done, total)} {done:,}/{total:,} {what}"

    def _tick(self) -> None:
        for turn in itertools.cycle(TURNS):
            if self._ended.wait(self.PERIOD_S):
                return
            text = f"{turn} {self.line(time.perf_counter() - self._start_s)}"
            with SCREEN:
                if not self._waits:
                    self._draw(text)

    def line(self, seconds: float) -> str:
        parts = [part for part in (self.stage, self.counted, self._look()) if part]
        return ", ".join([f"{self.title}: {parts[0]}" if parts else self.title, *parts[1:], f"{seconds:.0f} s"])

    def _draw(self, text: str) -> None:
        columns = DEFAULT_COLUMNS
        if _has_size(self._terminal):
            columns = os.get_terminal_size(self._terminal.fileno()).columns
        self._terminal.write(f"\r\x1b[K{text[: columns - 1]}")  # a longer one would go on in a line that stays
        self._terminal.flush()
        self._is_drawn = bool(text)


def bar(done: int, total: int) -> str:
    """How much of all is done, in characters that every terminal has."""
    filled = BAR_CELLS * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}]"


def _has_size(terminal: TextIO) -> bool:
    """Whether the terminal says its size; some (`script`, containers, CI) say 0 by 0, where tqdm would draw nothing."""
    try:
        return min(os.get_terminal_size(terminal.fileno())) > 0
    except (OSError, ValueError):
        return False


def describe(row: Row, names: Iterable[str] = tuple(FIGURES)) -> list[str]:
    """Those of the named figures that a row has, each as a person reads it; samples only where there are no tokens."""
    shown = [name for name in names if row.get(name) is not None]
    if "perf/tokens_per_s" in shown:
        shown = [name for name in shown if name != "perf/samples_per_s"]
    return [figure for name in shown for figure in (FIGURES[name](row[name]), *(_own(row) if name == HELD_OUT else ()))]


def _own(row: Row) -> list[str]:
    """The recipe's own metrics, which come with a held-out loss."""
    return [f"{name.removeprefix(OWN)} {value:.4g}" for name, value in row.items() if is_own(name)]
