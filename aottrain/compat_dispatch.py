"""Private parts of torch's dispatcher: which operators it would take apart before a mode sees them; what it does not
tell a mode of a call; who is told of the nodes that autograd makes; memory that is had without it; what stands in for
our operators where they are traced; what it runs in Python for sizes that are symbols, and what those are in a text; of
Python's profilers, which a mode puts aside; what its older profiler records of one thread."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch._library import simple_registry
from torch.autograd import ProfilerConfig, ProfilerState
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
# Where an operator becomes others before a mode sees it.
_ABOVE_MODES = frozenset({_COMPOSITE, torch._C.DispatchKey.Autograd})
_RESIZES = (
    *(f"{name}{rank}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip
_METADATA = tuple(getattr(torch.ops.aten, name).default for name in ("size", "stride", "storage_offset"))
# Before torch 2.13 tracers took every composite op apart.
_would_have_decomposed = getattr(_python_dispatch, "autograd_would_have_decomposed", lambda func, values: True)


def arrived_whole(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd would have taken the operator apart into others, and did not: in inference mode, and for its
    tensors, a mode sees operators such as `aten.batch_norm` and `aten.dropout` themselves. `take_apart` does it."""
    return _is_composite(func) and _would_have_decomposed(func, tree_leaves((args, kwargs)))


