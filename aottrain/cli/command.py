"""What a command line comes to: help, a run, a sweep; and a run's output directory, as Hydra makes it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import hydra
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, read_write

from aottrain import __version__
from aottrain.cli import raise_what_came
from aottrain.cli.compose import Checked, Composer, Job
from aottrain.cli.listing import ls
from aottrain.cli.lock import only_run_in
from aottrain.cli.resuming import all_steps_made, with_recorded
from aottrain.cli.usage import config_folder, parse_flags, usage
from aottrain.cli.values import HYDRA_BASE, as_hydra_takes_it, at_home, directory_of, found, text_of, verbatim
from aottrain.config.launch import place
from aottrain.config.run import RunConfig
from aottrain.errors import AottrainError, ConfigError, RecipeError
from aottrain.trainer.console import copied_to

# Words before which no training is configured: what follows is theirs. Each is a function of its name in a module that
# is imported where it is asked for, so that a run, or what is wrong with it, does not wait for pages.
SUBCOMMANDS = {
    "new": "aottrain.cli.scaffold",
    "report": "aottrain.cli.pages.reporting",
    "watch": "aottrain.cli.pages.watching",
}


def run(arguments: list[str]) -> int:
    """Do what the arguments say; the exit code. Raises AottrainError."""
    if arguments and arguments[0] in SUBCOMMANDS:
        subcommand = getattr(importlib.import_module(SUBCOMMANDS[arguments[0]]), arguments[0])
        return int(subcommand(arguments[1:]))
    arguments = [at_home(text) for text in arguments]
    if not {"-m", "--multirun"} & {*arguments}:  # where commas separate values
        arguments = [verbatim(text) for text in arguments]
    flags = parse_flags(arguments)
    named = {"--config-dir": flags.config_dir, "--config-path": flags.config_path}
    absent = [f"{flag} {path}: no such folder" for flag, path in named.items() if path and not os.path.isdir(path)]
    if absent:
        raise ConfigError(absent)
    folder = Path(flags.config_path).absolute() if flags.config_path else config_folder()
    extra = [Path(flags.config_dir).absolute()] if flags.config_dir else []
    if flags.help or flags.version:
        print(usage([config_folder(), *extra], __version__) if flags.help else f"aottrain {__version__}")
        return 0
    if flags.overrides[:1] == ["ls"]:
        return ls([config_folder(), *extra], flags.overrides[1:])
    if flags.hydra_help or flags.info or flags.shell_completion:
        return _show(arguments, folder)
    with initialize_config_dir(str(folder), job_name="aottrain", **HYDRA_BASE):
        composer = Composer(flags.config_name or "config", extra)
        if flags.cfg is None:
            return _run(composer, flags)
        _sound(composer.check(flags.overrides, look=False))
        resumed = with_recorded(composer, flags.overrides)
        texts = composer.completed(resumed.texts)
    return _show([*(text for text in arguments if text not in flags.overrides), *texts], folder)


def _show(arguments: Sequence[str], folder: Path) -> int:
    """Leave flags that only show something to Hydra."""
    sys.argv = [sys.argv[0], *map(as_hydra_takes_it, arguments)]
    hydra.main(**HYDRA_BASE, config_path=str(folder), config_name="config")(lambda composed: None)()
    return 0


def _sound(checked: Checked) -> Job:
    job, mistakes = checked
    if mistakes or job is None:
        raise ConfigError([str(mistake) for mistake in mistakes])
    return job


def _run(composer: Composer, flags: argparse.Namespace) -> int:
    resumes = any(text.startswith("sweep.resume=") for text in flags.overrides)
    if resumes:
        from aottrain.cli.sweeps import resumed_folder, with_recorded_sweep

        if folder := resumed_folder(composer, flags.overrides):
            flags = with_recorded_sweep(composer, flags, folder)
        else:
            resumes = False
    overrides, _ = composer.parse(flags.overrides)
    head, _, _ = composer.compose([text_of(item) for item in overrides if not item.is_sweep_override()])
    mode = found(head, "hydra.mode")  # set by an experiment's file, or by hydra.mode=MULTIRUN
    if flags.multirun or resumes or mode == RunMode.MULTIRUN:
        if place().size > 1:
            raise ConfigError("-m: a sweep starts processes of its own; start it without torchrun")
        from aottrain.cli.sweeps import sweep  # which makes a page in the end

        return sweep(composer, flags, found(head, "hydra.sweeper.params") or {})
    printed: list[str] = []
    with ExitStack() as loading:

        def announce(config: RunConfig, directory: str) -> None:
            """The first line, before torch is imported, which takes longer than all until here."""
            what = f"{config.task} {config.recipe.title}, engine {config.engine.name}"
            printed.append(f"aottrain {__version__}: {what}, in {os.path.relpath(directory)}; loading torch")
            print(printed[-1], flush=True)
            loading.enter_context(_turning("loading torch"))

        job = _sound(composer.check(flags.overrides, announce=announce))
        raise_what_came()
        line = all_steps_made(job.config, directory_of(job.composed, "hydra.run.dir")[0], job.differs)
    if line:
        print(line, flush=True)
        return 0
    return _run_one(composer, job, printed)


def _turning(what: str) -> AbstractContextManager[object]:
    """What moves on a terminal while something is imported, which says nothing itself."""
    from aottrain.trainer.progress import Status  # here, for tqdm is imported with it, and the first line does not wait

    return Status(what)


def _task(name: str) -> Callable[[RunConfig], int]:
    """The function `run` of a task's module, which brings the trainer, the compiler and what these need of torch."""
    with _turning("loading the compiler"):
        run: Callable[[RunConfig], int] = importlib.import_module(f"aottrain.tasks.{name}").run
    raise_what_came()
    return run


