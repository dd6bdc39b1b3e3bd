"""The symbols of a graph with symbolic sizes: what is known of them, and guards of what kernels assume about them."""

from __future__ import annotations

from typing import Any

from torch import fx

from aottrain.compat import size_range
from aottrain.errors import CompilerError
from aottrain.ir.graph import is_size, placeholders, value_of
from aottrain.ir.sizes.expressions import hint
from aottrain.ir.sizes.polynomials import SizeFacts


def symbols_of(graph: fx.Graph) -> dict[str, Any]:
    """The symbols by name: the graph's inputs that are sizes."""
    return {node.name: value_of(node) for node in placeholders(graph) if is_size(node)}


def size_facts(graph: fx.Graph) -> SizeFacts | None:
    """What is known of the graph's symbols; None where all sizes are numbers."""
    symbols = symbols_of(graph)
    if not symbols:
        return None
    hints = {name: hint(value) for name, value in symbols.items()}
    return SizeFacts(hints, {name: size_range(value) for name, value in symbols.items()})


def guard(graph: fx.Graph, facts: SizeFacts) -> None:
    """What was assumed about the sizes becomes guards of the program; nothing more is assumed from now on."""
    facts.closed = True
    for condition in facts.conditions(symbols_of(graph)):
        if not bool(condition):
            raise CompilerError("kernels assume of the sizes what does not hold for those that were traced")
