"""What measuring decided, as one record: each question with its answer, its times and where the answer came from.

A record is written beside a run and into its checkpoints, and can be given back: what it answers is then not asked
again, so that a program is compiled to the same kernels on another day, or another machine.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from aottrain.ir.settings.files import values_of
from aottrain.ir.units import format_bytes, format_flops, format_percent, format_seconds

FILE = "decisions.json"
_FORMAT = 1

# What `decisions=` may say beside the path of a record.
MEASURED, DEFAULT = "measured", "default"
# Where an answer came from, in words.
SOURCES = {
    "measured": "measured now",
    "cache": "measured before, and kept",
    "record": "taken from the record",
    "model": "by the fixed model",
    "shared": "measured by fewer threads, for the machine was busy",
    "busy": "by the fixed model, for the machine was busy",
}
# Figures of "rates" beside those of a type: bytes a second, seconds of a call.
TRAFFIC, OVERHEAD = "bytes_per_s", "op_overhead_s"
# Figures of "link": seconds of a collective without bytes, bytes a second that a process takes in.
LATENCY, BANDWIDTH = "latency_s", "link_bytes_per_s"
AS_GIVEN, CHANNELS_LAST = "as given", "channels_last"
ATEN, ONEDNN, OWN = "ATen", "oneDNN", "own function"
PRODUCTS, ONE_OP = "products and softmax", "one op"

# Of all convolutions of a program, or of some by their places in it: `channels_last: 0-6, 9`.
_LAYOUTS = re.compile(rf"{AS_GIVEN}|{CHANNELS_LAST}(: \d+(-\d+)?(, \d+(-\d+)?)*)?")

# Most bytes of collectives at once; 0: each is waited for where it starts.
_UNDER_WAY = re.compile(r"\d+ B(, small gathers joined)?")

Choice = str | float | None | Mapping[str, float]
# Of each kind of question what an answer may be: these names, or what a function admits.
_ANSWERS: dict[str, tuple[str, ...] | Callable[[Any], bool]] = {
    "products": (ATEN, ONEDNN, OWN),
    "layouts": lambda value: isinstance(value, str) and _LAYOUTS.fullmatch(value) is not None,
    "attention": (ATEN, OWN),
    "written attention": (PRODUCTS, ONE_OP),
    "rates": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "link": lambda value: isinstance(value, dict) and all(_is_number(v) and v > 0 for v in value.values()),
    "seconds": lambda value: value is None or _is_number(value),
    "workspace bytes": lambda value: value is None or _is_number(value),
    "free bytes": lambda value: _is_number(value),
    "under way": lambda value: isinstance(value, str) and _UNDER_WAY.fullmatch(value) is not None,
}
# Of these there may be one for each call of a program: reports count them.
COUNTED = ("seconds", "workspace bytes")


@dataclass(frozen=True)
class Timing:
    """How long one candidate took."""

    seconds: float
    """The best of all runs."""
    spread: float = 0.0
    """How much longer the longest run took, as a share of the best."""

    def __str__(self) -> str:
        return f"{format_seconds(self.seconds)} (+{format_percent(self.spread)})"


@dataclass(frozen=True)
class Decision:
    """One question, `kind` and `key`, with its answer."""

    kind: str
    key: str
    choice: Choice
    """A candidate's name, figures by name, or one figure; None: there is none."""
    source: str
    """Where the answer came from: a key of SOURCES."""
    times: Mapping[str, Timing] = field(default_factory=dict)
    """Of each candidate; in "rates" of one byte, operation or call."""

    def __str__(self) -> str:
        return "; ".join(filter(None, [f"{self.title}: {self.answer}", SOURCES[self.source], self.timing]))

    @property
    def title(self) -> str:
        """What was asked, with the operator alone of a call."""
        call, _, _ = self.key.partition("(")
        return f"{self.kind} of {call.removesuffix('.default')}"

    @property
    def answer(self) -> str:
        if isinstance(self.choice, Mapping):
            return ", ".join(_rate(name, figure) for name, figure in self.choice.items())
        return f"{self.choice:,.6g}" if isinstance(self.choice, (int, float)) else str(self.choice)

    @property
    def timing(self) -> str:
        """`oneDNN 1.00 ms (+3.0 %), ATen 2.00 ms (+5.1 %)`; empty where nothing was timed."""
        return ", ".join(self._time(name, timing) for name, timing in self.times.items())

    def _time(self, name: str, timing: Timing) -> str:
        if self.kind != "rates":
            return f"{name} {timing}"
        figure = timing.seconds if name == OVERHEAD else 1 / max(timing.seconds, 1e-18)
        return f"{_rate(name, figure)} (+{format_percent(timing.spread)})"


