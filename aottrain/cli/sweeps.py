"""A sweep: what the command line lists, as jobs that are all checked before the first one runs."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf, read_write

from aottrain import __version__
from aottrain.cli.compose import Composer, Job
from aottrain.cli.jobs import SweepJob, run_sweep
from aottrain.cli.lock import only_run_in
from aottrain.cli.values import directory_of, quoted, text_of
from aottrain.config.schema import Mistake, show
from aottrain.errors import ConfigError
from aottrain.report.runs.reading import OVERRIDES


def combinations(composer: Composer, texts: Sequence[str]) -> tuple[list[dict[str, str]], list[Mistake]]:
    """The jobs of a sweep, each as {key: override}: every combination of the values that the overrides list."""
    overrides, mistakes = composer.parse(texts)
    choices: dict[str, list[str]] = {}
    for item in overrides:
        key = item.get_key_element()
        if not item.is_sweep_override():
            choices[key] = [text_of(item)]
        elif item.is_discrete_sweep() and not item.is_hydra_override():
            choices[key] = [f"{key}={value}" for value in item.sweep_string_iterator()]
        else:
            mistakes.append(Mistake(text_of(item), "cannot be swept over; write key=a,b or key=range(0,3)"))
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())], mistakes


def sweep(composer: Composer, flags: argparse.Namespace, params: Any) -> int:
    """Check every job, then run each in a process of its own. `params`: the sweep that the configuration has."""
    jobs, mistakes = combinations(composer, [*(f"{key}={value}" for key, value in params.items()), *flags.overrides])
    if jobs and not mistakes:  # the first line, for checking takes a moment for each
        print(
            f"aottrain {__version__}: a sweep of {len(jobs)} job{'s' if len(jobs) > 1 else ''}; checking them",
            flush=True,
        )
    planned: list[SweepJob] = []
    folder = ""
    for number, overrides in enumerate(jobs):
        texts = list(overrides.values())
        job, wrong = composer.check(texts, sweep=True)
        mistakes += wrong
        if job is not None:
            with read_write(job.composed.hydra):
                job.composed.hydra.job.num, job.composed.hydra.job.id = number, str(number)
            folder = folder or directory_of(job.composed, "hydra.sweep.dir")[0]
            planned.append(_sweep_job(number, composer.parse(texts)[0], job, Path(folder), flags))
    if len({job.directory for job in planned}) < len(planned):
        mistakes.append(Mistake("hydra.sweep.subdir", "must differ between jobs, as ${hydra.job.num} does"))
    if mistakes:
        raise ConfigError([str(mistake) for mistake in dict.fromkeys(mistakes)])
    with only_run_in(Path(folder), "hydra.sweep.dir"):
        record(Path(folder), [*(["-m"] if flags.multirun else []), *flags.overrides])
        return run_sweep(planned, Path(folder))


def record(folder: Path, typed: list[str]) -> None:
    """What was typed, where a run's own is recorded."""
    path = folder / OVERRIDES
    path.parent.mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create(typed), path)


def _sweep_job(number: int, overrides: list[Override], job: Job, folder: Path, flags: argparse.Namespace) -> SweepJob:
    directory = folder / str(job.composed.hydra.sweep.subdir)
    named = {"config-dir": flags.config_dir, "config-path": flags.config_path, "config-name": flags.config_name}
    arguments = [f"--{name}={value}" for name, value in named.items() if value]
    own = ["hydra.mode=RUN", f"hydra.job.num={number}", f"hydra.run.dir={quoted(str(directory))}"]
    arguments += [*map(text_of, overrides), *own]
    if "group" in job.composed.logger and job.config.logger.group is None and "WANDB_RUN_GROUP" not in os.environ:
        arguments.append(f"logger.group={quoted(f'sweep-{folder.name}')}")  # so that wandb overlays the jobs
    shown = {item.key_or_group: show(item.value()) for item in overrides if not item.is_hydra_override()}
    return SweepJob(number, shown, directory, arguments)
