"""What loggers beside metrics.csv have in common: each is a guest, whose first failure ends it and not the run."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from aottrain.explain.report import CompileReport

T = TypeVar("T")
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

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self.is_gone = False

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

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """Its result; None where it failed, now or before."""
        if self.is_gone:
            return None
        try:
            return call()
        except Exception as error:  # whatever it is, it is not worth a training run
            self.is_gone = True
            reason = (str(error).splitlines() or [""])[0]
            what = f"{self.name}: {type(error).__name__}: {reason}"
            self._say(f"{what}; going on without it (metrics.csv has every figure)")
            self._left(error)
            return None

    def _left(self, error: Exception) -> None:
        """After a failure: what the library must be told, that nothing of it is heard later."""


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
