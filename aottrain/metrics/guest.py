"""What loggers beside metrics.csv have in common: each is a guest, whose first failure ends it and not the run."""

from __future__ import annotations

import platform
import queue
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from aottrain.explain.report import CompileReport
from aottrain.toolchain.threads import Thread

T = TypeVar("T")
# Of an error: a setting that is refused is named on the second line, and why on the third.
_SHOWN_LINES = 3
# Of a summary: under `bench/` every logger has these keys, for every engine.
BENCH = (
    "step_ms_median",
    "step_ms_p90",
    "tokens_per_s",
    "samples_per_s",
    "compile_s",
    "peak_bytes",
    "predicted_peak_bytes",
    "saved_bytes",
    "last_loss",
    "val_loss",
    "verify_max_error",
    "fallbacks",
)
# By type, of the files of a run's folder.
ARTIFACTS = {
    "report": ("run.html", "compile_report.html", "metrics.csv", "summary.json"),
    "plan": ("decisions.json",),
}


class Guest:
    """The base of sinks that may fail. Every call into the library of one goes through `_guarded`."""

    name: ClassVar[str]
    longest_s: ClassVar[float | None] = None
    """How long a call is waited for, of a library that may hang; None: its own limits are trusted."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self.is_gone = False
        self._patient = None if self.longest_s is None else _Patient()

    @property
    def run_id(self) -> str | None:
        """To be saved in a checkpoint, so that a resumed run goes on in the same record; None where that has none."""
        return None

    @property
    def hint(self) -> str | None:
        """The command that shows, or sends, what was logged; None where there is none."""
        return None

    def publish(self, directory: Path, report: CompileReport | None) -> None:
        """What is looked at after the run, once the pages in its folder are written. Before `close`."""

    def _guarded(self, call: Callable[[], T], longest_s: float | None = None) -> T | None:
        """Its result; None where it failed, now or before. longest_s: in place of the class's."""
        if self.is_gone:
            return None
        try:
            if self._patient is None or self.longest_s is None:
                return call()
            return self._patient.call(call, longest_s or self.longest_s)
        except Exception as error:  # whatever it is, it is not worth a training run
            self.is_gone = True
            reason = " ".join(" ".join(str(error).splitlines()[:_SHOWN_LINES]).split())
            what = f"{self.name}: {type(error).__name__}: {reason}"
            self._say(f"{what}; going on without it (metrics.csv has every figure)")
            self._left(error)
            return None

    def _left(self, error: Exception) -> None:
        """After a failure: what the library must be told, that nothing of it is heard later."""


class _Patient:
    """Calls in a thread of their own, one after the other, so that one which never ends holds up nobody."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[tuple[Any, Exception | None]]]]
        self._calls = queue.SimpleQueue()
        self._is_started = False

    def call(self, call: Callable[[], T], longest_s: float) -> T:
        """Its result, or what it raises. TimeoutError: there is none yet."""
        if not self._is_started:
            self._is_started = True
            Thread(target=self._run, name="logger", daemon=True).start()
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._calls.put((call, answer))
        try:
            result, error = answer.get(timeout=longest_s)
        except queue.Empty:
            raise TimeoutError(f"no answer for {longest_s:g} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _run(self) -> None:
        while True:
            call, answer = self._calls.get()
            try:
                answer.put((call(), None))
            except Exception as error:
                answer.put((None, error))
            del call, answer  # not until the next one comes


def bench(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Under the same keys for every engine; None where there is no figure."""
    return {f"bench/{name}": summary.get(name) for name in BENCH}


def files_of(directory: Path, kind: str) -> list[Path]:
    """Those of ARTIFACTS that are there."""
    return [directory / name for name in ARTIFACTS[kind] if (directory / name).is_file()]


def environment() -> dict[str, Any]:
    """What the figures depend on besides the config: versions, and the device's name."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "num_threads": torch.get_num_threads(),
    }
