"""The command line, and the only importer of Hydra and OmegaConf: compose, check, build the RunConfig, run the task.

Everything that can be wrong is looked for before anything runs, and all of it is said at once. Hydra would accept
`+partition.bugdet=0.4` and `partition.budget=1.4`, and stop at the first of several mistakes; so each override is held
against the keys that exist before Hydra sees it, and each value against the dataclasses of config.py after.

Exit codes: 0 success, 1 the run failed, 2 the input is wrong, 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from aottrain import __version__
from aottrain.config import RunConfig, absolute_paths, read_config, read_model
from aottrain.errors import AottrainError, BudgetError, ConfigError
from aottrain.preflight import missing_paths, unusable, unwritable, without_text
from aottrain.schema import Mistake, find, join, leaves, show, suggest
from aottrain.sweep import SweepJob, run_sweep
from aottrain.usage import config_folder, parse_flags, usage

PLUGINS = {"hydra/launcher": "basic", "hydra/sweeper": "basic"}
QUOTING = "a value with special characters is quoted twice, as in 'data.path=\"my books (2)\"'"


@dataclass(frozen=True)
class Job:
    """One checked run: the configuration as Hydra composed it, and as ours."""

    composed: DictConfig
    config: RunConfig


Checked = tuple[Job | None, list[Mistake]]


class Composer:
    """The configuration folders as Hydra sees them, and the checks of what a person adds to them."""

    def __init__(self, config_name: str, folders: Sequence[Path]):
        self.config_name, self.folders = config_name, folders
        search = ",".join(_quoted(f"file://{folder}") for folder in folders)
        self.search = [f"hydra.searchpath=[{search}]"] if folders else []
        self.loader = GlobalHydra.instance().config_loader()
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.groups = [group for group in self.loader.list_groups("") if group != "hydra"]
        self._composed: dict[tuple[str, ...], tuple[DictConfig | None, list[Mistake]]] = {}

    def parse(self, texts: Sequence[str]) -> tuple[list[Override], list[Mistake]]:
        """Every override that can be read, and a mistake for every one that cannot."""
        overrides, mistakes = [], []
        for text in texts:
            try:
                overrides += self.parser.parse_overrides([text])
            except HydraException as error:
                reason = f"not a valid override: {_one_line(error)}; {QUOTING}"
                if "=" not in text:
                    reason = f"is neither a flag nor group=option nor key=value{suggest(text, self.groups)}"
                mistakes.append(Mistake(text, reason))
        return overrides, mistakes

    def check(self, texts: Sequence[str], *, look: bool = True, sweep: bool = False) -> Checked:
        """A job, or every mistake in its overrides and in the configuration that they give.

        look: at files, folders and devices too. sweep: the job will run in another process, so that here `recipe.model`
        is read, and with it torch imported, only if somebody changed it.
        """
        composed, given, mistakes = self.compose(texts)
        if composed is None:
            return None, mistakes
        values, found = _resolved(composed)
        config, wrong = read_config(values)
        config = absolute_paths(config)
        found += wrong
        if look:
            found += missing_paths(config) + unusable(config, {item.key for item in found})
            found += _directory(composed, "hydra.sweep.dir" if sweep else "hydra.run.dir")[1]
        shipped, _ = self._compose_most(())
        changed = shipped is None or values.get("recipe") != shipped.get("recipe")
        finish = look and not sweep and not found and not mistakes
        if (changed or finish) and not any(item.key.startswith("recipe") for item in found):
            config, wrong = read_model(config)
            found += wrong + (without_text(config) if finish else [])
        mistakes += [self._with_file(item, composed, given) for item in found]
        return Job(composed, config), list(dict.fromkeys(mistakes))

    def compose(self, texts: Sequence[str]) -> tuple[DictConfig | None, set[str], list[Mistake]]:
        """The configuration with all overrides that Hydra can take, the keys they set, a mistake for each other one."""
        overrides, mistakes = self.parse(texts)
        several = [_text(item) for item in overrides if item.is_sweep_override()]
        mistakes += [Mistake(text, "several values: add -m to run each, or write [a,b] for a list") for text in several]
        overrides = [item for item in overrides if _text(item) not in several]
        choices = [item for item in overrides if self._is_choice(item)]
        wrong = {_text(item): found for item in choices if (found := self._wrong_choice(item))}
        base, found = self._compose_most(tuple(_text(item) for item in choices if _text(item) not in wrong))
        if base is None:
            return None, set(), mistakes + list(wrong.values()) + found
        known = OmegaConf.to_container(base, resolve=False)
        values = [item for item in overrides if not self._is_choice(item)]
        wrong |= {_text(item): reason for item in values if (reason := self._wrong_key(item, known))}
        composed, found = self._compose_most(tuple(_text(item) for item in overrides if _text(item) not in wrong))
        return composed, {item.key_or_group for item in overrides}, mistakes + list(wrong.values()) + found

    def _compose_most(self, texts: tuple[str, ...]) -> tuple[DictConfig | None, list[Mistake]]:
        """Compose; if Hydra refuses, find the overrides that it refuses each alone, and compose without them."""
        if texts not in self._composed:
            try:
                self._composed[texts] = self._hydra(texts), []
            except Exception as error:  # Hydra lets YAML, OS and OmegaConf errors through besides its own
                guilty = [Mistake(text, reason) for text in texts if (reason := self._refusal(text))]
                rest = tuple(text for text in texts if text not in {mistake.key for mistake in guilty})
                if guilty:
                    composed, mistakes = self._compose_most(rest)
                    self._composed[texts] = composed, guilty + mistakes
                else:
                    self._composed[texts] = None, [Mistake(" ".join(texts) or self.config_name, _one_line(error))]
        composed, mistakes = self._composed[texts]
        return composed, list(mistakes)

    def _hydra(self, texts: Sequence[str]) -> DictConfig:
        return compose(self.config_name, [*self.search, *texts], return_hydra_config=True)

    def _refusal(self, text: str) -> str:
        try:
            self._hydra([text])
        except Exception as error:
            return _one_line(error)
        return ""

    def _is_choice(self, item: Override) -> bool:
        return item.key_or_group in self.groups or item.key_or_group.startswith("hydra/")

    def _wrong_choice(self, item: Override) -> Mistake | None:
        """What is wrong with `group=option`, if anything is."""
        group, value = item.key_or_group, item.value()
        options = self.loader.get_group_options(group, config_name=self.config_name, overrides=self.search)
        listed = f"(options: {', '.join(options)})"
        if item.is_delete() or item.is_add() or item.is_force_add() or item.package:
            return Mistake(_text(item), f"write {group}=option, without ~, + or @ {listed}")
        if value != PLUGINS.get(group, value):
            return Mistake(group, "must be basic: sweeps are run by aottrain itself, a process per job", show(value))
        if isinstance(value, dict):
            return Mistake(group, f"is a group; set its keys one by one, as {group}.key=value {listed}", show(value))
        if value in options or (value is None and group in ("experiment", "debug")):
            return None
        return Mistake(group, f"unknown option{suggest(str(value), options)} {listed}", show(value))

    def _wrong_key(self, item: Override, known: Any) -> Mistake | None:
        """What is wrong with the key of `key=value`, if anything is. Values are looked at when all is composed."""
        key, value = item.key_or_group, item.value()
        exists = find(known, key)[0] or _is_open(key)
        if item.package:
            return Mistake(_text(item), "@ is for groups; write key=value")
        if not exists:
            return self._unknown_key(key, value, known)
        if item.is_delete():
            return Mistake(_text(item), "a key cannot be removed; give it another value")
        if item.is_add() and not _is_open(key):
            return Mistake(_text(item), f"the key exists; write {key}={show(value)}, without +")
        parts = leaves(value, key) if isinstance(value, dict) else ()
        unknown = [(name, part) for name, part in parts if not find(known, name)[0] and not _is_open(name)]
        return self._unknown_key(*unknown[0], known) if unknown else None

    def _unknown_key(self, key: str, value: Any, known: Any) -> Mistake:
        _, names, section = find(known, key)
        within = {"hydra": known["hydra"]} if key.startswith("hydra") else {**known, "hydra": None}
        near = suggest(key, [*(name for name, _ in leaves(within)), *self.groups])
        option = known["hydra"]["runtime"]["choices"].get(section)
        text = f"unknown key with {section}={option}" if option else "unknown key"
        there = f"keys of {section}: {', '.join(names)}" if section else f"groups: {', '.join(self.groups)}"
        return Mistake(key, f"{text}{near} ({there})", None if value is None else show(value))

    def _with_file(self, mistake: Mistake, composed: DictConfig, given: set[str]) -> Mistake:
        """The mistake with the person's own file that it comes from, if it comes from one."""
        chosen = {} if mistake.key in given else composed.hydra.runtime.choices
        for (group, option), folder in itertools.product(chosen.items(), self.folders):
            path = folder / str(group) / f"{option}.yaml"
            if path.is_file():
                values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
                if find(values, mistake.key)[0] or find({group: values}, mistake.key)[0]:
                    return replace(mistake, text=f"{mistake.text} (in {path})")
        return mistake


