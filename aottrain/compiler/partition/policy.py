"""A user's own policy: a function that says of each forward value whether it is saved, recomputed, or free."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import producer_of
from aottrain.compiler.partition.costs.op_cost import node_flops
from aottrain.errors import ConfigError
from aottrain.ir.graph import Mark, info, is_tuple, module_of, source_of, spec_of, storage_bytes, value_of
from aottrain.ir.plan import ForwardValue
from aottrain.ir.tensor import tensor_spec

Policy = Callable[[ForwardValue], str]

ANSWERS: dict[str, Mark | None] = {"save": Mark.MUST_SAVE, "recompute": Mark.MUST_RECOMPUTE, "free": None}


def policy_name(policy: Policy) -> str:
    return getattr(policy, "__name__", type(policy).__name__)


def ask(policy: Policy, nodes: Iterable[fx.Node]) -> dict[fx.Node, Mark]:
    """The policy's mark of each of these nodes of which it does not answer "free".

    Raises ConfigError where it fails, or answers something else.
    """
    marks = {}
    for node in nodes:
        value = forward_value(node)
        subject = f"the partition policy {policy_name(policy)}, asked about {value.name} ({value.op}),"
        try:
            answer = policy(value)
        except Exception as error:  # whatever it is: the user's code is wrong, and this says where
            raise ConfigError(f"{subject} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, str) or answer not in ANSWERS:
            raise ConfigError(f"{subject} answered {answer!r}; allowed: {', '.join(ANSWERS)}")
        mark = ANSWERS[answer]
        if mark is not None:
            marks[node] = mark
    return marks


def forward_value(node: fx.Node, producer: fx.Node | None = None) -> ForwardValue:
    """What may be told of a node. A tuple has the shape of its first item, and no bytes of its own. producer: whose
    operator and cost are told, by default those of the op behind the node."""
    producer = producer or producer_of(node)
    spec = spec_of(node)
    if is_tuple(node):
        first = next(iter(value_of(node)), None)
        spec = tensor_spec(first) if isinstance(first, torch.Tensor) else None
    return ForwardValue(
        name=node.name,
        op=info(producer).name if producer.op == "call_function" else "input",
        module=module_of(node),
        source=source_of(node),
        shape=() if spec is None else spec.shape,
        dtype="tuple" if spec is None else str(spec.dtype).removeprefix("torch."),
        num_bytes=storage_bytes(node),
        flops=node_flops(producer),
    )
