"""What the configuration's classes say of each key, written into conf/README.md and into the comments of conf/.

    python scripts/configuration.py           # write them
    python scripts/configuration.py --check   # exit code 1 where a file says otherwise

A key's sentence and its allowed values stand in aottrain/config/run.py, or in the recipe that has the key. The head of
each YAML file, the comments of Hydra's own keys and the introduction below are written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aottrain.config.choices import GLOBAL_GROUPS  # noqa: E402
from aottrain.config.documentation import Key, head_of, keys, model_keys, sections  # noqa: E402
from aottrain.config.schema import join, leaves, show  # noqa: E402

CONF = ROOT / "conf"
README = CONF / "README.md"
MAX_LINE = 160
# A key that says which file of its group was chosen.
FILE_KEYS = ("name", "strategy")

INTRODUCTION = """\
# Configuration

<!-- Written by `python scripts/configuration.py`; change run.py, of_tasks.py in aottrain/config, recipes or YAML. -->

This page and the comments of the YAML files are written by `python scripts/configuration.py`, from the sentences beside
the fields of `aottrain/config/run.py` and of the recipes' `Options`.

    python -m aottrain trainer.steps=2000 optimizer=lion         # a key; a file of a group
    python -m aottrain optimizer=lion optimizer.lr=1e-3          # a key of that file
    python -m aottrain 'compare.engines=[eager,aot]'             # a list
    python -m aottrain -m seed=1,2,3                             # several values: a run for each
    python -m aottrain --cfg job trainer.steps=2000              # show what a command line comes to

A folder here is a group, and `group=file` takes one of its files: `engine=eager` is
[engine/eager.yaml](engine/eager.yaml). The keys of that file are changed by `group.key=value`. An unknown key, a wrong
value or a contradiction is refused before anything runs, and all mistakes are listed.

