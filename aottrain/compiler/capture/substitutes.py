"""Around a run of the user's code on stand-ins: they take the places of the real tensors, and nothing leaks out."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from aottrain.compat import FakeTensor, is_wrapped, map_values, no_saved_tensor_hooks, onednn, tree_flatten
from aottrain.compat_dispatch import all_named, asked_for_nodes, grad_under, profile_again
from aottrain.compiler.capture.audit import presumed_truth
from aottrain.compiler.capture.checkpoint_regions import reentrant_checkpoint
from aottrain.compiler.capture.covariance import REPLACEMENTS
from aottrain.compiler.capture.torch_settings import global_settings, restore_settings
from aottrain.errors import UnsupportedError, note_refusal
from aottrain.guards.assigned import is_recurrents
from aottrain.ir.tensor import version_of
from aottrain.ops.checks import values_checked
from aottrain.ops.random.generator import generators_traced

CUSTOM_FUNCTION = "a custom autograd.Function"
OTHER_MEMORY = "the program puts other memory behind a tensor by .data"


class PerThread(dict[str, Any]):
    """A dictionary that is another one for the thread that makes it: `shared` for all others, whose writes go there."""

    def __init__(self, shared: dict[str, Any], own: dict[str, Any]):
        super().__init__(shared)  # for what reads a dictionary in C, past these methods
        self.shared = shared
        self._own = own
        self._before = dict(own)
        self._thread = threading.get_ident()

    def moved(self) -> list[str]:
        """The keys whose values its maker has changed, added or removed."""
        keys = {**self._before, **self._own}
        return [key for key in keys if self._own.get(key, keys) is not self._before.get(key, keys)]

    def seen(self) -> dict[str, Any]:
        return self._own if threading.get_ident() == self._thread else self.shared

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.shared), (dict(self.seen()),)


def _delegated(name: str) -> Any:
    def method(self: PerThread, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.seen(), name)(*args, **kwargs)

    return method


for _name in (
    "__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__",
    "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem",
    "setdefault", "update", "values",
):  # fmt: skip
    setattr(PerThread, _name, _delegated(_name))


@contextmanager
def installed(module: nn.Module, table: dict[int, Tensor]) -> Iterator[None]:
    """Inside, each parameter and buffer slot of the tree holds the stand-in of its tensor (tied ones the same), as this
    thread sees it: others, which may train or save the module meanwhile, see the tensors.

    Raises UnsupportedError where the program puts another tensor into a slot: that would be lost with the stand-ins.
    """
    owners = {id(vars(child)): vars(child) for child in module.modules()}.values()
    slots = [
        (attributes, kind, PerThread(tensors, {name: _stand_in(table, value) for name, value in tensors.items()}))
        for attributes in owners
        for kind in ("_parameters", "_buffers")
        if (tensors := attributes[kind])
    ]
    recurrent = [
        (vars(child), {name: value for name, value in vars(child).items() if is_recurrents(child, name)})
        for child in module.modules()
        if isinstance(child, nn.RNNBase)
    ]
    for attributes, kind, slot in slots:
        attributes[kind] = slot
    try:
        yield
        moved = [name for _, _, slot in slots for name in slot.moved()]
    finally:
        for attributes, before in recurrent:
            attributes.update(before)
        for attributes, kind, slot in slots:
            attributes[kind] = slot.shared
    if moved:
        raise UnsupportedError(f"the program assigns another tensor to {moved[0]}")


def _stand_in(table: dict[int, Tensor], value: Tensor | None) -> Tensor | None:
    return None if value is None else table[id(value)]


@contextmanager
def contained(rng: str) -> Iterator[None]:
    """Around every run of the user's code on stand-ins: what it would do to the world beside its inputs is refused."""
    backward, thread = torch.autograd.backward, threading.get_ident()  # others go on training meanwhile

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return backward(*args, **kwargs)
        raise UnsupportedError("the program calls backward() inside")

    torch.autograd.backward = refuse
    try:
        # oneDNN's composite ops are taken apart, but for an LSTM's layers: see `_lstm`.
        _onednn.allowed = torch.backends.mkldnn.enabled
        with outside_kept(rng), onednn(False):
            yield
    finally:
        torch.autograd.backward = backward


@contextmanager
def outside_kept(rng: str) -> Iterator[None]:
    """Around code that a trace runs: modes, settings and random numbers are after it what they were before.

    Raises UnsupportedError where the program changes them.
    """
    grad_mode, settings = torch.is_grad_enabled(), global_settings()
    random_state, numpy_state = random.getstate(), numpy.random.get_state()
    thread = threading.get_ident()

    def refuse_hook(push: Any, hook: Any) -> Any:
        if threading.get_ident() != thread:
            return push(hook)
        raise UnsupportedError("the program is shown the nodes that autograd makes, by node_creation_hook")

    try:
        with generators_traced(rng), no_saved_tensor_hooks(), asked_for_nodes(refuse_hook):
            yield
        if torch.is_grad_enabled() != grad_mode:
            raise UnsupportedError("the program changes the grad mode of its caller")
        if global_settings() != settings:
            raise UnsupportedError("the program changes torch's settings: the default type, determinism, threads")
        # As bytes: to print NumPy's state would take a fifth of the time of a small program's compile.
        numpy_drew = pickle.dumps(numpy.random.get_state()) != pickle.dumps(numpy_state)
        if numpy_drew or random.getstate() != random_state:
            raise UnsupportedError("the program draws from Python's or NumPy's random generator")
    finally:
        torch.set_grad_enabled(grad_mode)
        restore_settings(settings)
        random.setstate(random_state)
        numpy.random.set_state(numpy_state)


