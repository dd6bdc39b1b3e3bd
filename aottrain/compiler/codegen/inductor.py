"""kernel="inductor": the partitioned graphs run by torch's own kernel compiler, as a peer and as a way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._guards import TracingContext, tracing
from torch.fx.experimental.proxy_tensor import make_fx


def inductor_kernel(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A function of the module's flat inputs; `examples` are fakes of them.

    Composite operators are decomposed as Inductor expects; its rounding and its choice of kernels are its own.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    mode = detect_fake_mode(examples)
    assert mode is not None
    inputs = list(examples)
    with mode, torch.no_grad():
        decomposed = make_fx(module, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        compiled = compile_fx_inner(decomposed, inputs)
    return lambda *given: compiled(list(given))
