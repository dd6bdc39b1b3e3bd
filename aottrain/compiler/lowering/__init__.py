"""How each ATen op is done inside a kernel: what it iterates over, what it reads, and its formula.

Fusion asks the rules what may share a loop nest; lowering asks them for the instructions.
"""

from aottrain.compiler.lowering import activations, arithmetic, indexing, losses, norms, pointwise, random, reductions
from aottrain.compiler.lowering.rules import Builder, Operand, Output, Rule, rules_for

__all__ = ["Builder", "Operand", "Output", "Rule", "rules_for"]

_TABLES = (activations, arithmetic, indexing, losses, norms, pointwise, random, reductions)  # each registers its ops when imported