@contextmanager
def swapping(table: dict[int, Tensor], inputs: set[int], notes: set[str]) -> Iterator[None]:
    """Inside, torch functions that are given a tensor of the table (by identity) see its stand-in.

    Raises UnsupportedError where the program asks what only the real tensors know; inputs: identities of the stand-ins.
    """
    apply = torch.autograd.Function.__dict__["apply"]  # a classmethod, and of C's since torch 2.14
    thread = threading.get_ident()

    def swapped(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return apply.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            return reentrant_checkpoint(*args)
        # Not a torch function: the mode below does not see it, and the gradient would go to the real tensor.
        notes.add(CUSTOM_FUNCTION)
        return apply.__get__(None, cls)(*_swap(table, args), **_swap(table, kwargs))

    function: Any = torch.autograd.Function
    function.apply = classmethod(swapped)
    try:
        storages = asked_of_fakes(("untyped_storage", "storage"), _refuse_storage)
        with _StandInMode(table, inputs), storages, _fast_paths_refused(thread):
            yield
    finally:
        function.apply = apply


@contextmanager
def _fast_paths_refused(thread: int) -> Iterator[None]:
    """Inside, attention layers that find everything as their fast path wants it, in evaluation without gradients, are
    refused on this thread: they take it in eager, but in no mode, and it has other results at what a mask leaves out.
    """
    original = torch.overrides.has_torch_function

    def asked(args: Iterable[Any]) -> bool:
        asks = sys._getframe(1).f_globals.get("__name__") in _WITH_FAST_PATH and threading.get_ident() == thread
        if asks and not (torch.is_grad_enabled() and any(map(_needs_gradient, args))):
            raise UnsupportedError("eager takes the fast path of an attention layer in evaluation")
        return original(args)

    torch.overrides.has_torch_function = asked
    try:
        yield
    finally:
        torch.overrides.has_torch_function = original


def _needs_gradient(value: Tensor | None) -> bool:
    return value is not None and value.requires_grad


_WITH_FAST_PATH = ("torch.nn.modules.activation", "torch.nn.modules.transformer")


@contextmanager
def asked_of_fakes(methods: Sequence[str], tell: Callable[[Tensor, Any], None]) -> Iterator[None]:
    """Inside, `tell` hears what code that is neither torch's nor ours asks of a fake, and the answer: the user's
    program, or the fake of a custom operator, which no mode sees."""
    thread, before = threading.get_ident(), {name: vars(FakeTensor).get(name) for name in methods}

    def asked(name: str) -> Callable[[Tensor], Any]:
        method = getattr(FakeTensor, name)

        def ask(self: Tensor) -> Any:
            told = method(self)
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if caller not in ("torch", "aottrain") and threading.get_ident() == thread:
                tell(self, told)
            return told

        return ask

    for name in methods:
        setattr(FakeTensor, name, asked(name))
    try:
        yield
    finally:
        for name, method in before.items():
            delattr(FakeTensor, name) if method is None else setattr(FakeTensor, name, method)


def _refuse_storage(tensor: Tensor, told: Any) -> None:
    raise UnsupportedError("something asks for the memory behind a tensor, whose size no guard holds")


def _swap(table: dict[int, Tensor], value: Any) -> Any:
    return map_values(lambda leaf: table.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf, value)


_GRADIENT = tuple(getattr(Tensor.grad, f"__{action}__") for action in ("get", "set", "delete"))
# Of any tensor, and of inputs: stand-ins have no gradient, other versions and addresses, no numbers that a Python
# function could be applied to, and are all leaves.
_UNKNOWN = (
    *_GRADIENT,
    Tensor._version.__get__,  # type: ignore[attr-defined]
    *(getattr(Tensor, f"__{name}__") for name in ("dlpack", "repr", "format")),
    *(getattr(Tensor, name) for name in ("data_ptr", "apply_", "map_", "map2_")),
)
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)
_UNKNOWN_OF_INPUTS = (
    *(getattr(Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "_base")),
    Tensor._is_view,
    *_HOOKS,
)

# No op: the tensor would stay what it was computed as.
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """As on real tensors: a trace of torch's own compares with a range, which lets a class outside it pass unseen."""
    if num_classes <= 0 or tensor.numel() == 0:
        return torch.nn.functional.one_hot(tensor, num_classes)
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *more: Any, **named: Any
) -> Tensor:
    """With lengths as tensors: of lists C++ makes tensors that no trace sees."""
    inputs, outputs = (torch.tensor(v) if isinstance(v, (list, tuple)) else v for v in (input_lengths, target_lengths))
    return torch.nn.functional.ctc_loss(log_probs, targets, inputs, outputs, *more, **named)


