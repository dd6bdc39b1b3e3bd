"""Torch's own compiler, run beside ours for comparison: the settings that its public interface does not reach."""

from __future__ import annotations

from typing import Any


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
