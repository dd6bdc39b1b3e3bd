"""Where in memory the inputs of a graph of TorchDynamo's lie. It is for such as lie apart, and TorchDynamo guards that.

Where an op writes memory that overlaps, eager raises, and a `try` of the program's may catch it. TorchDynamo has
followed the code past that place and left the `except` out. So the code must not run compiled for such inputs.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from aottrain.compat import FakeTensor, is_wrapped
from aottrain.compat_dispatch import all_named
from aottrain.compat_dynamo_inputs import guard_inputs, inputs_of
from aottrain.compiler.capture.substitutes import asked_of_fakes
from aottrain.compiler.joint.overlap import overlap
from aottrain.errors import OverlapError, UnsupportedError
from aottrain.ir.tensor import is_injective

OVERLAP = "inputs overlap in memory, and the program writes one"
STARTS = "as_strided with an offset counts from the start of the memory, and an input starts elsewhere"
OPAQUE = "the program has a tensor in oneDNN's own layout, of which TorchDynamo's fake tensors show nothing"
READ = "what TorchDynamo does not follow asks where in memory a tensor starts, which nothing guards"
_NAMES = "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem"
_IN_PLACE = {getattr(operator, name) for name in _NAMES.split()}


def tensors_at(inputs: Sequence[Any]) -> list[int]:
    """The places of tensors among a graph's inputs."""
    return [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]


def keep_apart(graph: fx.GraphModule, indices: Sequence[int], state: Sequence[Tensor], written: Sequence[int]) -> None:
    """Have it guarded that what the program writes lies apart; OverlapError where it does not now.

    places: of the tensors among the graph's inputs; written: which of `state` and those inputs, each counted once.
    """

    def lie_apart(values: Sequence[Any]) -> bool:
        distinct = {id(value) if isinstance(value, Tensor) else (i,): value for i, value in enumerate(values)}
        return _lie_apart([*state, *distinct.values()], written)

    if written:
        _keep(graph, indices, lie_apart)


def keep_all_apart(graph: fx.GraphModule, indices: Sequence[int]) -> None:
    """The same for a graph that runs op by op, of which it is not known which input it writes."""

    def lie_apart(values: Sequence[Any]) -> bool:
        distinct = list({id(value): value for value in values if _is_plain(value)}.values())
        return _lie_apart(distinct, range(len(distinct)))

    if _may_write(graph):
        _keep(graph, indices, lie_apart)


def _keep(graph: fx.GraphModule, indices: Sequence[int], lie_apart: Any) -> None:
    inputs = inputs_of(graph, indices)
    if inputs is None:
        return  # called by hand: the program itself checks each call
    if not lie_apart(inputs):
        raise OverlapError(OVERLAP)
    guard_inputs(graph, indices, lie_apart)


def _lie_apart(values: Sequence[Any], written: Sequence[int]) -> bool:
    """Whether no place in memory is that of two elements that are written, or of a written one and another. Numbers,
    which TorchDynamo makes tensors of for a graph, have none of the program's memory."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    targets = [values[i] for i in written if isinstance(values[i], Tensor)]
    if not all(map(is_injective, targets)):
        return False
    shared = Counter(value.untyped_storage()._cdata for value in tensors)
    return not any(
        overlap(target, other)
        for target in targets
        if shared[target.untyped_storage()._cdata] > 1
        for other in tensors
        if other is not target
    )


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not is_wrapped(value)


def _may_write(graph: fx.GraphModule) -> bool:
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    return any(_writes(node) for part in parts for node in part.graph.nodes)


def _writes(node: fx.Node) -> bool:
    """By its name and its arguments: functions of torch.nn.functional take `inplace` by its place, too."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__")
    flagged = any(value is True for value in (*node.args, *node.kwargs.values()))
    return named or flagged or node.target in _IN_PLACE or "out" in node.kwargs


