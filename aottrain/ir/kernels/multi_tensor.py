"""One pass over many tensors as a value: kernels over blocks of elements, for any number of tensors of any size.

A stage's kernel has one loop, over the elements of a block. How many there are is known when it runs (`at_count`), as
is where its memory begins (`Base`). So the text, and what is compiled from it, depends on types alone: an optimizer's
update of a thousand parameters is one function over a table of pointers, as in NVIDIA's Apex.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from aottrain.errors import VerificationError
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import KernelIR, Load
from aottrain.ir.kernels.verify import verify_kernel

# Elements of a block. Sums are taken block by block, so results do not depend on the number of threads.
BLOCK = 4096


class Base(Enum):
    """Where a block finds the memory of a parameter."""

    LIST = "list"  # a list of tensors: the block's elements of the block's tensor
    ROW = "row"  # a table with a row for each tensor: the row of the block's tensor
    BLOCK = "block"  # a table with one number for each block
    WHOLE = "whole"  # the same memory in all


class Over(Enum):
    """What a stage runs over: once for each block of a segment's tensors; or once, its loop over a table."""

    BLOCKS = "blocks"
    ALL_TENSORS = "all tensors"
    ALL_BLOCKS = "all blocks"


@dataclass(frozen=True)
class Stage:
    """One kernel of the pass. The names of its parameters say which list or table each is."""

    kernel: KernelIR
    bases: tuple[Base, ...]
    """Of each parameter of the kernel."""
    over: Over
    segment: int = 0
    """Of Over.BLOCKS."""


@dataclass(frozen=True)
class MultiTensorIR:
    """A whole pass. The tensors of all lists are numbered alike, those of one segment one after the other."""

    name: str
    segments: tuple[torch.dtype, ...]
    """The type of the tensors of each segment."""
    stages: tuple[Stage, ...]
    """In order, each after all of the one before."""
    num_measuring: int
    """How many stages run before `total` is known."""
    lists: tuple[str, ...]
    """Their names, in the order of the arguments."""
    tables: tuple[str, ...]
    """Their names, in the order of the arguments, after the lists."""

    def __str__(self) -> str:
        return "\n".join(f"over {stage.over.value}: {stage.kernel}" for stage in self.stages)


def at_count(kernel: KernelIR, count: int) -> KernelIR:
    """The kernel of a block, or a table, of that many elements."""
    stepped = {i.buffer for i in kernel.body if isinstance(i, Load) and i.address.offset.terms}
    stepped |= {store.buffer for store in kernel.stores if store.address.offset.terms}
    parameters = tuple(
        dataclasses.replace(p, span=p.span // BLOCK * count) if number in stepped else p
        for number, p in enumerate(kernel.parameters)
    )
    return dataclasses.replace(kernel, ranges=(count,), parameters=parameters)


def row_size(kernel: KernelIR, parameter: int) -> int:
    """Elements from one iteration to the next; of what does not change along the loop all that there are."""
    steps = {offset.coefficient(0) for offset in _offsets(kernel, parameter)} - {0}
    return next(iter(steps), kernel.parameters[parameter].span)


def verify_multi_tensor(program: MultiTensorIR) -> None:
    """Raises VerificationError unless every stage stays inside its memory at any count, and blocks in any order give
    the same: each kernel is one loop over BLOCK elements, along which a parameter moves by whole rows; a kernel over
    blocks writes only elements of its own block, and reads nothing else that is written in its stage."""
    for stage in program.stages:
        kernel = stage.kernel

        def fail(text: str, name: str = kernel.name) -> None:
            raise VerificationError(f"kernel {name}: {text}")

        verify_kernel(kernel)
        if kernel.ranges != (BLOCK,) or kernel.num_outer or kernel.columns:
            fail(f"is not one loop over {BLOCK} elements")
        for number, (parameter, base) in enumerate(zip(kernel.parameters, stage.bases, strict=True)):
            offsets = list(_offsets(kernel, number))
            step = row_size(kernel, number)
            moves = any(offset.terms for offset in offsets)
            if moves and any(offset.coefficient(0) != step or not 0 <= offset.constant < step for offset in offsets):
                fail(f"parameter {parameter.name} is not addressed by whole rows")
            if moves and parameter.span != step * BLOCK:
                fail(f"parameter {parameter.name} has not {step} elements for each iteration")
            if stage.over is Over.BLOCKS:
                if moves != (base is Base.LIST) or (base is Base.LIST and step != 1):
                    fail(f"parameter {parameter.name} is no {base.value}: blocks would overlap")
                if parameter.written and base not in (Base.LIST, Base.BLOCK):
                    fail(f"parameter {parameter.name} is written by several blocks")
                if base is Base.BLOCK and parameter.span != 1:
                    fail(f"parameter {parameter.name} has not one number for each block")
            elif base is not Base.WHOLE:
                fail(f"parameter {parameter.name} belongs to a block, and the stage runs once")


def _offsets(kernel: KernelIR, parameter: int) -> Iterator[Affine]:
    for instruction in kernel.body:
        if isinstance(instruction, Load) and instruction.buffer == parameter:
            yield instruction.address.offset
    for store in kernel.stores:
        if store.buffer == parameter:
            yield store.address.offset
