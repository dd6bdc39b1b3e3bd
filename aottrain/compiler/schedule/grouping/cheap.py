"""Pointwise calls that are done again where their values are read."""

from __future__ import annotations

from torch import fx

from aottrain.compiler.lowering import Builder, Rule, rules_for
from aottrain.compiler.schedule.layouts import turns_around
from aottrain.ir.graph import info, required_spec, spec_of
from aottrain.ir.kernels.affine import ZERO
from aottrain.ir.kernels.kernel import Address, Compute, Constant, Load
from aottrain.ir.ops import OpKind

# What is done again for each reader, and, in a concatenation, also where another part is taken.
_CHEAP = frozenset({"add", "sub", "mul", "div", "fma", "neg", "abs", "sign", "max", "min", "sqrt", "rsqrt", "where",
                    "cast", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not"})  # fmt: skip
_DEAR = frozenset({"exp", "log", "tanh", "sigmoid", "erf", "reciprocal", "exp2", "log1p", "expm1"})
"""Cheap beside memory on a GPU alone."""
VIEWS = (OpKind.VIEW, OpKind.STRUCTURE)


def cheap_rule(node: fx.Node) -> tuple[Rule, int] | None:
    """The rule of a cheap pointwise call, and how many steps it takes."""
    rules = rules_for(node) if node.op == "call_function" and info(node).kind not in VIEWS else []
    spec = spec_of(node)
    if len(rules) != 1 or spec is None or rules[0].shape != spec.shape or len(rules[0].outputs) != 1:
        return None
    if turns_around(node):
        return None
    (rule,) = rules
    if rule.reduced or rule.columns or any(operand.free for operand in rule.operands):
        return None
    trial = Builder(index=(ZERO,) * len(rule.shape))
    values = [
        trial.emit(Load(k, Address(ZERO), required_spec(operand.node).dtype)) for k, operand in enumerate(rule.operands)
    ]
    rule.formula(trial, values)
    allowed = _CHEAP if spec.device.type == "cpu" else _CHEAP | _DEAR
    for number, step in enumerate(trial.body):
        if isinstance(step, Compute):
            divides = step.op == "div" and not step.dtype.is_floating_point
            if step.op not in allowed or divides:
                return None
        elif not isinstance(step, Constant) and number not in values:
            return None
    return rule, len(trial.body)
