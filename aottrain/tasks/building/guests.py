"""Which logger a run has beside metrics.csv."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aottrain.config.run import RunConfig
from aottrain.metrics.guest import Guest
from aottrain.metrics.mlflow_sink import MlflowSink
from aottrain.metrics.tensorboard_sink import TensorBoardSink
from aottrain.metrics.wandb_sink import WandbSink
from aottrain.trainer.checkpoint import Loaded


def open_guest(config: RunConfig, directory: Path, resume: Loaded | None, say: Callable[[str], None]) -> Guest | None:
    """None where it logs nothing more, or wandb is disabled. resume: it goes on in that run's record."""
    logger = config.logger
    if logger.name == "csv" or (logger.name == "wandb" and logger.mode == "disabled"):
        return None
    values = asdict(config)
    if logger.name == "tensorboard":
        first = resume.step + 1 if resume else 1
        return TensorBoardSink(directory=directory, config=values, first_step=first, say=say)
    parts = _parts(config)
    run_id = resume.state.get(_key(logger.name)) if resume else None
    named: dict[str, Any] = {
        "config": values,
        "name": "-".join([*parts, f"s{config.seed}"]),
        "group": config.recipe.title,
        "tags": [config.recipe.title, *parts],
        "run_id": run_id,
        "say": say,
    }
    return MlflowSink(logger, **named) if logger.name == "mlflow" else WandbSink(logger, directory=directory, **named)


def run_ids(guest: Guest | None) -> dict[str, str | None]:
    """What a checkpoint keeps, so that a run that goes on from it does so in the same record."""
    ids: dict[str, str | None] = {_key("wandb"): None}
    if guest is not None and guest.run_id is not None:
        ids[_key(guest.name)] = guest.run_id
    return ids


def _key(logger: str) -> str:
    return f"{logger}_id"


def _parts(config: RunConfig) -> list[str]:
    """What tells runs of a recipe apart: the engine, and of ours the kernels and the plan."""
    engine, partition = config.engine.name, config.partition
    if engine != "aot":
        return [engine]
    budget = "" if partition.budget is None else str(partition.budget)
    return [engine, config.kernel.name, partition.strategy + budget]
