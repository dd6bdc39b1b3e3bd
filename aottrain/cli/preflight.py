"""What only a look at the machine can tell, before a run begins: files, folders, devices, targets."""

from __future__ import annotations

import errno
import importlib.util
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from aottrain.cli.lock import GONE, is_taken
from aottrain.config.choices import DATA_KINDS, PATH_NEEDED, RUN_TASKS, TOKENIZERS
from aottrain.config.devices import find_target
from aottrain.config.extensions.recipes import kinds_taken, makes_batches, not_taken, recipe_of
from aottrain.config.extensions.targets import KINDS, load_target
from aottrain.config.folders import has_checkpoint, no_checkpoint
from aottrain.config.run import DataConfig, OptimizerConfig, RunConfig
from aottrain.config.schema import Mistake, command_line, naming
from aottrain.errors import ConfigError
from aottrain.ir.settings.decisions import DEFAULT, MEASURED, read_record
from aottrain.ir.settings.devices import is_file, is_specified
from aottrain.report.runs.reading import SUMMARY, read_summary

# Tasks that log, and of loggers that are extras the packages.
_LOGGING = ("train", "compare")
_OF_EXTRAS = {"tensorboard": "tensorboard", "mlflow": "mlflow-skinny (or mlflow)"}
_OUT_OF_REACH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
# What tasks that take long leave besides a run's own files.
_TABLES = {"compare.csv": "a comparison", "pareto.csv": "a measurement of budgets", "sweep.csv": "a sweep"}


@contextmanager
def said_of_paths() -> Iterator[None]:
    """Inside, a path that the system lets nobody look at, for it is in a folder that may not be entered or its name is
    too long, is a ConfigError. `exists` and its like raise for these."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OUT_OF_REACH or error.filename is None:
            raise
        raise ConfigError(f"{os.fsdecode(error.filename)}: cannot be looked at: {error.strerror}") from error


def missing_paths(config: RunConfig) -> list[Mistake]:
    """Paths that are absent, unreadable or empty. Imports nothing, so that a wrong path is answered at once."""
    mistakes = []
    if config.data.path is not None:
        if text := _unreadable(Path(config.data.path)):
            mistakes.append(Mistake("data.path", text, config.data.path))
    elif config.data.name in PATH_NEEDED:
        mistakes.append(Mistake("data.path", f"data={config.data.name} needs a file or folder", "null"))
    tokenizer = config.data.tokenizer
    if tokenizer not in (None, *TOKENIZERS) and not Path(tokenizer).is_file():
        text = f"no such file; allowed: null, {', '.join(TOKENIZERS)}, the path of a tokenizer.json"
        mistakes.append(Mistake("data.tokenizer", text, tokenizer))
    if tokenizer in TOKENIZERS and config.data.name != DataConfig.name:
        text = f"data={config.data.name} has tokens already; give a file"
        mistakes.append(Mistake("data.tokenizer", text, tokenizer))
    if config.resume not in (None, "auto"):
        absent = "no such file or folder; give the output directory of an earlier run, or auto"
        mistakes += _no_run("resume", config.resume, absent)
    for task in RUN_TASKS:
        if (run := getattr(config, task).run) is not None:
            mistakes += _no_run(f"{task}.run", run, "no such folder; give the output directory of a run")
    base = config.adapter.base
    if base is not None and config.task not in RUN_TASKS and config.resume is None:
        mistakes += _no_run("adapter.base", base, "no such folder; give the output directory of a run")
    if config.export.path is not None and Path(config.export.path).exists():
        text = "is there already; give the path of a new folder"
        mistakes.append(Mistake("export.path", text, config.export.path))
    if config.partition.path is not None and not Path(config.partition.path).is_file():
        text = "no such file; give a plan.json that task=plan device=... wrote"
        mistakes.append(Mistake("partition.path", text, config.partition.path))
    if config.decisions not in (MEASURED, DEFAULT):
        try:
            read_record(config.decisions)
        except ValueError as error:
            reason = "no such file or folder" if not Path(config.decisions).exists() else str(error)
            text = f"{reason}; allowed: {MEASURED}, {DEFAULT}, or the path of a run or of its decisions.json"
            mistakes.append(Mistake("decisions", text, config.decisions))
    return mistakes


def missing_packages(config: RunConfig) -> list[Mistake]:
    """A logger whose library is not installed; wandb is, with aottrain. Imports nothing."""
    name = config.logger.name
    if config.task not in _LOGGING or name not in _OF_EXTRAS or importlib.util.find_spec(name) is not None:
        return []
    text = f"needs {_OF_EXTRAS[name]}, which is not installed: pip install 'aottrain[{name}]'"
    return [Mistake("logger", text, name)]


def _no_run(key: str, run: str, absent: str) -> list[Mistake]:
    text = no_checkpoint(Path(run)) if Path(run).exists() else absent
    return [Mistake(key, text, run)] if text else []


def _unreadable(path: Path) -> str:
    """What is wrong with a data path, or nothing."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name that has a zero byte
        return "no such file or folder"
    except OSError as error:
        return f"cannot be read ({str(error.strerror).lower()})"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return "is neither a file nor a folder; a pipe or a device cannot be read again"
    if not os.access(path, os.R_OK):
        return "cannot be read (permission denied)"
    files = [path] if path.is_file() else path.rglob("*")  # not a list: a folder may have a million
    if not any(file.is_file() and file.stat().st_size for file in files):
        return "the file is empty" if path.is_file() else "the folder holds no data: no file in it has any bytes"
    return ""


