"""A clock for tests of what is decided by measuring: every run takes as long as it is told to."""

from __future__ import annotations

from collections.abc import Callable

from aottrain.measure import stopwatch, timings


class Clock:
    """seconds: of one call, a number or a function of how many runs were timed; switches: of each run; load: what a
    look at the machine sees of them."""

    def __init__(self, monkeypatch):
        self.seconds: float | Callable[[int], float] = 0.001
        self.switches = self.load = 0
        self.num_runs = 0
        self._at = self._switched = 0
        monkeypatch.delenv("AOTTRAIN_RATES", raising=False)
        monkeypatch.setattr(stopwatch, "_seconds", self._run)
        monkeypatch.setattr(stopwatch, "_switches", lambda: self._switched)
        monkeypatch.setattr(stopwatch, "_waited_seconds", lambda: None)
        monkeypatch.setattr(stopwatch, "_lost_seconds", lambda: 0.0)
        monkeypatch.setattr(stopwatch, "_work", self._look)
        monkeypatch.setattr(stopwatch, "now", lambda: self._at)
        monkeypatch.setattr(stopwatch, "epoch", lambda: self._at)
        self.forget(monkeypatch)

    def forget(self, monkeypatch) -> None:
        """As another process begins."""
        monkeypatch.setattr(timings, "_checked", set())
        monkeypatch.setattr(timings, "_busy", {})
        monkeypatch.setattr(stopwatch, "_seen", [])
        monkeypatch.setattr(stopwatch, "_begun", [])
        monkeypatch.setattr(stopwatch, "_undisturbed", [])

    def later(self, seconds: float) -> None:
        self._at += seconds

    def _look(self, seconds) -> None:
        self._switched += self.load

    def _run(self, run, num_calls, device) -> float:
        assert num_calls == 1  # none is shorter than a run shall be
        run.call()
        self.num_runs += 1
        self._switched += self.switches
        return self.seconds(self.num_runs) if callable(self.seconds) else self.seconds
