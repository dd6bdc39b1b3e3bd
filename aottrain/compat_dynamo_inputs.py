"""Private names of TorchDynamo: the inputs of a graph, where each comes from, how it is marked, and guards
on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def inputs_of(graph: torch.fx.GraphModule, places: Sequence[int]) -> list[torch.Tensor] | None:
    """The tensors that TorchDynamo compiles this graph for; None where it was not TorchDynamo that gave the graph."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    arguments = [nodes[i].meta.get("grapharg") for i in places]
    if torch._guards.TracingContext.try_get() is None or any(argument is None for argument in arguments):
        return None
    return [argument.example for argument in arguments]


def guard_inputs(
    graph: torch.fx.GraphModule, places: Sequence[int], holds: Callable[[Sequence[torch.Tensor]], bool]
) -> None:
    """From a backend: the code that is compiled now serves only calls for whose tensors, in the order of `places`,
    `holds` says True. It is asked before each call, when all other guards hold."""
    nodes = list(graph.graph.find_nodes(op="placeholder"))
    _guard([nodes[i]._dynamo_source for i in places], holds, "inputs lie apart in memory")


def _guard(sources: Sequence[Any], holds: Callable[[Sequence[Any]], bool], what: str) -> None:
    """The code that is compiled now serves only calls for whose values of these sources `holds` says True. Of a number
    that the program draws by Python's `random` it is given None."""
    from torch._dynamo.guards import _get_closure_vars
    from torch._guards import Guard, TracingContext

    named = [source for source in sources if not _is_drawn(source)]
    if not named:
        return
    # What the program draws does not exist yet where guards are asked.
    code = f"___holds(({', '.join('None' if _is_drawn(source) else source.name for source in sources)},))"

    def create(builder: Any, guard: Any) -> None:
        namespace = {**_get_closure_vars(), "___holds": holds}
        builder.add_python_lambda_leaf_guard_to_root([code], [what], namespace)

    TracingContext.get().guards_context.dynamo_guards.add(Guard(named[0], create))


def drawn_by_python(node: torch.fx.Node) -> bool:
    """Whether this input of a graph is a number that the program draws by Python's `random`, given as a tensor."""
    return _is_drawn(getattr(node, "_dynamo_source", None))


def _is_drawn(source: Any) -> bool:
    return type(source).__name__ == "RandomValueSource"


class _Number:
    """What numpy gave for numbers alone, as a call of a graph."""

    def __init__(self, function: Callable[..., Any], number: Any):
        self.__name__ = f"number_of_{function.__name__}"
        self.number = number

    def __call__(self) -> Any:
        return self.number


def number_numpy(graph: torch.fx.GraphModule) -> None:
    """A call of numpy on numbers alone, as np.sqrt(64), gives the number that it gives in eager: TorchDynamo makes a
    tensor of it, which rounds and promotes otherwise. What it is made of is guarded: it is the same in each call."""
    for part in (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)):
        numbered = [node for node in part.graph.nodes if _is_of_numpy(node) and not node.kwargs and _number(node)]
        if numbered:
            part.recompile()


def _number(node: torch.fx.Node) -> bool:
    """Whether the call is one that a number has become."""
    function = _pure(node.target)
    given = list(map(_as_number, node.args))
    if function is None or not all(isinstance(each, _PLAIN) for each in given):
        return False
    try:
        with np.errstate(all="raise"):  # eager says what is wrong with it
            number = function(*given)
    except Exception:
        return False
    if not isinstance(number, _PLAIN):
        return False
    node.target, node.args = _Number(function, number), ()
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.target, _Number)


def _as_number(value: Any) -> Any:
    return value.target() if _is_number(value) else value


def _pure(target: Any) -> Callable[..., Any] | None:
    """What eager calls where TorchDynamo calls its own form of it, if that makes a number of numbers: an operator, one
    of numpy's elementwise functions or of its types."""
    kind = type(target).__name__
    if kind == "numpy_operator_wrapper":
        return target.op
    if kind == "numpy_method_wrapper":
        return np.generic.item if target.method == "item" else None
    name = target.f.__name__ if kind == "numpy_to_tensor_wrapper" else ""
    named = getattr(np, name, None) if getattr(torch._numpy, name, None) is getattr(target, "f", target) else None
    return named if isinstance(named, np.ufunc) or named in _MAKERS else None


