"""What a step changes, and how it is put back: after bad numbers, or after memory that ran out in its middle."""

from __future__ import annotations

import operator
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aottrain.errors import OutOfMemoryError
from aottrain.step import ClipsItself

_VERSION = operator.attrgetter("_version")


class RandomNumbers:
    """Every random stream of this process as it is now; cheap, since each step begins with one."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class Undo:
    """Of one run. `before()` is called before each step.

    An update whose loss or norm is not finite leaves itself out (`optim.update`). One that an allocator ends in its
    middle is undone: ours, and torch's fused ones once they have their state, write nothing before all memory is
    there. Before every other update parameters and state are copied, which holds as much memory again.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        """optimizer: None where updates are not undone."""
        self.parameters, self.buffers = list(module.parameters()), list(module.buffers())
        self.optimizer = optimizer
        self.groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        self.num_trained = sum(map(len, self.groups))
        self._clips_itself = isinstance(optimizer, ClipsItself)
        self._is_fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def before(self) -> BeforeStep:
        return BeforeStep(self)

    def writes_at_once(self) -> bool:
        """Whether the next update takes all memory before it writes to the first parameter."""
        assert self.optimizer is not None
        stateless = not any(group.get("momentum", 1) for group in self.optimizer.param_groups)
        return self._clips_itself or (self._is_fused and (stateless or self.has_all_states()))

    def has_all_states(self) -> bool:
        assert self.optimizer is not None
        return len(self.optimizer.state) == self.num_trained

    def versions(self) -> tuple[int, ...]:
        """Of what an update writes. Torch's fused kernels give the counted steps alone new ones, group by group."""
        assert self.optimizer is not None
        firsts = [self.optimizer.state.get(group[0], {}) for group in self.groups if group]
        states = [value for state in firsts for value in state.values() if isinstance(value, Tensor)]
        return tuple(map(_VERSION, (*self.parameters, *states)))


class BeforeStep:
    """Random numbers, buffers, parameters and the optimizer's state before a step."""

    def __init__(self, undo: Undo):
        self._undo = undo
        self.random = RandomNumbers()
        self.is_taken = False
        """Whether the update is done, so that nothing may be put back any more."""
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in undo.buffers]
        self._states: dict[Tensor, dict[str, Any]] | None = None
        self._copies: list[tuple[Tensor, Tensor]] | None = None
        if undo.optimizer is not None:
            at_once = undo.writes_at_once()
            if not at_once or not undo.has_all_states():
                self._states = {parameter: dict(state) for parameter, state in undo.optimizer.state.items()}
            self._versions = undo.versions()
            self._copies = None if at_once else _copies(undo.parameters, undo.optimizer)

    @torch.no_grad()
    def put_buffers_back(self, *needed: Tensor) -> None:
        """Where one of these numbers is not finite, without waiting for the device."""
        finite = torch.stack([torch.isfinite(number) for number in needed]).all()
        for buffer, value in self._buffers:
            buffer.copy_(torch.where(finite, buffer, value))

    @torch.no_grad()
    def put_rest_back(self) -> None:
        """All that a step changes whose update has left itself out."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        self.random.put_back()

    @torch.no_grad()
    def put_all_back(self) -> None:
        """As if the step had not begun. OutOfMemoryError: its update is half done, and there was no room for a copy."""
        optimizer = self._undo.optimizer
        assert optimizer is not None
        for parameter in self._undo.parameters:
            parameter.grad = None
        if self._states is not None:
            for parameter in [parameter for parameter in optimizer.state if parameter not in self._states]:
                del optimizer.state[parameter]
            for parameter, values in self._states.items():
                optimizer.state[parameter].clear()
                optimizer.state[parameter].update(values)
        if self._copies is not None:
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        elif self._undo.versions() != self._versions:
            raise OutOfMemoryError(
                "memory ran out in the middle of the optimizer's update, and there was no room for a copy to undo it "
                "with; resume=auto goes on from the last checkpoint"
            )
        self.put_rest_back()
        if hasattr(optimizer, "found_inf"):
            del optimizer.found_inf


def _copies(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]] | None:
    """Parameters and state, each with a copy; None where there is no memory for them."""
    held: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*(p.detach() for p in parameters), *(value for value in held if isinstance(value, Tensor))]
    try:
        return [(tensor, tensor.clone()) for tensor in tensors]
    except (MemoryError, RuntimeError):  # as allocators say it
        return None
