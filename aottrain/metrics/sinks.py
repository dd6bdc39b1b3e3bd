"""Where figures go: metrics.csv, summary.json and whatever else takes rows. Names are the same for every engine."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from aottrain.errors import OutputError
from aottrain.ir.settings.files import write_text_whole, write_whole

Row = Mapping[str, float | int | None]

COLUMNS = (
    "step",
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "val/loss",
    "verify/max_error",
    "perf/step_ms",
    "perf/tokens_per_s",
    "perf/samples_per_s",
    "memory/peak_bytes",
    "memory/peak_rss_bytes",
)


OWN = "val/"
"""What the name of a column begins with that has a recipe's own metric of held-out data."""
OWN_NAME = re.compile(r"[\w.-]{1,80}")
_STEP = re.compile("[0-9]{1,18}")


def is_own(name: str) -> bool:
    """Whether a column has a recipe's own metric."""
    return name.startswith(OWN) and name not in COLUMNS and bool(OWN_NAME.fullmatch(name.removeprefix(OWN)))


class Sink(Protocol):
    """Takes the rows of one or more steps at a time, the newest last, and at the end the summary."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def rewind(self, step: int) -> None:
        """The run has gone back: rows after this step are to come again."""

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None: ...


class CsvSink:
    """metrics.csv: one row a step, columns as in COLUMNS and for own metrics, an empty cell where there is no figure.

    kept_steps: a resumed run keeps the rows up to the step it goes on from, and drops those it is about to repeat.
    What cannot be written (disk full) is said once, kept, and tried again with the next rows.
    """

    def __init__(self, path: Path, kept_steps: int = 0, say: Callable[[str], None] = print, own: Sequence[str] = ()):
        """own: names of the recipe's own metrics."""
        self.path, self._say, self._error, self._is_gone = path, say, "", False
        self._columns = (*COLUMNS, *(f"{OWN}{name}" for name in own))
        self._begin(kept_steps)

    def _begin(self, kept_steps: int) -> None:
        """The file with the rows that it has up to this step. OutputError: it cannot be written.

        While there is one with rows to keep it stays whole: they are its beginning, unless another release wrote it.
        """
        kept: list[dict[str, str]] = []
        path = self.path
        if kept_steps and path.is_file():
            with path.open(newline="", encoding="utf-8", errors="replace") as old, suppress(csv.Error):
                kept.extend(row for row in csv.DictReader(old) if _STEP.fullmatch(row.get("step") or ""))
        kept = [row for row in kept if int(row["step"]) <= kept_steps]
        text = self._lines([dict(zip(self._columns, self._columns, strict=True)), *kept])
        self._unwritten = b"" if kept else text
        try:
            if kept and path.read_bytes().startswith(text):
                os.truncate(path, len(text))
            elif kept:
                write_whole(path, lambda temporary: temporary.write_bytes(text))
            self._file = path.open("ab" if kept else "wb", buffering=0)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
        self._add([])

    def write(self, rows: Sequence[Row]) -> None:
        self._add([{key: "" if value is None else value for key, value in row.items()} for row in rows])
        if not self._is_gone and (gone := self._gone()):
            self._is_gone = True
            self._say(f"warning: {self.path}: {gone}; going on, checkpoints and all else go to that folder anew")

    def rewind(self, step: int) -> None:
        self._file.close()
        self._begin(step)

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """OutputError: the last rows could not be written."""
        self._add([])
        gone = self._gone()
        self._file.close()
        if self._unwritten:
            raise OutputError(f"{self.path}: lacks its last rows: {self._error}")
        if gone:
            raise OutputError(f"{self.path}: {gone}")

    def _gone(self) -> str:
        """What has become of the file where somebody has taken it from its place, or its folder; else ""."""
        if self.path.exists():
            return ""
        if os.fstat(self._file.fileno()).st_nlink:
            return "was moved while the run wrote it: its rows are where it is now"
        return "was removed while the run wrote it: its rows are lost"

    def _add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._unwritten += self._lines(rows)
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._error:
                self._say(f"warning: {self.path}: cannot be written ({error.strerror}); keeping its rows, trying again")
            self._error = error.strerror or str(error)

    def _lines(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns, restval="", extrasaction="ignore").writerows(rows)
        return text.getvalue().encode()


def write_result(path: Path, text: str) -> None:
    """A file of results, whole or not at all. OutputError: it cannot be written."""
    try:
        write_text_whole(path, text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Strict JSON (what is not finite becomes null), whole or not at all: readers may look while a run goes on.

    On a full disk it goes where the older one lies, whose place it has, so that how the run ended is told there too.
    OutputError: that is not possible either.
    """
    text = json.dumps(strict(summary), indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)  # a link of another's would lead elsewhere
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        try:
            with path.open("r+b", buffering=0) as file:
                written = file.write(text.encode())
                file.truncate(written)
                if written < len(text):  # json escapes all that is not ASCII: a character is a byte
                    raise OSError(error.errno, error.strerror)
        except OSError:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error


def strict(value: Any) -> Any:
    """For JSON: what is not finite becomes null, what is no plain value its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