@dataclass(frozen=True, eq=False)
class Record:
    """The decisions of a run."""

    decisions: tuple[Decision, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    """The machine on which they were made: its properties by name."""

    @cached_property
    def by_question(self) -> dict[tuple[str, str], Decision]:
        return {(decision.kind, decision.key): decision for decision in self.decisions}

    @cached_property
    def fingerprint(self) -> str:
        """The same for records that answer the same, whatever their times."""
        answers = sorted((kind, key, _plain(decision.choice)) for (kind, key), decision in self.by_question.items())
        return hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:12]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"<Record {self.fingerprint}: {self}>"

    def __str__(self) -> str:
        """`11 decisions: 8 measured now, 3 by the fixed model`, those that each call has one of not counted."""
        counts = Counter(decision.source for decision in self.decisions if decision.kind not in COUNTED)
        parts = ", ".join(f"{counts[source]} {words}" for source, words in SOURCES.items() if counts[source])
        return f"{counts.total()} decision{'' if counts.total() == 1 else 's'}{': ' if parts else ''}{parts}"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Of each decision what was asked, the answer, the times with their spread, and where it came from. What each
        call has one of is one row for each source."""
        single = [d for d in self.decisions if d.kind not in COUNTED]
        counts = Counter((d.kind, d.source) for d in self.decisions if d.kind in COUNTED)
        rows = [(d.title, d.answer, d.timing, SOURCES[d.source]) for d in single]
        return rows + [(f"{kind} of calls", f"{n} figures", "", SOURCES[s]) for (kind, s), n in counts.items()]

    def to_dict(self) -> dict[str, Any]:
        """As plain values: what `decisions.json` and a checkpoint hold."""
        rows = [
            {
                "kind": decision.kind,
                "key": decision.key,
                "choice": _plain(decision.choice),
                "source": decision.source,
                "times": {name: {"seconds": t.seconds, "spread": t.spread} for name, t in decision.times.items()},
            }
            for decision in self.decisions
        ]
        header = {"format": _FORMAT, "fingerprint": self.fingerprint, "machine": dict(self.machine)}
        return {**header, "decisions": rows}


def record_from(values: Any) -> Record:
    """The record that `to_dict` gave. ValueError, in one line: it is none."""
    if not isinstance(values, dict) or values.get("format") != _FORMAT or not isinstance(values.get("decisions"), list):
        raise ValueError(f"no record of decisions (format {_FORMAT})")
    try:
        machine = {str(name): str(fact) for name, fact in dict(values.get("machine") or {}).items()}
        return Record(tuple(map(_decision, values["decisions"])), machine)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a damaged record of decisions ({type(error).__name__}: {error})") from error


def read_record(path: str | Path) -> Record:
    """The record in a file, or in the folder of a run. ValueError, in one line: there is none that can be read."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        return record_from(values_of(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # JSON's own, too
        raise ValueError(f"{path}: {error}") from error


def merged(records: Iterable[Record]) -> Record:
    """All decisions, each question once, as it was answered first."""
    decisions: dict[tuple[str, str], Decision] = {}
    machine: Mapping[str, str] = {}
    for record in records:
        machine = machine or record.machine
        decisions = {**record.by_question, **decisions}
    return Record(tuple(decisions[question] for question in sorted(decisions)), machine)


def _decision(row: Any) -> Decision:
    kind, key, choice = str(row["kind"]), str(row["key"]), row["choice"]
    answers = _ANSWERS.get(kind)
    if answers is None:
        raise ValueError(f"nothing is decided about {kind!r}; known: {', '.join(_ANSWERS)}")
    if not (choice in answers if isinstance(answers, tuple) else answers(choice)):
        allowed = f"; allowed: {', '.join(answers)}" if isinstance(answers, tuple) else ""
        raise ValueError(f"{kind} of {key}: {choice!r} is no answer{allowed}")
    times = {str(name): Timing(float(t["seconds"]), float(t["spread"])) for name, t in row.get("times", {}).items()}
    if not all(_is_number(t.seconds) and _is_number(t.spread) for t in times.values()):
        raise ValueError(f"{kind} of {key}: a time is none")
    source = row.get("source")
    return Decision(kind, key, choice, source if source in SOURCES else "record", times)


def _rate(name: str, figure: float) -> str:
    """Of "rates" and "link": `float32 180 GFLOP/s`, `a call 2 us`, `a collective 100 us`."""
    if name == OVERHEAD:
        return f"a call {format_seconds(figure)}"
    if name == LATENCY:
        return f"a collective {format_seconds(figure)}"
    if name in (TRAFFIC, BANDWIDTH):
        return f"{'memory' if name == TRAFFIC else 'into each'} {format_bytes(figure)}/s"
    return f"{name.removeprefix('torch.')} {format_flops(figure)}/s"


def _plain(choice: Choice) -> Any:
    return dict(sorted(choice.items())) if isinstance(choice, Mapping) else choice


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max  # an int may be larger than any float
