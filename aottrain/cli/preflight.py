"""What only a look at the machine can tell, before a run begins: files, folders, devices, a kernel's target."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from aottrain.config.choices import BPE, DATA_KINDS, PATH_NEEDED
from aottrain.config.recipes import kinds_taken, load_recipe, not_taken
from aottrain.config.run import DataConfig, RunConfig
from aottrain.config.schema import Mistake
from aottrain.errors import ConfigError
from aottrain.ir.settings.decisions import DEFAULT, MEASURED, read_record


def missing_paths(config: RunConfig) -> list[Mistake]:
    """Paths that are absent, unreadable or empty. Imports nothing, so that a wrong path is answered at once."""
    mistakes = []
    if config.data.path is not None:
        if text := _unreadable(Path(config.data.path)):
            mistakes.append(Mistake("data.path", text, config.data.path))
    elif config.data.name in PATH_NEEDED:
        mistakes.append(Mistake("data.path", f"data={config.data.name} needs a file or folder", "null"))
    tokenizer = config.data.tokenizer
    if tokenizer not in (None, BPE) and not Path(tokenizer).is_file():
        mistakes.append(Mistake("data.tokenizer", "no such file; give null, bpe or a tokenizer.json", tokenizer))
    if tokenizer == BPE and config.data.name != DataConfig.name:
        mistakes.append(Mistake("data.tokenizer", f"data={config.data.name} has tokens already; give a file", BPE))
    if config.resume not in (None, "auto") and not Path(config.resume).exists():
        text = "no such file or folder; give the output directory of an earlier run, or auto"
        mistakes.append(Mistake("resume", text, config.resume))
    if config.decisions not in (MEASURED, DEFAULT):
        try:
            read_record(config.decisions)
        except ValueError as error:
            reason = "no such file or folder" if not Path(config.decisions).exists() else str(error)
            text = f"{reason}; allowed: {MEASURED}, {DEFAULT}, or the path of a run or of its decisions.json"
            mistakes.append(Mistake("decisions", text, config.decisions))
    return mistakes


def _unreadable(path: Path) -> str:
    """What is wrong with a data path, or nothing."""
    if not path.exists():
        return "no such file or folder"
    if not os.access(path, os.R_OK):
        return "cannot be read (permission denied)"
    files = [path] if path.is_file() else path.rglob("*")  # not a list: a folder may have a million
    if not any(file.is_file() and file.stat().st_size for file in files):
        return "the file is empty" if path.is_file() else "the folder holds no data: no file in it has any bytes"
    return ""


def unusable(config: RunConfig, wrong_keys: Iterable[str]) -> list[Mistake]:
    """A device or a kernel's target that is not there. Imports torch, and the target, if there is one to look at."""
    checks = []
    if config.kernel.target is not None and "kernel.target" not in wrong_keys:
        checks.append("load_kernel")
    if config.device.startswith("cuda") and "device" not in wrong_keys:
        checks.append("find_device")
    mistakes = []
    for check in checks:
        from aottrain.tasks import build

        try:
            build.load_kernel(config) if check == "load_kernel" else build.find_device(config.device)
        except ConfigError as error:
            mistakes += [Mistake.from_line(line) for line in error.mistakes]
    return mistakes


def without_use(config: RunConfig) -> list[Mistake]:
    """Data that the recipe does not take, a path for a recipe that reads none, or a folder of text without any. Imports
    torch."""
    recipe = load_recipe(config.recipe.name)
    makes_its_own = hasattr(recipe, "make_batch") and config.data.name == DataConfig.name
    if not makes_its_own and DATA_KINDS[config.data.name] not in kinds_taken(recipe.Options):
        return [Mistake.from_line(not_taken(config.data.name, recipe.Options))]
    if config.data.path is None or config.data.name != DataConfig.name:
        return []
    if makes_its_own:
        text = f"recipe {config.recipe.name} makes its own data and reads no text; leave it out"
        return [Mistake("data.path", text, config.data.path)]
    if Path(config.data.path).is_file():
        return []
    from aottrain.data.documents import is_saved_dataset
    from aottrain.data.text import TEXT_SUFFIXES

    files = (path for path in Path(config.data.path).rglob("*") if path.suffix.lower() in TEXT_SUFFIXES)
    if any(files) or is_saved_dataset(Path(config.data.path)):
        return []
    return [Mistake("data.path", f"the folder has no file that ends in {', '.join(TEXT_SUFFIXES)}", config.data.path)]


def unwritable(key: str, directory: str) -> list[Mistake]:
    """What keeps the output directory that `key` names from being made."""
    path = Path(directory).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return []
    reason = "is not writable" if existing.is_dir() else "is a file"
    return [Mistake(key, f"cannot be made: {existing} {reason}", directory)]
