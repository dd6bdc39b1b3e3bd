"""A sweep: what the command line lists, as jobs that are all checked before the first one runs."""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, RangeSweep
from omegaconf import OmegaConf, read_write

from aottrain import __version__
from aottrain.cli.compose import Composer, Job
from aottrain.cli.jobs import Start, SweepJob, differing, run_sweep
from aottrain.cli.lock import only_run_in, wait_until_free
from aottrain.cli.values import directory_of, is_within, text_of
from aottrain.config.effect import without_effect
from aottrain.config.extensions.metrics import own_objectives
from aottrain.config.folders import has_checkpoint
from aottrain.config.schema import Mistake, command_line, naming, quoted, show
from aottrain.config.tasks import SweepConfig
from aottrain.errors import ConfigError
from aottrain.ir.settings.files import yaml_of
from aottrain.report.runs.reading import OVERRIDES, SUMMARY, is_run

MOST_JOBS = 10_000
# Of Hydra's settings those that a sweep's folder may bring along.
HARMLESS = ("hydra.sweep.", "hydra.run.", "hydra.mode", "hydra.verbose")


def combinations(composer: Composer, texts: Sequence[str]) -> tuple[list[dict[str, str]], list[Mistake]]:
    """The jobs of a sweep, each as {key: override}: every combination of the values that the overrides list."""
    overrides, mistakes = composer.parse(texts)
    choices: dict[str, list[str]] = {}
    for item in overrides:
        key = item.get_key_element()
        if not item.is_sweep_override():
            choices[key] = [text_of(item)]
        elif is_endless(item):
            mistakes.append(Mistake(text_of(item), f"lists no values, or more than {MOST_JOBS:,}"))
        elif item.is_discrete_sweep() and not item.is_hydra_override():
            choices[key] = [f"{key}={value}" for value in item.sweep_string_iterator()]
        else:
            text = "cannot be swept over; write key=a,b or key=range(0,3), or sweep.search=optuna beside it"
            mistakes.append(Mistake(text_of(item), text))
    if math.prod(map(len, choices.values())) > MOST_JOBS:
        many = " x ".join(f"{len(values):,}" for values in choices.values() if len(values) > 1)
        return [], [*mistakes, Mistake("a sweep", f"has at most {MOST_JOBS:,} jobs, not {many}")]
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())], mistakes


def is_endless(item: Override) -> bool:
    """Whether a range has no end, as by a step of 0, too many values to be jobs, or none."""
    values = item.value()
    if not isinstance(values, RangeSweep):
        return False
    try:
        return not 0 < sum(1 for _ in itertools.islice(values.range(), MOST_JOBS + 1)) <= MOST_JOBS
    except (ValueError, ArithmeticError):  # a step of 0, numbers beyond those that can be counted
        return True


def sweep(composer: Composer, flags: argparse.Namespace, params: Any) -> int:
    """Check every job, then run each in a process of its own. `params`: the sweep that the configuration has."""
    goes_on = Path(folder) if (folder := resumed_folder(composer, flags.overrides)) else None
    texts = [*(f"{key}={value}" for key, value in params.items()), *flags.overrides]
    if searches(composer, texts):
        return _search(composer, flags, texts, goes_on is not None)
    jobs, mistakes = combinations(composer, texts)
    if jobs and not mistakes:  # the first line, for checking takes a moment for each
        print(
            f"aottrain {__version__}: a sweep of {len(jobs)} job{'s' if len(jobs) > 1 else ''}; checking them",
            flush=True,
        )
    planned, folder, settings, wrong = _planned(composer, flags, jobs)
    mistakes += wrong
    mistakes += _not_submittable(settings)
    mistakes += _misplaced(planned, Path(folder))
    if mistakes:
        raise ConfigError([str(mistake) for mistake in dict.fromkeys(mistakes)])
    with only_run_in(Path(folder), "hydra.sweep.dir"):
        if goes_on is None:
            record(Path(folder), [*(["-m"] if flags.multirun else []), *flags.overrides])
        else:
            planned = [_going_on(job) for job in planned]
        return run_sweep(planned, Path(folder), settings.parallel, goes_on is not None, *_elsewhere(settings, folder))