def _text(item: Override) -> str:
    return str(item.input_line)


def _is_open(key: str) -> bool:
    """Sections of Hydra that a person adds keys to."""
    return key.startswith(("hydra.callbacks.", "hydra.job.env_set.", "hydra.job_logging.", "hydra.hydra_logging."))


def _resolved(composed: DictConfig) -> tuple[dict[str, Any], list[Mistake]]:
    """Our part of the configuration as plain values, and a mistake for each value that refers to nothing."""
    HydraConfig.instance().set_config(composed)
    mistakes: list[Mistake] = []

    def plain(node: Any, prefix: str) -> Any:
        if isinstance(node, ListConfig):
            return [plain(item, prefix) for item in node]
        if not isinstance(node, DictConfig):
            return node
        values = {}
        for key in node:
            name = join(prefix, key)
            try:
                if name != "hydra":
                    values[key] = plain(node[key], name)
            except OmegaConfBaseException as error:
                mistakes.append(Mistake(name, _one_line(error)))
        return values

    return plain(composed, ""), mistakes


def _directory(composed: DictConfig, key: str) -> tuple[str, list[Mistake]]:
    """The output directory that `key` names, and what keeps it from being made."""
    HydraConfig.instance().set_config(composed)
    try:
        path = str(OmegaConf.select(composed, key, throw_on_missing=True))
    except OmegaConfBaseException as error:
        return "", [Mistake(key, _one_line(error))]
    return os.path.abspath(path), unwritable(key, path)


