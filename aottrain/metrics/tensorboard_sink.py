"""TensorBoard: a guest. Its files are in the run's folder; `tensorboard --logdir` of a folder above overlays runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from aottrain.explain.report import CompileReport
from aottrain.metrics.guest import Guest, bench, environment
from aottrain.metrics.report_tables import Table, tables
from aottrain.metrics.sinks import Row, strict

MOST_ROWS = 100


class TensorBoardSink(Guest):
    """Scalars by step under the names of metrics.csv, `bench/...` at the end; configuration, tables, summary as texts.

    directory: the run's. first_step: the one that comes next; of a resumed run TensorBoard drops what was logged of it
    and later ones before.
    """

    name: ClassVar[str] = "tensorboard"

    def __init__(
        self, *, directory: Path, config: Mapping[str, Any], first_step: int = 1, say: Callable[[str], None] = print
    ):
        super().__init__(say)
        self.folder = directory / "tensorboard"
        self._step = first_step - 1
        self._writer: Any = None
        self._begin(first_step if first_step > 1 else None)
        self._guarded(lambda: self._add_text("config", _block({**config, "env": environment()})))

    @property
    def hint(self) -> str | None:
        return None if self.is_gone else f"tensorboard --logdir {self.folder}"

    def rewind(self, step: int) -> None:
        """A new file, which says from which step on the ones before no longer count."""
        self._guarded(lambda: self._writer.close())
        self._begin(step + 1)

    def write(self, rows: Sequence[Row]) -> None:
        def log() -> None:
            for row in rows:
                self._step = int(row["step"] or 0)
                for name, value in row.items():
                    if value is not None and name != "step":
                        self._writer.add_scalar(name, value, self._step)
            self._writer.flush()

        self._guarded(log)

    def publish(self, directory: Path, report: CompileReport | None) -> None:
        def log() -> None:
            for name, table in tables(report).items():
                self._add_text(f"compile/{name}", _markdown(table))

        self._guarded(log)

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        def finish() -> None:
            for name, value in bench(summary).items():
                if value is not None:
                    self._writer.add_scalar(name, value, self._step)
            self._add_text("summary", _block({**summary, "exit_code": exit_code}))
            self._writer.close()

        self._guarded(finish)

    def _begin(self, purge_step: int | None) -> None:
        def start() -> Any:
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(log_dir=str(self.folder), purge_step=purge_step)

        self._writer = self._guarded(start)

    def _add_text(self, name: str, text: str) -> None:
        self._writer.add_text(name, text, self._step)


def _block(values: Mapping[str, Any]) -> str:
    """As Markdown shows it unchanged."""
    text = json.dumps(strict(values), indent=2, allow_nan=False)
    return "\n".join(f"    {line}" for line in text.splitlines())


def _markdown(table: Table) -> str:
    """The first rows; it says where there are more."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows[:MOST_ROWS]]
    text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
    more = len(table.rows) - MOST_ROWS
    return text + (f"\n\n{more:,} more rows are in compile_report.html" if more > 0 else "")