def _planned(
    composer: Composer, flags: argparse.Namespace, jobs: Sequence[dict[str, str]]
) -> tuple[list[SweepJob], str, SweepConfig, list[Mistake]]:
    """The jobs as they will be started, the sweep's folder, its settings, and what is wrong with any of them."""
    from aottrain.trainer.progress import Status  # here, so that the first line does not wait for it

    planned: list[SweepJob] = []
    mistakes: list[Mistake] = []
    folder, settings = "", SweepConfig()
    with Status("checking") as status:
        for number, overrides in enumerate(jobs):
            status.count("jobs", number, len(jobs))
            texts = list(overrides.values())
            job, wrong = composer.check(texts, sweep=True)
            mistakes += wrong
            if job is not None:
                with read_write(job.composed.hydra):
                    job.composed.hydra.job.num, job.composed.hydra.job.id = number, str(number)
                folder = folder or directory_of(job.composed, "hydra.sweep.dir")[0]
                settings = job.config.sweep
                planned.append(_sweep_job(number, composer.parse(texts)[0], job, Path(folder), flags))
    keys = differing(planned)
    return [replace(job, differing=keys) for job in planned], folder, settings, mistakes


def _misplaced(planned: Sequence[SweepJob], folder: Path) -> list[Mistake]:
    """What is wrong with the folders of the jobs: `sweep.resume` and the page look for them below that of the sweep."""
    key = "hydra.sweep.subdir"
    if len({job.directory for job in planned}) < len(planned):
        return [Mistake(key, "must differ between jobs, as ${hydra.job.num} does")]
    places = [Path(os.path.normpath(job.directory)) for job in planned]
    outside = [place for place in places if place == folder or not place.is_relative_to(folder)]
    return [Mistake(key, f"must be a folder below hydra.sweep.dir={folder}", str(place)) for place in outside[:1]]


def searches(composer: Composer, texts: Sequence[str]) -> bool:
    """Whether the configuration that these overrides give has a search choose the jobs."""
    plain = [text_of(item) for item in composer.parse(texts)[0] if not item.is_sweep_override()]
    return (composer.plain(plain).get("sweep") or {}).get("search") == "optuna"


def _search(composer: Composer, flags: argparse.Namespace, texts: Sequence[str], goes_on: bool) -> int:
    """A sweep whose jobs are chosen one after the other."""
    from aottrain.cli.sweeping.search import Search, checked_space, job_texts, open_study

    overrides, mistakes = composer.parse(texts)
    if mistakes:
        raise ConfigError([str(mistake) for mistake in mistakes])
    print(f"aottrain {__version__}: a search; checking the ends of its ranges", flush=True)
    checked: list[Job] = []

    def check(number: int, texts: Sequence[str]) -> list[Mistake]:
        job, wrong = composer.check(texts, sweep=True)
        checked.extend([] if job is None else [job])
        return [*wrong, *([] if job is None else _not_submittable(job.config.sweep))]

    fixed, space = checked_space(overrides, check)
    config = checked[0].config
    folder = Path(directory_of(checked[0].composed, "hydra.sweep.dir")[0])

    def make(number: int, values: Mapping[str, str]) -> SweepJob:
        own = job_texts(fixed, values)
        job, wrong = composer.check(own, sweep=True)
        if job is None:
            raise ConfigError([str(mistake) for mistake in wrong])
        with read_write(job.composed.hydra):
            job.composed.hydra.job.num, job.composed.hydra.job.id = number, str(number)
        planned = replace(_sweep_job(number, composer.parse(own)[0], job, folder, flags), differing=tuple(values))
        return _going_on(planned) if goes_on else planned

    with only_run_in(folder, "hydra.sweep.dir"):
        if not goes_on:
            record(folder, [*(["-m"] if flags.multirun else []), *flags.overrides])
        supply = Search(open_study(folder, config), space, config, make)
        return run_sweep(supply, folder, config.sweep.parallel, goes_on, *_elsewhere(config.sweep, str(folder)))


def _not_submittable(settings: SweepConfig) -> list[Mistake]:
    if settings.executor != "submitit":
        return []
    from aottrain.cli.sweeping.submitted import mistakes

    return mistakes(settings.options)


def _elsewhere(settings: SweepConfig, folder: str) -> list[Start]:
    """What starts jobs where that is not this process."""
    if settings.executor != "submitit":
        return []
    from aottrain.cli.sweeping.submitted import submitting

    return [submitting(Path(folder), settings.options)]


def resumed_folder(composer: Composer, texts: Sequence[str]) -> str:
    """What sweep.resume names in these overrides; "" where it is not there."""
    overrides, _ = composer.parse([text for text in texts if text.startswith("sweep.resume=")])
    return "" if not overrides or overrides[-1].value() is None else str(overrides[-1].value())


