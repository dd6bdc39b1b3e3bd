"""The flags, and the text of `--help`: one screen. Groups and their options are read from the folder of YAML files, the
keys from the classes of the configuration.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from aottrain.config.documentation import keys, model_keys
from aottrain.config.run import RunConfig
from aottrain.config.schema import show
from aottrain.errors import ConfigError

HELP = """\
aottrain {version}: train PyTorch models with a training compiler that keeps to a memory budget.
  python -m aottrain [flags] [group=option ...] [key=value ...]

Examples
  python -m aottrain                                         train a small GPT on built-in text
  python -m aottrain data.path=books/ trainer.steps=2000     your own text: a file or a folder
  python -m aottrain task=compare                            eager, torch.compile, aot in one table
  python -m aottrain ls                                      what each group=option means
  python -m aottrain new recipe NAME                         a recipe of your own, to begin with
  python -m aottrain -m partition.budget=0.1,0.4,1.0 engine=aot,eager    one process per job
  python -m aottrain resume=outputs/transformer/<run> trainer.steps=4000 go on with a run

Groups: group=option (files of conf/; {default} marks the default)
{groups}

Keys most used (all of them, with their values: {documented})
{keys}

Flags
  -m, --multirun            run every combination of comma-separated values
  -c, --cfg job [--resolve] show the configuration instead of running it
  --config-dir DIR          add a folder of your own groups, as in DIR/recipe/mine.yaml
  --version, --hydra-help   versions; all of Hydra's flags
A run writes to hydra.run.dir, outputs/<recipe>/<time>. To look at it: report DIR..., watch DIR"""

MOST_USED = (
    "task", "seed", "device", "trainer.steps", "trainer.precision", "data.batch_size", "optimizer.lr",
    "recipe.model.num_layers", "partition.budget", "verify.steps",
)  # fmt: skip
_MAX_COLUMN = 56
_MOST_NAMED = 10  # options of a group


def config_folder() -> Path:
    """The folder of the YAML files: in the package where it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    return Path(importlib.import_module("aottrain.conf").__path__[0])


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags, and `overrides`: the rest. Both may be mixed. ConfigError names every unknown flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (("--help", "-h"), ("--version",), ("--hydra-help",), ("--shell-completion", "-sc"), ("--resolve",)):
        parser.add_argument(*names, action="store_true")
    for names in (("--multirun", "-m"), ("--run", "-r")):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", nargs="?", const="all")
    for names in (("--config-dir", "-cd"), ("--config-path", "-cp"), ("--config-name", "-cn"), ("--package", "-p")):
        parser.add_argument(*names)
    parser.add_argument("overrides", nargs="*")

    def refuse(message: str) -> None:
        raise ConfigError(f"{message} (see --help)")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    flags, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        hint = "unknown flag; settings are written key=value, without dashes, as in trainer.steps=100"
        raise ConfigError([f"{flag}: {hint}" for flag in unknown])
    return flags


def usage(folders: Sequence[Path], version: str) -> str:
    """The help text for the groups in these folders, the first of which has the defaults."""
    defaults = defaults_of(folders[0] / "config.yaml")
    lines = []
    for group, chosen in defaults.items():
        options = sorted(path.stem for folder in folders for path in (folder / group).glob("*.yaml") if path.is_file())
        marked = [option + "*" if option == chosen else option for option in options]
        if marked == [f"{chosen}*"]:
            continue  # its keys are set one by one
        named = " ".join(marked)
        if len(marked) > _MOST_NAMED:
            named = f"{chosen}* and {len(marked) - 1} more: ls {group}" if chosen in options else f"see ls {group}"
        lines.append(f"  {group:<11} {named}")
    groups, keys = "\n".join(_two_columns(lines)), "\n".join(_keys())
    return HELP.format(version=version, groups=groups, keys=keys, default="*", documented=_documented(folders[0]))


def _documented(folder: Path) -> str:
    """Where all keys are told: as one finds it in a checkout, or where it was installed."""
    is_checkout = (folder.parent / "pyproject.toml").is_file()
    return "conf/README.md" if is_checkout else str(folder / "README.md")


def _keys() -> list[str]:
    """A line for each of the keys most used: its default, or the names that it takes, and the head of its sentence."""
    documented = {**keys(), **model_keys(RunConfig().recipe.name)}
    shown = {key.name: "|".join(key.one_of) or show(key.default) for key in documented.values()}
    heads = {name: documented[name].meaning.partition(";")[0].rstrip(".") for name in MOST_USED}
    return [f"  {f'{name}={shown[name]}':<33} {head}" for name, head in heads.items()]


def defaults_of(path: Path) -> dict[str, str]:
    """`group: option` of the defaults list, in its order. Read as text: help must not wait for a YAML reader."""
    defaults = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = line.split("#")[0].strip()
        if entry.startswith("- ") and ": " in entry:
            group, option = entry[2:].split(": ")
            defaults[group] = option
    return defaults


def _two_columns(lines: list[str]) -> list[str]:
    """Side by side; what is too long for that comes first, on lines of its own."""
    long = [line for line in lines if len(line) > _MAX_COLUMN]
    lines = [line for line in lines if len(line) <= _MAX_COLUMN]
    half = (len(lines) + 1) // 2
    left, right = lines[:half], [*lines[half:], ""][:half]
    width = max(map(len, left)) + 2
    return [*long, *(f"{first:<{width}}{second}".rstrip() for first, second in zip(left, right, strict=True))]
