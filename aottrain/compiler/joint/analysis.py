"""analyse: run the captured step once on fakes and see what it writes, what its outputs alias, what needs gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from aottrain.compat import flatten_values, tree_map
from aottrain.compiler.capture.capture import CapturedStep, CaptureMode, Provenance, enter_primals, fake_primals
from aottrain.compiler.capture.fakes import KernelFakes
from aottrain.compiler.capture.recording import tensors_among
from aottrain.compiler.capture.replaced_ops import hidden_writes
from aottrain.compiler.capture.torch_settings import autocast_cache, op_settings
from aottrain.compiler.joint.links import find_links, isolated, saved_state
from aottrain.compiler.joint.overlap import SPLITS, WRITTEN_PARTS, SplitParts, check_lists, check_overlap
from aottrain.compiler.joint.views import base_of, is_whole, view_of
from aottrain.errors import OverlapError, UnsupportedError
from aottrain.ir.calling import NO_LINKS, ComputedInfo, Links, OutputInfo, ResultSource
from aottrain.ir.ops import op_info
from aottrain.ir.sizes.expressions import hint, is_symbolic, size_of
from aottrain.ir.tensor import is_injective, tensor_spec, version_of
from aottrain.ir.values import PLAIN_TYPES

aten = torch.ops.aten


@dataclass(frozen=True)
class Analysis:
    """What the traced program must honour."""

    outputs: tuple[OutputInfo, ...]
    """How each tensor leaf of the result is made."""
    computed: tuple[ComputedInfo, ...]
    """The fresh tensors that the program returns for that."""
    leaves: tuple[Any, ...]
    """The flat result with None in the places of tensors."""
    is_tensor: tuple[bool, ...]
    """Of each leaf."""
    out_tree: Any
    """Rebuilds the result from its flat leaves."""
    mutated: tuple[int, ...]
    """Primals whose data the call writes."""
    replaced: tuple[int, ...]
    """Mutated primals through which gradients flow: their new value is a differentiable output of the program."""
    unversioned: tuple[int, ...]
    """Mutated primals that are written through .data only, which eager's version counters do not see."""
    needs_gradient: bool
    viewed: frozenset[int] = frozenset()
    """Computed tensors of which outputs are views by their strides."""
    links: Links = NO_LINKS
    """Results through which gradients of others pass."""
    saved_state: tuple[tuple[int, ...], ...] = ()
    """Of each computed tensor, and of `replaced`, the mutated primals that its backward in eager has saved as they are
    after the call: it raises once they are written again. () where there are none."""
    watched: tuple[int, ...] = ()
    """Primals that must be in the backward as they were, though the program may read nothing of them: eager's backward
    has saved them, for gradients that reach no input."""

    def computed_outputs(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Of a flat result, the fresh tensors that the program returns."""
        tensors = [leaf for leaf, is_tensor in zip(leaves, self.is_tensor, strict=True) if is_tensor]
        values = [(tensors[output.position], output.is_base) for output in self.computed]
        return [value._base if is_base and value._base is not None else value for value, is_base in values]


class CapturedTensors(Exception):
    """Signal, not an error: the program reads these tensors, which are neither arguments nor module state."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__("the program reads tensors that are not its inputs")
        self.tensors = list(tensors)


# Ops that copy their first argument with its strides, and write to a part of the copy.
_SCATTERS = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
)


