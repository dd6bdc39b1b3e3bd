"""Regions of torch.utils.checkpoint: while they are traced their bodies run in line, and every op in them is marked.

The marks tell the partitioner what to compute again. Eager runs a region twice, so one whose second run would do more
than compute the same values again is refused: it writes to memory from outside, or draws other random numbers.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from aottrain.compat import tree_flatten
from aottrain.compat_checkpoint import ask_policy, patched_checkpoint, selective_policy
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import Mark
from aottrain.ir.ops import op_info

Policy = Callable[..., Any]
# By identity, and kept alive, so that no other one takes the identity.
Storages = dict[int, Any]

UNLIKE_AUTOGRAD = "a reentrant torch.utils.checkpoint under autocast, or whose inputs need no gradient"

_open = threading.local()
_numbers = itertools.count()


class Region:
    """One run of a checkpointed body. policy: of selective checkpointing; None: compute everything again."""

    def __init__(self, policy: Policy | None, preserves_rng: bool):
        self.number = next(_numbers)
        self.policy = policy
        self.preserves_rng = preserves_rng
        self.computed: Storages = {}  # of the values that the region's own ops have made
        self.saved: Storages = {}  # of those that the policy saves

    def mark(self, func: Any, args: Any, kwargs: Any, out: Any) -> Mark:
        """The mark of an op that has run in the region."""
        mark = Mark.MUST_RECOMPUTE if self.policy is None else self._ask(func, args, kwargs, out)
        storages = storages_of(out)
        op = op_info(func)
        if op.view_of is None and not op.writes:
            self.computed.update(storages)
        if mark >= Mark.PREFER_SAVE:
            self.saved.update(storages)
        return mark

    def _ask(self, func: Any, args: Any, kwargs: Any, out: Any) -> Mark:
        if func is torch.ops.aten.detach.default:  # torch asks no policy about it
            return Mark.PREFER_RECOMPUTE
        answer = ask_policy(self.policy, out, func, args, kwargs)
        if isinstance(answer, bool):
            return Mark.MUST_SAVE if answer else Mark.PREFER_RECOMPUTE
        name = answer.name if isinstance(answer, CheckpointPolicy) else repr(answer)
        if name not in Mark.__members__:
            raise UnsupportedError(f"a policy of torch.utils.checkpoint answers {name}")
        return Mark[name]

    def check_writes(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if storage not in self.computed:
                raise UnsupportedError("torch.utils.checkpoint runs its function twice, and it writes to outer memory")
            if storage in self.saved:
                raise UnsupportedError("a value that a policy of torch.utils.checkpoint saves is overwritten")


def open_regions() -> tuple[Region, ...]:
    """The regions that this thread is tracing, the outermost first."""
    return getattr(_open, "regions", ())


def num_regions() -> int:
    """How many this thread has traced."""
    return getattr(_open, "count", 0)


@contextmanager
def checkpointed(context_fn: Any = None, preserves_rng: bool = True) -> Iterator[None]:
    """Around the body of torch.utils.checkpoint(..., context_fn=..., preserve_rng_state=...), while it is traced."""
    policy = None
    if context_fn is not None and context_fn is not noop_context_fn:
        contexts = context_fn()
        policy = selective_policy(contexts[0])
        if policy is None and not all(type(context) is nullcontext for context in contexts):
            raise UnsupportedError("torch.utils.checkpoint with contexts of the caller's own")
    before = open_regions()
    # Eager keeps everything as it is where no gradient is recorded.
    if torch.is_grad_enabled():
        _open.regions = (*before, Region(policy, preserves_rng))
        _open.count = num_regions() + 1
    try:
        yield
    finally:
        _open.regions = before


def reentrant_checkpoint(function: Callable[..., Any], preserves_rng: bool, *args: Any) -> Any:
    """torch.utils.checkpoint(use_reentrant=True), whose gradients follow other rules than autograd's: they are the same
    where every tensor that comes in directly needs one, and every result does."""
    if not torch.is_grad_enabled():
        return function(*args)
    tensors = [value for value in args if isinstance(value, Tensor)]
    is_under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if is_under_autocast or not any(value.requires_grad for value in tensors):
        raise UnsupportedError(UNLIKE_AUTOGRAD)
    with checkpointed(None, preserves_rng):
        result = function(*args)
    outputs = list(result) if isinstance(result, tuple) else [result]
    incoming = storages_of(tensors)
    for value in outputs:
        if not isinstance(value, Tensor) or not value.requires_grad or incoming.keys() & storages_of(value):
            raise UnsupportedError("a result of a reentrant torch.utils.checkpoint is an input or needs no gradient")
    return result if len(outputs) == 1 else _Together.apply(*outputs)


class _Together(torch.autograd.Function):
    """Several results of one node, as a reentrant region's are: where a gradient comes to one, zeros come to the
    others."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> tuple[Tensor, ...]:
        return tuple(result.clone() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


@contextmanager
def inlined_checkpoints() -> Iterator[None]:
    """Inside, torch.utils.checkpoint(use_reentrant=False) runs its function once and marks its ops, on this thread."""
    thread = threading.get_ident()

    def halves(original: Any, preserves_rng: bool, context_fn: Any, check: str, debug: bool) -> Iterator[None]:
        if threading.get_ident() != thread:
            yield from original()
            return
        if check not in ("default", "none") or debug:
            raise UnsupportedError("torch.utils.checkpoint with debug=True or another determinism_check")
        with checkpointed(context_fn, preserves_rng):
            yield

    with patched_checkpoint(halves):
        yield


def storages_of(values: Any) -> Storages:
    """The memory of the tensors among the values."""
    tensors = [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]
    memories = [value.untyped_storage() if value.layout == torch.strided else value for value in tensors]
    return {getattr(memory, "_cdata", id(memory)): memory for memory in memories}
