"""What a caller asks of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aottrain.compiler.partition.policy import Policy, policy_name
from aottrain.errors import ConfigError
from aottrain.ir.settings.budget import Budget, parse_budget
from aottrain.ir.settings.choices import CAPTURES, COSTS, KERNELS, LOSS_HEADS, ON_UNSUPPORTED, RNGS, STRATEGIES
from aottrain.ir.settings.decisions import DEFAULT, MEASURED, Record, read_record

Kernel = str | Callable[..., Any]


@dataclass(frozen=True)
class CompileOptions:
    """Checked options of `aottrain.compile`; see its docstring for their meaning."""

    partition: str | Policy = "min_cut"
    budget: Budget | None = None
    kernel: Kernel = "auto"
    capture: str = "dynamo"
    rng: str = "philox"
    dynamic: bool = False
    on_unsupported: str = "eager"
    reserved_bytes: int = 0
    cost: str = "roofline"
    modules: tuple[str, ...] = ()
    workspaces: bool = False
    loss_head: str = "auto"
    cuda_graphs: bool = False
    decisions: str | Record = MEASURED

    @property
    def partition_name(self) -> str:
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


def options_from_dict(given: Any) -> CompileOptions:
    """CompileOptions from `torch.compile(..., options=given)`. Raises ConfigError for what is no dict of known keys."""
    if not isinstance(given, dict):
        raise ConfigError(f"options is a {type(given).__name__}; allowed: a dict of keywords of aottrain.compile")
    allowed = ["partition", "budget", "kernel", "rng", "on_unsupported", "reserved_bytes", "cost"]
    allowed += ["modules", "workspaces", "loss_head", "cuda_graphs", "decisions"]
    unknown = [key for key in given if key not in allowed]
    if unknown:
        raise ConfigError([f"options[{key!r}] is not known; allowed: {', '.join(allowed)}" for key in unknown])
    return check_options(**given)


def check_options(
    *,
    partition: str | Policy | None = None,
    budget: Budget | None = None,
    kernel: Kernel = "auto",
    capture: str = "dynamo",
    rng: str = "philox",
    dynamic: bool = False,
    on_unsupported: str = "eager",
    reserved_bytes: int = 0,
    cost: str = "roofline",
    modules: Sequence[str] = (),
    workspaces: bool = False,
    loss_head: str = "auto",
    cuda_graphs: bool = False,
    decisions: str | Path | Record = MEASURED,
) -> CompileOptions:
    """CompileOptions from what the caller gave. Raises ConfigError with every mistake."""
    mistakes = []
    partition = partition or ("min_cut" if budget is None else "budget")
    if not callable(partition) and partition not in STRATEGIES:
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
    if capture not in CAPTURES:
        mistakes.append(f"capture={capture!r} is not known; allowed: {', '.join(CAPTURES)}")
    if rng not in RNGS:
        mistakes.append(f"rng={rng!r} is not known; allowed: {', '.join(RNGS)}")
    if not isinstance(reserved_bytes, int) or isinstance(reserved_bytes, bool) or reserved_bytes < 0:
        mistakes.append(f"reserved_bytes={reserved_bytes!r} is no number of bytes; allowed: 0 and above")
    if cost not in COSTS:
        mistakes.append(f"cost={cost!r} is not known; allowed: {', '.join(COSTS)}")
    for name, value in (("dynamic", dynamic), ("workspaces", workspaces), ("cuda_graphs", cuda_graphs)):
        if not isinstance(value, bool):
            mistakes.append(f"{name}={value!r} is not known; allowed: True, False")
    if loss_head not in LOSS_HEADS:
        mistakes.append(f"loss_head={loss_head!r} is not known; allowed: {', '.join(LOSS_HEADS)}")
    if on_unsupported not in ON_UNSUPPORTED:
        mistakes.append(f"on_unsupported={on_unsupported!r} is not known; allowed: {', '.join(ON_UNSUPPORTED)}")
    if decisions not in (MEASURED, DEFAULT) and not isinstance(decisions, Record):
        try:
            decisions = read_record(decisions)
        except (ValueError, TypeError) as error:
            allowed = f"{MEASURED}, {DEFAULT}, or the path of a record"
            mistakes.append(f"decisions={str(decisions)!r}: {error}; allowed: {allowed}")
    if mistakes:
        raise ConfigError(mistakes)
    return CompileOptions(
        partition=partition,
        budget=budget,
        kernel=kernel,
        capture=capture,
        rng=rng,
        dynamic=dynamic,
        on_unsupported=on_unsupported,
        reserved_bytes=reserved_bytes,
        cost=cost,
        modules=tuple(modules),
        workspaces=workspaces,
        loss_head=loss_head,
        cuda_graphs=cuda_graphs,
        decisions=decisions if isinstance(decisions, Record) else str(decisions),
    )
