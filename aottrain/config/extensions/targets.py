"""Programs of a person's own that a run uses: `recipe.target=package.module`, `optimizer.target=package.module:Class`.

**What may be imported.** A target is imported where a person named it: on the command line, or in a configuration file
of the folders that the command line names (`--config-dir`, `--config-path`). Nothing that a run wrote causes an import:
neither its checkpoints, nor its recorded configuration (`resume=`, see aottrain/cli/resuming.py), nor its
`decisions.json`. All targets are loaded here and nowhere else. Modules are found as Python finds them: in the current
folder, on PYTHONPATH, and among what is installed.

A target that is not there, or that is not what it must be, is answered in one line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aottrain.config.extensions.own_code import import_error_text, shown
from aottrain.config.schema import suggest
from aottrain.errors import ConfigError

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"


@dataclass(frozen=True)
class Kind:
    """What a group's target is."""

    group: str
    option: str = "custom"
    """The option of the group that takes one."""
    takes: tuple[str, ...] | None = ()
    """What it is called with, by position, before `options`; None for what is not called."""
    options: str = ""
    """The key of the group with what the target declares itself; "" where there is none."""
    form: str = "package.module:function"

    @property
    def key(self) -> str:
        return f"{self.group}.target"

    @property
    def options_key(self) -> str:
        return f"{self.group}.{self.options}"

    def near(self, target: Any) -> str:
        """The form of a target that is written as Python names it, `torch.optim.SGD`; "" where it cannot be that."""
        if self.takes is None or not isinstance(target, str) or not re.fullmatch(_NAME, target) or "." not in target:
            return ""
        return ":".join(target.rsplit(".", 1))


# Of each group that takes a target. What a target must be is the sentence of its key in aottrain/config/run.py.
KINDS = {
    kind.group: kind
    for kind in (
        Kind("recipe", takes=None, options="model", form="package.module"),
        Kind("data", options="options"),
        Kind("kernel", takes=("graph_module", "example_inputs")),
        Kind("partition", "policy", takes=("forward_value",)),
        Kind("optimizer", takes=("parameters",), options="options", form="package.module:Class"),
        Kind("lr_schedule", takes=("step", "total_steps"), options="options"),
    )
}


def is_open(key: str, values: Any) -> bool:
    """Whether the key is one that a target declares, or the section of these; no file lists them. values: the
    composed configuration."""
    kind = KINDS.get(key.partition(".")[0])
    if kind is None or not kind.options or not f"{key}.".startswith(f"{kind.options_key}."):
        return False
    return "target" in (values.get(kind.group) or {})


def named_again(config: RunConfig) -> list[str]:
    """The targets of a run as they are typed: who goes on with it names them again."""
    targets = {kind.key: getattr(config, kind.group).target for kind in KINDS.values()}
    return [f"{key}={target}" for key, target in targets.items() if target is not None]


def is_well_formed(group: str, target: Any) -> bool:
    """Whether it can be a target of the group, by its letters alone."""
    pattern = _NAME if KINDS[group].takes is None else f"{_NAME}:{_NAME}"
    return isinstance(target, str) and re.fullmatch(pattern, target) is not None


def load_target(group: str, target: str, options: Mapping[str, Any] | None = None) -> Any:
    """What the target of a group names, imported and held against what it must be.

    options: its keyword arguments. ConfigError: one line that says what is missing or wrong, and where.
    """
    kind, given = KINDS[group], f"{KINDS[group].key}={target}"
    name, _, path = target.partition(":")
    loaded: Any = _module(name, given)
    place = shown(getattr(loaded, "__file__", None) or name)
    for part in path.split(".") if path else ():
        if not hasattr(loaded, part):
            near = suggest(part, [other for other in dir(loaded) if not other.startswith("_")])
            raise ConfigError(f"{given}: {place} has no {part}{near}")
        loaded = getattr(loaded, part)
    if kind.takes is None:
        return loaded
    if not callable(loaded):
        raise ConfigError(f"{given}: is not a callable, {place} has a {type(loaded).__name__} there")
    if group == "optimizer":
        _check_optimizer(loaded, given)
    _check_call(loaded, kind, options or {}, given)
    return loaded


