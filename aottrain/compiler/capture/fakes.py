"""Fake tensors as kernels give them.

Torch's fakes differ from the CPU's kernels in the strides of some results (kernel_results.py). They also differ in
types: of a bfloat16 or float16 input with float32 parameters, as under autocast,
norms on a CPU keep their statistics in float32.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from aottrain.compat import FakeTensor, FakeTensorMode, forget_numbers, onednn, tree_map
from aottrain.compat_dispatch import in_backward
from aottrain.compiler.capture.kernel_results import CPU_LAYOUTS, CUDA_LAYOUTS, check_written, grouped_product
from aottrain.compiler.capture.recording import tensors_among
from aottrain.errors import UnsupportedError, refusals_here
from aottrain.ir.ops import hidden_mutation, op_info, packet_name

aten = torch.ops.aten

# Of norms on a CPU: where their parameters stand among the arguments, and their statistics among the results.
_STATISTICS: dict[Any, tuple[range, tuple[int, ...]]] = {
    aten.native_layer_norm.default: (range(2, 4), (1, 2)),
    aten.native_group_norm.default: (range(1, 3), (1, 2)),
    aten.native_batch_norm.default: (range(1, 5), (1, 2)),
    aten._native_batch_norm_legit_functional.default: (range(1, 5), (1, 2)),
    aten._native_batch_norm_legit.no_stats: (range(1, 3), (1, 2)),
    aten._native_batch_norm_legit_no_training.default: (range(1, 5), (1, 2)),
    aten._batch_norm_with_update_functional.default: (range(1, 5), (1, 2)),
}
# Results that have the type of an argument, by their places.
_SAME_TYPE: dict[Any, dict[int, int]] = {
    aten._native_batch_norm_legit_functional.default: {3: 3, 4: 4},
    aten._batch_norm_with_update_functional.default: {4: 3, 5: 4},
    aten.native_group_norm_backward.default: {0: 1},
}
# Results that are of float64 where the arguments are, whose fakes in torch 2.11 are of float32.
_OF_DOUBLES: dict[Any, tuple[int, ...]] = {aten._scaled_dot_product_flash_attention_for_cpu.default: (1,)}
_LOW = (torch.bfloat16, torch.float16)

_SUBTRACTIONS = {aten.sub.Tensor, aten.sub_.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar}

# Types of a result for which eager has no kernel though fakes have one, by operator; found as the strides were.
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_BOOL = frozenset({torch.bool})
_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_NO_KERNEL: dict[str, frozenset[torch.dtype]] = {
    **dict.fromkeys(
        (
            "_softmax", "_softmax_backward_data", "_log_softmax", "_safe_softmax", "gelu", "silu", "mish", "hardswish",
            "hardsigmoid", "softplus", "log_sigmoid_forward", "glu", "_prelu_kernel", "addcdiv", "lerp",
        ),
        _INTEGERS,
    ),
    **dict.fromkeys(
        (
            "abs", "addcmul", "ceil", "floor", "clamp", "fmod", "remainder", "relu", "max_pool2d_with_indices",
        ),
        _BOOL,
    ),
    **dict.fromkeys(("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"), _FLOATS),
    "avg_pool2d": _INTEGERS - {torch.int64, torch.uint8},
}  # fmt: skip


# Where among the arguments stand tensors that kernels take in the type of the first one alone, by operator.
_OF_ONE_TYPE: dict[Any, tuple[int, ...]] = {
    aten.nll_loss_forward.default: (2,),
    aten.nll_loss2d_forward.default: (2,),
    aten.huber_loss.default: (1,),
    aten.soft_margin_loss.default: (1,),
    aten.normal.Tensor_Tensor: (1,),
    aten._softmax_backward_data.default: (1,),
    aten._log_softmax_backward_data.default: (1,),
    aten.binary_cross_entropy.default: (1, 2),
    aten.addr.default: (1, 2),
}
_CLASSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


# What says how many elements of a sparse tensor are stored, which is known of no fake one that depends on values.
_STORED = tuple(
    getattr(aten, name).default
    for name in (
        "_indices",
        "_values",
        "indices",
        "values",
        "_nnz",
        "crow_indices",
        "ccol_indices",
        "row_indices",
        "col_indices",
    )
)


@functools.cache
def _without_kernel(func: Any) -> frozenset[torch.dtype]:
    if func is aten.div.Tensor_mode or func is aten.div_.Tensor_mode:
        return _BOOL  # divided without a mode booleans give floats
    name = packet_name(func)
    return _NO_KERNEL.get(name[:-1] if name.endswith("_") and name[:-1] in _NO_KERNEL else name, frozenset())


@functools.cache
def _dims_of(func: Any) -> tuple[int, ...]:
    """Where among the arguments stand dimensions of the first one, `self`. Fakes count some that lie outside anew."""
    if func.namespace != "aten" or packet_name(func).startswith("unsqueeze"):
        return ()
    names = ("dim", "dim1", "dim2") if packet_name(func) == "diagonal_scatter" else ("dim",)
    arguments = func._schema.arguments
    if not arguments or arguments[0].name != "self" or str(arguments[0].type) != "Tensor":
        return ()
    return tuple(i for i, one in enumerate(arguments) if one.name in names and str(one.type) == "int")


def _check_weight(func: Any, weight: Any, out: Any) -> None:
    """Raises where `alpha=` of a sum is a boolean and the sum is none. Kernels of products take it for a number."""
    if isinstance(weight, bool) and packet_name(func).rstrip("_") in ("add", "sub") and out.dtype != torch.bool:
        raise UnsupportedError("a sum of numbers with a boolean alpha, which is an error")


def _check_types(func: Any, args: Sequence[Any]) -> None:
    """Raises where operands are of types that kernels do not take together, or from which they give another one."""
    own = args[0].dtype if args and isinstance(args[0], Tensor) else None
    given = [args[i].dtype for i in _operands_of_one_type(func) if i < len(args) and isinstance(args[i], Tensor)]
    fits = {own}
    if func in _STATISTICS:
        if args[0].device.type != "cpu":
            return
        # A norm's parameters are all of the input's type, or beside an input of low precision all of float32.
        fits = {torch.float32} if own in _LOW and torch.float32 in given else fits
    if any(dtype not in fits for dtype in given):
        raise UnsupportedError(f"{packet_name(func)} of tensors of several types, which may be an error")
    if func in _CLASSES and not (args[0].is_floating_point() and args[1].dtype is torch.int64):
        raise UnsupportedError(f"{packet_name(func)} of {own} and {args[1].dtype}, which may be an error")


def _operands_of_one_type(func: Any) -> Sequence[int]:
    return _STATISTICS[func][0] if func in _STATISTICS else _OF_ONE_TYPE.get(func, ())


def _check_dims(func: Any, args: Sequence[Any]) -> None:
    """Raises the IndexError that kernels raise."""
    for i in _dims_of(func):
        rank = max(args[0].dim(), 1)
        if i < len(args) and not -rank <= args[i] < rank:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {args[i]})"
            )


@dataclass
class _Known:
    """How a value comes of constants alone: the call, with others of this kind in place of its tensors."""

    func: Any
    args: Any
    kwargs: Any
    computed: Tensor | None = None

    def value(self) -> Any:
        if self.computed is None:
            args, kwargs = tree_map(_value_of_known, (self.args, self.kwargs))
            self.computed = self.func(*args, **kwargs)
        return self.computed


# Elements of the largest value that is computed while a program is traced, so that a number may be read from it.
_MOST_KNOWN = 1 << 22


def _value_of_known(value: Any) -> Any:
    return value.value() if isinstance(value, _Known) else value


def _may_be_known(value: Any) -> bool:
    if type(value) is not FakeTensor or value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    return isinstance(numel := value.numel(), int) and numel <= _MOST_KNOWN


def _is_determined(func: Any) -> bool:
    """Whether the arguments alone decide what a call gives."""
    name = packet_name(func)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return func.namespace == "aten" and not is_random and "empty" not in name and not hidden_mutation(func)


class KernelFakes(FakeTensorMode):
    """A FakeTensorMode that corrects those results, and refuses what kernels refuse and fakes do not."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._known = WeakTensorKeyDictionary()
        self._borrowed: dict[int, torch.UntypedStorage] = {}  # what stands for an array's memory, by its address
        self._allows_onednn = bool(torch.backends.mkldnn.enabled)
        self._depth = 0  # of calls that a fake's own formula makes
        self._thread, self._refusals = threading.get_ident(), refusals_here()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        try:
            return self._dispatch_known(func, types, args, kwargs)
        except Exception as error:
            # No other mode of the trace sees what the program does in threads, and a future may keep what they raise.
            if threading.get_ident() != self._thread and not in_backward():
                self._refusals.note(f"{func} in another thread, {type(error).__name__}")
            raise

    def _dispatch_known(self, func: Any, types: Any, args: Any, kwargs: Mapping[str, Any] | None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            known = self._known_call(func, args, kwargs or {})
            forget_numbers(args)
            return super().dispatch(func, types, args, kwargs or {}) if known is None else known.value()
        out = self._dispatch(func, types, args, kwargs)
        self._note_known(func, args, kwargs or {}, out)
        return out

    def _note_known(self, func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        """Whether a value is one that no input of the program changes; what a call writes to is none from then on."""
        if writes := op_info(func).writes:
            names = [argument.name for argument in func._schema.arguments]
            values = [args[i] if i < len(args) else kwargs.get(names[i]) for i in writes]
            strided = [value for value in tensors_among(values) if value.layout is torch.strided]
            written = {value.untyped_storage()._cdata for value in strided}
            if not written.isdisjoint(self._borrowed):
                raise UnsupportedError("the memory of an array that is no tensor is written to")
            for value in [one for one in self._known if one.untyped_storage()._cdata in written]:
                del self._known[value]
            return
        if func is aten.lift_fresh.default and type(args[0]) is Tensor:
            # Of numbers that Python has given. What numpy holds has memory that torch cannot resize: an array may be
            # written to, and read, by its own name.
            if not args[0].untyped_storage().resizable():
                self._borrowed[out.untyped_storage()._cdata] = out.untyped_storage()
            elif _may_be_known(out):
                self._known[out] = _Known(None, (), {}, args[0].detach().clone())
            return
        parts = out if isinstance(out, (tuple, list)) else (out,)
        if not any(map(_may_be_known, parts)) or not _is_determined(func):
            return
        known = self._known_call(func, args, kwargs)
        if known is None:
            return
        for i, part in enumerate(parts):
            if _may_be_known(part):
                self._known[part] = known if part is out else _Known(operator.getitem, (known, i), {})

    def _known_call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> _Known | None:
        values = tensors_among((args, kwargs))
        if any(value not in self._known and getattr(value, "constant", None) is None for value in values):
            return None  # most calls: before anything is built
        is_known = True

        def known(value: Any) -> Any:
            nonlocal is_known
            if isinstance(value, Tensor):
                constant = getattr(value, "constant", None)
                found = self._known.get(value) if constant is None else _Known(None, (), {}, constant.clone())
                is_known &= found is not None
                return found
            is_known &= not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            return value

        args, kwargs = tree_map(known, (tuple(args), dict(kwargs)))
        return _Known(func, args, kwargs) if is_known else None

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _SUBTRACTIONS and any(isinstance(v, Tensor) and v.dtype == torch.bool for v in args):
            # Eager raises when it comes to it, which for a formula of a gradient is in the backward.
            raise UnsupportedError("a subtraction of booleans, which is an error")
        if func in _STORED and not self._depth:
            raise UnsupportedError("the elements that a sparse tensor stores, whose number depends on values")
        _check_dims(func, args)
        _check_types(func, args)
        check_written(func, args, kwargs or {}, fakes=self, own_formula=bool(self._depth))
        is_strided = func is aten.as_strided.default or func is aten.as_strided_.default
        if is_strided and not self._depth:  # that of an index makes views of its input for their strides alone
            _check_extent(*args, **(kwargs or {}))
        if func is aten._grouped_mm.default and (args[0].device.type == "cpu" or args[0].dtype is not torch.bfloat16):
            with self:
                return grouped_product(*args, **(kwargs or {}))
        # Of convolutions the fakes ask which library runs them, of which some results are in channels_last.
        allows = onednn(self._allows_onednn) if "convolution" in packet_name(func) else nullcontext()
        self._depth += 1
        try:
            with allows:
                out: Any = super().dispatch(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        if type(out) is FakeTensor and out.is_mkldnn:  # torch 2.15 has fakes of some, 2.13 none
            raise UnsupportedError("a tensor in oneDNN's own layout")
        _check_weight(func, (kwargs or {}).get("alpha"), out)
        refused = _without_kernel(func)
        if refused and _first(out).dtype in refused:
            raise UnsupportedError(f"{packet_name(func)} of a {_first(out).dtype}, which is an error")
        if func in _STATISTICS or func in _SAME_TYPE or func in _OF_DOUBLES:
            out = self._typed(out, func, args)
        if func not in CPU_LAYOUTS and func not in CUDA_LAYOUTS:
            return out
        with self:
            if isinstance(out, tuple):
                return tuple(_laid_out(value, func, args) for value in out)
            return _laid_out(out, func, args)

    def _typed(self, out: tuple[Any, ...], func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        if not isinstance(args[0], Tensor) or args[0].device.type != "cpu":
            return out
        types = {i: args[place].dtype for i, place in _SAME_TYPE.get(func, {}).items()}
        parameters, statistics = _STATISTICS.get(func, (range(0), ()))
        values = [args[place] for place in parameters if place < len(args)]
        if args[0].dtype in _LOW and any(isinstance(v, Tensor) and v.dtype is torch.float32 for v in values):
            types |= dict.fromkeys(statistics, torch.float32)
        if args[0].dtype is torch.float64:
            types |= dict.fromkeys(_OF_DOUBLES.get(func, ()), torch.float64)
        with self:
            return tuple(
                value.to(types[i]) if i in types and isinstance(value, Tensor) else value for i, value in enumerate(out)
            )


def _check_extent(value: Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> None:
    """Raises an error where a strided view would leave the memory of its tensor."""
    start = value.storage_offset() if storage_offset is None else storage_offset
    numbers = (*size, *stride, start, value.untyped_storage().nbytes())
    if 0 in size or not all(isinstance(number, int) for number in numbers):
        return
    last = start + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
    if (last + 1) * value.itemsize > value.untyped_storage().nbytes():
        raise RuntimeError(f"setStorage: sizes {list(size)}, strides {list(stride)} leave the tensor's memory")


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _laid_out(out: Any, func: Any, args: Sequence[Any]) -> Any:
    if not isinstance(out, Tensor) or out.dim() < 2:
        return out
    rule = {"cpu": CPU_LAYOUTS, "cuda": CUDA_LAYOUTS}.get(out.device.type, {}).get(func)
    if rule is None:
        return out
    strides = rule(args, out).stride()
    if out.stride() == strides:
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device)


def fake_of(value: Tensor, mode: FakeTensorMode, static: bool) -> Tensor:
    """A fresh leaf with a tensor's metadata; it shares nothing with it."""
    is_fake = isinstance(value, FakeTensor)
    fake = _fake_again(value, mode, static) if is_fake else _fake_of_real(value, mode)
    if not (value.requires_grad and value.is_leaf and value._is_view()):
        return fake
    with mode, torch.enable_grad():
        return aten.alias.default(fake)  # what is made of it under no_grad takes after its base


def _fake_of_real(value: Tensor, mode: FakeTensorMode) -> Tensor:
    fake = mode.from_tensor(value.detach(), static_shapes=True)
    memory, num_bytes = fake.untyped_storage(), value.untyped_storage().nbytes()
    if memory.nbytes() < num_bytes:  # of the first elements of a tensor torch's fake knows these alone
        memory.resize_(num_bytes)
    return fake


def _fake_again(value: Tensor, mode: FakeTensorMode, static: bool) -> Tensor:
    """Of a tensor that TorchDynamo has traced with."""
    size, stride = list(value.shape), list(value.stride())
    if static:
        size, stride = [int(n) for n in size], [int(n) for n in stride]
    with mode, torch.no_grad():
        empty = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        if static or not value.storage_offset():
            return empty
        memory = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device=value.device)
        return empty.set_(memory.untyped_storage(), value.storage_offset(), size, stride)
