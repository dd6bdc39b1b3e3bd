"""capture: a call of the user's function or module becomes a pure function of explicit state.

Also the mode that is active whenever the user's code is traced: it numbers random draws, writes the hidden mutations
of batch normalisation out, and notes which module and source line each op came from.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from aottrain.compat import flatten_values, is_wrapped, tree_unflatten
from aottrain.compat_dispatch import arrived_whole, in_backward, modes_of_functions_off, profile_again, take_apart
from aottrain.compat_distributed import in_parts
from aottrain.compiler.capture.audit import audited
from aottrain.compiler.capture.checkpoint_regions import (
    Region,
    Storages,
    inlined_checkpoints,
    open_regions,
    storages_of,
)
from aottrain.compiler.capture.dynamic import SymbolicSizes
from aottrain.compiler.capture.fakes import fake_of
from aottrain.compiler.capture.indexing import IndexingGradients
from aottrain.compiler.capture.replaced_ops import MUTATION_RULES, PURE_VARIANTS, RESULT_RULES, hidden_writes
from aottrain.compiler.capture.substitutes import contained, installed, swapping
from aottrain.compiler.graphs.source_locations import SourceLocation, noted_location, tell_source, user_line
from aottrain.errors import UnsupportedError, none_caught, note_refusal
from aottrain.ir.graph import InputKind, InputSpec, Mark, Marks, set_in_backward, set_marks, set_provenance
from aottrain.ir.ops import hidden_mutation, op_info, uses_generator
from aottrain.ir.sizes.expressions import hint
from aottrain.ir.tensor import is_injective, tensor_spec
from aottrain.ops.checks import checked_value
from aottrain.ops.random.eager_draws import eager_draw
from aottrain.ops.random.mode import PhiloxMode

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class CapturedStep:
    """One call as a pure function."""

    call: Callable[[Sequence[Tensor]], Any]
    """Runs the user's code on the primals, or what stands for them, and gives its raw result."""
    primals: tuple[Tensor, ...]
    """The real tensors, each once: parameters, buffers and captured tensors (the state), then the batch."""
    inputs: tuple[InputSpec, ...]
    """What each primal is."""
    module: nn.Module | None
    num_state: int
    is_leaf: tuple[bool, ...]
    is_view: tuple[bool, ...]
    shared: frozenset[int]
    """Primals whose storage another one shares."""
    notes: set[str] = field(default_factory=set)
    """What was met while the code ran, e.g. CUSTOM_FUNCTION."""
    rng: str = "philox"
    sizes: Mapping[str, torch.SymInt] = field(default_factory=dict)
    """The symbols by name, of a step with symbolic sizes; its batch is then fake tensors."""
    shape_env: Any = None
    """Where guards on symbolic sizes are kept."""
    watching: Callable[[], AbstractContextManager[None]] = nullcontext
    """To be entered around code of the user's."""
    function: Any = None
    """The user's."""

    @property
    def device(self) -> torch.device:
        devices = [primal.device for primal in self.primals] or [torch.device("cpu")]
        return next((device for device in devices if device.type != "cpu"), devices[0])  # before numbers of the host's