def promotes_otherwise(graph: torch.fx.GraphModule) -> bool:
    """Whether a value of numpy's without dimensions is a tensor here and makes a result another. Eager takes numpy's
    scalars for numbers, whose type gives way to that of a tensor; and what numpy computes is numpy's."""
    nodes = [node for part in graph.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes]
    values = [node for node in nodes if _is_of_numpy(node) and getattr(_value(node), "shape", None) == ()]
    if any(not _gives_way(node, user) for node in values for user in node.users):
        return True
    inputs = [node._dynamo_source.base for node in values if _is_scalar(node)]
    _guard(inputs, lambda given: all(isinstance(value, _NUMBERS) for value in given), "numpy's scalars are no arrays")
    return False


def _is_of_numpy(node: torch.fx.Node) -> bool:
    made = type(node.target).__module__ == "torch._dynamo.utils" and type(node.target).__name__.startswith("numpy_")
    return made or _is_number(node) or type(getattr(node, "_dynamo_source", None)).__name__ == "NumpyTensorSource"


def _value(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def _gives_way(value: torch.fx.Node, user: torch.fx.Node) -> bool:
    """Whether a scalar is a number here as in eager, and the result has the type of another operand."""
    if _is_of_numpy(user):
        return True
    result = _value(user)
    if not (_is_number(value) or _is_scalar(value)) or user.target == "fill_" or not isinstance(result, torch.Tensor):
        return False
    others = [_value(other) for other in user.all_input_nodes if other is not value]
    tensors = [other for other in others if isinstance(other, torch.Tensor) and other.dim()]
    return any(other.dtype == result.dtype and other.is_floating_point() for other in tensors)


def _is_scalar(node: torch.fx.Node) -> bool:
    """Whether an input was a real number of numpy's, and not an array without dimensions."""
    from torch._dynamo.guards import _get_closure_vars
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if node.op != "placeholder":
        return False
    output, source = InstructionTranslator.current_tx().output, node._dynamo_source.base
    scope = {**_get_closure_vars(), "L": output.local_scope, "G": output.global_scope}
    return isinstance(eval(source.name, scope), _NUMBERS)


def sizes_not_of_strides(graph: torch.fx.GraphModule) -> bool:
    """In the backward of a custom function TorchDynamo may read a size from a stride of the gradient, which it takes
    for contiguous: that of a sum has strides of zero. Here it is read from an input of that backward, or from a
    dimension of one. False where neither has it."""
    for part in (part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)):
        for node in part.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
            body: Any = part.get_submodule(node.args[1].target)
            read = list(body.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_stride.int))
            if not all([_is_replaced(body.graph, stride) for stride in read if stride.args[0].op == "placeholder"]):
                return False
            if read:
                body.recompile()
    return True


def _is_replaced(body: torch.fx.Graph, stride: torch.fx.Node) -> bool:
    wanted, inputs = _value(stride).node.expr, list(body.find_nodes(op="placeholder"))
    whole = [node for node in inputs if isinstance(_value(node), torch.SymInt) and _value(node).node.expr == wanted]
    dims = [
        (node, dim)
        for node in inputs
        if isinstance(_value(node), torch.Tensor)
        for dim, size in enumerate(_value(node).shape)
        if isinstance(size, torch.SymInt) and size.node.expr == wanted
    ]
    if whole:
        stride.replace_all_uses_with(whole[0])
        body.erase_node(stride)
    elif dims:
        stride.target, stride.args = torch.ops.aten.sym_size.int, dims[0]
    return bool(whole or dims)


_NUMBERS = (np.floating, np.integer)
_PLAIN = (*_NUMBERS, int, float)
_MAKERS = (np.float64, np.float32, np.int64, np.int32)


def dynamic_marks(tensor: torch.Tensor) -> frozenset[int]:
    """Dimensions that the caller marked as dynamic: torch._dynamo.mark_dynamic, maybe_mark_dynamic."""
    table, names = vars(tensor), ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    return frozenset().union(*(table.get(name, ()) for name in names)) if table else frozenset()


def no_marks(table: dict[str, Any]) -> bool:
    """Whether a tensor's attributes are all TorchDynamo's notes about its dimensions."""
    return all(name.startswith(("_dynamo_", "_has_dynamo_", "_specialize_on")) for name in table)
