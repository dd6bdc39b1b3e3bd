"""The flight record: the last steps of a run and what was said about it, written when it dies."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from aottrain.ir.settings.files import write_text_whole
from aottrain.metrics import memory
from aottrain.metrics.sinks import strict

FILE = "flight.json"
_NUM_STEPS = 100


class FlightRecord:
    """Kept in memory, of bounded length."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, Any]] = deque(maxlen=_NUM_STEPS)
        self._said: deque[str] = deque(maxlen=_NUM_STEPS)

    def add(self, row: Mapping[str, Any]) -> None:
        """The figures of a step that has been read."""
        self._steps.append(dict(row))

    def note(self, line: str) -> None:
        self._said.append(line)

    def write(self, folder: Path, error: BaseException, doing: Mapping[str, Any]) -> None:
        """What cannot be written (a full disk may be why the run died) is left."""
        record = {
            "error": f"{type(error).__name__}: {error}",
            **doing,
            "peak_rss_bytes": memory.peak_rss_bytes(),
            "steps": list(self._steps),
            "said": list(self._said),
        }
        with suppress(OSError):
            write_text_whole(folder / FILE, json.dumps(strict(record), indent=1) + "\n")