def capture(
    function: Callable[..., Any],
    module: nn.Module | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    captured: Sequence[Tensor] = (),
    rng: str = "philox",
    sizes: SymbolicSizes | None = None,
    watching: Callable[[], AbstractContextManager[None]] = nullcontext,
    containers: Container[int] = (),
    run: Callable[..., Any] = lambda target, /, *args, **kwargs: target(*args, **kwargs),
) -> CapturedStep:
    """Make the state of one call explicit.

    `function` is what runs; where it is a module, `module` is that same object and its parameters and buffers become
    inputs. `captured`: tensors that it reads from elsewhere (closures, globals, attributes); they become inputs too.
    `run`: makes the call, and may give more than its result.
    Raises UnsupportedError for inputs that it cannot describe (tensor subclasses, sparse tensors).
    """
    state = [*named_state(module), *(_captured_entry(i, tensor) for i, tensor in enumerate(captured))]
    num_named = len(state) - len(captured)
    leaves, tree = flatten_values((tuple(args), kwargs))
    entries, index = list(state), {id(tensor): i for i, (_, _, tensor) in enumerate(state)}
    entry_by_position = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) not in index:
                index[id(leaf)] = len(entries)
                entries.append((InputKind.BATCH, f"input{len(entries) - len(state)}", leaf))
            entry_by_position[position] = index[id(leaf)]
    notes: set[str] = set()
    inputs, traced = [], []
    for kind, name, tensor in entries:
        _check_input(name, tensor)
        stand_in = sizes.fakes.get(id(tensor)) if sizes is not None and kind is InputKind.BATCH else None
        traced.append(tensor if stand_in is None else stand_in)
        # Not parameters: a frozen weight that autocast casts would be held twice.
        lent = kind is not InputKind.PARAMETER and not (tensor.requires_grad or isinstance(tensor, nn.Parameter))
        inputs.append(InputSpec(kind, name, tensor_spec(traced[-1]), tensor.requires_grad, False, lent, tensor.is_leaf))
    named = [tensor for _, _, tensor in state[:num_named]]

    def call(primals: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for position, i in entry_by_position.items():
            filled[position] = primals[i]
        call_args, call_kwargs = tree_unflatten(filled, tree)
        table = {id(real): primals[num_named + i] for i, real in enumerate(captured)}
        stand_ins = swapping(table, {id(value) for value in primals}, notes)
        with none_caught(), contained(rng), audited(function, module), watching(), stand_ins, inlined_checkpoints():
            stand_for = {id(real): value for real, value in zip(named, primals, strict=False)}
            with nullcontext() if module is None else installed(module, stand_for):
                result = run(function if module is None else module, *call_args, **call_kwargs)
        # The containers are copies of the caller's.
        after, tree_after = flatten_values((call_args, call_kwargs))
        if tree_after != tree or any(one is not other for one, other in zip(after, filled, strict=True)):
            raise UnsupportedError("the program changes a list or dictionary that it was given")
        old, new = list(_containers((call_args, call_kwargs))), list(_containers(result))
        if len({*old, *new}) < len({*old}) + len(new) or any(one in containers for one in new):
            raise UnsupportedError("the program returns a list or dictionary that it was given or keeps, or one twice")
        return result

    tensors = tuple(tensor for _, _, tensor in entries)
    return CapturedStep(
        call,
        tuple(traced),
        tuple(inputs),
        module,
        len(state),
        tuple(value.is_leaf for value in tensors),
        tuple(value._is_view() for value in tensors),
        frozenset(shared_storages(tensors)),
        notes,
        rng,
        {} if sizes is None else sizes.symbols,
        None if sizes is None else sizes.shape_env,
        watching,
        function,
    )


def _containers(value: Any) -> Iterator[int]:
    """Identities of the lists and dictionaries in a nest: a call's result is rebuilt with new ones."""
    if isinstance(value, (list, dict)):
        yield id(value)
    if isinstance(value, (list, tuple, dict)) and not isinstance(value, torch.Size):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def named_state(module: nn.Module | None) -> list[tuple[InputKind, str, Tensor]]:
    """Parameters then buffers of a module, each distinct tensor once."""
    if module is None:
        return []
    state = [(InputKind.PARAMETER, name, value) for name, value in module.named_parameters()]
    return state + [(InputKind.BUFFER, name, value) for name, value in module.named_buffers()]


def _captured_entry(i: int, tensor: Tensor) -> tuple[InputKind, str, Tensor]:
    return (InputKind.PARAMETER if tensor.requires_grad else InputKind.BUFFER), f"captured{i}", tensor


def _check_input(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor):
        raise UnsupportedError(f"{name} is a tensor subclass, {type(tensor).__name__}{in_parts(tensor)}")
    if is_wrapped(tensor):  # of a module, by functional_call
        raise UnsupportedError(f"{name} is inside torch.func")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{name} has layout {tensor.layout}")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(f"{name} is quantised or a lazy conjugate")
    if tensor.device.type == "meta":
        raise UnsupportedError(f"{name} is on the meta device")


def shared_storages(tensors: Sequence[Tensor]) -> set[int]:
    """Indices of the tensors whose storage another tensor of the list shares."""
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        if hint(storage.nbytes()):
            groups.setdefault(storage._cdata, []).append(i)
    return {i for members in groups.values() if len(members) > 1 for i in members}


def fake_primals(step: CapturedStep, mode: FakeTensorMode) -> list[Tensor]:
    """Fresh leaf fakes with the primals' metadata; they share nothing with the real tensors."""
    static = step.shape_env is None
    pairs = zip(step.primals, step.inputs, strict=True)
    return [fake_of(value, mode, static).requires_grad_(spec.requires_grad) for value, spec in pairs]


def enter_primals(step: CapturedStep, leaves: Sequence[Tensor], cloned: Iterable[int]) -> list[Tensor]:
    """What the user's code gets for the leaves: those of `cloned` that are no leaves to the caller are copied first, so
    that they may be mutated, and gradients are still taken with respect to the value that came in. But for those whose
    elements share memory: no op may write to them, and a copy has other strides."""
    copied = set(cloned)
    for value, real in zip(leaves, step.primals, strict=True):
        if not isinstance(real, FakeTensor):
            # isinstance() tells a parameter by `_is_param`, and a parameter may have attributes of its owner's.
            vars(value).update({**vars(real), "_is_param": isinstance(real, nn.Parameter)})
    with torch.enable_grad():  # under no_grad, too, a view of what requires a gradient requires one
        return [
            _copy(value) if i in copied and value.requires_grad and not step.is_leaf[i] else value
            for i, value in enumerate(leaves)
        ]


def _copy(value: Tensor) -> Tensor:
    """With the same strides, of which the views that the program returns have theirs: a clone closes gaps."""
    if not is_injective(value):
        return value
    copy = value.clone()
    if copy.stride() == value.stride():
        return copy
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


class CaptureMode(PhiloxMode):
    """Active while the user's code is traced: functional draws, visible mutations, provenance of every node."""

    def __init__(self, state: Tensor, provenance: Provenance, rng: str = "philox"):
        super().__init__(state)
        self.provenance = provenance
        self.rng = rng
        self.read_in_regions: Storages = {}  # from outside a checkpointed region, by its ops
        self.indexing = IndexingGradients()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # autograd asks this several times for each op
        profile = sys.getprofile()
        sys.setprofile(None)  # the audit is of the user's code, and would slow this down
        try:
            with modes_of_functions_off():
                return self.dispatch(func, types, args, kwargs or {})
        except Exception as error:
            tell_source(error, self.provenance.current().source)
            if not isinstance(error, UnsupportedError):
                note_refusal(f"{func}, {type(error).__name__}")
            raise
        finally:
            profile_again(profile)

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if arrived_whole(func, args, kwargs):
            with self:  # its parts have rules of their own
                return take_apart(func, args, kwargs)
        location = self.provenance.current()
        regions = open_regions()
        self._check_regions(regions, func, args, kwargs)
        rule = MUTATION_RULES.get(func) or RESULT_RULES.get(func)
        node = torch._C._current_autograd_node()
        out = None if node is None else self.indexing.rule(node, func, args)
        if func is aten._local_scalar_dense.default:
            out = checked_value(*args)
        if rule is not None:
            out = rule(func, args, kwargs)
        elif out is None:
            if hidden_mutation(func) and func not in PURE_VARIANTS:
                raise UnsupportedError(f"{func} mutates an argument though its schema denies it")
            if self.rng == "eager" and uses_generator(func):
                if in_backward():
                    raise UnsupportedError("the backward draws random numbers")
                out = eager_draw(func, args, kwargs)
            else:
                out = self.drawn(func, args, kwargs)
        if in_backward():
            # What the gradient of a region's op makes of its values is never saved by eager's checkpoint.
            marks: Marks = tuple((number, Mark.MUST_RECOMPUTE) for number in location.regions)
        else:
            marks = tuple((region.number, region.mark(func, args, kwargs, out)) for region in regions)
        self.provenance.mark(location, marks)
        return out

    def _check_regions(self, regions: Sequence[Region], func: Any, args: Any, kwargs: Any) -> None:
        written_positions = op_info(func).writes or hidden_writes(func, args)
        if not (regions or (written_positions and self.read_in_regions)):
            return
        written = storages_of(_arguments_at(func, written_positions, args, kwargs))
        if written.keys() & self.read_in_regions.keys():
            raise UnsupportedError("memory that torch.utils.checkpoint reads when it runs again is overwritten")
        for region in regions:
            if uses_generator(func) and not region.preserves_rng:
                raise UnsupportedError("random numbers in torch.utils.checkpoint with preserve_rng_state=False")
            region.check_writes(written)
        if regions:
            read = storages_of((args, kwargs))
            self.read_in_regions.update((key, read[key]) for key in read.keys() - regions[0].computed.keys())

    def _next(self, device: torch.device) -> tuple[Tensor, int]:
        if in_backward():
            raise UnsupportedError("the backward draws random numbers")
        return super()._next(device)


def _arguments_at(func: Any, positions: Sequence[int], args: Any, kwargs: Any) -> list[Any]:
    """The arguments at these places of the schema."""
    names = [argument.name for argument in func._schema.arguments]
    return [args[i] if i < len(args) else kwargs.get(names[i]) for i in positions]


class Provenance:
    """Which module and source line is running: forward ops by hooks and stack, backward ops by sequence number."""

    def __init__(self, module: nn.Module | None):
        self.module = module
        self.names = {} if module is None else {id(child): name for name, child in module.named_modules()}
        self.roots: list[nn.Module] = []  # kept alive, so that no other module takes the identity
        self.stack: list[tuple[str, int]] = []
        self.runs: Counter[str] = Counter()
        self.by_sequence: dict[int, SourceLocation] = {}
        self.last: fx.Node | None = None
        self.graph: fx.Graph | None = None  # that is recorded; else that of torch's tracer

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the forwards of the captured module's children; of a function, those of the modules that it calls."""

        def enter(module: nn.Module, _: Any) -> None:
            if self.module is None and id(module) not in self.names:
                self._add_root(module)
            if id(module) in self.names:
                name = self.names[id(module)]
                self.stack.append((name, self.runs[name]))
                self.runs[name] += 1

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if id(module) in self.names and self.stack:
                self.stack.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add_root(self, module: nn.Module) -> None:
        """A module that a function calls is named by its class."""
        same = sum(type(root).__name__ == type(module).__name__ for root in self.roots)
        root = type(module).__name__ + (f"_{same + 1}" if same else "")
        self.roots.append(module)
        for name, child in module.named_modules():
            self.names.setdefault(id(child), f"{root}.{name}" if name else root)

    def current(self) -> SourceLocation:
        """Where the op that is about to run comes from."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.by_sequence.get(node._sequence_nr(), SourceLocation())
        location = noted_location()
        if location is None:
            location = SourceLocation(tuple(self.stack), user_line())
        location = location._replace(regions=tuple(region.number for region in open_regions()))
        # The autograd kernel above has numbered this op's gradient node already.
        self.by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, location)
        return location

    def mark(self, location: SourceLocation, marks: Marks) -> None:
        """Note the location and the marks on the nodes that were added since the last call."""
        graph = self.graph
        if graph is None and (mode := get_proxy_mode()) is not None:
            graph = mode.tracer.graph
        if graph is None:
            return
        node = graph._root._prev
        newest = node
        while node is not self.last and node.op != "root":
            if node.op == "call_function":
                set_provenance(node, location.modules, location.source, torch.is_grad_enabled())
                set_marks(node, marks)
                if in_backward():
                    set_in_backward(node)
            node = node._prev
        self.last = newest