def _one_line(error: BaseException) -> str:
    """What an error of Hydra, OmegaConf or YAML says, without advice that does not hold here."""
    cause: BaseException | None = error
    while cause is not None:
        mark = getattr(cause, "problem_mark", None)
        if mark is not None:
            return f"{mark.name}, line {mark.line + 1}: not valid YAML: {getattr(cause, 'problem', '')}"
        cause = cause.__cause__ or cause.__context__
    text = str(error) or str(error.__cause__ or type(error).__name__)
    dropped = ("See https://", "To append to your config", "full_key:", "object_type=")
    return " ".join(line for line in text.splitlines() if not line.strip().startswith(dropped))


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.double).with_quotes()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Mistakes go to stderr, one line each, and nothing is run."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # kernel.target may name a file of the current folder, however we were started
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except ConfigError as error:
        count = len(error.mistakes)
        print(f"aottrain: {count} mistake{'s' if count > 1 else ''} in the configuration", file=sys.stderr)
        for mistake in error.mistakes:
            print("  " + " ".join(mistake.split()), file=sys.stderr)
        return 2
    except AottrainError as error:
        print(f"aottrain: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, BudgetError) else 1  # a budget is refused before any step
    except KeyboardInterrupt:
        print("aottrain: interrupted", file=sys.stderr)
        return 130


def _main(arguments: list[str]) -> int:
    flags = parse_flags(arguments)
    if flags.help or flags.version:
        print(usage(config_folder(), __version__) if flags.help else f"aottrain {__version__}")
        return 0
    named = {"--config-dir": flags.config_dir, "--config-path": flags.config_path}
    absent = [f"{flag} {path}: no such folder" for flag, path in named.items() if path and not Path(path).is_dir()]
    if absent:
        raise ConfigError(absent)
    folder = Path(flags.config_path).absolute() if flags.config_path else config_folder()
    if flags.hydra_help or flags.info or flags.shell_completion:
        return _show(arguments, folder)
    with initialize_config_dir(str(folder), job_name="aottrain", version_base="1.3"):
        extra = [Path(flags.config_dir).absolute()] if flags.config_dir else []
        composer = Composer(flags.config_name or "config", extra)
        if flags.cfg is None:
            return _run(composer, flags)
        _sound(composer.check(flags.overrides, look=False))
    return _show(arguments, folder)


def _show(arguments: Sequence[str], folder: Path) -> int:
    """Leave flags that only show something to Hydra."""
    sys.argv = [sys.argv[0], *arguments]
    hydra.main(version_base="1.3", config_path=str(folder), config_name="config")(lambda composed: None)()
    return 0


def _sound(checked: Checked) -> Job:
    job, mistakes = checked
    if mistakes or job is None:
        raise ConfigError([str(mistake) for mistake in mistakes])
    return job


def _run(composer: Composer, flags: argparse.Namespace) -> int:
    overrides, _ = composer.parse(flags.overrides)
    head, _, _ = composer.compose([_text(item) for item in overrides if not item.is_sweep_override()])
    mode = None if head is None else head.hydra.mode  # set by an experiment's file, or by hydra.mode=MULTIRUN
    if flags.multirun or mode == RunMode.MULTIRUN:
        return _run_sweep(composer, flags, {} if head is None else head.hydra.sweeper.params or {})
    return _run_one(composer, _sound(composer.check(flags.overrides)))


def _run_one(composer: Composer, job: Job) -> int:
    """Make the output directory as Hydra does (.hydra/, log file, callbacks) and run the task in it."""
    errors: list[Exception] = []

    def task(_: DictConfig) -> int:
        try:
            config = replace(job.config, output_dir=HydraConfig.get().runtime.output_dir)
            return importlib.import_module(f"aottrain.tasks.{config.task}").run(config)
        except Exception as error:
            errors.append(error)
            raise

    composed = job.composed
    with read_write(composed.hydra):
        composed.hydra.mode = RunMode.RUN
    callbacks = Callbacks(composed)
    context = HydraContext(config_loader=composer.loader, callbacks=callbacks)
    callbacks.on_run_start(config=composed, config_name=composer.config_name)
    ended = run_job(task, composed, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
    callbacks.on_run_end(config=composed, config_name=composer.config_name, job_return=ended)
    if errors:
        raise errors[0]
    return ended.return_value or 0


def combinations(composer: Composer, texts: Sequence[str]) -> tuple[list[dict[str, str]], list[Mistake]]:
    """The jobs of a sweep, each as {key: override}: every combination of the values that the overrides list."""
    overrides, mistakes = composer.parse(texts)
    choices: dict[str, list[str]] = {}
    for item in overrides:
        key = item.get_key_element()
        if not item.is_sweep_override():
            choices[key] = [_text(item)]
        elif item.is_discrete_sweep() and not item.is_hydra_override():
            choices[key] = [f"{key}={value}" for value in item.sweep_string_iterator()]
        else:
            mistakes.append(Mistake(_text(item), "cannot be swept over; write key=a,b or key=range(0,3)"))
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())], mistakes


