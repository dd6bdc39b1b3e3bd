"""evaluate: run a KernelIR in plain torch, one tensor op per instruction: the definition of what it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Address, Column, Compute, Constant, Instruction, KernelIR, Load, Position, Reduce
from aottrain.ops.philox_constants import FLOAT_BITS
from aottrain.ops.random.philox import philox_words

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.true_divide, "neg": torch.neg, "abs": torch.abs,
    "max": torch.maximum, "min": torch.minimum, "exp": torch.exp, "expm1": torch.expm1, "exp2": torch.exp2,
    "log": torch.log, "log1p": torch.log1p, "log2": torch.log2, "log10": torch.log10, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh, "atan": torch.atan,
    "atan2": torch.atan2, "sigmoid": torch.sigmoid, "erf": torch.erf, "erfc": torch.erfc, "floor": torch.floor,
    "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round, "sign": torch.sign, "pow": torch.pow,
    "power": torch.pow,  # of what a float holds, where it is known to the last bits of one
    "reciprocal": torch.reciprocal, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "asin": torch.asin, "acos": torch.acos, "asinh": torch.asinh,
    "acosh": torch.acosh, "atanh": torch.atanh, "where": torch.where,
}  # fmt: skip

# Eager's vectors overflow early, or give NaN for denormal divisors.
_IN_DOUBLE: dict[str, Callable[..., Tensor]] = {"sinh": torch.sinh, "cosh": torch.cosh, "fmod": torch.fmod}


def evaluate(kernel: KernelIR, buffers: Sequence[Tensor]) -> None:
    """Fill the written buffers. buffers: for each parameter a one-dimensional view of its memory.

    Raises IndexError for an index outside of what it indexes, as eager does.
    """
    device = buffers[0].device if buffers else torch.device("cpu")
    rank = len(kernel.ranges)
    inner = tuple(range(kernel.num_outer, rank))
    grid = [
        torch.arange(size, device=device).view([-1 if d == loop else 1 for d in range(rank)])
        for loop, size in enumerate(kernel.ranges)
    ]
    values: list[Tensor] = []

    def at(offset: Affine) -> Tensor:
        total = torch.full([1] * rank, offset.constant, dtype=torch.int64, device=device)
        for loop, c in offset.terms:
            total = total + grid[loop] * c
        return total

    def address_of(address: Address) -> Tensor:
        total = at(address.offset)
        for value, stride, size in address.indirect:
            total = total + torch.where(values[value] < 0, values[value] + size, values[value]) * stride
        return total

    def run(instruction: Instruction) -> Tensor:
        if isinstance(instruction, Load):
            if instruction.guard is None:
                return buffers[instruction.buffer][address_of(instruction.address)]
            guard, position = torch.broadcast_tensors(values[instruction.guard], address_of(instruction.address))
            loaded = buffers[instruction.buffer][torch.where(guard, position, 0)]
            return torch.where(guard, loaded, torch.tensor(instruction.other, dtype=instruction.dtype, device=device))
        if isinstance(instruction, Constant):
            return torch.tensor(instruction.value, dtype=instruction.dtype, device=device).view([1] * rank)
        if isinstance(instruction, Position):
            return at(instruction.offset)
        if isinstance(instruction, Reduce):
            shape = [
                size if loop >= kernel.num_outer else length
                for loop, (size, length) in enumerate(zip(kernel.ranges, values[instruction.value].shape, strict=True))
            ]
            return _reduced(instruction.op, values[instruction.value].expand(shape), inner)
        return _compute(instruction, [values[value] for value in instruction.args])

    for instruction in kernel.body:
        values.append(run(instruction))
    for store in kernel.stores:
        position, value = torch.broadcast_tensors(address_of(store.address), values[store.value])
        buffers[store.buffer][position] = value
    for column in kernel.columns:
        _store_column(kernel, column, buffers[column.buffer], values[column.value], address_of(column.address))
    for part in kernel.parts:
        total = _reduced("sum", values[part.value].expand(kernel.ranges), tuple(range(kernel.num_kept, rank)))
        position, total = torch.broadcast_tensors(address_of(part.address), total.to(part.dtype))
        buffers[part.buffer][position] = total


def _compute(instruction: Compute, args: list[Tensor]) -> Tensor:
    if instruction.op == "cast":
        return args[0].to(instruction.dtype)
    if instruction.op == "checked":
        index, size = args
        if bool(((index < -size) | (index >= size)).any()):
            raise IndexError("index out of range in self")
        return index
    if instruction.op == "philox":
        return _uniform(*args)
    if instruction.op == "philox_normal":
        seed, number, element = args
        state = torch.stack([seed.flatten()[0], number.flatten()[0]])
        count = [int(element.max()) + 1]
        drawn: Tensor = torch.ops.aottrain.philox_normal(state, 0, count, dtype=torch.float32, device=element.device)
        return drawn[element]
    if instruction.op == "div" and not instruction.dtype.is_floating_point:
        return torch.div(*args, rounding_mode="trunc")
    if instruction.op in _IN_DOUBLE:
        wide = [value.double() if value.is_floating_point() else value for value in args]
        return _IN_DOUBLE[instruction.op](*wide).to(instruction.dtype)
    if instruction.op == "fma":
        return _fma(*args).to(instruction.dtype)
    return _FUNCTIONS[instruction.op](*args).to(instruction.dtype)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once: the product of two floats is exact in double. Doubles are rounded twice here."""
    if a.dtype is not torch.float32:
        return a * b + c
    return (a.double() * b.double() + c.double()).float()


def _uniform(seed: Tensor, number: Tensor, element: Tensor) -> Tensor:
    count = int(element.max()) + 1
    state = torch.stack([seed.flatten()[0], number.flatten()[0]])
    words = philox_words(state, 0, 0, -(-count // 4), element.device)
    table = torch.stack(list(words), dim=1).flatten()
    return (table[element] >> (32 - FLOAT_BITS)).to(torch.float32) * 2.0**-FLOAT_BITS


def _reduced(op: str, value: Tensor, dims: tuple[int, ...]) -> Tensor:
    if not dims:
        return value
    if op == "sum":
        return value.sum(dims, keepdim=True, dtype=value.dtype)
    if op in ("max", "min"):
        return value.amax(dims, keepdim=True) if op == "max" else value.amin(dims, keepdim=True)
    for dim in dims:
        value = value.prod(dim, keepdim=True)
    return value


def _store_column(kernel: KernelIR, column: Column, buffer: Tensor, value: Tensor, position: Tensor) -> None:
    value = value.expand(kernel.ranges)
    rank = len(kernel.ranges)
    over = (loop for loop in range(column.kept, kernel.num_outer) if loop not in column.apart)
    dims = tuple(range(rank)) if column.whole else tuple(over)
    total = _reduced(column.op, value, dims)
    if column.divisor != 1:
        total = total / column.divisor
    position, total = torch.broadcast_tensors(position, total.to(column.dtype))
    buffer[position] = total


def memory_of(value: Tensor, span: int) -> Tensor:
    """A one-dimensional view of `span` elements from a tensor's first one."""
    return value.as_strided((span,), (1,), value.storage_offset())
