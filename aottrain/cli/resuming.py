"""`resume=<run>`, `export.run=<run>` and its like: the run's own settings go before what is given on the command line.

They become overrides as a person would type them, so that they are checked, recorded and passed on as any others are.

A folder may come from elsewhere, and loading it must run no code of its choice: a recorded target is never taken over.
Who goes on with a run that has targets names them again, on the command line or in a file of `--config-dir`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from aottrain.cli.values import FOREIGN, directory_of, found, is_within, one_line, override, resolved, text_of, value_at
from aottrain.config.choices import GLOBAL_GROUPS, RECIPE_PATHS, RUN_TASKS, TOKENIZERS
from aottrain.config.extensions.targets import KINDS, is_open, is_well_formed
from aottrain.config.folders import CHECKPOINTS, has_checkpoint
from aottrain.config.launch import place
from aottrain.config.run import RunConfig
from aottrain.config.schema import command_line, find, leaves, show
from aottrain.errors import CheckpointError, ConfigError
from aottrain.ir.settings.files import yaml_of
from aottrain.report.runs.reading import SUMMARY, read_summary

if TYPE_CHECKING:
    from aottrain.cli.compose import Composer

RECORD = Path(".hydra", "config.yaml")
# A checkpoint has the decisions themselves.
NOT_TAKEN = ("task", "resume", "resume_override", "hydra", "decisions", *RUN_TASKS)
PATHS = ("data.path", "data.tokenizer", "adapter.base")


@dataclass(frozen=True)
class Recorded:
    """What a run was told."""

    folder: Path
    values: Mapping[str, Any]
    """Its configuration."""
    choices: Mapping[str, str]
    """The option of each group."""


@dataclass(frozen=True)
class Resumed:
    """A command line that resumes a run."""

    texts: tuple[str, ...]
    """It, behind the recorded settings."""
    notes: tuple[str, ...] = ()
    """What to say about it, a line each."""
    differs: bool = False
    """Whether a setting is another one here than in that run."""


def with_recorded(composer: Composer, texts: Sequence[str], *, sweep: bool = False) -> Resumed:
    """The command line `texts`, and before it what the run that it resumes was told otherwise than a new run is.

    What is given in `texts` (a key, an option of a group, what the file of an experiment sets) stands; where it
    differs from the recorded value, a note says so.
    """
    composed, _, _ = composer.compose(texts)
    if composed is None or (key := _key_of_run(composed)) is None:
        return Resumed(tuple(texts))
    path = found(composed, key)
    folder = _own_folder(composed, sweep) if path == "auto" else _folder_of(Path(str(path)).expanduser())
    if folder is None:
        missing = path != "auto" and Path(str(path)).expanduser().exists()
        note = f"{key}={path}: no {RECORD} beside it: what is not given here has its default"
        return Resumed(tuple(texts), (note,) if missing else ())
    recorded = _read(folder)
    together = (*_recorded_overrides(composer, recorded, f"{key}={path}", texts), *texts)
    differences = _differences(composer, recorded, together)
    return Resumed(together, (f"{key}: the settings are those of {folder}", *differences), bool(differences))


def all_steps_made(config: RunConfig, directory: str, differs: bool) -> str:
    """What to say where a run that has finished would be gone on with as it was, and there is no step left; else "".
    directory: that of this run. differs: as in `Resumed`; another setting may be what is wanted."""
    is_alone = config.task == "train" and config.resume is not None and place().size == 1
    if not is_alone or config.resume_override or differs:
        return ""
    folder = Path(directory) if config.resume == "auto" else _folder_of(Path(str(config.resume)).expanduser())
    summary = {} if folder is None else read_summary(folder / SUMMARY, [])
    if folder is None or summary.get("status") != "finished":  # not only its last checkpoint, its figures too
        return ""
    from aottrain.trainer.checkpoint import CheckpointFolder, find  # here, for torch is imported with it

    try:
        found = find(config.resume, CheckpointFolder(folder / CHECKPOINTS), lambda line: None)
    except CheckpointError:  # the run says it
        return ""
    if found is None or found.step < config.trainer.steps:
        return ""
    made = f"{os.path.relpath(folder)} has made all its steps, trainer.steps={config.trainer.steps}, and has finished"
    return f"{made}: nothing is run; a larger trainer.steps goes on with it"


def _key_of_run(composed: DictConfig) -> str | None:
    """The key that names a run whose settings are taken."""
    task = found(composed, "task")
    key = f"{task}.run" if task in RUN_TASKS else "resume"
    return key if found(composed, key) is not None else None


def _folder_of(path: Path) -> Path | None:
    """The folder of the run that a path names: the run's, that of its checkpoints, or one of these."""
    folders = [path, *path.absolute().parents[:2]]
    return next((folder for folder in folders if (folder / RECORD).is_file()), None)


