"""aottrain: training with a compiler inside. Importing it is cheap: torch is imported at the first use of a name."""

from __future__ import annotations

import _signal  # which `signal` is made of: Python has it already, where that takes milliseconds
import sys

if sys.argv[:1] == ["-m"] and "aottrain" in sys.orig_argv and _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
    # `python -m aottrain` begins with this module. Until the command line listens to Ctrl-C, and when all is written,
    # it ends the process by the signal, as a shell expects; Python's own answer is a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from importlib import import_module  # noqa: E402
from typing import Any  # noqa: E402

from aottrain.explain.report import set_renderer  # noqa: E402
from aottrain.ir.shown import set_value_renderer  # noqa: E402

__version__ = "0.1.0"

_PUBLIC = {
    "compile": "aottrain.compiler.frontends.api",
    "reports": "aottrain.compiler.frontends.refusals",
    "bisect": "aottrain.compiler.bisect.bisection",
    "capture": "aottrain.compiler.capture.capture",
    "analyse": "aottrain.compiler.joint.analysis",
    "trace_joint": "aottrain.compiler.joint.joint",
    "functionalize": "aottrain.compiler.joint.functional",
    "simplify": "aottrain.compiler.graphs.simplification",
    "plan_partition": "aottrain.compiler.partition.strategies",
    "apply_partition": "aottrain.compiler.partition.split",
    "philox_eager": "aottrain.ops.random.mode",
    "empty_cache": "aottrain.runtime.arena",
    "fuse": "aottrain.compiler.schedule.grouping.fusion",
    "lower": "aottrain.compiler.schedule.kernels",
    "schedule": "aottrain.compiler.schedule.order",
    "render": "aottrain.compiler.codegen.rendering",
    "render_cpp": "aottrain.compiler.codegen.cpp.render",
    "render_triton": "aottrain.compiler.codegen.triton.render",
    "link": "aottrain.compiler.link.linking",
    "ForwardValue": "aottrain.ir.plan",
    "CompileReport": "aottrain.explain.report",
    "draw_autograd": "aottrain.report.graph.standalone",
    "AdamW": "aottrain.compiler.optimizers",
    "SGD": "aottrain.compiler.optimizers",
    "Lion": "aottrain.compiler.optimizers",
    "Muon": "aottrain.ops.optimizers.muon",
    "AottrainError": "aottrain.errors",
    "UnsupportedError": "aottrain.errors",
    "BudgetError": "aottrain.errors",
    "ConfigError": "aottrain.errors",
    "VerificationError": "aottrain.errors",
    "NumericsError": "aottrain.errors",
    "CheckpointError": "aottrain.errors",
    "CapacityError": "aottrain.errors",
    "OutOfMemoryError": "aottrain.errors",
}

__all__ = ["__version__", "errors", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("aottrain.errors")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'aottrain' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _draw(report: Any, alone: bool) -> str:
    page = import_module("aottrain.report.html")
    return page.render(report) if alone else page.fragment(report)


def _draw_value(value: Any) -> str:
    return import_module("aottrain.report.rich").render(value)


set_renderer(_draw)
set_value_renderer(_draw_value)
