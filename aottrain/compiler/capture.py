"""capture: a call of the user's function or module becomes a pure function of explicit state.

Also the mode that is active whenever the user's code is traced: it numbers random draws, writes the hidden mutations
of batch normalisation out, and notes which module and source line each op came from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from aottrain.compat import tree_flatten, tree_unflatten
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import InputKind, InputSpec, set_provenance
from aottrain.ir.ops import hidden_mutation
from aottrain.ir.tensor import tensor_spec
from aottrain.runtime.rng import PhiloxMode

aten = torch.ops.aten


@dataclass(frozen=True)
class CapturedStep:
    """One call as a pure function: `call(primals)` runs the user's code on flat tensors and gives its raw result.

    primals: the real tensors, parameters then buffers then batch, duplicates removed; inputs: what each is.
    """

    call: Callable[[Sequence[Tensor]], Any]
    primals: tuple[Tensor, ...]
    inputs: tuple[InputSpec, ...]
    module: nn.Module | None

    @property
    def device(self) -> torch.device:
        return self.primals[0].device if self.primals else torch.device("cpu")


def capture(
    function: Callable[..., Any], module: nn.Module | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> CapturedStep:
    """Make the state of one call explicit.

    `function` is what runs; where it is a module, `module` is that same object and its parameters and buffers become
    inputs. Raises UnsupportedError for inputs that this door cannot describe (tensor subclasses, sparse tensors, inputs
    that overlap in memory).
    """
    state = named_state(module)
    leaves, tree = tree_flatten((tuple(args), kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    entries = [*state, *((InputKind.BATCH, f"input{n}", leaves[i]) for n, i in enumerate(positions))]
    inputs = []
    for kind, name, tensor in entries:
        _check_input(name, tensor)
        inputs.append(InputSpec(kind, name, tensor_spec(tensor), tensor.requires_grad))
    check_overlap([(name, tensor) for _, name, tensor in entries])
    names = [name for _, name, _ in state]

    def call(primals: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for i, value in zip(positions, primals[len(names) :], strict=True):
            filled[i] = value
        call_args, call_kwargs = tree_unflatten(filled, tree)
        if module is None:
            return function(*call_args, **call_kwargs)
        return torch.func.functional_call(module, dict(zip(names, primals, strict=False)), call_args, call_kwargs)

    return CapturedStep(call, tuple(tensor for _, _, tensor in entries), tuple(inputs), module)


def named_state(module: nn.Module | None) -> list[tuple[InputKind, str, Tensor]]:
    """Parameters then buffers of a module, each distinct tensor once."""
    if module is None:
        return []
    state = [(InputKind.PARAMETER, name, value) for name, value in module.named_parameters()]
    return state + [(InputKind.BUFFER, name, value) for name, value in module.named_buffers()]


def _check_input(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise UnsupportedError(f"{name} is a tensor subclass, {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{name} has layout {tensor.layout}")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(f"{name} is quantised or a lazy conjugate")
    if tensor.device.type == "meta":
        raise UnsupportedError(f"{name} is on the meta device")


def check_overlap(entries: Sequence[tuple[str, Tensor]]) -> None:
    """Raises UnsupportedError where two named tensors share a storage."""
    owners: dict[int, str] = {}
    for name, tensor in entries:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue
        other = owners.setdefault(storage.data_ptr(), name)
        if other != name:
            raise UnsupportedError(f"{name} shares its memory with {other}")


def fake_primals(step: CapturedStep, mode: FakeTensorMode) -> list[Tensor]:
    """Fresh leaf fakes with the primals' metadata; they share nothing with the real tensors."""
    return [mode.from_tensor(value.detach()).requires_grad_(value.requires_grad) for value in step.primals]


class CaptureMode(PhiloxMode):
    """Active while the user's code is traced: functional draws, visible mutations, provenance of every node."""

    def __init__(self, state: Tensor, provenance: Provenance):
        super().__init__(state)
        self.provenance = provenance

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self.provenance.current()
        rule = _MUTATION_RULES.get(func)
        if rule is not None:
            out = rule(func, args, kwargs or {})
        else:
            if hidden_mutation(func) and func not in _KNOWN_PURE:
                raise UnsupportedError(f"{func} mutates an argument though its schema denies it")
            out = super().__torch_dispatch__(func, types, args, kwargs)
        self.provenance.mark(place)
        return out

    def _next(self, device: torch.device) -> tuple[Tensor, int]:
        if torch._C._current_autograd_node() is not None:
            # torch.utils.checkpoint runs its block again in the backward, and would draw other numbers.
            raise UnsupportedError("the backward draws random numbers")
        return super()._next(device)


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mean, var = given["running_mean"], given["running_var"]
    if not given["training"] or mean is None:
        return func(*args, **kwargs)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    out, save_mean, save_invstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, True, given["momentum"], given["eps"]
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, save_mean, save_invstd


_MUTATION_RULES: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
}
_KNOWN_PURE = {aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default}


class Provenance:
    """Which module and source line is running: forward ops by hooks and stack, backward ops by sequence number."""

    def __init__(self, module: nn.Module | None):
        self.names = {} if module is None else {id(child): name for name, child in module.named_modules()}
        self.stack: list[str] = []
        self.by_sequence: dict[int, tuple[str, str]] = {}
        self.last: fx.Node | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the forwards of the captured module's children."""

        def enter(module: nn.Module, _: Any) -> None:
            if id(module) in self.names:
                self.stack.append(self.names[id(module)])

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if id(module) in self.names and self.stack:
                self.stack.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def current(self) -> tuple[str, str]:
        """(module path, "file.py:line") of the op that is about to run."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.by_sequence.get(node._sequence_nr(), ("", ""))
        place = (self.stack[-1] if self.stack else "", _user_line())
        # The autograd kernel above has numbered this op's gradient node already.
        self.by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def mark(self, place: tuple[str, str]) -> None:
        """Note the place on the nodes that were added since the last call."""
        mode = get_proxy_mode()
        if mode is None:
            return
        node = mode.tracer.graph._root._prev
        newest = node
        while node is not self.last and node.op != "root":
            if node.op == "call_function":
                set_provenance(node, *place)
            node = node._prev
        self.last = newest


_INTERNAL = ("/torch/", "/aottrain/", "<string>", "<eval_with_key>", "/contextlib.py")


def _user_line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if not any(part in name for part in _INTERNAL):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