def unusable(config: RunConfig, wrong_keys: Iterable[str]) -> list[Mistake]:
    """A device or a target that is not there, or not what it must be. Imports torch and the targets, where there is
    one to look at."""
    checks: dict[str, Callable[[], Any]] = {}
    for kind in KINDS.values():
        section = getattr(config, kind.group)
        if section.target is not None:
            options = kind.options and kind.takes is not None and getattr(section, kind.options) or {}
            checks[kind.key] = partial(load_target, kind.group, section.target, options)
    if config.recipe.target is not None:
        checks[KINDS["recipe"].key] = partial(recipe_of, config.recipe)
    if config.optimizer.target is not None:
        checks[KINDS["optimizer"].key] = partial(_check_optimizer, config.optimizer)
    if config.device.startswith("cuda") or is_file(config.device):
        checks["device"] = partial(device_type, config.device)
    mistakes = []
    wrong = set(wrong_keys)
    wrong |= {kind.key for kind in KINDS.values() if kind.options and kind.options_key in wrong}
    for key in sorted(checks.keys() - wrong):
        try:
            checks[key]()
        except ConfigError as error:
            mistakes += [Mistake.from_line(line) for line in error.mistakes]
    return mistakes


def _check_optimizer(config: OptimizerConfig) -> None:
    from aottrain.trainer.optim import check_target

    check_target(config)


def device_type(name: str) -> str:
    """As "cuda", of the device that `name` means. Imports torch. ConfigError: it is absent."""
    if is_specified(name):
        return find_target(name).kind
    from aottrain.tasks.building.build import find_device

    return find_device(name).type


def without_use(config: RunConfig) -> list[Mistake]:
    """Data that the recipe does not take, a path for a recipe that reads none, or a folder of text without any. Imports
    torch."""
    if config.data.target is not None:
        return []
    recipe = recipe_of(config.recipe)
    options = config.recipe.model if isinstance(config.recipe.model, recipe.Options) else recipe.Options
    makes_its_own = config.data.name == DataConfig.name and makes_batches(recipe, options)
    if not makes_its_own and DATA_KINDS[config.data.name] not in kinds_taken(options):
        return [Mistake.from_line(not_taken(config.data.name, options))]
    if config.data.path is None or config.data.name != DataConfig.name:
        return []
    if makes_its_own:
        text = f"recipe {config.recipe.title} makes its own data and reads no text; leave it out"
        return [Mistake("data.path", text, config.data.path)]
    if Path(config.data.path).is_file():
        return []
    from aottrain.data.tokens.documents import is_saved_dataset
    from aottrain.data.tokens.text import NO_TEXT, text_files

    if any(text_files(Path(config.data.path))) or is_saved_dataset(Path(config.data.path)):
        return []
    return [Mistake("data.path", NO_TEXT, config.data.path)]


def unwritable(key: str, directory: str) -> list[Mistake]:
    """What keeps the output directory that `key` names from being made."""
    path = Path(directory).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return []
    reason = "is not writable" if existing.is_dir() else "is a file"
    return [Mistake(key, f"cannot be made: {existing} {reason}", directory)]


def _leads_out(path: Path, folder: Path) -> bool:
    """Whether this is no file of the folder, but a link to one elsewhere or to nothing, a pipe or a device. Folders may
    be links."""
    if path.is_file():
        return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    return os.path.lexists(path) and not path.is_dir()  # a file that is gone since leads nowhere


def occupied(config: RunConfig, key: str, directory: str) -> list[Mistake]:
    """What another run, or a sweep, has left in the output directory that `key` names, which this one would write over,
    unless it goes on with it; and links by which what is written there would land elsewhere."""
    folder, resume = Path(directory), config.resume
    if leaders := sorted(path.name for path in (*folder.glob("*"), *folder.glob(".*/*")) if _leads_out(path, folder)):
        names = ", ".join(leaders[:3])
        text = f"what is written to {names} there would land elsewhere; remove it, or give another {key}"
        return [Mistake(key, text, directory)]
    goes_on = resume is not None and (resume == "auto" or folder in (Path(resume), *Path(resume).parents))
    goes_on = goes_on or (key == "hydra.sweep.dir" and config.sweep.resume is not None)
    if goes_on or (taken := is_taken(folder)):  # of one that runs now, its lock says more
        return []
    summary = read_summary(folder / SUMMARY, [])
    steps, status = summary.get("steps") or 0, summary.get("status", "unknown")
    status = GONE if status == "running" and taken is False else status
    left = next((what for name, what in _TABLES.items() if (folder / name).is_file()), "")
    if steps or has_checkpoint(folder):
        left = f"a run of {steps} steps ({status})"
    if not left:
        return []
    text = f"has {left}, which would be written over; give another {key}"
    if config.task == "train" and has_checkpoint(folder):
        more = [f"trainer.steps={2 * steps}"] if status == "finished" else []
        text += f", or go on with it: {command_line(['resume=auto', naming('hydra.run.dir', folder), *more])}"
    return [Mistake(key, text, directory)]