def with_recorded_sweep(composer: Composer, flags: argparse.Namespace, folder: str) -> argparse.Namespace:
    """The flags that the sweep in `folder` was started with, and sweep.* as it is given now.

    ConfigError: there is no sweep, or more is given than this. A folder alone starts no code: targets are given again.
    """
    path = Path(folder).expanduser().absolute()
    if is_run(path):
        text = f"holds one run, not a sweep; to go on with it: {command_line([naming('resume', path)])}"
        raise ConfigError(f"sweep.resume={folder}: {text}")
    try:
        typed = [str(text) for text in OmegaConf.create(yaml_of(path / OVERRIDES))]
    except Exception as error:  # YAML and the system have their own for a file that is damaged or absent
        raise ConfigError(f"sweep.resume={folder}: no sweep was recorded there ({OVERRIDES} cannot be read)") from error
    recorded = [text for text in typed if text != "-m" and not text.startswith(("sweep.resume=", "hydra.sweep.dir="))]
    more = [text for text in flags.overrides if not text.startswith("sweep.") and text not in recorded]
    if more:
        text = "goes on with that sweep's own settings; beside it only sweep.parallel and its targets are given"
        raise ConfigError(f"sweep.resume={folder}: {text}, not {' '.join(more)}")
    parsed, mistakes = composer.parse(recorded)
    if mistakes:
        raise ConfigError([f"sweep.resume={folder}: {mistake}" for mistake in mistakes])
    starting = [text_of(item) for item in parsed if _may_start_code(item)]
    if missing := [text for text in starting if text not in flags.overrides]:
        text = "a folder alone starts no code, so name again what starts some, if you trust it"
        raise ConfigError(f"sweep.resume={folder}: {text}: {' '.join(missing)}")
    own = [text for text in flags.overrides if text.startswith("sweep.") and text not in recorded]
    again = argparse.Namespace(**vars(flags))
    again.multirun = "-m" in typed
    again.overrides = [*recorded, *own, f"hydra.sweep.dir={quoted(str(path))}"]
    return again


def _may_start_code(item: Override) -> bool:
    """Whether it names code, or sets what starts some: Hydra's own settings (where files are looked for, callbacks,
    what the environment is) but for folders and the like, and what a cluster runs before a job."""
    key = item.key_or_group
    if key.startswith("hydra"):
        return not key.startswith(HARMLESS)
    return key == "sweep" or is_within(key, "sweep.options") or key.endswith(".target")


def _going_on(job: SweepJob) -> SweepJob:
    """It, and whether a run was there, with a checkpoint to go on from or none: without `resume=auto` its folder is
    refused. One that a sweep which was killed has left ends first: after a step, or elsewhere."""
    wait_until_free(job.directory)
    is_told = any(key in job.overrides for key in ("resume", "task"))
    return replace(job, goes_on=not is_told and ((job.directory / SUMMARY).is_file() or has_checkpoint(job.directory)))


def record(folder: Path, typed: list[str]) -> None:
    """What was typed, where a run's own is recorded."""
    path = folder / OVERRIDES
    path.parent.mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create(typed), path)


def _sweep_job(number: int, overrides: list[Override], job: Job, folder: Path, flags: argparse.Namespace) -> SweepJob:
    directory = folder / str(job.composed.hydra.sweep.subdir)
    named = {"config-dir": flags.config_dir, "config-path": flags.config_path, "config-name": flags.config_name}
    arguments = [f"--{name}={value}" for name, value in named.items() if value]
    metrics = own_objectives(job.config.sweep.objectives) if job.config.sweep.search == "optuna" else {}
    own = ["hydra.mode=RUN", f"hydra.job.num={number}", f"hydra.run.dir={quoted(str(directory))}"]
    overrides = [item for item in overrides if not item.key_or_group.startswith("sweep.")]  # of the sweep, not of a job
    arguments += [*map(text_of, overrides), *own]
    arguments += [f"sweep.objectives=[{','.join(map(quoted, metrics))}]"] if metrics else []  # which it is to have
    wanted = "group" in job.composed.logger and job.config.logger.group is None
    wanted = wanted and not without_effect(job.config, {"logger.group": ""})
    if wanted and "WANDB_RUN_GROUP" not in os.environ:
        arguments.append(f"logger.group={quoted(f'sweep-{folder.name}')}")  # so that wandb overlays the jobs
    shown = {item.key_or_group: show(item.value()) for item in overrides if not item.is_hydra_override()}
    judge_by = job.config.trainer.judge_by
    return SweepJob(number, shown, directory, arguments, judge_by=judge_by, prints_pages=job.config.task == "plan")
