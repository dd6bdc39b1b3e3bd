"""What kernels give where torch's fakes differ: layouts of results, a grouped product on a CPU, and what they refuse to
write.

A program sees layouts: what is flattened is a view or a copy by them, and an op chooses its formula by them, and so how
it rounds. The differences were found by running every operator of torch's own database with every tensor, indices and
booleans among them, in many layouts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import suggest_memory_format
from aottrain.compiler.capture.indexing import is_by_mask
from aottrain.compiler.capture.recording import tensors_among
from aottrain.errors import UnsupportedError
from aottrain.ir.ops import overload_of, packet_name, without_writing

aten = torch.ops.aten
_TYPES = (torch.float32, torch.bfloat16, torch.float16)

# From the arguments and the result, a tensor with the strides that the result gets.
Rule = Callable[[Sequence[Any], Tensor], Tensor]


def _contiguous(args: Sequence[Any], out: Tensor) -> Tensor:
    return torch.empty(out.shape, device=out.device)


def _suggested_by(place: int) -> Rule:
    """Channels last where this argument is, else contiguous, as are results of another rank, such as statistics."""

    def rule(args: Sequence[Any], out: Tensor) -> Tensor:
        if out.dim() != args[place].dim():
            return _contiguous(args, out)
        return torch.empty(out.shape, device=out.device, memory_format=suggest_memory_format(args[place]))

    return rule


def _as_rolled(args: Sequence[Any], out: Tensor) -> Tensor:
    """The kernel joins two parts of each dimension in turn; without dimensions it rolls the elements in their order."""
    value, shifts, dims = args[0], args[1], args[2] if len(args) > 2 else ()
    if not dims or out.numel() == 0:
        return _contiguous(args, out)
    for shift, dim in zip(shifts, dims, strict=True):
        size = value.shape[dim]
        start = (size - shift) % size
        value = torch.cat([value.narrow(dim, start, size - start), value.narrow(dim, 0, start)], dim)
    return value


def _as_a_sum(args: Sequence[Any], out: Tensor) -> Tensor:
    """An elementwise op of two tensors, whose fake goes wrong where one is broadcast or laid out in another way."""
    return torch.add(args[0], args[1])


def _like(place: int) -> Rule:
    """As an empty tensor that is made in the likeness of this argument; sums of losses have no strides."""

    def rule(args: Sequence[Any], out: Tensor) -> Tensor:
        return torch.empty_like(args[place], device=out.device)

    return rule


def _as_a_product_of_powers(args: Sequence[Any], out: Tensor) -> Tensor:
    """ldexp, whose powers of two are a contiguous tensor."""
    return torch.add(args[0], torch.empty(args[1].shape, device=out.device))


def _as_transformed(args: Sequence[Any], out: Tensor) -> Tensor:
    """MKL's real transform: the other dimensions first, then the transformed ones, both by descending stride; the last
    one named is the innermost."""
    if not torch.backends.mkl.is_available():
        return _contiguous(args, out)
    value, dims = args[0], args[1]

    def by_stride(group: Sequence[int]) -> list[int]:
        return sorted(group, key=lambda dim: -value.stride(dim))

    order = [*by_stride([dim for dim in range(out.dim()) if dim not in dims]), *by_stride(dims[:-1]), dims[-1]]
    return _in_order(order, out)


def _as_indexed(args: Sequence[Any], out: Tensor) -> Tensor:
    """A tensor with the strides of `x[i, ..., j]`, which are those of an elementwise op of all its operands.

    The kernel sees x with a stride of 0 in each dimension that indices take the place of, and the indices beside it:
    their layout counts, as in `x[i.transpose(0, 1)]`. Torch's fakes ask x alone (torch 2.11 to 2.14).
    """
    value, indices = args[0], [*args[1]]
    given = [index for index in indices if index is not None]
    if is_by_mask(indices) or not given:
        return out
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    places = [i for i, index in enumerate(indices) if index is not None]
    if places[-1] - places[0] + 1 != len(places):  # those that lie apart come to the front
        value = value.permute(*places, *(i for i in range(value.dim()) if i not in places))
        places = list(range(len(places)))
    before, after = value.shape[: places[0]], value.shape[places[-1] + 1 :]
    strides = (*value.stride()[: places[0]], *(0,) * len(shape), *value.stride()[places[-1] + 1 :])
    operands = [strides]
    for index in _as_a_gpu_takes_them(given, shape) if value.is_cuda else given:
        lined_up = index.expand(shape).reshape((*(1,) * len(before), *shape, *(1,) * len(after)))
        # Of a dimension that is spread the kernel knows no stride.
        steps = zip(lined_up.stride(), lined_up.shape, out.shape, strict=True)
        operands.append(tuple(0 if size == 1 != whole else step for step, size, whole in steps))
    return _in_order(_from_inside_out(operands, out.shape)[::-1], out)


def _from_inside_out(operands: Sequence[Sequence[Any]], shape: Sequence[Any]) -> list[int]:
    """The dimensions by ascending stride, as elementwise kernels sort them: of two the first operand decides in which
    neither has a stride of 0, of equal strides the smaller one is inside, and what nothing decides stays."""

    def after(one: int, other: int) -> int:
        for strides in operands:
            if strides[one] == 0 or strides[other] == 0:
                continue
            if strides[one] != strides[other]:
                return 1 if strides[one] > strides[other] else -1
            if shape[one] > shape[other]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        place = i
        for other in range(i - 1, -1, -1):
            found = after(order[other], order[place])
            if found > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif found < 0:
                break
    return order


def _in_order(order: Sequence[int], out: Tensor) -> Tensor:
    """A dense tensor of this shape whose dimensions lie in this order in memory, the outermost first."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return torch.empty([out.shape[dim] for dim in order], device=out.device).permute(inverse)


