"""What each kernel means, run on the host in the memory that its launch was given: generated ones by `evaluate`."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aottrain.compiler.codegen.evaluation import evaluate
from aottrain.compiler.codegen.triton import programs as triton_programs
from aottrain.compiler.link import multi_tensor
from aottrain.ir.kernels.kernel import Constant, KernelIR, draw_constants
from aottrain.ir.kernels.multi_tensor import Base, MultiTensorIR, Over, Stage, at_count
from aottrain.ir.kernels.open_sizes import size_names

# Of a kernel by its name, on so many programs, with these arguments (addresses, numbers): what it does.
Meaning = Callable[[str, int, Sequence[Any]], None]


class Meanings:
    """By a module's name what its kernels mean; `spans`: bytes that each pointer among the arguments reaches over."""

    def __init__(self) -> None:
        self._kernels: dict[str, KernelIR] = {}
        self._programs: dict[str, MultiTensorIR] = {}
        self._listen(triton_programs, "render_triton", self._kernels)
        self._listen(multi_tensor, "render_triton_multi_tensor", self._programs)

    @staticmethod
    def _listen(module: Any, name: str, known: dict[str, Any]) -> None:
        """Remember what each text was made of."""
        render = getattr(module, name)

        def heard(value: Any) -> str:
            source = render(value)
            known[f"aottrain_triton_{hashlib.sha256(source.encode()).hexdigest()[:24]}"] = value
            return source

        setattr(module, name, heard)

    def spans(self, module: str, name: str) -> list[int]:
        kernel = self._kernels.get(module)
        if kernel is None or _adds_partial_results(name) or size_names(kernel):
            return []
        return [parameter.span * parameter.dtype.itemsize for parameter in kernel.parameters]

    def of(self, module: str) -> Meaning | None:
        if module in self._kernels and size_names(self._kernels[module]):
            return None  # kernels for all sizes are not run here: their launches are seen alone
        if module in self._kernels:
            return lambda name, programs, given: _run(self._kernels[module], name, given)
        if module in self._programs:
            return lambda name, programs, given: _run_stage(self._programs[module], name, programs, given)
        return _OTHERS.get(module)


def _adds_partial_results(name: str) -> bool:
    return re.search(r"_column(s|_\d+)$", name) is not None


def memory_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Host memory as one dimension, which nothing keeps alive."""
    if not count:
        return torch.empty(0, dtype=dtype)
    raw = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)


def _run(kernel: KernelIR, name: str, given: Sequence[int]) -> None:
    """A kernel with its sums over rows, of which others of its module then add the parts: here there are none. What it
    reads is read before it writes."""
    if _adds_partial_results(name):
        return
    kernel = _drawing(kernel, given)
    memory = [memory_at(at, p.span, p.dtype) for at, p in zip(given, kernel.parameters, strict=False)]
    evaluate(kernel, [m if p.written else m.clone() for m, p in zip(memory, kernel.parameters, strict=True)])


def _drawing(kernel: KernelIR, given: Sequence[int]) -> KernelIR:
    """The kernel with the numbers of draws that a launch was given, which are its last arguments."""
    constants = draw_constants(kernel)
    numbers = dict(zip(constants, given[len(given) - len(constants) :], strict=True))
    body = [
        replace(instruction, value=numbers[value])
        if value in numbers and isinstance(instruction, Constant)
        else instruction
        for value, instruction in enumerate(kernel.body)
    ]
    return replace(kernel, body=tuple(body))


def _run_stage(program: MultiTensorIR, name: str, programs: int, given: Sequence[int]) -> None:
    stage = next(stage for stage in program.stages if stage.kernel.name == name)
    parameters = stage.kernel.parameters
    if stage.over is not Over.BLOCKS:
        known = at_count(stage.kernel, given[0])
        evaluate(known, [memory_at(at, p.span, p.dtype) for at, p in zip(given[1:], known.parameters, strict=True)])
        return
    owner, origins, counts, first, *memory = given
    for block in range(first, first + programs):
        tensor, origin, count = (int(memory_at(at + 8 * block, 1, torch.int64)) for at in (owner, origins, counts))
        buffers = [
            _block(stage, number, at, (tensor, origin, count, block))
            for number, at in zip(range(len(parameters)), memory, strict=False)
        ]
        evaluate(at_count(stage.kernel, count), buffers)


def _block(stage: Stage, number: int, at: int, place: tuple[int, int, int, int]) -> Tensor:
    parameter, base = stage.kernel.parameters[number], stage.bases[number]
    (tensor, origin, count, block), size = place, stage.kernel.parameters[number].dtype.itemsize
    if base is Base.LIST:
        start = int(memory_at(at + 8 * tensor, 1, torch.int64))
        return memory_at(start + origin * size, count, parameter.dtype)
    position = block if base is Base.BLOCK else tensor * parameter.span if base is Base.ROW else 0
    return memory_at(at + position * size, parameter.span, parameter.dtype)


def _loss_rows(name: str, programs: int, given: Sequence[Any]) -> None:
    logits, target, losses, counted, classes, ignored, mean, low, wanted, _ = given
    dtype = torch.bfloat16 if low else torch.float32
    rows = memory_at(logits, programs * classes, dtype).view(programs, classes)
    targets = memory_at(target, programs, torch.int64)
    x = rows.float()
    memory_at(losses, programs, torch.float32).copy_(
        F.cross_entropy(x, targets, ignore_index=ignored, reduction="none")
    )
    if wanted:
        shares = (x.softmax(-1) - F.one_hot(targets.clamp(min=0), classes)) * (targets != ignored)[:, None]
        rows.copy_(shares / float(memory_at(counted, 1, torch.float32)) if mean else shares)


_OTHERS: Mapping[str, Meaning] = {"aottrain.ops.triton.loss_rows": _loss_rows}
