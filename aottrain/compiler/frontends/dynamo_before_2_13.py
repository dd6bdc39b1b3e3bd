"""What TorchDynamo before torch 2.13 writes into its graphs that no program wrote."""

from __future__ import annotations

import torch

from aottrain.compat import OPTIONS_PER_THREAD


def drop_shadows(graph: torch.fx.GraphModule) -> None:
    """A custom Function's output that is written in place stands twice in TorchDynamo's graph before torch 2.13: as it
    is, and as it was before. Only autograd reads the latter, and gives it the gradient."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if OPTIONS_PER_THREAD or node.target is not torch.ops.higher_order.autograd_function_apply:
                continue
            (result,) = (n for n in getattr(part, node.args[0].target).graph.nodes if n.op == "output")
            outputs, saved = result.args[0]
            read = {user.args[1] for user in node.users}
            memory = [value and id(value.meta.get("example_value")) for value in outputs]
            shown = {memory[i] for i in read}
            kept = [v if i in read or memory[i] not in shown else None for i, v in enumerate(outputs)]
            result.args = ((tuple(kept), saved),)
