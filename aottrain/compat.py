"""The one place that hides private torch names, and what differs between torch 2.11 and 2.13.

The compiler's own users of private names are capture, analysis, joint and functional; all else imports from here.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


def flatten_result(result: Any) -> tuple[list[Any], Any]:
    """tree_flatten, which takes a torch.Size for a tuple and rebuilds it as one."""
    return tree_flatten(result, is_leaf=lambda value: isinstance(value, torch.Size))


__all__ = [
    "PLAIN_TYPES",
    "TorchDispatchMode",
    "ask_policy",
    "autocast_cache",
    "autocast_state",
    "disable_autocast",
    "disable_modes",
    "dynamo_settings",
    "flatten_result",
    "global_settings",
    "in_dual_level",
    "is_wrapped",
    "has_function_modes",
    "has_global_module_hooks",
    "patched_checkpoint",
    "restore_settings",
    "selective_policy",
    "tracing_alone",
    "tree_flatten",
    "tree_map",
    "no_onednn",
    "no_saved_tensor_hooks",
    "set_view_origin",
    "tree_unflatten",
    "view_origin",
]

_AUTOCAST_DEVICES = ("cpu", "cuda")


def disable_autocast() -> torch._C._DisableAutocast:
    """Context manager: autocast is off on every device inside it."""
    return torch._C._DisableAutocast()


def disable_modes() -> Any:
    """Context manager: no dispatch mode sees the ops inside it."""
    return _disable_current_modes()


def dynamo_settings(**settings: Any) -> Any:
    """Context manager, to be entered again and again: TorchDynamo's options inside it."""
    import torch._dynamo.config as config  # here, because it takes a second that most programs need not spend

    return config.patch(**settings)


@contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Autocast keeps (or not) the low-precision copy of a weight for its second use, as it does around eager code.

    Tracers switch it off; but then the gradient of a weight that is used twice is summed in another precision.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


@contextmanager
def patched_checkpoint(make: Any) -> Iterator[None]:
    """Inside, torch.utils.checkpoint(use_reentrant=False) runs its function between the two halves of the generator
    that make(original generator function) gives, whatever name the user's code knows it by."""
    module = torch.utils.checkpoint
    original = module._checkpoint_without_reentrant_generator
    module._checkpoint_without_reentrant_generator = make(original)
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = original


def ask_policy(policy: Any, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """What a policy of selective checkpointing answers for an op; torch 2.11 may not tell it the op's result."""
    context = torch.utils.checkpoint.SelectiveCheckpointContext
    known = {"op_output": out} if "op_output" in inspect.signature(context).parameters else {}
    return policy(context(is_recompute=False, **known), func, *args, **kwargs)


def selective_policy(context: Any) -> Any:
    """The policy behind a forward context of torch's create_selective_checkpoint_contexts; None for any other."""
    known = type(context) is torch.utils.checkpoint._CachingTorchDispatchMode
    return context.policy_fn if known else None


_GLOBAL_HOOKS = re.compile("_global_(forward|backward)(_pre)?_hooks")

# Values that compare by equality and hash: guards may hold them.
PLAIN_TYPES = (
    type(None), bool, int, float, complex, str, bytes, slice, type(...),
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
)  # fmt: skip


@contextmanager
def no_onednn() -> Iterator[None]:
    """oneDNN's own composite ops are off inside (not through torch.backends, which warns about other devices)."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


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


def in_dual_level() -> bool:
    """Whether tensors can carry forward-mode tangents, of torch.autograd.forward_ad or of torch.func."""
    return torch.autograd.forward_ad._current_level >= 0


def is_wrapped(value: torch.Tensor) -> bool:
    """Whether a torch.func transformation (grad, vmap) has wrapped the tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


def global_settings() -> tuple[Any, ...]:
    """What a program can set for all code after it, beside the grad mode."""
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_default_dtype(), deterministic, torch.get_num_threads(), autocast_state()


def restore_settings(settings: tuple[Any, ...]) -> None:
    dtype, deterministic, num_threads, _ = settings
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def has_function_modes() -> bool:
    """Whether a TorchFunctionMode is active, other than torch's own for the default device."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def has_global_module_hooks() -> bool:
    """Whether anyone but this package has registered hooks that every module runs."""
    tables = [table for name, table in vars(torch.nn.modules.module).items() if _GLOBAL_HOOKS.fullmatch(name)]
    hooks = [hook for table in tables for hook in table.values()]
    return any(not getattr(hook, "__module__", "").startswith("aottrain.") for hook in hooks)


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


def view_origin(value: torch.Tensor) -> Any:
    """How autograd thinks that a differentiable view was made; None where the value is no view."""
    return torch._C._autograd._get_creation_meta(value) if value._is_view() else None


def set_view_origin(value: torch.Tensor, origin: Any) -> None:
    """Make autograd treat a view as one of the given origin: of several outputs, under no_grad, and so on."""
    if origin is not None and value._is_view():
        torch._C._autograd._set_creation_meta(value, origin)


def autocast_state() -> tuple[object, ...]:
    """What autocast would do to the next op, as a hashable value."""
    state: list[object] = []
    for device in _AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            state += [device, torch.get_autocast_dtype(device)]
    if state:
        state.append(torch.is_autocast_cache_enabled())
    return tuple(state)