Speed is tokens/s where a recipe has tokens, else samples/s. `--config-dir DIR` adds groups of your own, as in
`DIR/recipe/mine.yaml`.
"""
_KEY_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w.]+):(?P<value>[^#]*?)(?: +# .*)?")
_DEFAULT_LINE = re.compile(r"(?P<text>  - (?P<group>\w+): \w+) # .*")


def commented(path: Path) -> str:
    """A YAML file with the comment of each key as the classes have it; other lines stay."""
    documented = {**keys(), **model_keys(_recipe_of(path))}
    purposes = {**sections(), "recipe.model": keys()["recipe.model"].meaning}
    root = "" if path.parent == CONF or path.parent.name in GLOBAL_GROUPS else path.parent.name
    lines, inside = [], [(-1, root)]
    for line in path.read_text(encoding="utf-8").splitlines():
        default, key = _DEFAULT_LINE.fullmatch(line), _KEY_LINE.fullmatch(line)
        if default and default["group"] in purposes:
            line = f"{default['text']} # {_plain(purposes[default['group']])}"
        elif key:
            indent = len(key["indent"])
            inside = [(depth, name) for depth, name in inside if depth < indent]
            name = join(inside[-1][1], key["key"])
            inside.append((indent, name))
            text = f"{key['indent']}{key['key']}:{key['value'].rstrip()} # "
            if name in purposes:
                line = text + _plain(purposes[name])
            elif name in documented:
                line = text + _comment(documented[name], MAX_LINE - len(text))
        lines.append(line)
    return "\n".join(lines) + "\n"


def _recipe_of(path: Path) -> str:
    """The recipe whose options a file sets; "" where it sets none."""
    if path.parent.name == "recipe":
        return path.stem
    chosen = [entry.get("override /recipe") for entry in _read(path).get("defaults", []) if isinstance(entry, dict)]
    return next(filter(None, chosen), "")


def _comment(key: Key, room: int) -> str:
    """The sentence, and after it what is allowed, where there is room for it and the file has not said it."""
    whole = f"{_plain(key.meaning)} ({key.allowed})"
    return _plain(key.meaning) if _last(key) in FILE_KEYS or len(whole) > room else whole


def _last(key: Key) -> str:
    return key.name.rpartition(".")[2]


def _plain(sentence: str) -> str:
    return sentence.removesuffix(".")


def readme() -> str:
    """The text of conf/README.md."""
    main = _read(CONF / "config.yaml")
    entries = [entry for entry in main["defaults"] if isinstance(entry, dict)]
    chosen = {group: str(option) for entry in entries for group, option in entry.items()}
    own = {name: value for name, value in main.items() if name not in ("defaults", "hydra", *sections())}
    parts = [INTRODUCTION, "## Keys of no group\n", _keys_table([keys()[name] for name in own], {"": dict(own)})]
    for name, purpose in sections().items():
        parts += _group(name, purpose, chosen[name]) if name in chosen else _section(name, purpose, main[name])
    for name in GLOBAL_GROUPS:
        parts += [f"## `{name}=`\n", f"{GLOBAL_GROUPS[name]}\n", _options_table(name, chosen[name])]
    parts += ["## Hydra's own\n", _table(("key", "default", "what it does"), _hydra_keys())]
    return "\n".join(parts)


def _section(name: str, purpose: str, values: Mapping[str, Any]) -> list[str]:
    """A section that stands in config.yaml."""
    by_key = {join(name, key): value for key, value in values.items()}
    return [f"## `{name}`\n", f"{purpose}\n", _keys_table([keys()[key] for key in by_key], {"": by_key})]


def _group(name: str, purpose: str, chosen: str) -> list[str]:
    """A section with a file for each choice, the chosen one first."""
    paths = sorted((CONF / name).glob("*.yaml"), key=lambda path: (path.stem != chosen, path.stem))
    files = {path.stem: {join(name, key): value for key, value in leaves(_read(path))} for path in paths}
    parts = [f"## `{name}=`\n", f"{purpose}\n", _options_table(name, chosen)]
    if name == "recipe":
        for recipe in files:
            shown = [keys()["recipe.target"]] if "recipe.target" in files[recipe] else []
            shown += model_keys(recipe).values()
            parts += [f"`recipe={recipe}`:\n", _keys_table(shown, {"": files[recipe]})]
        return parts
    shown = [key for key in keys().values() if key.name.startswith(f"{name}.") and _last(key) not in FILE_KEYS]
    return [*parts, _keys_table(shown, files)] if shown else parts


def _options_table(group: str, chosen: str) -> str:
    paths = sorted((CONF / group).glob("*.yaml"), key=lambda path: (path.stem != chosen, path.stem))
    rows = []
    for path in paths:
        text = head_of(path) + (_changes(_read(path)) if group in GLOBAL_GROUPS else "")
        rows.append((f"`{path.stem}`" + (" (default)" if path.stem == chosen else ""), text))
    return _table((f"`{group}=`", ""), rows)


def _keys_table(shown: Sequence[Key], files: Mapping[str, Mapping[str, Any]]) -> str:
    """files: of each file of the group the values of its keys; "" where there is one alone."""
    rows = [(f"`{key.name}`", key.allowed, _default(key.name, files), key.meaning) for key in shown]
    return _table(("key", "values", "default", "what it does"), rows)


def _default(name: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """As the files have it: once where all agree, else by file; a file that is not named has no such key."""
    by_file = {option: show(values[name]) for option, values in files.items() if name in values}
    if not by_file:
        raise KeyError(f"{name} stands in no file of conf/")
    by_value: dict[str, list[str]] = {}
    for option, value in by_file.items():
        by_value.setdefault(value, []).append(option)
    if len(by_file) == len(files) and len(by_value) == 1:
        return f"`{next(iter(by_value))}`"
    return "; ".join(f"{', '.join(options)}: `{value}`" for value, options in by_value.items())


def _changes(values: Mapping[str, Any]) -> str:
    """What a file that changes other groups sets, as it would be typed, and what it sweeps over."""
    groups = [next(iter(entry.items())) for entry in values.get("defaults", [])]
    swept = values.get("hydra", {}).get("sweeper", {}).get("params", {})
    changed = {name: value for name, value in values.items() if name not in ("defaults", "hydra")}
    choices = [(name.removeprefix("override /"), value) for name, value in groups]
    text = ""
    for word, items in (("Sets", (*choices, *leaves(changed))), ("Sweeps over", swept.items())):
        named = ", ".join(f"`{name}={show(value)}`" for name, value in items)
        text += f" {word} {named}." if named else ""
    return text


def _hydra_keys() -> Iterator[tuple[str, str, str]]:
    """The keys of Hydra that config.yaml sets, with their comments."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8").partition("\nhydra:")[2]
    comments = [line.partition(" # ")[2] for line in text.splitlines()[1:] if not re.fullmatch(r"  \w+: # .*", line)]
    values = leaves(_read(CONF / "config.yaml")["hydra"], "hydra")
    for (name, value), comment in zip(values, comments, strict=True):
        yield f"`{name}`", f"`{value}`", comment[:1].upper() + comment[1:] + "." * (not comment.endswith("."))


def _read(path: Path) -> Any:
    """Every value as it is written: `2e-3` stays these four characters."""
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def texts() -> dict[Path, str]:
    """Every file that this writes, with what it shall say."""
    return {**{path: commented(path) for path in sorted(CONF.rglob("*.yaml"))}, README: readme()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file differs")
    options = parser.parse_args()
    stale = {path: text for path, text in texts().items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if not options.check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'differs' if options.check else 'written'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
