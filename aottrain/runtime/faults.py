"""Faults of the compiler itself, in lowering, fusion, scheduling or rendering: counted, shown, and never a crash."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field

from aottrain.errors import BudgetError, CapacityError, ConfigError, UnsupportedError, is_out_of_memory
from aottrain.explain.report import CompileReport, add_fallback

# Not faults: errors that are meant for the caller.
_FOR_CALLER = (BudgetError, CapacityError, ConfigError, UnsupportedError)


@dataclass
class Faults:
    """Of one program. Where making kernels failed, operators run one by one.

    With AOTTRAIN_FAULTS=raise in the environment, as in our tests, faults are raised instead.
    """

    reasons: list[str] = field(default_factory=list)
    report: CompileReport | None = None
    """Where they are counted."""

    def note(self, stage: str, error: Exception) -> str:
        """Count it; the reason, in words. Raises what is meant for the caller, and what an allocator raised."""
        if isinstance(error, _FOR_CALLER) or is_out_of_memory(error) or os.environ.get("AOTTRAIN_FAULTS") == "raise":
            raise error
        text = (str(error).strip().splitlines() or [""])[0]
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        line = "" if where is None else f" ({os.path.basename(where.tb_frame.f_code.co_filename)}:{where.tb_lineno})"
        reason = f"a fault of aottrain in {stage}: {type(error).__name__}: {text[:200]}{line}; operators run one by one"
        self.reasons.append(reason)
        warnings.warn(reason, stacklevel=2)
        if self.report is not None:
            add_fallback(self.report, reason, is_fault=True)
        return reason

    def count_in(self, report: CompileReport) -> None:
        """From now on in this report; what has happened, too."""
        for reason in self.reasons:
            add_fallback(report, reason, is_fault=True)
        self.report = report