def _as_a_gpu_takes_them(indices: Sequence[Tensor], shape: Any) -> list[Tensor]:
    """Several indices are copied where their strides differ."""
    spread = [index.expand(shape) for index in indices]
    alike = all(index.stride() == spread[0].stride() for index in spread)
    return spread if alike else [index.contiguous() for index in spread]


def _as_cudnn_does(images: int) -> Rule:
    """A convolution of the images in this place by the weight in the next, as cuDNN lays out all that it gives. A build
    without it asks other kernels, of devices that are simulated, or planned for and not there."""

    def rule(args: Sequence[Any], out: Tensor) -> Tensor:
        if torch.version.cuda is not None or torch.version.hip is not None or args[images].dtype is torch.float64:
            return out
        formats = [suggest_memory_format(value) for value in args[images : images + 2]]
        laid = [form for form in formats if form is not torch.contiguous_format]
        return torch.empty(out.shape, device=out.device, memory_format=(laid or formats)[0])

    return rule


def _contiguous_in_evaluation(args: Sequence[Any], out: Tensor) -> Tensor:
    """The gradient of a batch norm by running statistics, in whatever layout the images are."""
    is_training = args[7]
    return out if is_training else _contiguous(args, out)


CPU_LAYOUTS: dict[Any, Rule] = {
    aten.index.Tensor: _as_indexed,
    aten.log_sigmoid_forward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.glu_backward.default: _contiguous,
    aten.grid_sampler_2d.default: _contiguous,
    aten.huber_loss_backward.default: _contiguous,
    aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.native_layer_norm_backward.default: _contiguous,
    aten.normal.Tensor_Tensor: _contiguous,
    aten.pow.Scalar: _contiguous,
    aten.roll.default: _as_rolled,
    aten._fft_r2c.default: _as_transformed,
    aten.channel_shuffle.default: _suggested_by(0),
    aten.max_unpool2d.default: _suggested_by(0),
    aten.reflection_pad3d.default: _suggested_by(0),
    aten.replication_pad3d.default: _suggested_by(0),
    aten.native_group_norm.default: _suggested_by(0),  # whose fakes are contiguous in torch 2.14
    aten.native_group_norm_backward.default: _suggested_by(1),
    aten.native_batch_norm.default: _suggested_by(0),
    aten._native_batch_norm_legit_functional.default: _suggested_by(0),
    aten._native_batch_norm_legit.no_stats: _suggested_by(0),
    aten._batch_norm_with_update_functional.default: _suggested_by(0),
    aten.batch_norm_backward.default: _suggested_by(1),
    aten.native_batch_norm_backward.default: _suggested_by(1),
    aten.replication_pad2d_backward.default: _suggested_by(1),
    aten.binary_cross_entropy.default: _like(0),
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.nll_loss2d_forward.default: _contiguous,
    aten.reflection_pad2d_backward.default: _suggested_by(1),
    aten.replication_pad3d_backward.default: _suggested_by(1),
    aten.copysign.Tensor: _as_a_sum,
    aten.heaviside.default: _as_a_sum,
    aten.logaddexp.default: _as_a_sum,
    aten.div.Tensor_mode: _as_a_sum,
    aten.ldexp.Tensor: _as_a_product_of_powers,
    aten.floor_divide.default: _as_a_sum,
    aten.hardswish_backward.default: _as_a_sum,
    aten.hardtanh_backward.default: _as_a_sum,
    aten.logical_and.default: _as_a_sum,
    aten.logical_or.default: _as_a_sum,
    aten.logical_xor.default: _as_a_sum,
    aten.logit_backward.default: _as_a_sum,
    aten.native_dropout_backward.default: _as_a_sum,
    aten.special_xlog1py.default: _as_a_sum,
    aten.xlogy.Tensor: _as_a_sum,
}


