"""Makes a call's result outside the compiled function: inputs handed back, views regenerated, constants put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import negated, set_view_origin
from aottrain.ir.calling import OutputInfo, ResultSource, is_pair
from aottrain.ir.sizes.expressions import SizeExpression, resolve
from aottrain.runtime.autograd.chain import Chain


def assemble(
    outputs: Sequence[OutputInfo],
    leaves: Sequence[Any],
    is_tensor: Sequence[bool],
    computed: Sequence[Tensor],
    primals: Sequence[Tensor],
    sizes: Mapping[str, int],
) -> list[Any]:
    """The flat result; in `leaves`, symbolic numbers and shapes (tuples) are expressions of the sizes.

    Views are made here, not inside the compiled function: autograd forbids writing to views that a custom Function
    returned, and a view of an input must be one of the caller's own tensor."""
    tensors: dict[int, Tensor] = {}
    splits: dict[Any, Sequence[Tensor]] = {}

    def make(number: int) -> Tensor:  # not recursive: a closure of itself is a cycle, and keeps the results alive
        twin = outputs[number].twin
        number = number if twin is None else twin
        pending: list[int] = []
        ancestor: int | None = number
        while ancestor is not None and ancestor not in tensors:
            pending.append(ancestor)
            ancestor = outputs[ancestor].parent
        for i in reversed(pending):
            info = outputs[i]
            if info.parent is not None:
                source = tensors[info.parent]
            elif info.source is ResultSource.PRIMAL:
                if isinstance(computed, Chain):
                    computed.prepare(primals[info.index])
                source = primals[info.index]
            else:
                source = computed[info.index]
            tensors[i] = _make(info, source, sizes, splits)
        return tensors[number]

    if isinstance(computed, Chain):
        chain = computed
        chain.finish(lambda number: (make(number), _bases(number, outputs, tensors, primals, chain)))
    result = list(leaves)
    numbers = iter(range(len(outputs)))
    for position, is_tensor_leaf in enumerate(is_tensor):
        if is_tensor_leaf:
            result[position] = make(next(numbers))
        elif isinstance(result[position], SizeExpression):
            result[position] = result[position].of(sizes)
        elif type(result[position]) is tuple:
            result[position] = torch.Size(resolve(result[position], sizes))
    return result


def _bases(
    number: int, outputs: Sequence[OutputInfo], tensors: Mapping[int, Tensor], primals: Sequence[Tensor], chain: Chain
) -> list[Tensor]:
    """What a result is a view of: other results, and what the first of them was made of. Not an input as it was given:
    what comes to that, the program hands it."""
    twin = outputs[number].twin
    info = outputs[number if twin is None else twin]
    bases = []
    while info.parent is not None:
        bases.append(tensors[info.parent])
        info = outputs[info.parent]
    if info.source is not ResultSource.PRIMAL:
        bases.append(chain[info.index])
    elif any(primals[info.index] is replaced for replaced in chain.replaced):
        bases.append(primals[info.index])
    return bases


def _make(info: OutputInfo, source: Tensor, sizes: Mapping[str, int], splits: dict[Any, Sequence[Tensor]]) -> Tensor:
    if info.split is not None:
        lengths, dim, part = info.split
        if (info.index, lengths, dim) not in splits:  # once, so that its parts have one node in autograd's graph
            split = torch.unsafe_split if isinstance(lengths, int) else torch.unsafe_split_with_sizes
            with torch.enable_grad():
                splits[info.index, lengths, dim] = split(source, lengths, dim)
        return splits[info.index, lengths, dim][part]
    if info.geometry is None:
        return source
    if not info.requires_grad and info.origin is None:
        value = source.detach()
        value = value if _is_whole(info, value, sizes) else _view(info, value, sizes)
        return value.data if info.hidden else value
    with torch.set_grad_enabled(info.requires_grad):
        value = _view(info, source, sizes)
    set_view_origin(value, info.origin)
    return value


def _view(info: OutputInfo, source: Tensor, sizes: Mapping[str, int]) -> Tensor:
    assert info.geometry is not None
    size, stride = resolve(info.geometry[0], sizes), resolve(info.geometry[1], sizes)
    (offset,) = resolve(info.geometry[2:], sizes)
    pairs = info.dtype is not None and is_pair(info.dtype, source.dtype)
    if pairs and not source.is_complex():
        size, stride, offset = (*size, 2), (*(2 * step for step in stride), 1), 2 * offset
    elif pairs:
        source = torch.view_as_real(source.conj() if source.is_conj() else source)
    elif info.dtype is not None:
        source = source.view(info.dtype)
    if info.neg:  # first, as in the imaginary part of a conjugate: the zeros beside its gradient are negative ones, too
        source = negated(source)
    value = source.as_strided(size, stride, offset + source.storage_offset())
    if pairs and value.dtype != info.dtype:
        value = torch.view_as_complex(value)
    return value.conj() if info.conj else value


def _is_whole(info: OutputInfo, value: Tensor, sizes: Mapping[str, int]) -> bool:
    """Whether the view shows its base as it is."""
    assert info.geometry is not None
    if info.dtype is not None or info.conj or info.neg:
        return False
    layout = resolve(info.geometry[0], sizes), resolve(info.geometry[1], sizes), *resolve(info.geometry[2:], sizes)
    return layout == (tuple(value.shape), tuple(value.stride()), 0)