_onednn = threading.local()  # whether the user's settings allow it, while this thread traces


def _lstm(*args: Any, **kwargs: Any) -> Any:
    """By oneDNN where eager takes it: taken apart, each step of time is products and gates of its own. Of symbolic
    sizes the library's workspace is not known."""
    is_fixed = all(isinstance(size, int) for size in args[0].shape)
    with onednn(True) if is_fixed and getattr(_onednn, "allowed", False) else nullcontext():
        return torch.lstm(*args, **kwargs)


def _multilabel_margin_loss(*args: Any, **kwargs: Any) -> Tensor:
    """Where sizes may be symbolic, though its own are not, torch takes it apart before any mode sees it, and its parts
    compute another number."""
    of_any_size = isinstance(args[0], FakeTensor) and args[0].fake_mode.shape_env is not None
    if of_any_size or any(isinstance(size, torch.SymInt) for size in args[0].shape):
        raise UnsupportedError("multilabel_margin_loss of symbolic sizes")
    return torch.nn.functional.multilabel_margin_loss(*args, **kwargs)


_REPLACEMENTS: dict[Any, Any] = {
    torch.nn.functional.multilabel_margin_loss: _multilabel_margin_loss,
    torch.lstm: _lstm,
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.ctc_loss: _ctc_loss,
    # By way of an operator: what is no fake torch reads from its memory, past every mode, and no guard holds it.
    Tensor.tolist: lambda tensor: tensor.detach().tolist(),
    **REPLACEMENTS,
}


class _StandInMode(TorchFunctionMode):
    def __init__(self, table: dict[int, Tensor], inputs: set[int]):
        super().__init__()
        self.table = table
        self.inputs = inputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        profile = sys.getprofile()
        sys.setprofile(None)  # the audit is of the user's code, and would slow this down
        try:
            kwargs = all_named(func, args, kwargs)
            if self.is_unknown(func, args):
                method = getattr(func, "__self__", func)
                raise UnsupportedError(f"the program uses Tensor.{method.__name__}, which a trace cannot know")
            if func == _SET_DATA:
                raise UnsupportedError(OTHER_MEMORY)
            if self.table:
                args, kwargs = _swap(self.table, args), _swap(self.table, kwargs)
        finally:
            profile_again(profile)
        try:
            return self._run(func, args, kwargs)
        except Exception as error:  # such as that fakes have no numpy(); the program may catch it
            if not isinstance(error, UnsupportedError):
                note_refusal(f"{getattr(func, '__name__', func)}, {type(error).__name__}")
            raise

    def is_unknown(self, func: Any, args: Any) -> bool:
        of_input = bool(args) and (id(args[0]) in self.inputs or id(args[0]) in self.table)
        return func in _UNKNOWN or (of_input and func in _UNKNOWN_OF_INPUTS)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.__bool__ and (truth := presumed_truth(args[0], sys._getframe(2))) is not None:
            return truth
        if func is torch.autograd.grad:
            return grad_under(_BackwardMode(self.table, self.inputs), args, kwargs)
        stand_in = _REPLACEMENTS.get(func)
        if stand_in is not None:
            return stand_in(*args, **kwargs)
        if func is torch.nn.functional.gaussian_nll_loss:
            with values_checked("var has negative entry/entries"):
                return func(*args, **kwargs)
        if not kwargs or kwargs.get("out") is None:
            return func(*args, **kwargs)
        return _run_into(func, args, kwargs)


def _run_into(func: Any, args: Any, kwargs: Any) -> Any:
    """A call with `out=`: some functions of torch leave it as it was, and make a new result for tensors of a tracer."""
    outs = [out for out in tree_flatten(kwargs["out"])[0] if isinstance(out, Tensor)]
    before = list(map(version_of, outs))
    result = func(*args, **kwargs)
    for out, version in zip(outs, before, strict=True):
        if version is not None and version_of(out) == version and out.numel():
            raise UnsupportedError(f"{func.__name__} with out=, of which a trace does not see what is written")
    return result


class _BackwardMode(_StandInMode):
    """In the Python that autograd runs: leaves that it makes have gradients, as where a part is computed again; what
    it does to tensors that are no stand-ins it does to the user's."""

    def is_unknown(self, func: Any, args: Any) -> bool:
        first = args[0] if args else None
        if isinstance(first, Tensor) and not isinstance(first, FakeTensor) and not is_wrapped(first):
            if func in _HOOKS or func is Tensor.requires_grad_ or getattr(func, "__name__", "") == "__set__":
                return True
        elif func in _GRADIENT and first is not None and first.is_leaf and id(first) not in self.inputs:
            return False
        return super().is_unknown(func, args)


@contextmanager
def gradients_left(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Around torch.autograd.grad of the whole program. Raises UnsupportedError where its Python asks what only the real
    tensors know, or leaves gradients in the program's inputs."""
    with _StandInMode({}, {id(value) for value in inputs}):
        yield
    if any(value.is_leaf and value.grad is not None for value in inputs):
        raise UnsupportedError("the backward leaves gradients in an input of the program")