class _AnalysisMode(CaptureMode):
    """Capture's mode, which also notes the storage of every argument that an op writes, and every tensor that is no
    input."""

    def __init__(self, state: Tensor, rng: str, fake_mode: KernelFakes):
        super().__init__(state, Provenance(None), rng)
        self.fake_mode = fake_mode
        self.stand_ins: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self.foreign: dict[int, Tensor] = {}
        self.addressed: set[int] = set()  # storages that as_strided has looked into
        self.of_inputs: set[int] = set()
        self.parts = SplitParts()
        self.settings = op_settings()

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if op_settings() != self.settings:  # which a graph does not hold: its operators run under those of the call
            raise UnsupportedError("the program changes torch's settings: the default type, determinism, threads")
        writes = op_info(func).writes or hidden_writes(func, args)
        self.parts.check_read(tensors_among((args, kwargs)))
        if writes:
            names = [argument.name for argument in func._schema.arguments]
            for i in writes:
                value = args[i] if i < len(args) else kwargs.get(names[i])
                targets = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Tensor)]
                self.written |= {_storage_key(target) for target in targets}
                self.parts.write(targets)
                if torch.Tag.inplace_view not in func.tags:
                    read = list(tensors_among((args, kwargs)))
                    check_overlap(func, targets, read)
                    check_lists(func, (*args, *kwargs.values()))
        if func is aten.as_strided.default:
            self.addressed.add(_storage_key(args[0]))
            if args[0].requires_grad and _storage_key(args[0]) not in self.of_inputs and not is_whole(args[0]):
                # Its gradient relies on the strides of the fake tensor, and kernels may choose others.
                raise UnsupportedError("as_strided of a computed tensor that requires gradients")
        if func not in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            for value in tensors_among((args, kwargs)):
                if not isinstance(value, FakeTensor):
                    self.foreign[id(value)] = value
            if self.foreign:  # an op whose inputs are all real would write to real memory
                args, kwargs = tree_map(self._stand_in, (args, kwargs))
        result = super().dispatch(func, types, args, kwargs)
        if func in SPLITS:
            self.parts.add(args[0], result)
        if func in _SCATTERS and not is_injective(result):
            # Eager's copy has these strides, too; what is in it depends on the order of the writes.
            raise UnsupportedError(f"{func} of a tensor whose elements share their memory")
        return result

    def _stand_in(self, value: Any) -> Any:
        if id(value) not in self.foreign:
            return value
        return self.stand_ins.setdefault(id(value), self.fake_mode.from_tensor(value, static_shapes=True))


def analyse(step: CapturedStep) -> Analysis:
    """Raises UnsupportedError where there is no proven treatment, and CapturedTensors where tensors that are not inputs
    are read: the caller then makes inputs of them and starts again."""
    fake_mode = KernelFakes(allow_non_fake_inputs=True, shape_env=step.shape_env)
    leaves_in = fake_primals(step, fake_mode)
    grad_mode = torch.is_grad_enabled()
    with fake_mode:
        state = torch.zeros(2, dtype=torch.int64, device=step.device)
        primals = enter_primals(step, leaves_in, range(len(leaves_in)))
        before = [_metadata(value) for value in primals]
        versions, histories = list(map(version_of, primals)), [value.grad_fn for value in primals]
        with _AnalysisMode(state, step.rng, fake_mode) as mode, autocast_cache(torch.is_autocast_cache_enabled()):
            mode.of_inputs = {_storage_key(value) for value in primals}
            result = step.call(primals)
    if mode.foreign:
        raise CapturedTensors(list(mode.foreign.values()))
    leaves, out_tree = flatten_values(result)
    mutated = tuple(i for i, value in enumerate(primals) if _storage_key(value) in mode.written)
    for i, value in enumerate(primals):
        _check_input_state(step, i, before[i], value, i in mutated)
    unversioned = tuple(i for i in mutated if version_of(primals[i]) == versions[i])
    differentiable = {i for i in mutated if grad_mode and step.inputs[i].requires_grad and not step.is_leaf[i]}
    # What is written through a detached alias keeps its history: gradients go by the old value's.
    differentiable = {i for i in differentiable if primals[i].grad_fn is not histories[i]}
    replaced = tuple(sorted(differentiable - set(unversioned)))
    is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    mode.parts.check_read(value for value in tensors if _storage_key(value) not in mode.of_inputs)
    if mode.parts.outdated & mode.of_inputs:
        raise UnsupportedError(WRITTEN_PARTS)
    outputs, computed = _classify_outputs(tensors, primals)
    viewed = {info.index for info in outputs if info.source is ResultSource.COMPUTED and info.geometry is not None}
    viewed -= {i for i, info in enumerate(computed) if _storage_key(tensors[info.position]) in mode.addressed}
    analysis = Analysis(
        outputs=outputs,
        computed=computed,
        leaves=tuple(None if flag else _constant(leaf) for leaf, flag in zip(leaves, is_tensor, strict=True)),
        is_tensor=is_tensor,
        out_tree=out_tree,
        mutated=mutated,
        replaced=replaced,
        unversioned=unversioned,
        needs_gradient=any(info.requires_grad for info in computed) or bool(replaced),
        viewed=frozenset(viewed),
    )
    fresh = analysis.computed_outputs(leaves)
    updated = [primals[i] for i in replaced]
    links = find_links(outputs, tensors, fresh, updated)
    alone, watched = isolated(fresh, leaves_in, updated, primals, tensors)
    if set(watched) & set(mutated):
        raise UnsupportedError("a gradient that reaches no input needs an input, which the program writes")
    written = {i: primals[i] for i in mutated if i not in replaced and not step.inputs[i].requires_grad}
    saved = saved_state([*fresh, *updated], leaves_in, written) if written else ()
    return _isolate(replace(analysis, links=links, watched=watched, saved_state=saved), alone)


