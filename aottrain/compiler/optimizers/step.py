"""`step` of an optimizer as one call of generated kernels, whatever the number of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aottrain.compiler.link.multi_tensor import link_multi_tensor
from aottrain.compiler.optimizers.formulas import Formula, Segment, optimizer_step, state_dtype
from aottrain.compiler.optimizers.plan import Member, Plan, check_parameter, segments_of
from aottrain.ir.settings.choices import STEP_KERNELS
from aottrain.ops.optimizers.lion import loss_of
from aottrain.ops.optimizers.masters import HALVES, MASTER, restore_states
from aottrain.runtime.multi_tensor import TensorTables

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


class GeneratedStep(_Base):
    """Replaces the `step` of the torch optimizer that it is mixed into. Raises UnsupportedError for what has no kernel.

    After a step `grad_norm` is the norm before clipping.
    """

    formula: Formula
    clip_norm: float | None = None
    """Gradients count as scaled to at most this global norm, as by torch.nn.utils.clip_grad_norm_ just before; `.grad`
    itself stays as it is."""
    skip_nonfinite = False
    """Where the norm is not finite, parameters and state stay as they are."""
    master_weights = False
    """Parameters of half precision have a state "master" in float32, as their other states are: that is what steps
    change, and the parameter is its rounding. What else writes the parameter writes the state, too, or is lost."""
    kernel = "auto"
    """One of "cpp", "triton", "auto" (Triton on CUDA), or "evaluate" (plain torch: slow, the definition)."""
    sum_over: Callable[[Tensor], Tensor] | None = None
    """Sums a tensor in place over the processes that have the other parts of each parameter, where there are some."""
    found_inf: Tensor
    """As torch's fused optimizers do, a step is left out where this is set and not 0."""
    _plans: Sequence[Plan] = ()
    _current_key: Sequence[Any] = ()
    _current_state: Any = None
    _waiting: Sequence[Tensor] = ()

    def __init__(
        self,
        params: Any,
        *args: Any,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        master_weights: bool = False,
        kernel: str = "auto",
        **options: Any,
    ):
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm}: must be more than 0, or None for no clipping")
        if kernel not in STEP_KERNELS:
            raise ValueError(f"kernel={kernel!r}: must be one of {', '.join(STEP_KERNELS)}")
        self.clip_norm, self.skip_nonfinite, self.kernel = clip_norm, skip_nonfinite, kernel
        self.master_weights = master_weights
        super().__init__(params, *args, **options)
        self._step_supports_amp_scaling = False  # a GradScaler scales gradients back itself, before the step
        self._norm = torch.zeros((), dtype=torch.float64)

    def __getstate__(self) -> dict[str, Any]:
        names = ("clip_norm", "skip_nonfinite", "master_weights", "kernel", "_norm", "sum_over")
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own}

    @property
    def grad_norm(self) -> Tensor:
        """The 2-norm of all gradients in the latest step, before clipping: a new float64 scalar on their device."""
        return self._norm.clone()

    def prepare(self) -> None:
        """Compile now what a step over all parameters needs, instead of in the first one; nothing is updated."""
        for device, members in self._members(lambda parameter: True).items():
            segments = segments_of(members)
            sizes = [[p.numel() for _, p, names in members if Segment(p.dtype, names) == s] for s in segments]
            program = optimizer_step(self.formula, segments)
            tables = TensorTables(program, sizes, device)
            run = link_multi_tensor(program, self._backend(device))(tables)
            if self._backend(device) == "triton":
                run([], 0, len(program.stages))  # no block has elements, but Triton compiles what it launches

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        plans = self._current_plans()
        rows = [(-1.0 if group["maximize"] else 1.0, *map(float, self._row(group))) for group in self.param_groups]
        clip_norm = math.inf if self.clip_norm is None else self.clip_norm
        settings = (clip_norm, float(self.clip_norm is not None), float(self.skip_nonfinite))
        found_inf = getattr(self, "found_inf", None)
        lists = [plan.fill(rows, settings, found_inf) for plan in plans]
        if len(plans) == 1 and self.sum_over is None:
            plans[0].run(lists[0], 0, len(plans[0].program.stages))
        elif plans:
            self._run_all(plans, lists)
        for plan, tensors in zip(plans, lists, strict=True):
            plan.finish(tensors[1])
        self._norm = plans[0].tables.tables["results"][0] if plans else torch.zeros((), dtype=torch.float64)

    def _run_all(self, plans: Sequence[Plan], lists: Sequence[Any]) -> None:
        """On several devices, or of parts: the sums of squares are added before any parameter is updated."""
        for plan, tensors in zip(plans, lists, strict=True):
            plan.run(tensors, 0, plan.program.num_measuring)
        first = plans[0].device
        total = torch.stack([plan.tables.tables["total"][0].to(first) for plan in plans]).sum()
        total = total if self.sum_over is None else self.sum_over(total)
        for plan, tensors in zip(plans, lists, strict=True):
            plan.tables.tables["total"].copy_(total)
            plan.run(tensors, plan.program.num_measuring, len(plan.program.stages))

    def _current_plans(self) -> Sequence[Plan]:
        """The plans of the last step, unless something has changed that they were made for."""
        key = self._plan_key()
        current = self._current_state is self.state and key == self._current_key
        current = current and all(parameter.grad is None for parameter in self._waiting)
        if not current or not all(plan.is_current() for plan in self._plans):
            newcomers = self._newcomers()
            plans = []
            for device, members in self._members(lambda parameter: parameter.grad is not None).items():
                for _, parameter, names in members:
                    self._initialise(parameter, names)
                plans.append(Plan(self.formula, members, self.state, newcomers, self._backend(device)))
            self._plans, self._current_key, self._current_state = plans, key, self.state
            taken = {id(parameter) for plan in plans for parameter in plan.parameters}
            self._waiting = [p for group in self.param_groups for p in group["params"] if id(p) not in taken]
        return self._plans

    def _plan_key(self) -> list[tuple[Any, ...]]:
        """Of each group what decides which tables there are."""
        return [(self._states(group), *map(id, group["params"])) for group in self.param_groups]

    def _newcomers(self) -> set[int]:
        """Parameters that have a gradient for the first time, by their ids: their states are still to be made."""
        newcomers = set()
        for group in self.param_groups:
            for p in group["params"]:
                names = self._states_of(p, group)
                if names and p.grad is not None and (p not in self.state or self.state[p].get(names[0]) is None):
                    newcomers.add(id(p))
        return newcomers

    def _members(self, takes_part: Callable[[Tensor], bool]) -> dict[torch.device, list[Member]]:
        """For each device the parameters that take part, or did before, or need no state."""
        members: dict[torch.device, list[Member]] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                names = self._states_of(p, group)
                if not names or takes_part(p) or (p in self.state and self.state[p].get(names[0]) is not None):
                    check_parameter(p)
                    members.setdefault(p.device, []).append((number, p, names))
        return members

    def _initialise(self, parameter: Tensor, names: tuple[str, ...]) -> None:
        if not names:
            return
        state = self.state[parameter]
        dtype = state_dtype(parameter.dtype, names)
        for name in names:
            if state.get(name) is None:
                begin = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
                state[name] = begin.copy_(parameter) if name == MASTER else begin
        if self.formula.counts_steps:
            state.setdefault("step", torch.zeros((), dtype=torch.float32))

    def _backend(self, device: torch.device) -> str:
        if self.kernel != "auto":
            return self.kernel
        return "triton" if device.type == "cuda" else "cpp"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's rounds states to the parameter's type; those beside a master are taken as they are."""
        super().load_state_dict(state_dict)
        if self.master_weights:
            restore_states(self, state_dict)

    def _states_of(self, parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        states = self._states(group)
        return (*states, MASTER) if self.master_weights and parameter.dtype in HALVES else states

    def _states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the tensors that each of the group's parameters has; UnsupportedError for what has no kernel."""
        raise TypeError(f"{type(self).__name__} does not say what its states are")

    def _row(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The group's numbers as `formula.hyperparameters` names them, behind `active` and `sign`."""
        raise TypeError(f"{type(self).__name__} does not say what its groups give")
