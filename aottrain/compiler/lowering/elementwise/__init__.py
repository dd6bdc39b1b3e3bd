"""Ops that compute each element of a result from the elements at its place."""

from aottrain.compiler.lowering.elementwise import activations, arithmetic, pointwise

__all__ = ["activations", "arithmetic", "pointwise"]