class UnlikeFakes:
    """What TorchDynamo's fake tensors do not show of a graph's inputs: where they start, and that their layout is
    oneDNN's own. UnsupportedError where the graph makes such a layout, or the inputs start elsewhere."""

    REASONS = STARTS, OPAQUE

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]):
        if any("to_mkldnn" in (node.target, getattr(node.target, "__name__", "")) for node in graph.graph.nodes):
            raise UnsupportedError(OPAQUE)
        self._indices, self._from_start = tensors_at(inputs), _counts_from_start(graph)
        self._is_opaque: bool | None = None
        if self._from_start and any(inputs[i].storage_offset() for i in self._indices):
            raise UnsupportedError(STARTS)

    def reason(self, args: Sequence[Any]) -> str | None:
        """Why a call of the graph runs eagerly, if it does."""
        if self._is_opaque is None:  # of the first call: a guard holds it for the others
            self._is_opaque = any(args[i].is_mkldnn for i in self._indices)
        if self._is_opaque:
            return OPAQUE
        starts = self._from_start and any(args[i].storage_offset() for i in self._indices)
        return STARTS if starts else None


def _counts_from_start(graph: fx.GraphModule) -> bool:
    """Whether it calls as_strided with an offset: Dynamo does not guard where in its memory an input starts."""
    return any(
        getattr(node.target, "__name__", node.target) == "as_strided" and _has_offset(node.args, node.kwargs)
        for part in graph.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def _has_offset(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return len(args) > 3 or kwargs.get("storage_offset") is not None


def keep_for_eager(graph: fx.GraphModule, indices: Sequence[int], error: UnsupportedError) -> None:
    """Guard what a graph that is not compiled for this reason relies on: see `keep_all_apart`. And where its inputs
    start, if something has asked for that: TorchDynamo takes sizes that come of it for constants."""
    keep_all_apart(graph, indices)
    inputs = inputs_of(graph, indices) if error.reason == READ else None
    if inputs is not None:
        starts = list(map(_start, inputs))
        guard_inputs(graph, indices, lambda values: list(map(_start, values)) == starts)


def _start(value: Any) -> Any:
    """Where in its memory it starts, and how large that is."""
    return (value.storage_offset(), value.untyped_storage().nbytes()) if _is_plain(value) else None


@contextmanager
def starts_unread(node: fx.Node, values: Mapping[fx.Node, Any]) -> Iterator[None]:
    """Around the call of a graph's node: UnsupportedError where code that is not torch's own asks for the start of an
    input, in a function that the user has allowed in the graph as it is, or in the fake of a custom operator.

    values: of the graph's nodes so far.
    """
    if node.op != "call_function" or _is_followed(node.target):
        yield
        return
    inputs = {
        value.untyped_storage()._cdata
        for other, value in values.items()
        if other.op == "placeholder" and isinstance(value, FakeTensor)
    }

    def tell(value: Tensor, told: Any) -> None:
        """A symbol may be told: TorchDynamo guards it."""
        if Tensor.untyped_storage(value)._cdata in inputs and not isinstance(told, torch.SymInt):
            raise UnsupportedError(READ)

    with _StartsUnread(), asked_of_fakes(("storage_offset", "untyped_storage", "storage"), tell):
        yield


def _is_followed(target: Any) -> bool:
    if (namespace := getattr(target, "namespace", None)) is not None:  # of an operator
        return namespace in _OWN_OPERATORS
    return (getattr(target, "__module__", None) or "torch").partition(".")[0] in _FOLLOWED


_FOLLOWED = {"torch", "_operator", "builtins", "math"}
_OWN_OPERATORS = {"aten", "prims", "prim", "torchvision", "aottrain"}


class _StartsUnread(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = all_named(func, args, kwargs)
        reads = func is Tensor.storage_offset or (func in _STRIDED and _has_offset(args, named))
        if reads and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            raise UnsupportedError(READ)
        return func(*args, **named)


_STRIDED = (Tensor.as_strided, Tensor.as_strided_, torch.as_strided, torch.as_strided_)
