"""A run small enough to repeat in every test: one thread, two layers, a few milliseconds a step."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from aottrain.config.extensions.recipes import load_recipe
from aottrain.config.run import LoggerConfig, RecipeConfig, RunConfig
from aottrain.metrics.sinks import CsvSink
from aottrain.tasks import train
from aottrain.tasks.building.build import build_job
from aottrain.tasks.summary import first_summary
from aottrain.trainer.checkpoint import CheckpointFolder
from aottrain.trainer.loop import Output, fit
from aottrain.trainer.preparing import prepare


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(tmp_path):
    """tiny(engine="eager", trainer={"steps": 4}, ...) -> RunConfig: sections take changes, the rest takes values."""

    def make(engine: str = "eager", model: dict | None = None, **changes) -> RunConfig:
        options = {"num_layers": 2, "width": 16, "num_heads": 2, "context": 16, **(model or {})}
        config = RunConfig(
            output_dir=str(tmp_path / "run"),
            logger=LoggerConfig(name="csv"),
            recipe=RecipeConfig(model=load_recipe("transformer").Options(**options)),
        )
        defaults = {
            "trainer": {"steps": 4, "log_every": 2, "eval_every": 0, "eval_batches": 2, "sample_bytes": 0},
            "data": {"batch_size": 4},
            "measure": {"warmup_steps": 1},
            "lr_schedule": {"warmup_steps": 2},
            "engine": {"name": engine},
        }
        for section, values in defaults.items():
            changes[section] = {**values, **changes.get(section, {})}
        return dataclasses.replace(
            config,
            **{
                key: dataclasses.replace(getattr(config, key), **value) if isinstance(value, dict) else value
                for key, value in changes.items()
            },
        )

    return make


@dataclasses.dataclass
class Trained:
    """What a run left behind."""

    directory: Path

    @property
    def summary(self) -> dict:
        return json.loads((self.directory / "summary.json").read_text(), parse_constant=_refuse)

    @property
    def rows(self) -> list[dict[str, str]]:
        with (self.directory / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    @property
    def losses(self) -> list[str]:
        return [row["train/loss"] for row in self.rows]


def _refuse(name: str) -> None:
    raise AssertionError(f"summary.json has {name}, which is not JSON")


@pytest.fixture
def left_by():
    """left_by(config) -> what the run in its output directory left there."""
    return lambda config: Trained(Path(config.output_dir))


@pytest.fixture
def fit_job():
    """fit_job(config, change=None): build a job, let `change(job)` alter it, train it; returns (job, summary)."""

    def train(config, change=None):
        job = build_job(config)
        if change is not None:
            change(job)
        directory = Path(config.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        summary = first_summary(config, job)
        sinks = [CsvSink(directory / "metrics.csv")]
        checkpoints = CheckpointFolder(directory / "checkpoints", config.trainer)
        output = Output(sinks, summary, directory / "summary.json", checkpoints)
        prepare(job)
        fit(job, config, output)
        return job, summary

    return train


def unbroken_and_resumed(tiny, folder: Path, engine: str, **trainer) -> tuple[RunConfig, RunConfig]:
    """The configurations of a run of four steps, and of one that goes on after two of another run; all have ended."""
    kept = {"eval_every": 2, **trainer}
    whole, first = (tiny(engine, trainer={"steps": n, **kept}, lr_schedule={"total_steps": 4}) for n in (4, 2))
    half = dataclasses.replace(first, output_dir=str(folder / "half"))
    rest = dataclasses.replace(whole, output_dir=str(folder / "rest"), resume=half.output_dir)
    for config in (whole, half, rest):
        assert train.run(config) == 0
    return whole, rest
