"""What a caller asks of the compiler."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ParamSpec, TypeVar

from aottrain.compiler.partition.policy import Policy, policy_name
from aottrain.errors import ConfigError
from aottrain.ir.plan import StoredPlan
from aottrain.ir.settings.budget import Budget, parse_budget
from aottrain.ir.settings.choices import CAPTURES, COSTS, KERNELS, LOSS_HEADS, ON_UNSUPPORTED, RNGS, STRATEGIES
from aottrain.ir.settings.decisions import DEFAULT, MEASURED, Record, read_record

Kernel = str | Callable[..., Any]
AUTO = "auto"  # of `dynamic`
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class UnknownOptionError(ConfigError, TypeError):
    """An option has no such name: of a call Python raises a TypeError for that."""


@dataclass(frozen=True)
class CompileOptions:
    """Checked options of `aottrain.compile`; see its docstring for their meaning."""

    partition: str | Policy | StoredPlan = "min_cut"
    budget: Budget | None = None
    kernel: Kernel = "auto"
    capture: str = "dynamo"
    rng: str = "philox"
    dynamic: bool | str = False
    on_unsupported: str = "eager"
    reserved_bytes: int = 0
    cost: str = "roofline"
    modules: tuple[str, ...] = ()
    workspaces: bool = False
    loss_head: str = "auto"
    cuda_graphs: bool = False
    decisions: str | Record = MEASURED
    memory_bytes: int | None = None
    reduce_over: str | None = None

    @property
    def partition_name(self) -> str:
        if isinstance(self.partition, StoredPlan):
            return f"plan {self.partition.path}"
        return self.partition if isinstance(self.partition, str) else f"policy {policy_name(self.partition)}"

    @property
    def chunks_loss_head(self) -> bool:
        """Whether a loss head may be computed in chunks, which rounds otherwise than eager: by default not for the
        oracle, nor for a backend of the caller's, which may not know our op."""
        generated = isinstance(self.kernel, str) and self.kernel != "aten"
        return self.loss_head == "chunked" or (self.loss_head == "auto" and generated)

    @property
    def counts_workspaces(self) -> bool:
        """Whether what libraries allocate is part of the predicted peak."""
        return self.workspaces or self.partition == "budget"

    @property
    def kernel_name(self) -> str:
        return self.kernel if isinstance(self.kernel, str) else getattr(self.kernel, "__name__", "custom")


def options_from_dict(options: Any) -> CompileOptions:
    """CompileOptions from `torch.compile(..., options=...)`. Raises ConfigError for what is no dict of known keys."""
    if not isinstance(options, dict):
        raise ConfigError(f"options is a {type(options).__name__}; allowed: a dict of keywords of aottrain.compile")
    # TorchDynamo captures, and says itself which sizes are dynamic.
    allowed = [field.name for field in fields(CompileOptions) if field.name not in ("capture", "dynamic")]
    _check_names(options, allowed, "options[{!r}]")
    return check_options(**options)


def names_checked(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, of which an option that it has not got is told as a wrong value is, and not by Python."""
    parameters = inspect.signature(function).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    allowed = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        _check_names([name for name in kwargs if name not in named], allowed, "{}")
        return function(*args, **kwargs)

    return checked


def _check_names(given: Iterable[Any], allowed: Sequence[str], form: str) -> None:
    """UnknownOptionError with each that is not allowed, as `form` writes it, and the nearest one."""
    mistakes = []
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            mistakes.append(f"{form.format(name)} is not known{meant}; allowed: {', '.join(allowed)}")
    if mistakes:
        raise UnknownOptionError(mistakes)


def check_options(**options: Any) -> CompileOptions:
    """CompileOptions by their names; what is not given has its default. Raises ConfigError with every mistake."""
    mistakes = []
    budget = options.get("budget")
    partition = options.get("partition") or ("min_cut" if budget is None else "budget")
    parsed = CompileOptions(**{**options, "partition": partition})
    modules, kernel, decisions = parsed.modules, parsed.kernel, parsed.decisions
    if not callable(partition) and not isinstance(partition, StoredPlan) and partition not in STRATEGIES:
        mistakes.append(f"partition={partition!r} is not known; allowed: {', '.join(STRATEGIES)}, or a callable")
    elif partition == "budget":
        try:
            budget = parse_budget(budget)
        except ValueError as error:
            mistakes.append(f"budget: {error}")
    elif budget is not None:
        mistakes.append(f"budget={budget!r} is given, but partition={partition!r} takes none; allowed: 'budget'")
    if isinstance(modules, str) or not all(isinstance(pattern, str) and pattern for pattern in modules):
        mistakes.append(f"modules={modules!r} is no list of module paths; allowed: such as ['blocks.*']")
    elif modules and partition != "checkpoint":
        mistakes.append(f"modules={modules!r} is given, but partition={partition!r} takes none; allowed: 'checkpoint'")
    if not callable(kernel) and kernel not in KERNELS:
        mistakes.append(f"kernel={kernel!r} is not known; allowed: {', '.join(KERNELS)}, or a callable")
    if parsed.capture not in CAPTURES:
        mistakes.append(f"capture={parsed.capture!r} is not known; allowed: {', '.join(CAPTURES)}")
    if parsed.rng not in RNGS:
        mistakes.append(f"rng={parsed.rng!r} is not known; allowed: {', '.join(RNGS)}")
    reserved = parsed.reserved_bytes
    if not isinstance(reserved, int) or isinstance(reserved, bool) or reserved < 0:
        mistakes.append(f"reserved_bytes={reserved!r} is no number of bytes; allowed: 0 and above")
    memory = parsed.memory_bytes
    if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory <= 0):
        mistakes.append(f"memory_bytes={memory!r} is no number of bytes; allowed: 1 and above, or None")
    group = parsed.reduce_over
    if group is not None and (not isinstance(group, str) or not group):
        mistakes.append(f"reduce_over={group!r} is no name of a process group; allowed: its group_name, or None")
    if parsed.cost not in COSTS:
        mistakes.append(f"cost={parsed.cost!r} is not known; allowed: {', '.join(COSTS)}")
    if not isinstance(parsed.dynamic, bool) and parsed.dynamic != AUTO:
        mistakes.append(f"dynamic={parsed.dynamic!r} is not known; allowed: True, False, {AUTO!r}")
    for name in ("workspaces", "cuda_graphs"):
        if not isinstance(value := getattr(parsed, name), bool):
            mistakes.append(f"{name}={value!r} is not known; allowed: True, False")
    if parsed.loss_head not in LOSS_HEADS:
        mistakes.append(f"loss_head={parsed.loss_head!r} is not known; allowed: {', '.join(LOSS_HEADS)}")
    if parsed.on_unsupported not in ON_UNSUPPORTED:
        mistakes.append(f"on_unsupported={parsed.on_unsupported!r} is not known; allowed: {', '.join(ON_UNSUPPORTED)}")
    if decisions not in (MEASURED, DEFAULT) and not isinstance(decisions, Record):
        try:
            decisions = read_record(decisions)
        except (ValueError, TypeError) as error:
            allowed = f"{MEASURED}, {DEFAULT}, or the path of a record"
            mistakes.append(f"decisions={str(decisions)!r}: {error}; allowed: {allowed}")
    if mistakes:
        raise ConfigError(mistakes)
    chosen = decisions if isinstance(decisions, Record) else str(decisions)
    return replace(parsed, budget=budget, modules=tuple(modules), decisions=chosen)
