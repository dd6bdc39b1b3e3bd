"""Who answers what could be measured: a record that was given, else what was kept or is measured now, else a fixed
model. What is asked while a program is compiled is collected, with the answers, for its report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from aottrain.ir.settings.decisions import DEFAULT, MEASURED, Choice, Decision, Record, Timing
from aottrain.ir.settings.devices import Target
from aottrain.measure.machine import machine_description
from aottrain.measure.stopwatch import work_watched

Policy = str | Record
T = TypeVar("T")


@dataclass(frozen=True)
class Timed:
    """Times of candidates, and where they come from."""

    times: Mapping[str, Timing] = field(default_factory=dict)
    source: str = "model"
    """One of "measured", "cache", "shared" and "busy", as `SOURCES` in ir.settings.decisions has them; "model": it
    could not be timed."""

    @property
    def decides(self) -> bool:
        return self.source in ("measured", "cache", "shared")


@dataclass
class Ledger:
    """What was decided while a program is compiled."""

    policy: Policy
    """MEASURED, DEFAULT or the record whose answers are taken; what that lacks the fixed model answers."""
    decisions: dict[tuple[str, str], Decision] = field(default_factory=dict)
    target: Target | None = None
    """The device that is planned for where it is not the one at hand: its specification answers, no clock."""

    @property
    def measures(self) -> bool:
        return self.policy == MEASURED

    def recorded(self, kind: str, key: str) -> Decision | None:
        decision = self.policy.by_question.get((kind, key)) if isinstance(self.policy, Record) else None
        return None if decision is None else replace(decision, source="record")

    def record(self, device: torch.device | None = None) -> Record:
        if self.target is not None:
            return Record(tuple(self.decisions.values()), {"device": self.target.name})
        return Record(tuple(self.decisions.values()), machine_description(device))


_active: ContextVar[Ledger | None] = ContextVar("ledger", default=None)


def policy_of(policy: Policy) -> Policy:
    """AOTTRAIN_RATES=default in the environment says DEFAULT for all that would be measured."""
    return DEFAULT if policy == MEASURED and os.environ.get("AOTTRAIN_RATES") == DEFAULT else policy


@contextmanager
def deciding(policy: Policy, target: Target | None = None) -> Iterator[Ledger]:
    """Inside, in this thread, every decision is made by this policy and kept in the ledger that is given. target: the
    device that is planned for; None is that of the ledger outside, else the device at hand."""
    ledger = Ledger(policy_of(policy), target=target or planned_for())
    before = _active.set(ledger)
    try:
        with work_watched():
            yield ledger
    finally:
        _active.reset(before)


def decided_here(function: Callable[[], T]) -> Callable[[], T]:
    """The function, to be called later: what it asks is answered as it would be now."""
    ledger = _active.get()

    def later() -> T:
        before = _active.set(ledger)
        try:
            return function()
        finally:
            _active.reset(before)

    return later


def planned_for() -> Target | None:
    """The specification of the device that is planned for; None: it is at hand, and can be asked."""
    ledger = _active.get()
    return None if ledger is None else ledger.target


def ledger_of_measurements() -> Ledger | None:
    """That of the compile in progress, where what was measured on the device at hand, and is kept, answers."""
    ledger = _active.get()
    return ledger if ledger is not None and ledger.measures and ledger.target is None else None


def gradients_are_shared() -> bool:
    """Whether gradients go to several devices as they are complete, and are counted with the state there."""
    target = planned_for()
    return target is not None and target.world > 1


def decide(
    kind: str,
    key: str,
    model: Choice,
    measure: Callable[[], Timed],
    prefer: Callable[[Mapping[str, Timing]], Choice],
) -> Decision:
    """The answer to a question, the same each time that one compile asks it.

    model: the fixed model's; measure: times the candidates, or finds their times; prefer: what follows from these.
    """
    ledger = _ledger()
    if (kind, key) not in ledger.decisions:
        ledger.decisions[kind, key] = ledger.recorded(kind, key) or _decide(ledger, kind, key, model, measure, prefer)
    return ledger.decisions[kind, key]


def _decide(
    ledger: Ledger,
    kind: str,
    key: str,
    model: Choice,
    measure: Callable[[], Timed],
    prefer: Callable[[Mapping[str, Timing]], Choice],
) -> Decision:
    if not ledger.measures:
        return Decision(kind, key, model, "model")
    timed = measure()
    return Decision(kind, key, prefer(timed.times) if timed.decides else model, timed.source, timed.times)


def recorded(kind: str, key: str) -> Decision | None:
    """What the record says of a figure that no clock gives, such as bytes."""
    ledger = _ledger()
    return ledger.decisions.get((kind, key)) or ledger.recorded(kind, key)


def note(kind: str, key: str, choice: Choice, source: str) -> None:
    """Such a figure, as it was found."""
    take(Decision(kind, key, choice, source))


def take(decision: Decision) -> None:
    """What was decided before this compile began, and is asked for in it."""
    _ledger().decisions.setdefault((decision.kind, decision.key), decision)


def _ledger() -> Ledger:
    """That of the compile in progress; where a stage runs alone, one that nobody reads."""
    return _active.get() or Ledger(policy_of(MEASURED))
