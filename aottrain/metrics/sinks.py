"""Where figures go: metrics.csv, summary.json and whatever else takes rows. Names are the same for every engine."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, float | int | None]

COLUMNS = (
    "step",
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "val/loss",
    "perf/step_ms",
    "perf/tokens_per_s",
    "perf/samples_per_s",
    "memory/peak_bytes",
    "memory/peak_rss_bytes",
)


class Sink(Protocol):
    """Takes the rows of one or more steps at a time, the newest last, and at the end the summary."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None: ...


class CsvSink:
    """metrics.csv: one row a step, columns as in COLUMNS, an empty cell where there is no figure.

    kept_steps: a resumed run keeps the rows up to the step it goes on from, and drops those it is about to repeat.
    """

    def __init__(self, path: Path, kept_steps: int = 0):
        kept: list[dict[str, str]] = []
        if kept_steps and path.exists():
            with path.open(newline="") as old:
                kept = [row for row in csv.DictReader(old) if (row.get("step") or "").isdigit()]
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="", extrasaction="ignore")
        self._writer.writeheader()
        self._writer.writerows(row for row in kept if int(row["step"]) <= kept_steps)
        self._file.flush()

    def write(self, rows: Sequence[Row]) -> None:
        self._writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
        self._file.flush()

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._file.close()


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Strict JSON (what is not finite becomes null), whole or not at all: readers may look while a run goes on."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(_strict(summary), indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
