"""MLflow: a guest. Runs go to a folder, which needs no server and no account, or wherever `logger.uri` says."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from aottrain.config.folders import is_address
from aottrain.explain.report import CompileReport
from aottrain.metrics.guest import ARTIFACTS, Guest, bench, environment, files_of
from aottrain.metrics.report_tables import tables
from aottrain.metrics.sinks import Row, strict

FOLDER = "mlruns"
# What one request may carry, and how long a parameter's value may be.
MOST_METRICS, MOST_PARAMETERS, MOST_CHARACTERS = 1000, 100, 500
_ENDS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# A store of files is offered still, but only to those who ask for it; the others keep a server that is away from
# holding a step up, and MLflow from sending its own figures of use. What is set already stands.
_ENVIRONMENT = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class MlflowSink(Guest):
    """One MLflow run of the experiment `logger.project`: metrics by step under the names of metrics.csv.

    logger: the run's LoggerConfig. Where its uri is None, MLFLOW_TRACKING_URI says where runs are kept, or else the
    folder `mlruns` of the current one. run_id: the run to go on with; where that store has none, a new one begins.
    """

    name: ClassVar[str] = "mlflow"

    def __init__(
        self,
        logger: Any,
        *,
        config: Mapping[str, Any],
        name: str,
        group: str,
        tags: Sequence[str],
        run_id: str | None = None,
        say: Callable[[str], None] = print,
    ):
        super().__init__(say)
        self.uri = store_of(logger.uri or os.environ.get("MLFLOW_TRACKING_URI") or FOLDER)
        self._client: Any = None
        self._step = 0

        def start() -> str:
            for variable, value in _ENVIRONMENT.items():
                os.environ.setdefault(variable, value)
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
            if run_id is not None and self._goes_on(run_id):
                return run_id
            labels = {"group": logger.group or group, "tags": ",".join([*tags, *logger.tags])}
            experiment = _experiment(self._client, logger.project)
            new = self._client.create_run(experiment, run_name=logger.run_name or name, tags=labels).info.run_id
            self._log_parameters(new, {**config, "env": environment()})
            return new

        self._run_id = self._guarded(start)

    @property
    def run_id(self) -> str | None:
        return None if self.is_gone else self._run_id

    @property
    def hint(self) -> str | None:
        if self.is_gone or not self.uri.startswith("file:"):
            return None
        return f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {self.uri}"

    def rewind(self, step: int) -> None:
        """Nothing: MLflow keeps every value of a step, and shows the newest as the last."""

    def write(self, rows: Sequence[Row]) -> None:
        def log() -> None:
            figures = []
            for row in rows:
                self._step = int(row["step"] or 0)
                figures += [(name, value, self._step) for name, value in row.items() if name != "step"]
            self._log_metrics(figures)

        self._guarded(log)

    def publish(self, directory: Path, report: CompileReport | None) -> None:
        """The pages, the figures' files and the decisions as artifacts; tables as JSON, `{"columns", "data"}`."""

        def log() -> None:
            for name, table in tables(report).items():
                text = json.dumps(strict({"columns": list(table.columns), "data": table.rows}), allow_nan=False)
                self._client.log_text(self._run_id, text, f"compile/{name}.json")
            for file in (file for kind in ARTIFACTS for file in files_of(directory, kind)):
                self._client.log_artifact(self._run_id, str(file))

        self._guarded(log)

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        def finish() -> None:
            self._log_metrics([(name, value, self._step) for name, value in bench(summary).items()])
            for key in ("status", "error"):
                if summary.get(key):
                    self._client.set_tag(self._run_id, key, str(summary[key]))
            self._client.set_terminated(self._run_id, _ENDS.get(str(summary.get("status")), "FAILED"))

        self._guarded(finish)

    def _goes_on(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException:
            return False
        return True

    def _log_parameters(self, run_id: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        found = [Param(name, text[:MOST_CHARACTERS]) for name, text in _leaves(config)]
        for first in range(0, len(found), MOST_PARAMETERS):
            self._client.log_batch(run_id, params=found[first : first + MOST_PARAMETERS])

    def _log_metrics(self, figures: Sequence[tuple[str, float | int | None, int]]) -> None:
        """Of (name, value, step); what is missing, or not finite, which not every store takes, is left out."""
        from mlflow.entities import Metric

        now = int(time.time() * 1e3)
        found = [
            Metric(name, float(value), now, step)
            for name, value, step in figures
            if value is not None and math.isfinite(value)
        ]
        for first in range(0, len(found), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=found[first : first + MOST_METRICS])


def store_of(place: str) -> str:
    """The address of a folder; an address as it is."""
    return place if is_address(place) else Path(place).absolute().as_uri()


def _experiment(client: Any, name: str) -> str:
    """Its id. Jobs of a sweep may make it at the same time: the one that is too late takes the other's."""
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:
        if (found := client.get_experiment_by_name(name)) is None:
            raise
        return found.experiment_id


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names, as they are typed, with their values as text; MLflow refuses a value that is empty."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, str(value) or "''"
