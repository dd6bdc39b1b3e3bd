"""Torch's own compiler, run beside ours for comparison: the settings that its public interface does not reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def torch_backend(name: str, budget: float | None) -> Any:
    """A backend of torch.compile, for comparison with this package; under torch's own budget of activations if given.

    budget: `activation_memory_budget`, 1 to save what torch's min-cut chooses, 0 to save the inputs alone.
    """
    if budget is None:
        return name

    def backend(graph: Any, inputs: Any) -> Any:
        import torch._functorch.config as config
        from torch._dynamo.backends.registry import lookup_backend

        with config.patch(activation_memory_budget=budget):
            return lookup_backend(name)(graph, inputs)

    return backend


def inductor_kernel(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A function of the module's flat inputs; `examples` are fakes of them.

    Composite operators are decomposed as Inductor expects; its rounding and its choice of kernels are its own.
    """
    from torch._dynamo.utils import detect_fake_mode
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = detect_fake_mode(examples)
    assert mode is not None
    inputs = list(examples)
    with mode, torch.no_grad():
        decomposed = make_fx(module, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        compiled = compile_fx_inner(decomposed, inputs)
    return lambda *arguments: compiled(list(arguments))
