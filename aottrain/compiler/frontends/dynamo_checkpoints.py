"""Regions of torch.utils.checkpoint in TorchDynamo's graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from aottrain.compat_checkpoint import DIRECT, RESULTS
from aottrain.compiler.capture.checkpoint_regions import UNLIKE_AUTOGRAD, checkpointed, reentrant_checkpoint
from aottrain.errors import PythonOnlyError


def restore_checkpoints(graph: fx.GraphModule) -> None:
    """Make Dynamo's graph run torch's own checkpoint, as it was called: Dynamo's stand-in keeps no random state."""
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                    node.args = (closed_over(node), *node.args)
                    node.target = _checkpoint
            part.recompile()


def _checkpoint(closed: Sequence[bool], body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    context = body.meta.get("_checkpoint_context_fn")
    function, direct = close_over(body, args, closed)
    return checkpoint(function, *direct, **kwargs, **({} if context is None else {"context_fn": context}))


def closed_over(node: fx.Node) -> tuple[bool, ...]:
    """Which inputs of a checkpoint's body are no arguments of checkpoint's: it closes over them, as over parameters."""
    return tuple(not is_argument for is_argument in node.meta.get(DIRECT, [False] * len(node.args[1:])))


def check_reentrant(graph: fx.GraphModule) -> None:
    """Raises PythonOnlyError where Dynamo's graph does not tell what gradients eager gives for use_reentrant=True."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) and torch.is_grad_enabled() else ():
            if node.target is torch.ops.higher_order.tag_activation_checkpoint and node.kwargs.get("use_reentrant"):
                inputs = zip(node.args[1:], closed_over(node), strict=True)
                if not any(value.meta["example_value"].requires_grad for value, closed in inputs if not closed):
                    raise PythonOnlyError(UNLIKE_AUTOGRAD)
                body: Any = part.get_submodule(node.args[0].target)
                kept = [value for value in body.graph.output_node().args[0] if isinstance(value, fx.Node)]
                if len(kept) != node.meta.get(RESULTS, len(kept)):
                    raise PythonOnlyError("a reentrant torch.utils.checkpoint of which a result goes unused")


def run_in_line(
    node: fx.Node, body: Any, run: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A checkpoint's body, run by `run`: its ops marked, or as a reentrant one."""
    preserves_rng = kwargs.get("preserve_rng_state", True)
    if kwargs.get("use_reentrant"):
        function, arguments = close_over(run, inputs, closed_over(node))
        return reentrant_checkpoint(function, preserves_rng, *arguments)
    with checkpointed(body.meta.get("_checkpoint_context_fn"), preserves_rng):
        return run(*inputs)


def close_over(
    function: Callable[..., Any], inputs: Sequence[Any], closed: Sequence[bool]
) -> tuple[Callable[..., Any], list[Any]]:
    """The function with some inputs closed over, and the other inputs: checkpoint keeps only its direct arguments."""

    def partially(*direct: Any) -> Any:
        rest = iter(direct)
        return function(*(value if flag else next(rest) for value, flag in zip(inputs, closed, strict=True)))

    return partially, [value for value, flag in zip(inputs, closed, strict=True) if not flag]
