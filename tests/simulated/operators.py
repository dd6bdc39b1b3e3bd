"""Operators of the simulated devices: on the host, in the same memory; or nothing but what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_flatten, tree_map

from tests.simulated.device import Device

aten = torch.ops.aten
_libraries: list[torch.library.Library] = []
# The place of a convolution's images; the weight is in the next.
_IMAGES = {aten.convolution.default: 0, aten.convolution_backward.default: 1}
Rule = Callable[[Device, Any, tuple[Any, ...], dict[str, Any]], Any]


def register(device: Device) -> None:
    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(device, op, args, kwargs)

    anything = torch.library.Library("_", "IMPL")
    anything.fallback(run, "CUDA")
    some = torch.library.Library("aten", "IMPL")
    for op, rule in _OWN.items():
        some.impl(op, _bound(device, op, rule), "CUDA")
    _libraries.extend((anything, some))


def _bound(device: Device, op: Any, rule: Rule) -> Any:
    return lambda *args, **kwargs: rule(device, op, args, kwargs)


def host(value: Any) -> Any:
    """The same memory as a tensor of the host; what keeps it alive is the device's tensor alone."""
    if isinstance(value, Tensor) and value.device.type == "cuda":
        return torch.ops.simulated.as_host(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def _run(device: Device, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a device an operator is queued when its results have memory: what runs, or what a graph records."""
    args = tuple(map(_as_declared, args, op._schema.arguments))
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    places = [t.device.index for t in given if t.device.type == "cuda"]
    named = torch.device(kwargs.get("device") or "cuda").index
    index = places[0] if places else device.native.current_device() if named is None else named
    device.note(str(op), places, index)
    found = _returned(op, args, kwargs, index)
    compute = _COMPUTED.get(op, _COMPUTED.get(op.overloadpacket, op))
    if torch.Tag.nondeterministic_seeded in op.tags and any(a.name == "generator" for a in op._schema.arguments):
        own = kwargs.get("generator") or torch.cuda.default_generators[index]
        kwargs = {**kwargs, "generator": _drawn_from(own)}
    args, kwargs, targets = tree_map(host, (args, kwargs, tree_flatten(found)[0]))

    def step() -> None:
        for target, result in zip(targets, tree_flatten(compute(*args, **kwargs))[0], strict=True):
            if isinstance(target, Tensor) and isinstance(result, Tensor) and target.data_ptr() != result.data_ptr():
                target.copy_(result)

    touched = [*given, *(leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, Tensor))]
    device.queue(step, addresses(touched))
    return found


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors if t.device.type == "cuda" and t.numel()]


def _as_declared(value: Any, argument: Any) -> Any:
    """A number that stands for a tensor comes as a number, which few operators take as one."""
    if isinstance(value, int | float | complex) and isinstance(argument.type, torch.TensorType):
        dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
        return torch.scalar_tensor(value, dtype=dtypes[type(value)])
    return value


def _drawn_from(generator: torch.Generator) -> torch.Generator:
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)
    return torch.Generator().manual_seed((seed + offset) % 2**63)


def _returned(op: Any, args: Any, kwargs: Any, index: int) -> Any:
    """Memory for what an operator returns, as its meta function says; operands that it returns are themselves."""
    if not op._schema.returns:
        return None
    if args and op._schema.name.endswith("_") and not op._schema.name.endswith("__"):
        return args[0]  # in place
    made: dict[int, Tensor] = {}  # by the operand
    known: dict[int, Tensor] = {}  # by its stand-in

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in made:
                stand_in = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                made[id(value)], known[id(stand_in)] = stand_in, value
            return made[id(value)]
        if isinstance(value, torch.device):
            return torch.device("meta")
        return None if isinstance(value, torch.Generator) else value

    def bring(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        operand = known.get(id(value))
        if operand is None:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=f"cuda:{index}")
        if operand.shape != value.shape:
            operand.resize_(value.shape)  # memory that was given to be filled
        return operand

    found = op(*tree_map(meta, args), **tree_map(meta, kwargs))
    if op in _IMAGES:
        found = tree_map(lambda value: _as_cudnn_does(value, *args[_IMAGES[op] :][:2]), found)
    return tree_map(bring, found)


def _as_cudnn_does(value: Any, images: Tensor, weight: Tensor) -> Any:
    """What a convolution gives is in channels_last where images or weight are."""
    if not isinstance(value, Tensor) or value.dim() != 4 or torch.float64 in (images.dtype, weight.dtype):
        return value
    either = any(suggest_memory_format(given) is torch.channels_last for given in (images, weight))
    return torch.empty_like(value, memory_format=torch.channels_last if either else torch.contiguous_format)


def _copy(device: Device, op: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    device.note("copy_", [t.device.index for t in (target, source) if t.device.type == "cuda"])
    if device.capture is not None and "cpu" in (target.device.type, source.device.type):
        raise RuntimeError("operation not permitted when stream is capturing")
    to, origin = host(target), host(source)
    if target.device.type == "cpu":
        to.copy_(origin)
    else:
        device.queue(lambda: to.copy_(origin), addresses([target, source]))
    return target


def _item(device: Device, op: Any, args: Any, kwargs: Any) -> Any:
    if device.capture is not None:
        raise RuntimeError("operation not permitted when stream is capturing")
    return host(args[0]).item()


def _item_of_two(device: Device, op: Any, args: Any, kwargs: Any) -> Any:
    return op(*map(host, args))


def _values(device: Device, op: Any, args: Any, kwargs: Any) -> Any:
    """Where the result's shape depends on values: what the host finds."""
    index = args[0].device.index
    device.note(str(op), [index])
    if not device.computes:
        raise RuntimeError(f"{op} on a device that computes nothing")
    return tree_map(lambda x: x.to(f"cuda:{index}"), op(*tree_map(host, args), **tree_map(host, kwargs)))


def _grouped(query: Tensor, shared: Tensor) -> Tensor:
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Any, causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
    """Attention as it is written, and the logarithm of each row's sum of exponentials."""
    key, value = _grouped(query, key), _grouped(query, value)
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if bias is not None:
        scores = scores + bias.float()
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


def _padded(sums: Tensor) -> Tensor:
    return F.pad(sums, (0, -sums.shape[-1] % 32))


def _flash(query: Any, key: Any, value: Any, dropout_p=0.0, is_causal=False, *_: Any, scale: Any = None) -> Any:
    assert not dropout_p
    return (*_attend(query, key, value, None, is_causal, scale), *[None] * 7)


def _efficient(
    query: Any, key: Any, value: Any, bias: Any, sums: bool, dropout_p=0.0, is_causal=False, *, scale: Any = None
) -> Any:
    assert not dropout_p
    mixed, found = _attend(query, key, value, bias, is_causal, scale)
    return mixed, _padded(found) if sums else None, None, None


def _flash_backward(grad_out: Any, query: Any, key: Any, value: Any, *more: Any, scale: Any = None) -> Any:
    return _gradients(grad_out, query, key, value, None, more[7], scale)


def _efficient_backward(
    grad_out: Any, query: Any, key: Any, value: Any, bias: Any, *more: Any, scale: Any = None
) -> Any:
    return (*_gradients(grad_out, query, key, value, bias, more[6] if len(more) > 6 else False, scale), None)


def _gradients(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Any, causal: bool, scale: Any) -> Any:
    """By the formula, as below autograd nothing is differentiated."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    wide_key, wide_value, grad_out = _grouped(query, key).float(), _grouped(query, value).float(), grad_out.float()
    scores = query.float() @ wide_key.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if bias is not None:
        scores = scores + bias.float()
    shares = scores.softmax(-1)
    of_shares = grad_out @ wide_value.mT
    of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
    found = of_scores @ wide_key, of_scores.mT @ query.float(), shares.mT @ grad_out

    def shared(gradient: Tensor, like: Tensor) -> Tensor:
        heads = like.shape[1]
        return gradient.unflatten(1, (heads, gradient.shape[1] // heads)).sum(2)

    return found[0], shared(found[1], key), shared(found[2], value)


def _wide_product(left: Tensor, right: Tensor, dtype: torch.dtype, **_: Any) -> Tensor:
    return left.to(dtype) @ right.to(dtype)


def _wide_sum(own: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, **_: Any) -> Tensor:
    return own + left.to(dtype) @ right.to(dtype)


def _from_half(op: Any) -> Any:
    """A softmax to float32, which the host has of float32 alone."""

    def compute(value: Tensor, dim: int, to_float: bool, out: Tensor | None = None) -> Tensor:
        result = op(value.float() if to_float else value, dim, False)
        return result if out is None else out.copy_(result)

    return compute


def _to_half(op: Any) -> Any:
    def compute(gradient: Tensor, value: Tensor, dim: int, dtype: Any, **out: Tensor) -> Tensor:
        result = op(gradient, value, dim, gradient.dtype)
        return next(iter(out.values())).copy_(result) if out else result

    return compute


# What the host computes in another way.
_COMPUTED: dict[Any, Any] = {
    **{op: _from_half(op.default) for op in (aten._softmax, aten._log_softmax)},
    **{op: _to_half(op.default) for op in (aten._softmax_backward_data, aten._log_softmax_backward_data)},
    aten.mm.dtype: _wide_product,
    aten.mm.dtype_out: _wide_product,
    aten.bmm.dtype: _wide_product,
    aten.addmm.dtype_out: _wide_sum,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
# What torch has in C++ for every backend, and which then looks for a kernel of the device's.
_OWN: dict[Any, Rule] = {
    aten.copy_.default: _copy,
    aten._local_scalar_dense.default: _item,
    aten.convolution.default: _run,
    aten.convolution_backward.default: _run,
    aten.record_stream.default: lambda device, op, args, kwargs: None,
    aten.equal.default: _item_of_two,
    aten.nonzero.default: _values,
    aten.masked_select.default: _values,
}