def _own_folder(composed: DictConfig, sweep: bool) -> Path | None:
    """The run's own output directory, where there is something to go on from."""
    folder = Path() if sweep else Path(directory_of(composed, "hydra.run.dir")[0])
    goes_on = not sweep and has_checkpoint(folder) and (folder / RECORD).is_file()
    return folder if goes_on else None


def _read(folder: Path) -> Recorded:
    """Relative paths were those of the folder in which that run was started. ConfigError: the record is damaged."""
    config, hydra = _load(folder / RECORD), _load((folder / RECORD).with_name("hydra.yaml"))
    config.pop("hydra", None)  # a run records none there, and what it would look up is this run's
    values = {key: value for key, value in resolved(config)[0].items() if key not in NOT_TAKEN}
    started_in = OmegaConf.select(hydra, "hydra.runtime.cwd")
    recipe = value_at(values, "recipe.name") if find(values, "recipe.name")[0] else None
    for key in (*PATHS, *RECIPE_PATHS.get(str(recipe), ())):
        path = value_at(values, key) if find(values, key)[0] else None
        if path not in (None, *TOKENIZERS) and started_in is not None:
            group, _, name = key.rpartition(".")
            value_at(values, group)[name] = str(Path(str(started_in)) / Path(str(path)).expanduser())
    choices = OmegaConf.select(hydra, "hydra.runtime.choices") or {}
    named = {str(group): str(option) for group, option in choices.items() if option is not None}
    return Recorded(folder, values, named)


def _load(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.create(yaml_of(path))
    except Exception as error:  # YAML, the system and OmegaConf have their own for a file that is damaged or absent
        raise ConfigError(f"resume: the settings of that run cannot be read: {path}: {one_line(error)}") from error
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create()


def _recorded_overrides(composer: Composer, recorded: Recorded, given: str, texts: Sequence[str]) -> list[str]:
    """Overrides that give a new run the recorded settings, but for what `texts` set. ConfigError: see `_refuse`."""
    overrides = composer.parse(texts)[0]
    own = {item.key_or_group for item in overrides}
    for_all = [text_of(item) for item in overrides if item.key_or_group in GLOBAL_GROUPS]
    shipped, base = composer.plain(()), composer.plain(for_all)
    own |= {group for group in composer.groups if composer.choice(group, for_all) != composer.choice(group, ())}
    own |= {key for key, value in leaves(base) if find(shipped, key)[0] and value != value_at(shipped, key)}
    choices = [
        f"{group}={option}"
        for group, option in recorded.choices.items()
        if group in composer.groups and group not in (*GLOBAL_GROUPS, *own) and option in composer.options(group)
        if option != composer.choice(group, ())
    ]
    chosen = composer.plain([*choices, *texts])  # what the person's own words and files say, and ours
    unnamed = {
        kind.group: value_at(recorded.values, kind.key)
        for kind in KINDS.values()
        if find(recorded.values, kind.key)[0] and value_at(recorded.values, kind.key) is not None
        if kind.group not in own and (chosen.get(kind.group) or {}).get("target") is None
    }
    if unnamed:
        _refuse(composer, given, texts, unnamed)
    targets = {kind.key for kind in KINDS.values()}
    return choices + [
        override(key, value)
        for key, value in leaves(recorded.values)
        if key not in targets and not any(is_within(key, name) for name in own)
        if _differs(chosen, key, value)
    ]


def _differs(chosen: Mapping[str, Any], key: str, value: Any) -> bool:
    """Whether a setting that is there, or that a target declares, has another value."""
    return value_at(chosen, key) != value if find(chosen, key)[0] else key.startswith(FOREIGN) or is_open(key, chosen)


def _refuse(composer: Composer, given: str, texts: Sequence[str], unnamed: Mapping[str, Any]) -> None:
    """ConfigError: the run was made by code that nobody has named here. unnamed: by group, as the folder has it."""
    odd = [f"{KINDS[group].key}={target!r}" for group, target in unnamed.items() if not is_well_formed(group, target)]
    if odd:
        raise ConfigError(f"{given}: its record names what cannot be a target: {', '.join(odd)}")
    again = [f"{KINDS[group].key}={target}" for group, target in unnamed.items()]
    command = command_line([*(f"--config-dir={folder}" for folder in composer.folders), *texts, *again])
    raise ConfigError(
        f"{given}: that run used code of {', '.join(again)}; a run's folder alone starts no code, so name it "
        f"again if you trust it: {command}"
    )


def _differences(composer: Composer, recorded: Recorded, texts: Sequence[str]) -> list[str]:
    """A line for each setting that is another one here than in the recorded run."""
    here = dict(leaves(composer.plain(texts)))
    return [
        f"  {key}: {show(value)} in that run, {show(here[key]) if key in here else 'no such key'} here"
        for key, value in leaves(recorded.values)
        if key not in here or here[key] != value
    ]