def _isolate(analysis: Analysis, indices: set[int]) -> Analysis:
    """Computed outputs from which no gradient comes to an input are no part of the backward."""
    if any(to and i in indices for i, to in enumerate(analysis.links.reached)):
        raise UnsupportedError("gradients pass between results, and reach none of the inputs")
    computed = tuple(
        replace(output, requires_grad=False, isolated=True) if i in indices else output
        for i, output in enumerate(analysis.computed)
    )
    needs_gradient = any(output.requires_grad for output in computed) or bool(analysis.replaced)
    return replace(analysis, computed=computed, needs_gradient=needs_gradient)


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, torch.Size) and any(map(is_symbolic, leaf)):
        return tuple(map(size_of, leaf))
    if is_symbolic(leaf):
        return size_of(leaf)
    if isinstance(leaf, slice) and any(map(is_symbolic, (leaf.start, leaf.stop, leaf.step))):
        raise UnsupportedError("the result holds a slice with a symbolic size")
    if isinstance(leaf, PLAIN_TYPES):
        return leaf
    raise UnsupportedError(f"the result holds a {type(leaf).__name__}")


def _check_input_state(step: CapturedStep, i: int, before: Any, value: Tensor, mutated: bool) -> None:
    name = step.inputs[i].name
    if _metadata(value) != before:
        raise UnsupportedError(f"{name} changes its shape, strides, storage or requires_grad in place")
    if not mutated:
        return
    if not is_injective(value):
        raise OverlapError(f"{name} is mutated, and some of its elements share their memory")
    if i in step.shared:
        raise OverlapError(f"{name} is mutated and shares its memory with another input")
    if step.inputs[i].requires_grad and step.is_view[i]:
        raise UnsupportedError(f"{name} is mutated and is a differentiable view of another tensor")


def _classify_outputs(
    tensors: Sequence[Tensor], primals: Sequence[Tensor]
) -> tuple[tuple[OutputInfo, ...], tuple[ComputedInfo, ...]]:
    owners: dict[int, list[int]] = {}
    for i, value in enumerate(primals):
        owners.setdefault(_storage_key(value), []).append(i)
    groups: dict[int, list[int]] = {}
    outputs: dict[int, OutputInfo] = {}
    for position, value in enumerate(tensors):
        identity = next((i for i, primal in enumerate(primals) if value is primal), None)
        _check_output(position, value, is_made=identity is None)
        key = _storage_key(value)
        if identity is not None:
            outputs[position] = OutputInfo(ResultSource.PRIMAL, identity, value.requires_grad)
        elif key in owners:
            if len(owners[key]) > 1:
                raise UnsupportedError(f"output {position} is a view of memory that several inputs share")
            outputs[position] = view_of(ResultSource.PRIMAL, owners[key][0], value, primals[owners[key][0]])
        else:
            _check_mode(position, base_of(value))
            groups.setdefault(key if hint(value.untyped_storage().nbytes()) else -1 - position, []).append(position)
    computed: list[ComputedInfo] = []
    for members in groups.values():
        _classify_group(members, tensors, outputs, computed)
    _find_parents(tensors, outputs)
    first: dict[int, int] = {}
    for position, value in enumerate(tensors):  # one object that is returned twice is one view, not two
        if first.setdefault(id(value), position) != position and outputs[position].geometry is not None:
            outputs[position] = replace(outputs[position], twin=first[id(value)])
    return tuple(outputs[position] for position in range(len(tensors))), tuple(computed)


