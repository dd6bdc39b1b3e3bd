"""Private parts of torch.utils.checkpoint: the two halves of a region, and what policies are asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.utils.checkpoint

Halves = Callable[[Callable[[], Iterator[None]], bool, Any, str, bool], Iterator[None]]


@contextmanager
def patched_checkpoint(halves: Halves) -> Iterator[None]:
    """Inside, torch.utils.checkpoint(use_reentrant=False) runs its function between the two halves of a generator,
    whatever name the user's code knows it by.

    halves: of (original, preserve_rng_state, context_fn, determinism_check, debug); original() is torch's generator.
    """
    module, name = torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"

    def before_2_14(fn: Any, preserve: Any, context_fn: Any, check: Any, debug: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(original, fn, preserve, context_fn, check, debug, *args, **kwargs)
        return halves(call, preserve, context_fn, check, debug)

    def since_2_14(fn: Any, args: Any, kwargs: Any, **settings: Any) -> Any:
        asked = (settings[key] for key in ("preserve_rng_state", "context_fn", "determinism_check", "debug"))
        return halves(partial(original, fn, args, kwargs, **settings), *asked)

    is_packed = hasattr(module, f"{name}_impl")  # since torch 2.14: a tuple and a dictionary for the function
    name = f"{name}_impl" if is_packed else name
    original = getattr(module, name)
    setattr(module, name, since_2_14 if is_packed else before_2_14)
    try:
        yield
    finally:
        setattr(module, name, original)


def ask_policy(policy: Any, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """What a policy of selective checkpointing answers for an op; torch 2.11 may not tell it the op's result."""
    context = torch.utils.checkpoint.SelectiveCheckpointContext
    more = {"op_output": out} if "op_output" in inspect.signature(context).parameters else {}
    return policy(context(is_recompute=False, **more), func, *args, **kwargs)


def selective_policy(context: Any) -> Any:
    """The policy behind a forward context of torch's create_selective_checkpoint_contexts; None for any other."""
    selective = type(context) is torch.utils.checkpoint._CachingTorchDispatchMode
    return context.policy_fn if selective else None
