"""Seeding inside a program under TorchDynamo, which breaks graphs there: under rng="eager" it is shown functions that
it can trace into our ops. Outside of a trace they do what torch's own do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import aottrain.ops.random.generator  # noqa: F401  # defines operators
from aottrain.compat import load_dynamo_rules

_ops = torch.ops.aottrain
_get_rng_state, _set_rng_state = torch.get_rng_state, torch.set_rng_state
_manual_seed, _fork_rng = torch.random.manual_seed, torch.random.fork_rng
_CPU = torch.device("cpu")


def get_rng_state() -> Tensor:
    if not torch.compiler.is_dynamo_compiling():
        return _get_rng_state()
    return _ops.get_rng_state(_CPU)


def set_rng_state(new_state: Tensor) -> None:
    if not torch.compiler.is_dynamo_compiling():
        return _set_rng_state(new_state)
    _ops.set_rng_state(new_state, _CPU)
    return None


def manual_seed(seed: Any) -> torch.Generator:
    if not torch.compiler.is_dynamo_compiling():
        return _manual_seed(seed)
    _ops.manual_seed(int(seed), _CPU)
    return torch.default_generator


@contextmanager
def _forked() -> Iterator[None]:
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def fork_rng(devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_dynamo_compiling() or devices or not enabled or args or kwargs:
        return _fork_rng(devices, enabled, *args, **kwargs)
    return _forked()


class _Shown:
    """Replaces attributes of torch while any call is inside, in whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before: list[tuple[Any, str, Any]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                load_dynamo_rules()  # by name: of torch's own functions
                for place, name, function in _replacements():
                    self._before.append((place, name, getattr(place, name)))
                    setattr(place, name, function)
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                while self._before and not self._num_inside:
                    setattr(*self._before.pop())


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    functions = (get_rng_state, set_rng_state, manual_seed)
    replacements: list[tuple[Any, str, Any]] = [(torch, function.__name__, function) for function in functions]
    replacements += [(torch.random, "fork_rng", fork_rng)]
    if testing := sys.modules.get("torch.testing._utils"):
        replacements.append((testing, "freeze_rng_state", fork_rng))
    return replacements


shown = _Shown()


@contextmanager
def seeding_shown(rng: str) -> Iterator[None]:
    """TorchDynamo traces seeding inside, where draws are of eager's generator and no other device has one."""
    if rng == "philox" or torch.accelerator.is_available():
        yield
    else:
        with shown():
            yield