def _run_sweep(composer: Composer, flags: argparse.Namespace, params: Any) -> int:
    """Check every job, then run each in a process of its own. `params`: the sweep that the configuration has."""
    jobs, mistakes = combinations(composer, [*(f"{key}={value}" for key, value in params.items()), *flags.overrides])
    planned: list[SweepJob] = []
    folder = ""
    for number, overrides in enumerate(jobs):
        texts = list(overrides.values())
        job, found = composer.check(texts, sweep=True)
        mistakes += found
        if job is not None:
            with read_write(job.composed.hydra):
                job.composed.hydra.job.num, job.composed.hydra.job.id = number, str(number)
            folder = folder or _directory(job.composed, "hydra.sweep.dir")[0]
            planned.append(_sweep_job(number, composer.parse(texts)[0], job, Path(folder), flags))
    if len({job.directory for job in planned}) < len(planned):
        mistakes.append(Mistake("hydra.sweep.subdir", "must differ between jobs, as ${hydra.job.num} does"))
    if mistakes:
        raise ConfigError([str(mistake) for mistake in dict.fromkeys(mistakes)])
    return run_sweep(planned, Path(folder))


def _sweep_job(number: int, given: list[Override], job: Job, folder: Path, flags: argparse.Namespace) -> SweepJob:
    directory = folder / str(job.composed.hydra.sweep.subdir)
    named = {"config-dir": flags.config_dir, "config-path": flags.config_path, "config-name": flags.config_name}
    arguments = [f"--{name}={value}" for name, value in named.items() if value]
    own = ["hydra.mode=RUN", f"hydra.job.num={number}", f"hydra.run.dir={_quoted(str(directory))}"]
    arguments += [*map(_text, given), *own]
    if "group" in job.composed.logger and job.config.logger.group is None and "WANDB_RUN_GROUP" not in os.environ:
        arguments.append(f"logger.group={_quoted(f'sweep-{folder.name}')}")  # so that wandb overlays the jobs
    shown = {item.key_or_group: show(item.value()) for item in given if not item.is_hydra_override()}
    return SweepJob(number, shown, directory, arguments)
