"""Torch's default random generators as ops of a program, for rng="eager": what a program reads of them and sets in them
happens anew in every call, in program order between its draws.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import disable_modes, enable_dispatch
from aottrain.compat_dispatch import register_fake
from aottrain.errors import UnsupportedError

_ops = torch.ops.aottrain
_CPU = torch.default_generator
_STATE_BYTES = {"cpu": _CPU.get_state().numel(), "cuda": 16}

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define("get_rng_state(Device device) -> Tensor")
_library.define("set_rng_state(Tensor state, Device device) -> ()")
_library.define("manual_seed(int seed, Device device) -> ()")


def _generator(device: torch.device) -> torch.Generator:
    return _CPU if device.type == "cpu" else torch.cuda.default_generators[device.index]


def _get_rng_state(device: torch.device) -> Tensor:
    return _generator(device).get_state()


def _set_rng_state(state: Tensor, device: torch.device) -> None:
    _generator(device).set_state(state)


def _manual_seed(seed: int, device: torch.device) -> None:
    _generator(device).manual_seed(seed)


for _name, _function in {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@register_fake(_library, "get_rng_state")
def _(device: torch.device) -> Tensor:
    return torch.empty(_STATE_BYTES[device.type], dtype=torch.uint8)


@register_fake(_library, "set_rng_state")
def _(state: Tensor, device: torch.device) -> None:
    if state.dtype != torch.uint8 or state.device.type != "cpu" or state.shape != (_STATE_BYTES[device.type],):
        raise UnsupportedError(f"the program sets a generator's state to a {state.dtype}{list(state.shape)}")


@register_fake(_library, "manual_seed")
def _(seed: int, device: torch.device) -> None: ...


class _StandIn:
    """In the place of a default generator while a program is traced. Other threads reach the real one through it."""

    def __init__(self, real: torch.Generator, traceable: bool):
        self._real, self._traceable, self._thread = real, traceable, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._thread:
            return getattr(self._real, name)
        if not self._traceable or name not in ("get_state", "set_state", "manual_seed"):
            raise UnsupportedError(f"the program calls {name} of torch's random generator")
        return getattr(self, f"_{name}")

    def _get_state(self) -> Tensor:
        with enable_dispatch():
            return _ops.get_rng_state(self._real.device)

    def _set_state(self, state: Tensor) -> _StandIn:
        with enable_dispatch():
            _ops.set_rng_state(state, self._real.device)
        return self

    def _manual_seed(self, seed: int) -> _StandIn:
        with enable_dispatch():
            _ops.manual_seed(seed, self._real.device)
        return self


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """What eager ops draw inside leaves the generators of the CPU and the device as they were, also during a trace."""
    generators = [_CPU]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = _generator(torch.device(device.type, index))
        generators.append(getattr(generator, "_real", generator))
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def generators_traced(rng: str) -> Iterator[None]:
    """Inside, torch's seeding functions add ops to the program under rng="eager"; else they are refused.

    Raises UnsupportedError where the program reaches a generator behind their back: it must be left as it was.
    """
    # Before the accelerator is initialised torch queues seeds for it, which no op does.
    on_device = torch.accelerator.is_available()
    traceable = rng == "eager" and (not on_device or torch.cuda.is_initialized())
    generators = torch.random.default_generator, torch.cuda.default_generators
    state = _CPU.get_state()
    torch.random.default_generator = _StandIn(_CPU, traceable)  # type: ignore[assignment]
    if on_device:
        torch.cuda.default_generators = tuple(_StandIn(value, traceable) for value in generators[1])  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = generators[0]
        if generators[1]:  # else the device may have been initialised meanwhile, which gave it some
            torch.cuda.default_generators = generators[1]
        with disable_modes():
            moved = not torch.equal(_CPU.get_state(), state)
        _CPU.set_state(state)
    if moved:
        raise UnsupportedError("the program draws from or sets torch's random generator in a way that cannot be traced")