# CUDA's kernels, in the few places where they are known to differ from the fakes.
CUDA_LAYOUTS: dict[Any, Rule] = {
    aten.index.Tensor: _as_indexed,
    aten.native_group_norm.default: _contiguous,
    aten.native_group_norm_backward.default: _contiguous,
    aten.native_batch_norm_backward.default: _contiguous_in_evaluation,
    aten.convolution.default: _as_cudnn_does(0),
    aten.convolution_backward.default: _as_cudnn_does(1),
}


def grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What a kernel gives. Torch's fake takes bfloat16 alone, as the fast one of CUDA's kernels does, and pads no rows
    where torch was built without CUDA.

    Raises UnsupportedError where the kernel refuses (its error is eager's), and for sizes that are symbols.
    """
    sizes = (*a.shape, *b.shape, *a.stride(), *b.stride(), *(offs.shape if offs is not None else ()))
    flat = a.dim() == 2, b.dim() == 2
    fits = {a.dim(), b.dim()} <= {2, 3} and (offs is not None) == any(flat) and bias is None
    fits = fits and a.dtype == b.dtype and a.dtype in _TYPES and out_dtype in (None, a.dtype)
    fits = fits and (offs is None or (offs.dim() == 1 and offs.dtype == torch.int32))
    if not fits or not all(isinstance(size, int) for size in sizes):
        raise UnsupportedError("a grouped product of tensors that kernels refuse, or of symbolic sizes")
    groups = {len(value) for value, is_flat in ((a, flat[0]), (b, flat[1])) if not is_flat}
    groups |= {len(offs)} if offs is not None else set()
    if len(groups) != 1 or (flat != (True, True) and a.shape[-1] != b.shape[-2]):
        raise UnsupportedError("a grouped product of tensors whose sizes do not fit together")
    if not (_is_aligned(a) and _is_aligned(b)):
        raise UnsupportedError("a grouped product of rows that do not begin at multiples of 16 bytes")
    shape = [groups.pop(), a.shape[-2], b.shape[-1]][0 if flat[0] == flat[1] else 1 :]
    each = 16 // a.itemsize
    row = -(-shape[-1] // each) * each
    return torch.empty_strided(shape, [shape[-2] * row, row, 1][-len(shape) :], dtype=a.dtype, device=a.device)


def _is_aligned(value: Tensor) -> bool:
    """Whether rows or columns lie one after the other, each from a multiple of 16 bytes on."""
    (rows, columns), (down, across) = value.shape[-2:], value.stride()[-2:]
    each = 16 // value.itemsize
    if down == 1 and across >= max(1, rows):
        return across % each == 0
    return across == 1 and down >= max(1, columns) and down % each == 0


# Elementwise operators that torch does not mark as such.
_ELEMENTWISE = frozenset({"floor_divide_", "masked_fill_"})
# They cast their result to any type that `out=` has.
_CAST_TO_OUT = frozenset({"add", "sub", "mul", "div", "pow", "eq", "ne", "lt", "le", "gt", "ge"})


def check_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fakes: AbstractContextManager[Any], own_formula: bool
) -> None:
    """Raises where kernels do not write what the operator gives without mutation.

    fakes: inside, operators give fakes. own_formula: the call is one of a fake's own formula, which writes to no `out=`
    of the program.
    """
    if args and isinstance(args[0], Tensor) and (twin := _out_of_place(func)) is not None:
        _check_shape(args)
        with fakes:
            _check_cast(twin, args, kwargs)
    if not own_formula and (twin := _without_out(func)) is not None:
        with fakes:
            _check_out(func, twin, args, kwargs)


@functools.cache
def _out_of_place(func: Any) -> Any:
    """The elementwise operator that gives what this one writes to its first argument; None for all others."""
    twin = without_writing(func)
    if twin is None or packet_name(func) in _ELEMENTWISE:
        return twin
    return twin if torch.Tag.pointwise in (*func.tags, *twin.tags) else None


@functools.cache
def _without_out(func: Any) -> Any:
    """The overload that gives what this one writes to its `out=`; None for all others, for those that cast it to any
    type, and for those that take the type of their result from there."""
    given = [argument for argument in func._schema.arguments if not argument.is_out]
    if func.namespace != "aten" or len(given) == len(func._schema.arguments) or packet_name(func) in _CAST_TO_OUT:
        return None
    return overload_of(func.overloadpacket, [str(argument.type) for argument in given])


def _check_shape(args: Sequence[Any]) -> None:
    """Raises where an argument is larger than the one that is written to, which torch's fakes ask of some operators."""
    own = args[0].shape
    for other in args[1:]:
        shape = other.shape if isinstance(other, Tensor) else ()
        reversed_pairs = zip(reversed(shape), reversed(own), strict=False)
        if len(shape) > len(own) or any(size != wanted and size != 1 for size, wanted in reversed_pairs):
            raise RuntimeError(
                f"output with shape {list(own)} doesn't match a shape {list(shape)} that it is written from"
            )


def _check_cast(twin: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises where a result is of a type that the argument it is written to cannot take, such as `ints.mul_(0.5)`.
    Torch's fakes ask this of some operators, of more in each release."""
    written = args[0].dtype
    if written.is_complex or written.is_floating_point and not any(_is_complex(one) for one in args):
        return
    result = twin(*args, **kwargs).dtype
    if not torch.can_cast(result, written):
        raise RuntimeError(f"result type {result} can't be cast to the desired output type {written}")


def _is_complex(value: Any) -> bool:
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


def _check_out(func: Any, twin: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises where `out=` is of another type than the result, for eager computes a reduction in the type of `out`, and
    most other operators raise; where it has other strides, which some operators change and others do not heed; and
    where the result is an argument, as the real numbers' conjugates are."""
    name = packet_name(func)
    outs = {each.name: kwargs[each.name] for each in func._schema.arguments if each.is_out and each.name in kwargs}
    results = list(tensors_among([twin(*args, **{key: value for key, value in kwargs.items() if key not in outs})]))
    arguments = list(tensors_among(args))
    for out, result in zip(outs.values(), results, strict=True):
        if out.dtype is not result.dtype:
            raise UnsupportedError(f"the out= of {name} is of another type than its result")
        fits = out.stride() == result.stride() if out.shape == result.shape else result.is_contiguous()
        # In eager an `out` of the result's shape keeps its strides. Traced, one that is all of its memory is replaced.
        is_replaced = out.shape == result.shape and out.untyped_storage().nbytes() == out.nbytes
        if not fits and (is_replaced or torch.Tag.pointwise not in func.tags):
            raise UnsupportedError(f"the out= of {name} has other strides than its result")
        if any(result is argument for argument in arguments):
            raise UnsupportedError(f"the out= of {name}, whose result is its argument")
