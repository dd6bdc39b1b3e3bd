"""Private parts of torch.utils.checkpoint: the halves of a region, what it decorates, what TorchDynamo makes of it, and
what policies are asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
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


@cache
def follow_checkpoints() -> None:
    """From now on TorchDynamo follows checkpoints as we need it."""
    _show_decorated()
    _keep_arguments()


def _show_decorated() -> None:
    """From now on TorchDynamo sees a call of what `checkpoint(use_reentrant=False)` has decorated for the call of
    `checkpoint` that it is. Torch 2.13 decorates nothing.

    By itself it looks past that and compiles the function within. But the backward runs the function eagerly, and
    takes what this keeps, in order, for what the compiled code has kept: gradients are wrong with every backend that
    keeps other values.
    """
    module = torch.utils.checkpoint
    decorated = getattr(module, "_CheckpointedFunction", None)
    if decorated is None:
        return
    from torch._dynamo.variables import higher_order_ops

    hidden, nothing = torch._disable_dynamo(decorated.__call__), module.noop_context_fn
    variable: Any = higher_order_ops.CheckpointHigherOrderVariable
    original = variable._call_function

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(name in self.checkpoint_kwargs for name in kwargs):  # the function's own, of the same name
            return hidden(self, *args, **kwargs)
        # TorchDynamo does not know torch's own context that does nothing.
        settings = {name: value for name, value in self.checkpoint_kwargs.items() if value is not nothing}
        return module.checkpoint(self.function, *args, **settings, **kwargs)

    def looked_up(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Settings out of a dictionary: TorchDynamo has not looked yet what they are."""
        return original(self, tx, args, {name: value.realize() for name, value in kwargs.items()})

    decorated.__call__ = call
    variable._call_function = looked_up


DIRECT, RESULTS = "aottrain_direct", "aottrain_results"


def _keep_arguments() -> None:
    """From now on TorchDynamo's nodes of checkpoints tell, in their meta, which of their arguments the program gives to
    `checkpoint` itself (DIRECT, a flag for each; the others its function closes over) and how many tensors come back
    (RESULTS; Dynamo leaves out those that nothing reads)."""
    from torch._dynamo.variables import higher_order_ops

    variable: Any = higher_order_ops.CheckpointHigherOrderVariable
    original = variable._call_function

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        out = original(self, tx, args, kwargs)
        target = torch.ops.higher_order.tag_activation_checkpoint
        node = next((node for node in reversed(tx.output.graph.nodes) if node.target is target), None)
        if node is not None:
            seen = [arg.realize() for arg in args[1:] if arg.is_realized()]
            given = {proxy.node for arg in seen if (proxy := getattr(arg, "proxy", None)) is not None}
            node.meta[DIRECT] = tuple(arg in given for arg in node.args[1:])
            node.meta[RESULTS] = sum(hasattr(item, "proxy") for item in getattr(out, "items", [out]))
        return out

    variable._call_function = call


def ask_policy(policy: Any, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """What a policy of selective checkpointing answers for an op; torch 2.11 may not tell it the op's result."""
    context = torch.utils.checkpoint.SelectiveCheckpointContext
    more = {"op_output": out} if "op_output" in inspect.signature(context).parameters else {}
    return policy(context(is_recompute=False, **more), func, *args, **kwargs)


def selective_policy(context: Any) -> Any:
    """The policy behind a forward context of torch's create_selective_checkpoint_contexts; None for any other."""
    selective = type(context) is torch.utils.checkpoint._CachingTorchDispatchMode
    return context.policy_fn if selective else None
