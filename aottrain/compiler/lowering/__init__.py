"""How each ATen op is done inside a kernel: what it iterates over, what it reads, and its formula.

Fusion asks the rules what may share a loop nest; lowering asks them for the instructions.
"""

from aottrain.compiler.lowering import (
    activations,
    arithmetic,
    extrema,
    gathering,
    indexing,
    losses,
    norm_parts,
    norms,
    pointwise,
    pooling,
    random,
    reductions,
)
from aottrain.compiler.lowering.rules import Builder, Operand, Output, Rule, rules_for

__all__ = ["Builder", "Operand", "Output", "Rule", "rules_for"]

# Each registers its ops when it is imported.
_TABLES = (
    activations, arithmetic, extrema, gathering, indexing, losses, norm_parts, norms, pointwise, pooling,
    random, reductions,
)  # fmt: skip
