"""The one place that hides private torch names, and what differs between torch 2.11 and 2.15.

versions.py says which are taken; others are refused where aottrain is installed. Of the compiler capture, recording,
analysis, joint and functional use private names; all else imports from here, or from a neighbour: compat_dynamo knows
how TorchDynamo treats frames, compat_dynamo_inputs where inputs of its graphs come from and how they are marked,
compat_checkpoint torch.utils.checkpoint.
"""

from __future__ import annotations

import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _config_module, _python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from aottrain.versions import warn_of

warn_of(torch.__version__)
disable_autocast = torch._C._DisableAutocast  # context manager: autocast is off on every device inside it


def map_values(function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with each leaf's result in its place; a torch.Size is a leaf."""
    return tree_map(function, nest, is_leaf=lambda value: isinstance(value, torch.Size))


def flatten_values(nest: Any) -> tuple[list[Any], Any]:
    """tree_flatten, for which a torch.Size is a leaf: torch's takes it for a tuple and rebuilds it as one."""
    return tree_flatten(nest, is_leaf=lambda value: isinstance(value, torch.Size))


def disable_modes() -> Any:
    """Context manager: no dispatch mode sees the ops inside it."""
    return _python_dispatch._disable_current_modes()


@contextmanager
def enable_dispatch() -> Iterator[None]:
    """Dispatch modes see the ops inside it again, where a caller has switched them off."""
    keys = torch._C.DispatchKey
    guard = torch._C._SetExcludeDispatchKeyGuard
    with guard(keys.Python, False), guard(keys.PythonTLSSnapshot, False):
        yield


def dynamo_settings(**settings: Any) -> Any:
    """Context manager, to be entered again and again and by any thread: TorchDynamo's options inside it."""
    import torch._dynamo.config as config  # here, because it takes a second that most programs need not spend

    patch = config.patch(**settings)
    return patch if OPTIONS_PER_THREAD else Shared(patch)


OPTIONS_PER_THREAD = hasattr(_config_module, "ContextVar")  # not before torch 2.13


class Shared:
    """A patch of what all threads see: from when the first enters until the last has left."""

    def __init__(self, patch: Any):
        self.patch, self.num_inside, self.lock = patch, 0, threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            if not self.num_inside:
                self.patch.__enter__()
            self.num_inside += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.num_inside -= 1
            if not self.num_inside:
                self.patch.__exit__(*error)


def load_dynamo_rules() -> None:
    """TorchDynamo looks up by name which functions it treats in a way of their own: once, at the latest here."""
    import torch._dynamo.trace_rules as rules

    rules.get_torch_obj_rule_map()


@contextmanager
def _replaced(write: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


_GLOBAL_HOOKS = re.compile("_global_(forward|backward)(_pre)?_hooks")
# Found once: they are asked for before each call, and torch changes what is in them alone.
_GLOBAL_TABLES = [table for name, table in vars(torch.nn.modules.module).items() if _GLOBAL_HOOKS.fullmatch(name)]


def onednn(is_on: bool) -> Any:
    """oneDNN's own composite ops are on or off inside (not through torch.backends, which warns of other devices)."""
    return _replaced(torch._C._set_mkldnn_enabled, is_on, torch._C._get_mkldnn_enabled())


_tracing = threading.RLock()


@contextmanager
def tracing_alone() -> Iterator[None]:
    """One thread of the process traces at a time: tracing replaces functions of torch and the tensors of modules.

    TorchDynamo calls a backend under its own lock. Where it is loaded that one is taken first, here too: taken in
    either order, the two could wait for each other.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    with getattr(dynamo, "compile_lock", nullcontext()), _tracing:
        yield


def is_tracing() -> bool:
    """Whether this thread traces: a compiled target that it calls now is a part of what is traced."""
    return torch.compiler.is_compiling() or _tracing._is_owned()  # type: ignore[attr-defined]


def in_dual_level() -> bool:
    """Whether tensors can carry forward-mode tangents, of torch.autograd.forward_ad or of torch.func."""
    return torch.autograd.forward_ad._current_level >= 0


# Which backward this thread runs; and whether it executes a node.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
runs_in_this_backward: Callable[[Any], bool] = torch._C._will_engine_execute_node  # type: ignore[attr-defined]


def after_this_backward(call: Callable[[], object]) -> None:
    """Within a backward: call it when that has ended. Not where it ends in an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def is_wrapped(value: torch.Tensor) -> bool:
    """Whether a torch.func transformation, or a batch of gradients as in `jacobian(vectorize=True)`, has wrapped it."""
    return torch._C._functorch.is_functorch_wrapped_tensor(value) or torch._C._functorch.is_legacy_batchedtensor(value)


def operators_are_watched(inputs: Sequence[Any]) -> bool:
    """Whether something, such as a dispatch mode, stands between operators called on the inputs and their kernels."""
    watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None
    return watched or any(isinstance(value, torch.Tensor) and is_wrapped(value) for value in inputs)


def has_function_modes() -> bool:
    """Whether a TorchFunctionMode is active, other than ours and torch's own for the default device."""
    kinds = map(type, _get_current_function_mode_stack()) if torch._C._len_torch_function_stack() else ()
    return any(not issubclass(k, DeviceContext) and not k.__module__.startswith("aottrain.") for k in kinds)


def default_device() -> torch.device | None:
    """Where factories put tensors; None where nobody has said it, which a mode on torch's functions would."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def has_global_module_hooks() -> bool:
    """Whether anyone but this package has registered hooks that every module runs."""
    return bool(_global_hooks())


def _global_hooks() -> list[Any]:
    hooks = [hook for table in _GLOBAL_TABLES for hook in table.values()]
    return [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("aottrain.")]


def guard_modules() -> None:
    """To be called while TorchDynamo compiles: guards on modules that it leaves out.

    Hooks that are added to a module later; hooks that are added to all modules; an attribute that hides a parameter,
    buffer or submodule, which Dynamo reads past it; methods that are replaced on a class, attributes that are added.
    """
    import torch._dynamo.config as config
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:  # called by hand
        return
    config.skip_nnmodule_hook_guards = False  # guards are built after this: to set it for a while would be in vain
    if not OPTIONS_PER_THREAD:  # torch 2.11 takes a module's tensors for unchanged where its tables are: not if thawed
        config.skip_tensor_guards_with_matching_dict_tags = False
        config.use_recursive_dict_tags_for_guards = False  # nor a module's class
    added: set[Any] = set()
    guard_methods = partial(_guard_methods, set())
    for guard in list(context.guards_context.dynamo_guards):
        source = guard.originating_source
        while source is not None:
            table = getattr(source, "base", None)
            if getattr(table, "member", None) in ("_modules", "_parameters", "_buffers"):
                owner, name = table.base, str(getattr(source, "index", ""))
                if (owner, name) not in added:
                    added.add((owner, name))
                    absent = partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
                    install_guard(owner.make_guard(absent))
            source = table
        if guard.create_fn_name() == "TYPE_MATCH":
            install_guard(guard.originating_source.make_guard(guard_methods))
    for guard in list(context.guards_context.dynamo_guards):
        if guard.create_fn_name() == "GRAD_MODE":  # any source that holds for the whole call
            install_guard(guard.originating_source.make_guard(_guard_global_hooks))
            break


def _guard_global_hooks(builder: Any, _: Any) -> None:
    hooks = _global_hooks()
    _add_guard(builder, lambda _: _global_hooks() == hooks, "hooks of all modules")


def _guard_methods(done: set[type], builder: Any, guard: Any) -> None:
    for cls in type(builder.get(guard)).__mro__:
        if cls in done:
            continue
        done.add(cls)
        if cls.__module__.partition(".")[0] in ("torch", "builtins", "collections", "typing", "abc", "enum"):
            continue
        methods = {name: value for name, value in vars(cls).items() if isinstance(value, _METHODS)}
        table = vars(cls)

        def holds(_: Any, methods: Any = methods, table: Any = table, size: int = len(table)) -> bool:
            return len(table) == size and all(table.get(name) is value for name, value in methods.items())

        _add_guard(builder, holds, f"methods of {cls.__name__}")


_METHODS = (types.FunctionType, property, staticmethod, classmethod)


def _add_guard(builder: Any, holds: Any, what: str) -> None:
    try:
        builder.guard_manager.root.add_lambda_guard(holds, [what], None)
    except TypeError:  # before torch 2.13
        builder.guard_manager.root.add_lambda_guard(holds, [what])


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """The caller's hooks on saved tensors are for the values of the run, not for a tracer's: off inside."""
    autograd = torch._C._autograd
    taken = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        taken.append(pair)
    try:
        yield
    finally:
        for pair in reversed(taken):
            autograd._push_saved_tensors_default_hooks(*pair)


def negated(value: torch.Tensor) -> torch.Tensor:
    """A view that reads as the negative of its memory."""
    return torch._neg_view(value)


def view_origin(value: torch.Tensor) -> Any:
    """How autograd thinks that a differentiable view was made; None where the value is no view."""
    return torch._C._autograd._get_creation_meta(value) if value._is_view() else None


def set_view_origin(value: torch.Tensor, origin: Any) -> None:
    """Make autograd treat a view as one of the given origin: of several outputs, under no_grad, and so on."""
    if origin is not None and value._is_view():
        torch._C._autograd._set_creation_meta(value, origin)


def autocast_state() -> tuple[object, ...]:
    """What autocast would do to the next op, and what a program may read of it where it is off, as a hashable value."""
    devices = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return *devices, torch.is_autocast_cache_enabled()


def validates_distributions() -> bool:
    """Whether distributions check their arguments, unless they are told otherwise."""
    return Distribution._validate_args


# What the text of a size may name.
SIZE_NAMESPACE: dict[str, Any] = dict(SYMPY_INTERP)


def size_hint(value: Any) -> Any:
    """The number that a symbolic size has in the call that is traced, without a guard on it; None where it has none."""
    return value.node.hint


def size_text(value: Any) -> tuple[str, tuple[str, ...]]:
    """Python text of a symbolic number, and the names of its symbols."""
    return _text_of(value.node.expr)


@lru_cache(maxsize=1 << 14)  # the same few are asked for again and again
def _text_of(expression: Any) -> tuple[str, tuple[str, ...]]:
    from torch.utils._sympy.printers import PythonPrinter  # here: sympy is slow to import, and few programs need it

    return PythonPrinter().doprint(expression), tuple(sorted(str(symbol) for symbol in expression.free_symbols))


def size_range(value: Any) -> tuple[int, int | None]:
    """Least and greatest value of a symbolic number, which guards hold it to; None where there is no greatest."""
    bounds = value.node.shape_env.bound_sympy(value.node.expr)
    least, greatest = bounds.lower, bounds.upper
    at_most = int(greatest) if greatest.is_Integer and greatest < 1 << 62 else None
    return int(least) if least.is_Integer else -(1 << 62), at_most  # a number that is no size has no least


def symbolic_mode() -> Any:
    """A FakeTensorMode with symbols of its own; values that tensors hold never become sizes."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without duck shaping equal sizes are not taken for one: a batch that happens to be as large as a length is both.
    return FakeTensorMode(
        shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)
    )


def symbolic_fake(mode: Any, tensor: torch.Tensor, dims: frozenset[int], name: str) -> torch.Tensor:
    """A fake of a real tensor in which the sizes of `dims` are symbols."""
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor.detach(), symbolic_context=context, source=LocalSource(name))


