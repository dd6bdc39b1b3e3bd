"""Float32 weights of which those of half precision are roundings, in eager torch: the plain reference beside the
generated kernels, and what the other engines run.

A step of half a unit in the last place of a bfloat16 changes nothing: the sum of small steps is kept in float32, and
the model has its rounding (Micikevicius et al., "Mixed Precision Training", ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.ops.optimizers.lion import loss_of, reads_found_inf

# The state that holds a parameter of half precision in float32.
MASTER = "master"
HALVES = (torch.bfloat16, torch.float16)


def wide(tensor: Tensor) -> Tensor:
    """In float32 where it is of half precision, else itself; without its history."""
    value = tensor.detach()
    return value.float() if value.dtype in HALVES else value


def wide_bytes(tensors: Iterable[Tensor]) -> int:
    """Of `wide` of each."""
    return sum(tensor.numel() * (4 if tensor.dtype in HALVES else tensor.element_size()) for tensor in tensors)


class MasterWeights(torch.optim.Optimizer):
    """Any optimizer, over float32 copies of the parameters of half precision; the others are its own.

    What a parameter's state has is the inner optimizer's, and beside it the copy: what steps change. What else writes
    the parameter writes the copy, too, or is lost.
    """

    def __init__(self, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], groups: Sequence[dict[str, Any]]):
        """make: gives the optimizer of such groups."""
        self._masters: dict[Tensor, nn.Parameter] = {
            parameter: nn.Parameter(parameter.detach().float())
            for group in groups
            for parameter in group["params"]
            if parameter.dtype in HALVES
        }
        self.inner = make([{**group, "params": [self._of(p) for p in group["params"]]} for group in groups])
        pairs = zip(self.inner.param_groups, groups, strict=True)
        super().__init__([{**inner, "params": group["params"]} for inner, group in pairs], {})
        self._step_supports_amp_scaling = reads_found_inf(self.inner)
        for parameter, master in self._masters.items():
            self.state[parameter][MASTER] = master.data

    def _of(self, parameter: Tensor) -> Tensor:
        return self._masters.get(parameter, parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        self._hand_over()
        if hasattr(self, "found_inf"):
            self.inner.found_inf = self.found_inf
        try:
            self.inner.step()
        finally:
            self.inner.__dict__.pop("found_inf", None)
            for master in self._masters.values():
                master.grad = None
        self._take_back()
        return loss

    def _hand_over(self) -> None:
        """What the inner optimizer works on is what this one's groups and states say now: they may have been loaded, or
        put back."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
            for parameter in group["params"]:
                states = {name: value for name, value in self.state.get(parameter, {}).items() if name != MASTER}
                own = self._of(parameter)
                self.inner.state.pop(own, None)
                if states:
                    self.inner.state[own] = states
        for parameter, master in self._masters.items():
            held = self.state[parameter].get(MASTER)
            if held is None:  # a checkpoint of a run that had none
                master.data.copy_(parameter)
            elif held.data_ptr() != master.data_ptr():
                master.data.copy_(held)
            self.state[parameter][MASTER] = master.data
            master.grad = None if parameter.grad is None else parameter.grad.float()

    def _take_back(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self._of(parameter)
                if own in self.inner.state:
                    self.state[parameter].update(self.inner.state[own])
        for parameter, master in self._masters.items():
            if parameter.grad is not None:
                parameter.copy_(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's rounds states to the parameter's type; those beside a master are taken as they are."""
        super().load_state_dict(state_dict)
        restore_states(self, state_dict)


def restore_states(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """After `load_state_dict`: copies of the states beside a master in their own type, which torch has rounded."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        values = state_dict["state"].get(number, {})
        if values.get(MASTER) is not None:
            exact = {name: value for name, value in values.items() if isinstance(value, Tensor) and name != "step"}
            copies = {name: value.to(parameter.device, copy=True) for name, value in exact.items()}
            optimizer.state[parameter].update(copies)
