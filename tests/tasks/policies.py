"""A partition policy, for the command line to load."""

from aottrain import ForwardValue


def save_products(value: ForwardValue) -> str:
    return "save" if "mm" in value.op else "recompute"
