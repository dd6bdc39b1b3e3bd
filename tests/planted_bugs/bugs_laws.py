"""Bugs in the laws that hold after each stage, and in what asks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aottrain.compiler import functional
from aottrain.ir import verify
from tests.planted_bugs.planting import Area, TestsOf

HERE = Area("laws")
PROGRAMS = TestsOf("tests/numerics/test_small_programs.py")

HERE.attribute(
    "all expressions are one to the law", PROGRAMS.law_of_partition, verify._Expressions, "of", lambda self, nodes: []
)


@HERE.bug("mutation is not seen by the law", PROGRAMS.law_of_mutation)
def _(patch: Any) -> None:
    patch.setattr(verify, "info", lambda node: replace(functional.info(node), writes=()))
    patch.setattr(verify, "is_pure", lambda target: True)
