"""Checks in flight: now and then a step is checked against eager, within a share of the run's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from aottrain.errors import NumericsError
from aottrain.ir.units import format_percent, format_seconds
from aottrain.step import Batch
from aottrain.trainer.job import Job
from aottrain.trainer.verify.verification import Verification

if TYPE_CHECKING:
    from aottrain.config.run import VerifyConfig

Check = Callable[[int, Sequence[Batch]], Verification | None]


class Sentinel:
    """Says when a step is checked, and what becomes of the run where one differs. State is as before after a check."""

    def __init__(self, job: Job, config: VerifyConfig, start: int, check: Check, say: Callable[[str], None]):
        self.job, self.config, self.start, self.check, self.say = job, config, start, check, say
        self.num_checks = 0
        self.first_error: float | None = None
        """The largest relative error of the first check, and of the newest one."""
        self.last_error: float | None = None
        self.asked = False
        """Whether the next step is to be checked, whatever it takes: its program is another than before."""
        self._cost_s: float | None = None
        self._spent_s = 0.0
        self._began_s = time.perf_counter()
        self._is_announced = False

    @property
    def drift(self) -> float | None:
        """How many times the first error the newest one is; None before there are two, and where the first is 0."""
        if self.num_checks < 2 or not self.first_error or self.last_error is None:
            return None
        return self.last_error / self.first_error

    def look(self, step: int, micro_batches: Sequence[Batch], step_ms: Sequence[float]) -> Verification | None:
        """Check the step, if it is its turn, before it is taken. NumericsError: it differs, and is not to go on.

        step_ms: how long steps took so far.
        """
        if self.job.step.engine != "aot":
            return None
        is_first = step - self.start <= self.config.steps
        in_flight = self.config.every and step % self.config.every == 0
        is_due = is_first or (self.asked and self.config.steps)
        if not is_due and not (in_flight and self.job.module.world.from_first(lambda: self._has_time(step_ms))):
            return None
        self.asked = False
        start_s = time.perf_counter()
        verification = self._checked(step, micro_batches)
        self._cost_s = time.perf_counter() - start_s
        self._spent_s += 0.0 if is_first else self._cost_s
        if verification is not None:
            self.num_checks += 1
            self.last_error = verification.max_error
            if self.first_error is None:
                self.first_error = verification.max_error
        return verification

    def _has_time(self, step_ms: Sequence[float]) -> bool:
        """Whether a check as long as the last one stays within the share of the time since the run began."""
        if self._cost_s is None:
            return True
        if not self._is_announced and step_ms:
            self._is_announced = True
            self.say(self._announcement(median(step_ms) / 1e3))
        elapsed_s = time.perf_counter() - self._began_s + self._cost_s
        return self._spent_s + self._cost_s <= self.config.share * elapsed_s

    def _announcement(self, step_s: float) -> str:
        assert self._cost_s is not None
        every, share = self.config.every, self.config.share
        wanted = self._cost_s / (self._cost_s + every * step_s)
        text = f"a check takes {format_seconds(self._cost_s)}, every {every} steps {format_percent(wanted)} of the time"
        if wanted <= share:
            return text
        rarer = self._cost_s * (1 - share) / (share * step_s)
        return f"{text}; verify.share={share:g} makes it about every {rarer:,.0f} steps"

    def _checked(self, step: int, micro_batches: Sequence[Batch]) -> Verification | None:
        while True:
            try:
                return self.check(step, micro_batches)
            except NumericsError as error:
                rungs = self.job.step.rungs
                change = rungs.safer() if self.config.on_breach == "fallback" and rungs is not None else None
                if change is None:
                    raise
                self.say(f"{error}; verify.on_breach=fallback: {change} from now on")
