"""The programs that a run of engine aot may go down to: plans of lower peak, then with fewer parts of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aottrain.errors import AottrainError, UnsupportedError
from aottrain.explain.figures import train_graph
from aottrain.ir.settings.decisions import record_from
from aottrain.ir.units import format_bytes
from aottrain.ops.random.mode import philox_eager
from aottrain.step import Batch
from aottrain.trainer.engines import LossModule, ModuleStep

# Fractions between the lowest peak of any plan and that of the fastest, the next one first.
BUDGETS = (0.75, 0.5, 0.25, 0.0)
EAGER = "eager"


class Programs:
    """Compiles `module` again with other options, and puts the program into `step`. See step.Rungs."""

    def __init__(
        self, step: ModuleStep, module: LossModule, compiled_with: Callable[..., Any], plan: Mapping[str, Any]
    ):
        """compiled_with: gives the compiled module for the options of `plan`, some of them others."""
        self.step, self.module, self.compiled_with, self.plan = step, module, compiled_with, dict(plan)
        self.changes: dict[str, Any] = {}
        self._left = list(BUDGETS)

    def lower_peak(self, batch: Batch) -> str | None:
        """A plan whose predicted peak is lower by a percent or more; those that are not are passed over. An allocator's
        error is raised, and the plan that it met counts as tried."""
        if self.changes.get("kernel") == EAGER or self.step.report is None:
            return None
        graph = train_graph(self.step.report)
        current = self.changes.get("budget", self.plan["budget"])
        before = None if graph is None else graph.predicted_peak_bytes
        while self._left and before is not None:
            budget = self._left.pop(0)
            if isinstance(current, float | int) and budget >= current:
                continue
            changes = {**self.changes, "partition": "budget", "budget": budget, "modules": ()}
            self._let_go()
            compiled = self.compiled_with({**self.plan, **changes})
            try:
                peak = compiled.prepare(*batch).predicted_peak_bytes
            except UnsupportedError:
                return None
            except AottrainError:  # no plan within it
                continue
            if peak < 0.99 * before:
                self._put(compiled, changes)
                was = self.plan["partition"] if current is None else current
                peaks = f"predicted peak {format_bytes(peak)} instead of {format_bytes(before)}"
                return f"partition.budget={budget} instead of {was}, {peaks}"
        return None

    def safer(self) -> str | None:
        current = self.changes.get("kernel", self.plan["kernel"])
        if current == EAGER:
            return None
        changes = {**self.changes, "kernel": EAGER if current == "aten" else "aten"}
        self.take(changes)
        return "eager PyTorch runs the step" if current == "aten" else "PyTorch's operators run in the plan's order"

    def take(self, changes: Mapping[str, Any]) -> None:
        if changes.get("kernel") == EAGER:
            self._let_go()
            self.step.call, self.step.draws, self.changes = self.module, philox_eager, dict(changes)
            return
        self._left = [budget for budget in self._left if budget < changes.get("budget", 2.0)]
        self._put(self.compiled_with({**self.plan, **changes}), changes)

    def follow(self, decisions: Mapping[str, Any]) -> None:
        self.plan["decisions"] = record_from(decisions)
        self._put(self.compiled_with({**self.plan, **self.changes}), self.changes)

    def _put(self, compiled: Any, changes: Mapping[str, Any]) -> None:
        self.step.call, self.step.report, self.changes = compiled, compiled.report, dict(changes)

    def _let_go(self) -> None:
        """Of what programs that have ended keep."""
        import aottrain  # the compiler, which the other engines do without

        aottrain.empty_cache()
