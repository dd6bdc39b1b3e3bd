"""A graph to a function that runs it by Triton kernels, and libraries between them."""

from __future__ import annotations

import torch
from torch import fx

from aottrain.compiler.codegen.triton import render_code, render_triton
from aottrain.compiler.scheduling.order import schedule
from aottrain.ir.graph import spec_of
from aottrain.runtime.executor import Runner
from aottrain.runtime.launch import Launch, scheduled_runner
from aottrain.runtime.triton_launch import check_device, triton_launch


def triton_runner(graph: fx.Graph) -> Runner:
    """The graph's boxed function. Raises ConfigError where its device cannot run Triton's kernels."""
    check_device(_device(graph))
    planned = schedule(graph)
    launches: dict[str, Launch] = {}
    known: dict[str, Launch] = {}
    for call in planned.kernels:
        # Equal kernels, as those of repeated blocks, are one module; its comment names the first one's sources.
        code = render_code(call.kernel)
        if code not in known:
            known[code] = triton_launch(render_triton(call.kernel))
        launches[call.kernel.name] = known[code]
    return scheduled_runner(graph, planned, launches)


def _device(graph: fx.Graph) -> torch.device:
    """Of the graph's values: CUDA where any is there."""
    devices = [facts.device for node in graph.nodes if (facts := spec_of(node)) is not None]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
