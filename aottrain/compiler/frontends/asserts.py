"""Statements as TorchDynamo writes them into its graph: an assertion about a tensor raises what Python raises, and
`x.data = y` is refused for what it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

import aottrain.ops.checks  # noqa: F401  (the op)
from aottrain.compiler.capture.substitutes import OTHER_MEMORY
from aottrain.errors import UnsupportedError

# TorchDynamo's message for a statement that has none.
_NO_MESSAGE = "assertion error"


def raise_as_python(graph: fx.GraphModule) -> None:
    """In place: an `assert` raises AssertionError; Dynamo has made `torch._assert_async` of it, a RuntimeError's."""
    for part in graph.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        statements = [node for node in part.graph.nodes if _is_statement(node)]
        for node in statements:
            node.target = assert_true
        if statements:
            part.recompile()


def _is_statement(node: fx.Node) -> bool:
    """By the source that Dynamo notes: its last frame's line is followed by marks under it, or nothing."""
    lines = str(node.meta.get("stack_trace") or "").splitlines()
    written = any(line.strip().startswith("assert") for line in lines[-2:])
    return written and getattr(node.target, "__name__", "") == "_assert_async"


def assert_true(flag: Tensor, message: Any = _NO_MESSAGE) -> None:
    text = "" if message == _NO_MESSAGE else str(message)
    torch.ops.aottrain.require_false(flag == 0, text, "AssertionError")


@contextmanager
def naming_other_memory(target: Any) -> Iterator[None]:
    """Around a call of TorchDynamo's graph: what is refused of its part of `x.data = y` is told as what it is."""
    try:
        yield
    except UnsupportedError:
        if getattr(target, "__name__", "") == "_lower_version_count_by_1":
            raise UnsupportedError(OTHER_MEMORY) from None
        raise