def take_apart(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator's result by others, as in eager: by C++. Torch prefers its Python for tracers, which differs: in
    evaluation `aten.dropout` gives a copy there, and its argument itself by C++."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    return func.decompose(*args, **kwargs)


@contextmanager
def symbolic_tracing() -> Iterator[None]:
    """Around tracing with symbolic sizes: ops whose C++ takes numbers only run in Python. Of one that has
    none, the caller goes on with numbers. Where torch's Python gives something else than its C++, `_as_by_cpp` runs."""
    from torch._dispatch.python import enable_python_dispatcher

    kept = {op: dict(op.py_kernels) for op in _as_by_cpp()}
    for op, form in _as_by_cpp().items():
        kernels = {key: form if key in _ABOVE_MODES else kernel for key, kernel in kept[op].items()}
        _set_kernels(op, {key: kernel for key, kernel in kernels.items() if kernel is not None})
    try:
        with enable_python_dispatcher(), _numbers_in_texts():
            yield
    finally:
        for op, kernels in kept.items():
            _set_kernels(op, kernels)
        _forget_sizes()


def _forget_sizes() -> None:
    """Torch's caches of what it has found of sizes keep all of a trace's fakes, for ever."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for method in vars(ShapeEnv).values():
        if clear := getattr(method, "cache_clear", None):
            clear()


@contextmanager
def _numbers_in_texts() -> Iterator[None]:
    """Inside, a size is its number in a text that code makes which is neither torch's nor ours, and a guard: the name
    of its symbol would stay in the text, or in what is chosen by it, at every call."""
    thread = threading.get_ident()
    before = [(symbolic, name, vars(symbolic).get(name)) for symbolic in _NUMBERS for name in _TEXTS]

    def text_of(symbolic: type, name: str) -> Callable[..., str]:
        method = getattr(symbolic, name)

        def text(self: Any, *how: str) -> str:
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if caller == "torch" or caller in TRACERS or threading.get_ident() != thread:
                return method(self, *how)
            return getattr(_NUMBERS[symbolic](self), name)(*how)

        return text

    for symbolic, name, _ in before:
        setattr(symbolic, name, text_of(symbolic, name))
    try:
        yield
    finally:
        for symbolic, name, method in before:
            delattr(symbolic, name) if method is None else setattr(symbolic, name, method)


# Packages beside torch whose code runs while a program is traced, and is not the program.
TRACERS = frozenset({"aottrain", "sympy", "mpmath"})
_NUMBERS: dict[Any, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_TEXTS = ("__repr__", "__str__", "__format__")


def _set_kernels(op: Any, kernels: dict[Any, Callable[..., Any]]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


@cache
def _as_by_cpp() -> dict[Any, Callable[..., Any] | None]:
    """The operators that torch's Python takes apart into what gives something else than eager, each with what it is
    taken apart into instead; None: nothing, C++ takes symbols, or has none of what is looked at. In Python a dropout of
    everything draws nothing, and one of nothing is a copy; `istft` and `one_hot` take what eager refuses; recurrent
    layers have no dropout between them; an image that keeps its size is computed anew, which in eager is copied; and
    the loss of one sample has a dimension."""
    aten = torch.ops.aten
    forms: dict[Any, Callable[..., Any] | None] = {aten.istft.default: None, aten.one_hot.default: None}

    def instead(op: Any, key: Any, form: Callable[..., Any], **how: Any) -> None:
        if key in op.py_kernels:  # not so in every torch
            forms[op] = form(op.py_kernels[key], **how)

    instead(aten.dropout.default, _COMPOSITE, _of_some)
    for name in ("rnn_tanh", "rnn_relu", "lstm", "gru"):
        instead(getattr(aten, name).input, _COMPOSITE, _layer_by_layer, packed=False)
        instead(getattr(aten, name).data, _COMPOSITE, _layer_by_layer, packed=True)
    for name in _RESIZES:
        instead(getattr(aten, name).vec, _COMPOSITE, _to_another_size)
    instead(aten.multi_margin_loss.default, torch._C.DispatchKey.Autograd, _of_one_sample)
    return forms


def _of_some(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A dropout. By C++ one of some elements would be written by parts, for which sizes that are products of symbols
    have no names."""

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return x
        if p == 1:
            raise RuntimeError("a dropout of everything draws what its Python form does not")
        return kernel(x, p, train)

    return dropout


def _of_one_sample(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(scores: Tensor, *args: Any) -> Tensor:
        found = kernel(scores, *args)
        return found.reshape(()) if scores.dim() < 2 else found

    return loss


def _to_another_size(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An image enlarged by factors, of which no length stays as it is: a guard. That one goes on with numbers."""

    def resize(image: Tensor, size: Any, *how: Any) -> Tensor:
        resized = kernel(image, size, *how)
        lengths = zip(resized.shape[2:], image.shape[2:], how[-1] or (), strict=False)
        if any(length == before for length, before, factor in lengths if factor != 1):
            raise RuntimeError("an image is enlarged by a factor that leaves its size as it is")
        return resized

    return resize


def _layer_by_layer(kernel: Callable[..., Any], packed: bool) -> Callable[..., Any]:
    """Recurrent layers, with dropout between them. packed: of sequences in one tensor, after which their numbers stand
    that are as long; else the last argument says whether the batch is the first dimension."""

    def layers(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        numbers, (hx, params, biases, num_layers, dropout, train, *both) = args[:packed], args[packed:]
        if not (train and dropout and num_layers > 1):
            return kernel(x, *args)
        states = [hx] if isinstance(hx, Tensor) else hx
        width, num_params = states[0].shape[0] // num_layers, len(params) // num_layers
        batch_first = not packed and both[1]
        x, found = x.transpose(0, 1) if batch_first else x, []
        for i in range(num_layers):
            given = [state.narrow(0, i * width, width) for state in states]
            of = given[0] if isinstance(hx, Tensor) else given, params[i * num_params : (i + 1) * num_params]
            x = torch.dropout(x, dropout, True) if i else x
            x, *state = kernel(x, *numbers, *of, biases, 1, 0.0, train, both[0], *(() if packed else (False,)))
            found.append(state)
        return x.transpose(0, 1) if batch_first else x, *(torch.cat(parts) for parts in zip(*found, strict=True))

    return layers


@cache
def _is_composite(func: Any) -> bool:
    """Whether it is written in terms of other ops, for which autograd has formulas."""
    if func in _METADATA or func.namespace == "prim":  # questions, such as where a number of the host's lies
        return False
    return _COMPOSITE in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def all_named(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments of a torch function that a mode was told of, with those that torch has left out: it tells
    all of `l1_loss` but its weight. To be asked by `__torch_function__` itself."""
    named, code = kwargs or {}, getattr(func, "__code__", None)
    told_by = sys._getframe(2).f_back  # behind handle_torch_function
    if code is None or told_by is None or told_by.f_code is not code:
        return named
    positional, count = code.co_varnames[: code.co_argcount], code.co_argcount + code.co_kwonlyargcount
    rest = (*positional[len(args) :], *code.co_varnames[code.co_argcount : count])
    return {**{name: told_by.f_locals[name] for name in rest}, **named}


def in_backward() -> bool:
    """Whether autograd runs this, on the thread of its caller or on one of its own."""
    return torch._C._current_autograd_node() is not None


@cache
def _grad_under_modes() -> Callable[..., Any]:
    grad = torch.autograd.grad
    names = {**grad.__globals__, "has_torch_function": lambda _: False}
    function = FunctionType(grad.__code__, names, grad.__name__, grad.__defaults__, grad.__closure__)
    function.__kwdefaults__ = grad.__kwdefaults__
    return function


def grad_under(mode: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad, in which a mode of torch functions sees what Python calls in the backward. To torch `grad`
    is itself such a function, under which the mode would be off."""
    with mode:
        return _grad_under_modes()(*args, **kwargs)


def modes_of_functions_off() -> Any:
    """Inside, no mode of torch functions sees anything: for what serves an op. Autograd calls ops past such modes."""
    return torch._C.DisableTorchFunction()


def registered_backward(function: Any) -> Any:
    """What `torch.library.register_autograd` was given, of the autograd Function that torch makes of it; else None."""
    if not function.__module__.startswith("torch._library."):
        return None
    cells = list(function.backward.__closure__ or ())
    while cells:
        value = cells.pop().cell_contents
        if hasattr(value, "_backward_fn"):
            return value._backward_fn
        cells += getattr(value, "__closure__", None) or ()  # with lists of tensors it is wrapped
    return None


_CYCLES_A_SECOND = 2e9  # of a GPU, about

_HAS_NODE_HOOKS = hasattr(torch._C._autograd, "_push_node_creation_hook")  # not in torch 2.13


def _find_question() -> Callable[[], bool]:
    """Whether nobody is told of the nodes: torch's C++ knows, its Python has no name for it."""
    if _HAS_NODE_HOOKS:
        try:
            library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            function = library._ZN2at4impl17NodeCreationHooks5emptyEv
        except (OSError, AttributeError):  # no Linux
            return lambda: True
        function.argtypes, function.restype = (), ctypes.c_bool
        return function
    return lambda: True


_nobody_told_of_nodes = _find_question()


def told_of_nodes() -> bool:
    """Whether this thread is inside torch.autograd.graph.node_creation_hook: each node that autograd makes is shown."""
    return not _nobody_told_of_nodes()


@contextmanager
def asked_for_nodes(tell: Callable[..., Any]) -> Iterator[None]:
    """Inside, `tell` is called instead where a node_creation_hook begins, in any thread; with torch's own way."""
    module: Any = torch._C._autograd
    if not _HAS_NODE_HOOKS:
        yield
        return
    push = module._push_node_creation_hook
    module._push_node_creation_hook = lambda hook: tell(push, hook)
    try:
        yield
    finally:
        module._push_node_creation_hook = push


def wait_on_device(seconds: float) -> None:
    """What is queued on the current stream from now on begins about so much later."""
    if hasattr(torch._C, "_cuda_sleep"):
        torch.cuda._sleep(round(seconds * _CYCLES_A_SECOND))


@cache
def quick_empty(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor] | None:
    """torch.empty_strided (shape, strides, type) on this device, past the dispatcher and its modes: a third of the time
    on the host. None where torch has none, and where another device may be the current one, on which it makes them."""
    function = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    function = getattr(function, "_empty_strided_cuda", None)
    if function is None or device.type != "cuda" or torch.cuda.device_count() != 1:
        return None
    try:
        made = function((1,), (1,), torch.uint8)
    except RuntimeError:  # devices that are not there
        return None
    return function if made.device == device else None


@cache
def maker_on(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """The quickest function of (shape, strides, type) that makes tensors on this device; their elements are any."""

    def make(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return quick_empty(device) or make


def register_fake(library: torch.library.Library, name: str) -> Callable[[FunctionType], FunctionType]:
    """Decorator: as torch.library.register_fake. That reads the source of the module again for each operator, which was
    a fifth of the time that importing took."""

    def register(function: FunctionType) -> FunctionType:
        place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        holder = simple_registry.singleton.find(f"{library.ns}::{name}").fake_impl
        holder.register(function, place, lib=library, allow_override=True)
        return function

    return register


def cpu_allocations(run: Callable[[], Any]) -> list[int]:
    """Call it; the bytes that this thread took of torch's allocator for CPUs meanwhile or, negative, gave back, in that
    order, while the result was alive. By torch's older profiler, which records a thread alone: it may run while another
    thread is profiled, where a second session of the newer one crashes the process."""
    settings = False, True, False, False, False  # no shapes, memory, no stacks, operations or modules
    begin = ProfilerConfig(ProfilerState.CPU, *settings, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(begin)
    try:
        result = run()
    finally:
        records = torch.autograd._disable_profiler_legacy()
    del result
    events = (event for thread in records for event in thread)
    return [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]


def profile_again(profiler: Any) -> None:
    """Give back what `sys.getprofile` gave. cProfile's of Python 3.11 is an object that cannot be called."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()


def scaled_product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(left * left_scale) times (right * right_scale): of matrices in float8, the second of which lies column by
    column, and one number for each. dtype: the result's."""
    return torch._scaled_mm(left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype)


def same_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether writes to one are counted in the other, where autograd looks for them; tensors of inference mode count
    none."""
    if one.is_inference() or other.is_inference():
        return True
    before = other._version
    with torch.autograd._unsafe_preserve_version_counter(one):
        torch.autograd.graph.increment_version(one)
        return other._version > before


def held_in_torch(value: Tensor) -> tuple[int, int]:
    """How many refer to a tensor's memory, and how many to the tensor within torch."""
    return torch._C._storage_Use_Count(value.untyped_storage()._cdata), value._use_count()  # type: ignore[attr-defined]


_REFERENCES = "run_getrefcount({0}), run_held_in_torch({0})"
ALONE = f"({_REFERENCES}) == run_alone"
"""Text of whether a local variable is all that refers to a tensor, by ALONE_NAMES. Python's references are asked for
where the variable is: a function of Python's would add one, and another one where TorchDynamo watches calls."""
ALONE_NAMES: dict[str, Any] = {"run_getrefcount": sys.getrefcount, "run_held_in_torch": held_in_torch}
exec(f"def run(inputs):\n    x, = inputs\n    inputs.clear()\n    return {_REFERENCES.format('x')}", ALONE_NAMES)
ALONE_NAMES["run_alone"] = ALONE_NAMES.pop("run")([torch.empty(1, device="cpu")])
del ALONE_NAMES["__builtins__"]
