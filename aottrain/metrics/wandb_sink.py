"""Weights & Biases: a guest. It starts late, it may fail, and training goes on without it.

Runs overlay because nothing about the engine is in a metric's name: engine, kernel and budget are in the run's config,
and runs of one recipe share a group.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from aottrain.explain.report import CompileReport
from aottrain.metrics.guest import ARTIFACTS, Guest, bench, environment, files_of
from aottrain.metrics.report_tables import tables
from aottrain.metrics.sinks import Row

INIT_TIMEOUT_S = 20
LONGEST_S = 60.0  # of a call while a run goes on, which its service takes and answers on this machine
LAST_S = 1800.0  # of those at the end, when all that was logged is sent


class WandbSink(Guest):
    """One wandb run. Every call into wandb is guarded: the first failure is said in one line and ends the logging.

    logger: the run's LoggerConfig. Where it has wandb's default or None, an environment variable (WANDB_MODE,
    WANDB_PROJECT, WANDB_RUN_GROUP, WANDB_NAME, WANDB_TAGS, ...) decides. run_id: the run to go on with, or None.
    """

    name: ClassVar[str] = "wandb"
    longest_s: ClassVar[float | None] = LONGEST_S

    def __init__(
        self,
        logger: Any,
        *,
        directory: Path,
        config: Mapping[str, Any],
        name: str,
        group: str,
        tags: Sequence[str],
        run_id: str | None = None,
        say: Callable[[str], None] = print,
    ):
        super().__init__(say)
        self.mode = os.environ.get("WANDB_MODE", logger.mode) if logger.mode == "offline" else logger.mode
        self._run: Any = None
        project = os.environ.get("WANDB_PROJECT", logger.project) if logger.project == "aottrain" else logger.project
        environment_tags = [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]

        def start() -> Any:
            own_folders(directory)
            import wandb

            run = wandb.init(
                project=project,
                mode=self.mode,
                dir=str(directory),
                config={**config, "env": environment()},
                name=logger.run_name or os.environ.get("WANDB_NAME") or name,
                group=logger.group or os.environ.get("WANDB_RUN_GROUP") or group,
                job_type=os.environ.get("WANDB_JOB_TYPE") or "train",
                tags=[*tags, *logger.tags, *environment_tags],
                id=run_id or os.environ.get("WANDB_RUN_ID"),
                resume="allow" if run_id else None,
                reinit="finish_previous",  # or the second job of a sweep would go on in the run of the first
                settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT_S),
            )
            run.define_metric("trainer/step", hidden=True)
            for pattern in ("train/*", "val/*", "perf/*", "memory/*", "verify/*"):
                run.define_metric(pattern, step_metric="trainer/step")
            return run

        self._run = self._guarded(start)

    @property
    def run_id(self) -> str | None:
        return self._guarded(lambda: self._run.id) if self._run is not None else None

    @property
    def directory(self) -> str | None:
        """The folder that `wandb sync` takes; None where there is none."""
        return self._guarded(lambda: str(Path(self._run.dir).parent)) if self._run is not None else None

    @property
    def hint(self) -> str | None:
        directory = self.directory if self.mode == "offline" else None
        return directory and f"wandb sync {directory}"

    def rewind(self, step: int) -> None:
        """Nothing: wandb shows the newest of several values of one trainer/step last."""

    def write(self, rows: Sequence[Row]) -> None:
        """One `log` for each row. Steps go as a value: wandb's own step may only grow, and a resumed run goes back."""

        def log() -> None:
            for row in rows:
                figures = {key: value for key, value in row.items() if value is not None and key != "step"}
                self._run.log({"trainer/step": row["step"], **figures})

        if self._run is not None:
            self._guarded(log)

    def publish(self, directory: Path, report: CompileReport | None) -> None:
        """What is looked at after the run: its page, the compiler's decisions as tables, and its files as artifacts.
        Before `close`, when the pages are written."""

        def log() -> None:
            import wandb

            for name, table in tables(report).items():
                self._run.log({f"compile/{name}": wandb.Table(columns=list(table.columns), data=table.rows)})
            if (directory / "run.html").is_file():
                self._run.log({"page": wandb.Html((directory / "run.html").read_text(encoding="utf-8"), inject=False)})
            for kind in ARTIFACTS:
                files = files_of(directory, kind)
                artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
                for file in files:
                    artifact.add_file(str(file))
                if files:
                    self._run.log_artifact(artifact)
            checkpoints = directory / "checkpoints"
            if checkpoints.is_dir():
                # Where it lies, not a copy: it may be larger than all the rest of the disk's free space.
                artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint")
                artifact.add_reference(checkpoints.resolve().as_uri(), checksum=False)
                self._run.log_artifact(artifact)

        if self._run is not None:
            self._guarded(log, LAST_S)

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """The summary; beside it under `bench/` the same keys for every engine. A fault alerts those who asked for it
        in their settings."""

        def finish() -> None:
            self._run.summary.update({key: value for key, value in summary.items() if value is not None})
            self._run.summary.update(bench(summary))
            if summary.get("status") == "failed":
                self._run.alert(title="the run failed", text=str(summary.get("error", "")), level="ERROR")
            elif summary.get("fallbacks"):
                text = f"{summary['fallbacks']} calls ran eagerly: see the compile report"
                self._run.alert(title="calls ran eagerly", text=text, level="WARN")
            self._run.finish(exit_code=exit_code)

        if self._run is not None:
            self._guarded(finish, LAST_S)
            self._run = None

    def _left(self, error: Exception) -> None:
        self._run = None
        if isinstance(error, TimeoutError):
            _end_service()
        if isinstance(error, ConnectionError | TimeoutError):
            _forget_service()


def own_folders(directory: Path) -> None:
    """Where the home folder takes no files, wandb's caches and settings go into the run's: else its second process,
    which has nowhere to log to, does so on the screen."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "wandb")
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ.setdefault(name, str(directory / "wandb"))


def _end_service() -> None:
    """wandb's own process, a child of this one, hangs: what waits for it, now and when Python exits, would do so for
    ever. Linux alone."""
    for tasks in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError, ValueError):
            for child in map(int, tasks.read_text(encoding="ascii").split()):
                if b"wandb-core" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)


def _forget_service() -> None:
    """wandb's own process is gone. Without this, wandb would print a traceback about that when Python exits."""
    import wandb

    with suppress(Exception, SystemExit):
        wandb.teardown(exit_code=1)
