"""Compose the configuration with Hydra, and hold it against what exists: all mistakes are found, and said at once.

Hydra would accept `+partition.bugdet=0.4` and `partition.budget=1.4`, and stop at the first of several mistakes; so
each override is held against the keys that exist before Hydra sees it, and each value against the dataclasses of
aottrain/config/run.py after.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from aottrain.cli.preflight import (
    device_type,
    missing_packages,
    missing_paths,
    occupied,
    said_of_paths,
    unusable,
    without_use,
)
from aottrain.cli.ranks import misplaced
from aottrain.cli.resuming import with_recorded
from aottrain.cli.usage import config_folder
from aottrain.cli.values import (
    FOREIGN,
    as_hydra_takes_it,
    dangling,
    directory_of,
    one_line,
    resolved,
    text_of,
    unnamed_log,
    value_at,
)
from aottrain.config.choices import GLOBAL_GROUPS, TASKS
from aottrain.config.documentation import keys
from aottrain.config.effect import OF_DEVICE, without_effect
from aottrain.config.extensions.metrics import LOSS, own_objectives
from aottrain.config.extensions.recipes import recipe_of
from aottrain.config.extensions.targets import KINDS, is_open
from aottrain.config.other_names import by_another_name, option_by_another_name
from aottrain.config.reading import absolute_paths, read_config, read_model
from aottrain.config.run import RunConfig
from aottrain.config.schema import Mistake, find, leaves, no_section, quoted, show, suggest

PLUGINS = {"hydra/launcher": "basic", "hydra/sweeper": "basic"}
INSTEAD = {
    "hydra/launcher": "write sweep.parallel=2 for jobs at once, sweep.executor=submitit for a cluster",
    "hydra/sweeper": "write sweep.search=optuna for a search, with ranges as key='interval(a,b)'",
}
QUOTING = "a value with special characters is quoted twice, as in 'data.path=\"my books (2)\"'"


@dataclass(frozen=True)
class Job:
    """One checked run."""

    composed: DictConfig
    """The configuration as Hydra composed it."""
    config: RunConfig
    """The same as ours."""
    notes: tuple[str, ...] = ()
    """What to say before it runs."""
    differs: bool = False
    """As in `Resumed`."""


Checked = tuple[Job | None, list[Mistake]]
Composed = tuple[DictConfig | None, set[str], list[Mistake]]
Announce = Callable[[RunConfig, str], None]


class Composer:
    """The configuration folders as Hydra sees them, and the checks of what a person adds to them."""

    def __init__(self, config_name: str, folders: Sequence[Path]):
        self.config_name, self.folders = config_name, folders
        search = ",".join(quoted(f"file://{folder}") for folder in folders)
        self.search = [f"hydra.searchpath=[{search}]"] if folders else []
        self.loader = GlobalHydra.instance().config_loader()
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.groups = [group for group in self.loader.list_groups("") if group != "hydra"]
        self._hydras: dict[tuple[str, ...], tuple[DictConfig | None, list[Mistake]]] = {}
        self._composed: dict[tuple[str, ...], Composed] = {}
        self._options: dict[str, list[str]] = {}

    def parse(self, texts: Sequence[str]) -> tuple[list[Override], list[Mistake]]:
        """Every override that can be read, and a mistake for every one that cannot."""
        overrides, mistakes = [], []
        for text in texts:
            if re.match(r"=|[\w.]+\s+=", text):
                mistakes.append(Mistake(text, "is not key=value; write it without spaces, as in trainer.steps=100"))
                continue
            try:
                overrides += self.parser.parse_overrides([text])
            except HydraException as error:
                reason = f"not a valid override: {one_line(error)}; {QUOTING}"
                if "=" not in text:
                    reason = self._word_alone(text)
                mistakes.append(Mistake(text, reason))
        return overrides, mistakes

    def _word_alone(self, text: str) -> str:
        """What is wrong with a word that sets nothing: a name that wants a value, or one that is a value or a flag."""
        if text in self.groups:
            return f"is a group; write {text}=option (options: {', '.join(self.options(text))}) or {text}.key=value"
        if text in keys():
            return f"is a key; write {text}=value, without spaces"
        meant = f"; did you mean task={text}?" if text in TASKS else suggest(text, self.groups)
        meant = "; did you mean --help?" if text == "help" else meant
        return f"is neither a flag nor group=option nor key=value{meant}"

    @said_of_paths()
    def check(
        self, texts: Sequence[str], *, look: bool = True, sweep: bool = False, announce: Announce | None = None
    ) -> Checked:
        """A job, or every mistake in its overrides and in the configuration that they give.

        look: at files, folders and devices too. sweep: the job will run in another process, so that here `recipe.model`
        is read, and with it torch imported, only if somebody changed it. announce: is called before torch is imported,
        with the output directory, where nothing wrong has been found until then.
        """
        resumed = with_recorded(self, texts, sweep=sweep)
        composed, overridden, mistakes = self.compose(resumed.texts)
        if composed is None:
            return None, mistakes
        values, wrong = resolved(composed)
        config, mistaken = read_config(values)
        config = absolute_paths(config)
        wrong += mistaken
        if look:
            folder = "hydra.sweep.dir" if sweep else "hydra.run.dir"
            directory, unmade = directory_of(composed, folder)
            if not any(item.key == "parallel" for item in mistakes):  # else it is not what was asked for
                wrong += misplaced(config)
            wrong += unnamed_log(composed) + missing_paths(config) + missing_packages(config)
            wrong += unmade or occupied(config, folder, directory)
            if announce is not None and not wrong and not mistakes:
                announce(config, directory)
            wrong += unusable(config, {item.key for item in wrong})
        finish = look and not sweep and not wrong and not mistakes
        recipe_is_wrong = any(item.key.startswith("recipe") for item in wrong)
        judges = own_objectives(config.sweep.objectives) or config.trainer.judge_by != LOSS  # by what the recipe has
        if not recipe_is_wrong and (finish or (judges and not wrong) or self._is_changed(values, "recipe")):
            config, mistaken = read_model(config)
            wrong += mistaken or (without_use(config) if finish else [])
        mistakes += [self._with_file(item, composed, overridden) for item in wrong]
        notes = resumed.notes if mistakes else (*resumed.notes, *self._without_effect(config, texts, loaded=finish))
        return Job(composed, config, notes, resumed.differs), list(dict.fromkeys(mistakes))

    def _without_effect(self, config: RunConfig, texts: Sequence[str], loaded: bool) -> list[str]:
        """What was typed and will not be read. loaded: the recipe and torch have been imported."""
        given = {}
        for item in self.parse(texts)[0]:
            key = item.key_or_group
            if key in self.groups:
                key += ".strategy" if key == "partition" else ".name"
            given[key] = text_of(item)
        recipe = recipe_of(config.recipe) if loaded else None
        device = device_type(config.device) if loaded and given.keys() & set(OF_DEVICE) else ""
        return without_effect(config, given, recipe, device)

    def _is_changed(self, values: Mapping[str, Any], section: str) -> bool:
        """Whether a section is another than without overrides, which takes a composition of its own to know."""
        shipped, _ = self._compose_most(())
        return shipped is None or values.get(section) != shipped.get(section)

    def completed(self, texts: Sequence[str]) -> list[str]:
        """The overrides as Hydra takes them: a target that is given alone chooses the option of its group that takes
        one (`optimizer.target=...` is `optimizer=custom` too), and a key that a target declares is an added one."""
        overrides, _ = self.parse(texts)
        choices = [text_of(item) for item in overrides if self._is_choice(item) and not item.is_sweep_override()]
        values = self._values(choices)
        chosen = {item.key_or_group for item in overrides}
        given = [kind for kind in KINDS.values() if kind.key in chosen and kind.group not in chosen]
        implied = [f"{kind.group}={kind.option}" for kind in given if "target" not in (values.get(kind.group) or {})]
        values = self._values([*implied, *choices]) if implied else values
        added = {
            text_of(item) for item in overrides
            if is_open(item.key_or_group, values) and not (item.is_add() or item.is_force_add() or item.is_delete())
        }  # fmt: skip
        return [*implied, *(f"++{text}" if text in added else text for text in texts)]

    def _values(self, choices: Sequence[str]) -> dict[str, Any]:
        """What the files of these options say, unresolved."""
        composed, _ = self._compose_most(tuple(choices))
        values = None if composed is None else OmegaConf.to_container(composed, resolve=False)
        return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}

    def compose(self, texts: Sequence[str]) -> Composed:
        """The configuration with all overrides that Hydra can take, the keys they set, a mistake for each other one."""
        if tuple(texts) not in self._composed:
            self._composed[tuple(texts)] = self._compose(texts)
        composed, overridden, mistakes = self._composed[tuple(texts)]
        return composed, set(overridden), list(mistakes)

    def _compose(self, texts: Sequence[str]) -> Composed:
        overrides, mistakes = self.parse(self.completed(texts))
        several = [text_of(item) for item in overrides if item.is_sweep_override()]
        mistakes += [Mistake(text, "several values: add -m to run each, or write [a,b] for a list") for text in several]
        overrides = [item for item in overrides if text_of(item) not in several]
        choices = [item for item in overrides if self._is_choice(item)]
        wrong = {text_of(item): refused for item in choices if (refused := self._wrong_choice(item))}
        base, refused = self._compose_most(tuple(text_of(item) for item in choices if text_of(item) not in wrong))
        if base is None:
            return None, set(), mistakes + list(wrong.values()) + refused
        base_values = OmegaConf.to_container(base, resolve=False)
        values = [item for item in overrides if not self._is_choice(item)]
        wrong |= {text_of(item): reason for item in values if (reason := self._wrong_key(item, base_values))}
        composed, refused = self._compose_most(tuple(text_of(item) for item in overrides if text_of(item) not in wrong))
        given = {item.key_or_group for item in overrides}
        if composed is not None:
            refused += dangling(composed, (key for key in given if key.startswith("hydra.")))
        return composed, given, mistakes + list(wrong.values()) + refused

    def plain(self, texts: Sequence[str]) -> dict[str, Any]:
        """Our part of what the overrides give, those left out that are wrong."""
        composed, _, _ = self.compose(texts)
        return {} if composed is None else resolved(composed)[0]

    def choice(self, group: str, texts: Sequence[str]) -> str:
        """The option of a group under these overrides."""
        composed, _, _ = self.compose(texts)
        return "" if composed is None else str(composed.hydra.runtime.choices.get(group))

    def options(self, group: str) -> list[str]:
        """Those that the folders have; Hydra reads the primary configuration anew each time that it is asked."""
        if group not in self._options:
            found = self.loader.get_group_options(group, config_name=self.config_name, overrides=self.search)
            self._options[group] = found
        return self._options[group]

    def _compose_most(self, texts: tuple[str, ...]) -> tuple[DictConfig | None, list[Mistake]]:
        """Compose; if Hydra refuses, find the overrides that it refuses each alone, and compose without them."""
        if texts not in self._hydras:
            try:
                self._hydras[texts] = self._hydra(texts), []
            except Exception as error:  # Hydra lets YAML, OS and OmegaConf errors through besides its own
                guilty = [Mistake(text, reason) for text in texts if (reason := self._refusal(text))]
                rest = tuple(text for text in texts if text not in {mistake.key for mistake in guilty})
                if guilty:
                    composed, mistakes = self._compose_most(rest)
                    self._hydras[texts] = composed, guilty + mistakes
                else:
                    self._hydras[texts] = None, [Mistake(" ".join(texts) or self.config_name, one_line(error))]
        composed, mistakes = self._hydras[texts]
        return composed, list(mistakes)

    def _hydra(self, texts: Sequence[str]) -> DictConfig:
        return compose(self.config_name, [*self.search, *map(as_hydra_takes_it, texts)], return_hydra_config=True)

    def _refusal(self, text: str) -> str:
        try:
            self._hydra([text])
        except Exception as error:
            return one_line(error)
        return ""

    def _is_choice(self, item: Override) -> bool:
        return item.key_or_group in self.groups or item.key_or_group.startswith("hydra/")

    def _wrong_choice(self, item: Override) -> Mistake | None:
        """What is wrong with `group=option`, if anything is."""
        group, value = item.key_or_group, item.value()
        options = self.options(group)
        listed = f"(options: {', '.join(options)})"
        own = f"; a program of your own: {KINDS[group].key}={KINDS[group].form}" if group in KINDS else ""
        if item.is_delete() or item.is_add() or item.is_force_add() or item.package:
            return Mistake(text_of(item), f"write {group}=option, without ~, + or @ {listed}")
        if value != PLUGINS.get(group, value):
            return Mistake(group, f"must be basic: sweeps are run by aottrain itself; {INSTEAD[group]}", show(value))
        if isinstance(value, dict):
            return Mistake(group, f"is a group; set its keys one by one, as {group}.key=value {listed}", show(value))
        if value in options or (value is None and group in GLOBAL_GROUPS):
            return None
        near = suggest(str(value), options) or option_by_another_name(group, str(value))
        near = near or self._of_another_group(str(value))
        return Mistake(group, f"unknown option{near} {listed}{own}", show(value))

    def _of_another_group(self, value: str) -> str:
        """Where options of other groups begin with what one was asked for: gpt2 is a size, not a recipe."""
        found = [
            f"{group}={option}"
            for group in self.groups
            for option in self.options(group)
            if value in (option, re.split("[_.-]", option)[0]) and value not in ("none", "custom")
        ]
        return f"; did you mean {' or '.join(found[:3])}?" if found else ""

    def _wrong_key(self, item: Override, base_values: Any) -> Mistake | None:
        """What is wrong with the key of `key=value`, if anything is. Values are looked at when all is composed."""
        key, value = item.key_or_group, item.value()
        is_known = find(base_values, key)[0]
        exists = is_known or _is_open(key, base_values)
        if item.package:
            return Mistake(text_of(item), "@ is for groups; write key=value")
        if not exists:
            return self._unknown_key(key, value, base_values)
        if item.is_delete():
            return Mistake(text_of(item), "a key cannot be removed; give it another value")
        if item.is_add() and not _is_open(key, base_values):
            return Mistake(text_of(item), f"the key exists; write {key}={show(value)}, without +")
        section = value_at(base_values, key) if is_known else None
        if isinstance(value, list) and isinstance(section, dict):  # which Hydra cannot join
            return no_section(key, value, [str(name) for name in section])
        if isinstance(value, dict) and isinstance(section, list):
            return Mistake(key, "must be a list, written [a,b]", show(value))
        parts = leaves(value, key) if isinstance(value, dict) else ()
        unknown = [item for item in parts if not find(base_values, item[0])[0] and not _is_open(item[0], base_values)]
        return self._unknown_key(*unknown[0], base_values) if unknown else None

    def _unknown_key(self, key: str, value: Any, base_values: Any) -> Mistake:
        _, names, section = find(base_values, key)
        within = {"hydra": base_values["hydra"]} if key.startswith("hydra") else {**base_values, "hydra": None}
        candidates = [*(name for name, _ in leaves(within)), *self.groups]
        ours = by_another_name(key, [*candidates, "hydra.run.dir"])
        near = f"; did you mean {ours}?" if ours else suggest(key, candidates)
        kind = KINDS.get(section)
        if kind is not None and kind.options and "target" in (base_values.get(section) or {}):
            near += f"; what {kind.key} takes itself is {kind.options_key}.{key.rpartition('.')[2]}"
        option = base_values["hydra"]["runtime"]["choices"].get(section)
        text = f"unknown key with {section}={option}" if option else "unknown key"
        there = f"keys of {section}: {', '.join(names)}" if section else f"groups: {', '.join(self.groups)}"
        return Mistake(key, f"{text}{near} ({there})", None if value is None else show(value))

    def _with_file(self, mistake: Mistake, composed: DictConfig, overridden: set[str]) -> Mistake:
        """The mistake with the person's own file that it comes from, if it comes from one, or with the size or
        experiment that set it."""
        chosen = {} if mistake.key in overridden else composed.hydra.runtime.choices
        for group in GLOBAL_GROUPS:
            values = _plain(config_folder() / group / f"{chosen.get(group)}.yaml")
            if find(values, mistake.key)[0] and mistake.key not in self.groups:  # whose keys it sets, not its option
                of = [f", which is of recipe={each['override /recipe']}" for each in values.get("defaults", ())
                      if "override /recipe" in each]  # fmt: skip
                return replace(mistake, text=f"{mistake.text} (set by {group}={chosen[group]}{''.join(of)})")
        for (group, option), folder in itertools.product(chosen.items(), self.folders):
            path = folder / str(group) / f"{option}.yaml"
            values = _plain(path)
            if path.is_file() and (find(values, mistake.key)[0] or find({group: values}, mistake.key)[0]):
                return replace(mistake, text=f"{mistake.text} (in {path})")
        return mistake


def _plain(path: Path) -> dict[Any, Any]:
    """What a file of settings says; nothing of one that is not there."""
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False) if path.is_file() else None
    return values if isinstance(values, dict) else {}


def _is_open(key: str, values: Any) -> bool:
    """Sections that a person adds keys to: some of Hydra's, those that a target of one's own declares, and options of a
    recipe that belong to another package."""
    hydra = ("hydra.callbacks.", "hydra.job.env_set.", "hydra.job_logging.", "hydra.hydra_logging.")
    return key.startswith((*hydra, *FOREIGN)) or is_open(key, values)
