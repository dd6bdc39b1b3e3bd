"""How far each pattern is from the least traffic, in `recorded.json`; `scripts/bench_traffic.py --renew` renews it.

By pattern, back end and type the ratio of what is moved to the least. Where a program moves more than recorded its test
fails, and where it moves less, too: then the record is to be renewed, so that it stays so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

PATH = Path(__file__).with_name("recorded.json")
Record = dict[str, dict[str, float]]  # by pattern, then by `key_of`
_SAME = 0.002  # what rounding of a ratio in the record may be


def key_of(backend: str, dtype: str) -> str:
    return f"{backend} {dtype}"


@functools.cache
def load() -> Record:
    return dict(json.loads(PATH.read_text(encoding="utf-8"))) if PATH.exists() else {}


def change(name: str, key: str, ratio: float) -> str | None:
    """In words, how a pattern stands otherwise than recorded; None where it stands as it did."""
    before = load().get(name, {}).get(key)
    if before is None:
        return f"{name} ({key}) is not recorded: python scripts/bench_traffic.py --renew {name}"
    if ratio > before + _SAME:
        return f"{name} ({key}) moves {ratio:.3f} of the least, more than the {before:.3f} recorded"
    if ratio < before - _SAME:
        return (
            f"{name} ({key}) moves {ratio:.3f} of the least, less than the {before:.3f} recorded: "
            f"python scripts/bench_traffic.py --renew {name}"
        )
    return None


def is_worse(name: str, key: str, ratio: float) -> bool:
    return ratio > load().get(name, {}).get(key, ratio) + _SAME


def text_of(record: Mapping[str, Mapping[str, float]]) -> str:
    """The record as JSON, a line for each pattern, so that changes of it seldom meet."""
    lines = [f" {json.dumps(name)}: {json.dumps(record[name], sort_keys=True)}" for name in sorted(record)]
    return "{\n" + ",\n".join(lines) + "\n}\n"