def shape_guard(shape_env: Any, names: list[str], fakes: list[torch.Tensor]) -> str:
    """Python text that says, of `L` (tensors by these names), whether what was traced holds for them."""
    from torch._dynamo.source import LocalSource

    checks = shape_env.produce_guards(fakes, [LocalSource(name) for name in names], ignore_static=False)
    return " and ".join(f"({check})" for check in checks) or "True"


def forget_numbers(values: Sequence[Any]) -> None:
    """Fakes do not know what number the tensor held that they were made of: since torch 2.14 those of float64, int64
    and no dimension do, without a guard on it."""
    for value in values:
        if isinstance(value, FakeTensor) and value.fake_mode.shape_env is None:
            value.item_memo = None


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects refer to this memory."""
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


def profiling() -> bool:
    """Whether torch's profiler records, in any thread: starting a second session crashes the process."""
    return torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()


CAN_UNPACK_ONE = hasattr(torch._C._autograd.SavedTensor, "unpack")  # torch 2.11 cannot
copy_all = torch._foreach_copy_  # (targets, sources), by few launches
free_cublas_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)


def saved_tensors(ctx: Any, needed: Sequence[bool]) -> list[torch.Tensor | None]:
    """What an autograd.Function has saved; None where not needed: whether that is still what was saved, nobody asks."""
    if all(needed) or not CAN_UNPACK_ONE:
        return list(ctx.saved_tensors)
    return [raw.unpack() if flag else None for raw, flag in zip(ctx._raw_saved_tensors, needed, strict=True)]
