"""Regions of torch.utils.checkpoint in TorchDynamo's graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint


def restore_checkpoints(graph: fx.GraphModule) -> None:
    """Make Dynamo's graph run torch's own checkpoint, as it was called: Dynamo's stand-in keeps no random state."""
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                    node.args = (is_state(node), *node.args)
                    node.target = _checkpoint
            part.recompile()


def _checkpoint(is_state: Sequence[bool], body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    context = body.meta.get("_checkpoint_context_fn")
    function, direct = close_over(body, args, is_state)
    return checkpoint(function, *direct, **kwargs, **({} if context is None else {"context_fn": context}))


def is_state(node: fx.Node) -> tuple[bool, ...]:
    """Which inputs of a checkpoint's body are parameters or buffers: Dynamo names them after where they are found."""
    names = [getattr(value, "name", "") for value in node.args[1:]]
    return tuple("_parameters_" in name or "_buffers_" in name for name in names)


def close_over(
    function: Callable[..., Any], inputs: Sequence[Any], closed: Sequence[bool]
) -> tuple[Callable[..., Any], list[Any]]:
    """The function with some inputs closed over, and the other inputs: checkpoint keeps only its direct arguments."""

    def partially(*direct: Any) -> Any:
        rest = iter(direct)
        return function(*(value if flag else next(rest) for value, flag in zip(inputs, closed, strict=True)))

    return partially, [value for value, flag in zip(inputs, closed, strict=True) if not flag]
