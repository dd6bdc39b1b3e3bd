"""Lowering rules: how each ATen op is computed inside a kernel. A rule has its domain, its operands, and its formula.

Fusion reads from the rules what may share a loop nest. Kernels are built from their formulas.
"""

from aottrain.compiler.lowering import (
    elementwise,
    extrema,
    gathering,
    indexing,
    losses,
    norm_parts,
    norms,
    pooling,
    random,
    reductions,
)
from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.rules import Operand, Output, Rule, rules_for

__all__ = ["Builder", "Operand", "Output", "Rule", "rules_for"]

# Each registers its ops when it is imported.
_TABLES = (
    elementwise, extrema, gathering, indexing, losses, norm_parts, norms, pooling, random, reductions,
)  # fmt: skip
