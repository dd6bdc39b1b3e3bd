"""The reports of all that is compiled. What runs eagerly is counted there, and a warning for each new reason."""

from __future__ import annotations

import itertools
import logging
import warnings
import weakref
from typing import Any

from aottrain.compat import Shared
from aottrain.compiler.graphs.source_locations import user_line
from aottrain.errors import UnsupportedError
from aottrain.explain.report import CompileReport, add_fallback

# In the order in which they were made, and only while something that is compiled holds them.
_reports: dict[int, weakref.ref[CompileReport]] = {}
_numbers = itertools.count()
_shared: weakref.WeakValueDictionary[Any, CompileReport] = weakref.WeakValueDictionary()


class _Unlogged:
    """Torch logs a traceback for each operator that refuses its fake arguments, as those of a wrong shape. The log is
    off: the program runs in another way, or raises the error itself."""

    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def __enter__(self) -> None:
        self.before, self.logger.disabled = self.logger.disabled, True

    def __exit__(self, *error: Any) -> None:
        self.logger.disabled = self.before


refusals_unlogged = Shared(_Unlogged())


def reports() -> list[CompileReport]:
    """The reports of everything that is compiled and still alive, oldest first: of `aottrain.compile`, and of
    `torch.compile(..., backend="aottrain")`, where each piece of code that TorchDynamo compiles has one of its own."""
    return [report for reference in list(_reports.values()) if (report := reference()) is not None]


def new_report(target: Any) -> CompileReport:
    """An empty report for a module, a function, or a name; `reports` lists it while anyone holds it."""
    report = CompileReport(target=target if isinstance(target, str) else _name(target))
    number = next(_numbers)
    _reports[number] = weakref.ref(report, lambda _: _reports.pop(number, None))
    return report


def shared_report(code: Any, target: str) -> CompileReport:
    """One report for all that is compiled of the same code, while anyone holds it."""
    report = _shared.get(code)
    if report is None or code is None:
        report = _shared[code] = new_report(target)
    return report


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", "") or type(target).__name__


def count_fallback(report: CompileReport, error: UnsupportedError, stacklevel: int) -> None:
    """Count a call that runs eagerly; a new reason is a warning, `stacklevel` callers above this function's."""
    is_known = any(fallback.reason == error.reason for fallback in report.fallbacks)
    # Where it is about the whole call, its line is the caller's.
    source = error.source or ("" if is_known else user_line())
    if add_fallback(report, error.reason, source) and not is_known:
        place = f" ({source})" if source else ""
        warnings.warn(f"aottrain runs this call eagerly: {error.reason}{place}", stacklevel=stacklevel + 1)