def _find_parents(tensors: Sequence[Tensor], outputs: dict[int, OutputInfo]) -> None:
    """Views of results that are views: made from those, so that their gradients pass through them as in eager."""
    views = [i for i, info in outputs.items() if info.geometry is not None or info.split is not None]
    views = sorted((i for i in views if tensors[i].requires_grad), reverse=True)
    edges = {(tensors[i].grad_fn, tensors[i].output_nr): i for i in views}  # of one view in two places, the first
    for position in views:
        if outputs[position].geometry is not None:
            parent = _next_among(edges, tensors[position])
            if parent is not None:
                output = outputs[position]
                info = view_of(output.source, output.index, tensors[position], tensors[parent])
                outputs[position] = replace(info, origin=output.origin, parent=parent)


def _next_among(edges: dict[Any, int], value: Tensor) -> int | None:
    """The first of the edges that a gradient of a view comes to on its way to the view's base."""
    node, base = value.grad_fn, base_of(value).grad_fn
    while node is not None and node is not base and node.next_functions:
        edge = node.next_functions[0]
        if edge in edges:
            return edges[edge]
        node = edge[0] if len(node.next_functions) == 1 else None
    return None


def _check_output(position: int, value: Tensor, is_made: bool) -> None:
    if value.layout != torch.strided or value.is_quantized:
        raise UnsupportedError(f"output {position} is not a plain strided tensor")
    if type(value) is not FakeTensor:
        raise UnsupportedError(f"output {position} is a {type(value).__name__}")
    if value.retains_grad:
        raise UnsupportedError(f"retain_grad() is called on output {position} inside the program")
    # It would see the gradients of the program alone; and what retain_grad() keeps outside comes after all hooks.
    if value._backward_hooks:
        raise UnsupportedError(f"a hook is registered on output {position} inside the program")
    if is_made and not value._is_view():
        _check_mode(position, value)


def _check_mode(position: int, value: Tensor) -> None:
    if value.is_inference() != torch.is_inference_mode_enabled():
        raise UnsupportedError(f"output {position} is made under another inference mode than the call's")


def _classify_group(
    members: Sequence[int], tensors: Sequence[Tensor], outputs: dict[int, OutputInfo], computed: list[ComputedInfo]
) -> None:
    """Outputs that live in one fresh storage: the program returns their base, and each is made from it outside."""
    bases = {id(base_of(tensors[p])): p for p in reversed(members)}
    if len(bases) > 1:  # tensors that share memory without being views, as .data: one must hold all of it
        required = {id(base_of(tensors[p])) for p in members if tensors[p].requires_grad}
        whole = {key: p for key, p in bases.items() if is_whole(base_of(tensors[p]))}
        bases = {key: p for key, p in whole.items() if required <= {key}}
    if not bases:
        raise UnsupportedError(f"outputs {', '.join(map(str, members))} share their memory in a way autograd hides")
    first = min(bases.values())
    base = base_of(tensors[first])
    if base.is_conj() or base.is_neg():
        raise UnsupportedError(f"output {first} is a lazy conjugate or negative that autograd does not take for a view")
    for position in members:
        value = tensors[position]
        if value.requires_grad and value.is_leaf:
            raise UnsupportedError(f"output {position} is a new leaf")
        if value is base:
            outputs[position] = OutputInfo(ResultSource.COMPUTED, len(computed), value.requires_grad)
        else:
            outputs[position] = view_of(ResultSource.COMPUTED, len(computed), value, base)
    computed.append(ComputedInfo(tensor_spec(base), base.requires_grad, first, base is not tensors[first]))


def _metadata(value: Tensor) -> tuple[Any, ...]:
    storage = value.untyped_storage()
    return tuple(value.shape), tuple(value.stride()), value.storage_offset(), storage._cdata, value.requires_grad


def _storage_key(value: Tensor) -> int:
    return value.untyped_storage()._cdata