def _run_one(composer: Composer, job: Job, printed: Sequence[str]) -> int:
    """Make the output directory, which is this run's alone, and run the task in it. Of several processes that do the
    run together the first one makes it, and tells the others."""
    if place().rank:
        return int(_task(job.config.task)(job.config))
    with only_run_in(Path(directory_of(job.composed, "hydra.run.dir")[0]), "hydra.run.dir"):
        return _run_in_folder(composer, job, printed)


def _run_in_folder(composer: Composer, job: Job, printed: Sequence[str]) -> int:
    """Fill the output directory as Hydra does (.hydra/, log file, callbacks) and run the task in it.

    printed: what has been printed already; it goes to the log, as all that is printed from now on does.
    """
    errors: list[Exception] = []
    is_begun = False

    def task(_: DictConfig) -> int:
        nonlocal is_begun
        is_begun = True
        directory = HydraConfig.get().runtime.output_dir
        with copied_to(Path(directory, f"{HydraConfig.get().job.name}.log"), printed) as log:
            try:
                for note in job.notes:
                    print(note, flush=True)
                config = replace(job.config, output_dir=directory)
                return _task(config.task)(config)
            except BaseException as error:
                own = isinstance(error, AottrainError | KeyboardInterrupt)
                if not own or isinstance(error, RecipeError):
                    log.write(traceback.format_exc())
                if own:
                    log.write(f"{type(error).__name__}: {error}\n")
                if isinstance(error, Exception):  # which Hydra would keep for itself
                    errors.append(error)
                raise

    composed = job.composed
    with read_write(composed.hydra):
        composed.hydra.mode = RunMode.RUN
    callbacks = Callbacks(composed)
    context = HydraContext(config_loader=composer.loader, callbacks=callbacks)
    callbacks.on_run_start(config=composed, config_name=composer.config_name)
    try:
        ended = run_job(task, composed, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
    except MemoryError as error:  # what Hydra does after a task that had no memory left
        raise (errors or [error])[0] from None
    except (OSError, ValueError) as error:  # of what Hydra writes there; a log's file that cannot be is a ValueError
        cause = error if isinstance(error, OSError) else error.__cause__
        if is_begun or not isinstance(cause, OSError):
            raise
        folder, _ = directory_of(composed, "hydra.run.dir")
        told = f"{cause.filename or 'its configuration'}: {cause.strerror}"
        raise ConfigError(f"hydra.run.dir={folder}: cannot be written to: {told}") from error
    callbacks.on_run_end(config=composed, config_name=composer.config_name, job_return=ended)
    if errors:
        raise errors[0]
    return ended.return_value or 0
