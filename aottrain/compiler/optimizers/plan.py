"""The parameters of one device as a generated step sees them: in order, with their tables, and what runs on these."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aottrain.compiler.link.multi_tensor import link_multi_tensor
from aottrain.compiler.optimizers.formulas import Formula, Segment, optimizer_step, state_dtype
from aottrain.errors import UnsupportedError
from aottrain.ir.tensor import strides_without_gaps
from aottrain.runtime.multi_tensor import TensorTables

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_LAYOUT, _DTYPE = operator.attrgetter("shape", "dtype", "device"), operator.attrgetter("dtype")
_SHAPE = operator.attrgetter("shape")
Member = tuple[int, Tensor, tuple[str, ...]]


def segments_of(members: Sequence[Member]) -> tuple[Segment, ...]:
    """The kinds of parameters that there are, in a fixed order."""
    return tuple(sorted({Segment(p.dtype, names) for _, p, names in members}, key=str))


class Plan:
    """State tensors take on the parameter's strides; the numbers of steps become views of one tensor.

    members: (number of its group, parameter, names of its states), all on one device. states: the optimizer's. fresh:
    ids of the parameters that take their first step.
    """

    def __init__(
        self,
        formula: Formula,
        members: Sequence[Member],
        states: Mapping[Tensor, dict[str, Tensor]],
        fresh: Collection[int],
        backend: str,
    ):
        segments = segments_of(members)
        by_segment = [[m for m in members if Segment(m[1].dtype, m[2]) == segment] for segment in segments]
        ordered = [member for part in by_segment for member in part]
        self.groups = [group for group, _, _ in ordered]
        self.parameters = [parameter for _, parameter, _ in ordered]
        self.names = [names for _, _, names in ordered]
        self._all_states, self._counts_steps = states, formula.counts_steps
        self.strides = [strides_without_gaps(each.shape, each.stride()) for each in self.parameters]
        self.device = self.parameters[0].device
        self.program = optimizer_step(formula, segments)
        sizes = [[parameter.numel() for _, parameter, _ in part] for part in by_segment]
        self.tables = TensorTables(self.program, sizes, self.device)
        self.run = link_multi_tensor(self.program, backend)(self.tables)
        self.gapped = any(p.stride() != strides for p, strides in zip(self.parameters, self.strides, strict=True))
        self.columns = {name: column for column, name in enumerate(formula.hyperparameters)}
        self._rows: list[tuple[float, ...] | None] = [None] * (1 + max(self.groups))
        self._ranges = _ranges(self.groups)
        self._active: list[bool] | None = None
        self._first = self.tables.hyperparameters[:, self.columns["first"]] if "first" in self.columns else None
        if self._first is not None:
            self._first[:] = [id(parameter) in fresh for parameter in self.parameters]
        self._adopt()
        self.held: list[Tensor] = self.tensors()  # type: ignore[assignment]
        self._held_layouts = list(map(_LAYOUT, self.held))
        self._numels, self._dtypes = list(map(Tensor.numel, self.held)), list(map(_DTYPE, self.held))
        self._pointers = list(map(Tensor.data_ptr, self.held))
        self._layouts = self._layouts_now()
        self._on_cuda = self.device.type == "cuda"
        self._state_lists: list[list[Tensor | None]] = [
            [states[p][name] if name in names else None for p, names in zip(self.parameters, self.names, strict=True)]
            for name in self.program.lists[2:]
        ]

    def _adopt(self) -> None:
        """Bring states that come from elsewhere (a checkpoint, another optimizer) to where and how they are read."""
        for number, parameter in enumerate(self.parameters):
            if not self.names[number]:
                continue
            state = self._all_states[parameter]
            for name in self.names[number]:
                tensor = state[name]
                if tensor.shape != parameter.shape:
                    raise UnsupportedError(f"{name} of shape {list(tensor.shape)} for {list(parameter.shape)} elements")
                dtype = state_dtype(parameter.dtype, self.names[number])
                if tensor.stride() != self.strides[number] or (tensor.dtype, tensor.device) != (dtype, self.device):
                    copy = torch.empty_strided(parameter.shape, self.strides[number], dtype=dtype, device=self.device)
                    state[name] = copy.copy_(tensor)
            if self._counts_steps:
                steps = self.tables.tables["steps"]
                steps[number] = torch.as_tensor(state["step"], dtype=torch.float32)
                state["step"] = steps[number]

    def tensors(self) -> list[Tensor | None]:
        """What the optimizer holds now, in a fixed order."""
        tensors: list[Tensor | None] = list(self.parameters)
        for parameter, names in zip(self.parameters, self.names, strict=True):
            if names:
                state = self._all_states.get(parameter, {})
                tensors += [state.get(name) for name in names]
                if self._counts_steps:
                    tensors.append(state.get("step"))
        return tensors

    def is_current(self) -> bool:
        """Whether the optimizer still holds the tensors that the tables were made for, and these are what they were:
        `module.to()`, for one, puts other memory behind the same parameter."""
        now = self.tensors()
        if len(now) != len(self.held) or not all(map(operator.is_, now, self.held)):
            return False
        if list(map(Tensor.numel, self.held)) != self._numels or list(map(_DTYPE, self.held)) != self._dtypes:
            return False
        pointers = list(map(Tensor.data_ptr, self.held))
        if pointers != self._pointers:
            self._pointers = pointers
            if list(map(_LAYOUT, self.held)) != self._held_layouts:
                return False
        return self._layouts_now() == self._layouts

    def _layouts_now(self) -> tuple[list[torch.Size], list[tuple[int, ...]]]:
        """Of the parameters: both, since memory with gaps may have the strides of other memory without."""
        return list(map(_SHAPE, self.parameters)), list(map(Tensor.stride, self.parameters))

    def fill(self, rows: Sequence[tuple[float, ...]], settings: Sequence[float], found_inf: Tensor | None) -> list[Any]:
        """Write the numbers of this step and where the tensors lie. rows: of each group, behind `active`.

        Returns the tensors of each list; those without a gradient have None in the first.
        """
        gradients = [self._gradient(i, p.grad) for i, p in enumerate(self.parameters)]
        active = [gradient is not None for gradient in gradients]
        tables = self.tables
        if active != self._active:
            tables.set_active(active)
            tables.hyperparameters[:, self.columns["active"]] = active
            self._active = active
        for group, ranges in self._ranges.items():
            if rows[group] != self._rows[group]:
                for low, high in ranges:
                    tables.hyperparameters[low:high, 1 : 1 + len(rows[group])] = rows[group]
                self._rows[group] = rows[group]
        tables.settings[:] = settings
        lists: list[Sequence[Tensor | None]] = [gradients, self._dense()]
        lists += self._state_lists
        for number, tensors in enumerate(lists):
            tables.pointers[number] = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._check_memory()
        if found_inf is None:
            tables.tables["found"].zero_()
        else:
            tables.tables["found"].copy_(found_inf.reshape(1))
        tables.upload()
        return lists

    def _check_memory(self) -> None:
        """Tensors without memory of their own (fakes, wrappers of others) have no place that a kernel could write."""
        if (self.tables.pointers[1] == 0).any():
            for tensor in self.parameters:
                if tensor.numel() and not tensor.data_ptr():
                    raise UnsupportedError(f"a parameter of {type(tensor).__name__} has no memory of its own")

    def _gradient(self, number: int, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            raise UnsupportedError("gradients must be dense: sparse ones are torch.optim.SparseAdam's and SGD's own")
        parameter = self.parameters[number]
        same = gradient.dtype is self._dtypes[number] and gradient.is_cuda == self._on_cuda
        if same and gradient.stride() == self.strides[number] and gradient.numel() == self._numels[number]:
            return gradient
        if gradient.shape != parameter.shape:
            raise UnsupportedError(f"a gradient of shape {list(gradient.shape)} for {list(parameter.shape)} elements")
        return torch.empty_strided(parameter.shape, self.strides[number], **_options(parameter)).copy_(gradient)

    def _dense(self) -> list[Tensor]:
        """The parameters, or, of those with gaps between their elements, copies, for `finish`."""
        if not self.gapped:
            return self.parameters
        return [
            p if p.stride() == strides else torch.empty_strided(p.shape, strides, **_options(p)).copy_(p)
            for p, strides in zip(self.parameters, self.strides, strict=True)
        ]

    def finish(self, dense: Sequence[Tensor]) -> None:
        """After a step: copies go into their parameters, and what kernels have written gets a new version."""
        if self._first is not None:
            self._first[:] = 0
        if self.gapped:
            for parameter, copy in zip(self.parameters, dense, strict=True):
                if copy is not parameter:
                    parameter.copy_(copy)
        assert self._active is not None
        torch.autograd.graph.increment_version([p for p, on in zip(self.parameters, self._active, strict=True) if on])


def check_parameter(parameter: Tensor) -> None:
    """Raises UnsupportedError for what no kernel updates."""
    if parameter.dtype not in DTYPES or parameter.layout is not torch.strided:
        raise UnsupportedError(f"parameters must be dense real floating-point tensors, not {parameter.dtype}")
    if parameter.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"parameters must be on a CPU or a CUDA device, not {parameter.device}")


def _ranges(groups: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """For each group the ranges of its parameters."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for number in range(1, len(groups) + 1):
        if number == len(groups) or groups[number] != groups[start]:
            ranges.setdefault(groups[start], []).append((start, number))
            start = number
    return ranges


def _options(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}