def target_file(target: str) -> str | None:
    """The file of a target's module, once it has been imported."""
    return getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)


def could_take(function: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Whether it can be called so; True where a builtin does not say what it takes."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*args, **options)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _module(name: str, given: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == "torch":
            raise  # of an installation, not of the program: the command line says what to do
        if name != missing and not name.startswith(f"{missing}."):
            raise ConfigError(f"{given}: cannot be imported: {import_error_text(error)}") from error
        raise ConfigError(f"{given}: there is no module {missing}{_near(missing)} ({_looked_in(missing)})") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{given}: cannot be imported: {import_error_text(error)}") from error


def _near(missing: str) -> str:
    """The module that was meant, perhaps."""
    if missing.endswith(".py") and importlib.util.find_spec(missing.removesuffix(".py").partition(".")[0]):
        return f"; did you mean {missing.removesuffix('.py')}?"
    package, _, word = missing.rpartition(".")
    return suggest(word, [found.name for found in pkgutil.iter_modules(_search_path(package))])


def _search_path(package: str) -> list[str]:
    """Where a person's own modules may lie: in the package, or where Python looks but for its own and what is
    installed."""
    if package:
        return list(getattr(sys.modules.get(package), "__path__", []))
    library = (os.path.dirname(os.__file__), "site-packages", "dist-packages")
    folders = [os.path.abspath(folder) for folder in sys.path]
    return [folder for folder in folders if not any(part in folder for part in library)]


def _looked_in(missing: str) -> str:
    package = missing.rpartition(".")[0]
    if package:
        with suppress(ImportError, AttributeError):
            return f"{package} is {shown(importlib.import_module(package).__file__ or package)}"
    return "it is looked for in this folder, on PYTHONPATH and among what is installed"


def _check_optimizer(loaded: Any, given: str) -> None:
    from torch.optim import Optimizer  # here, so that reading a configuration does not import torch

    if not (inspect.isclass(loaded) and issubclass(loaded, Optimizer)):
        kind = "class" if inspect.isclass(loaded) else type(loaded).__name__
        raise ConfigError(f"{given}: must be a class of torch.optim.Optimizer, it is a {kind}")
    if not could_take(loaded.step, None):
        raise ConfigError(f"{given}: has a step that needs a closure, which the trainer does not have")


_RATES = ("lr", "weight_decay")


def _check_call(loaded: Any, kind: Kind, options: Mapping[str, Any], given: str) -> None:
    """ConfigError: it does not take what it is called with; an option that it does not take is named."""
    taken = tuple(kind.takes or ())
    with suppress(ValueError):  # a builtin, which does not say what it takes
        parameters = inspect.signature(loaded).parameters.values()
        named = [item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
        accepts_any = any(item.kind is item.VAR_KEYWORD for item in parameters)
        positional = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
        free = set(named) - {item.name for item in positional[: len(taken)]}
        if not accepts_any and (unknown := [name for name in options if name not in free]):
            texts = [f"{kind.options_key}.{name}: {given} takes no {name}{suggest(name, free)}" for name in unknown]
            raise ConfigError([f"{text} (it takes {', '.join(sorted(free)) or 'none'})" for text in texts])
    # A constructor may demand what an optimizer is given beside its options.
    more = [{}, *({name: 0.0} for name in _RATES), dict.fromkeys(_RATES, 0.0)] if kind.group == "optimizer" else [{}]
    if not any(could_take(loaded, *taken, **options, **each) for each in more if not each.keys() & options.keys()):
        call = ", ".join([*taken, *(f"{name}=..." for name in options)])
        try:
            has = f", it takes {inspect.signature(loaded)}"
        except ValueError:
            has = ""
        raise ConfigError(f"{given}: cannot be called as ({call}){has}")
