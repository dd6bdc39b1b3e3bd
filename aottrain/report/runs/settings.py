"""How the settings of several runs differ, and what of that changes what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aottrain.report.runs.reading import Run

ABSENT = "-"
# Where a run writes, and what it is called: never what makes runs differ. Of `compare` and `pareto` only those tasks
# know.
_OF_NO_INTEREST = ("logger.", "compare.", "pareto.", "resume", "output_dir", "task")
# What does not change the numbers of a training, but for rounding.
_NEUTRAL = ("engine.", "kernel.", "partition.", "verify.", "measure.", "decisions", "trainer.log_every",
            "trainer.eval_", "trainer.save_", "trainer.keep_", "trainer.sample_", "trainer.num_threads",
            "trainer.deterministic", "optimizer.kernel")  # fmt: skip


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """{key: its value in each run, as text} of the keys in which the runs differ, in the order of the files.

    A run that left no configuration has ABSENT everywhere, and makes no difference.
    """
    told = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in told for key in run.settings)
    found = {}
    for key in keys:
        if not key.startswith(_OF_NO_INTEREST):
            values = {text(run.settings.get(key, ABSENT)) for run in told}
            if len(values) > 1:
                found[key] = [text(run.settings.get(key, ABSENT)) if run.settings else ABSENT for run in runs]
    return found


def first_keys(keys: Sequence[str], most: int) -> list[str]:
    """The keys that say most, for columns of a table: the name of a choice stands for its other keys."""
    named = {key.rpartition(".")[0] for key in keys if key.endswith((".name", ".strategy"))}
    kept = [
        key
        for key in keys
        if key.rpartition(".")[0] not in named or key.endswith((".name", ".strategy", "partition.budget"))
    ]
    return kept[:most]


def short(keys: Sequence[str]) -> list[str]:
    """The keys by what one says: `budget` of partition.budget, `engine` of engine.name; whole, where two would be
    called the same."""
    names = [_short(key) for key in keys]
    return [name if names.count(name) == 1 else key for key, name in zip(keys, names, strict=True)]


def _short(key: str) -> str:
    section, _, name = key.rpartition(".")
    return section.rpartition(".")[2] if section and name in ("name", "strategy") else name


def changing(keys: Sequence[str]) -> list[str]:
    """Those that change what is trained: where there are any, losses are not expected to agree."""
    return [key for key in keys if not key.startswith(_NEUTRAL)]


def text(value: Any) -> str:
    """As it is typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(text, value)) or "[]"
    return repr(value) if isinstance(value, float) else str(value)
