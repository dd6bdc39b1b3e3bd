"""Triton's driver for the simulated devices: compiles for sm_90 as on a real one, checks each launch, and runs it on the
host as `evaluate` says, or not at all.

A launch is refused where a device would go wrong: memory that was freed, is too short or is another device's, a stream
of another device, more threads than the kernel's registers allow.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

from tests.simulated.device import Device
from tests.simulated.meanings import Meanings
from tests.simulated.runtime import CAPABILITY, PROPERTIES

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Launch:
    """One launch as the driver got it. addresses: of the pointers among its arguments."""

    name: str
    programs: int
    warps: int
    device: int
    stream: int
    addresses: tuple[int, ...]
    captured: bool


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, for each thread (registers, stack bytes) and each program (shared bytes)."""

    registers: int
    stack: int
    shared: int


class LaunchError(RuntimeError):
    """A launch that a device would not survive."""


@dataclass
class Log:
    """launches: since `clear`; resources: of each kernel that was loaded, by its name; skipped: kernels that have no
    meaning here, whose launches compute nothing."""

    launches: list[Launch] = field(default_factory=list)
    resources: dict[str, Resources] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    meanings: Meanings = field(default_factory=Meanings)

    def clear(self) -> None:
        self.launches.clear()


def install_driver(device: Device) -> Log:
    """Triton runs on the simulated devices from now on."""
    log = Log()
    triton.runtime.driver.set_active(Driver(device, log))
    return log


class Utils:
    def __init__(self, log: Log):
        self.log = log

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": PROPERTIES.shared_memory_per_block_optin, "max_num_regs": _REGISTERS,
            "multiprocessor_count": PROPERTIES.multi_processor_count, "warpSize": 32,
        }  # fmt: skip

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        found = resources(binary)
        self.log.resources[name] = found
        most = min(1024, _REGISTERS // max(found.registers, 1) // 32 * 32)
        return name, name, found.registers, found.stack // 4, most

    def unload_module(self, module: Any) -> None: ...


def resources(binary: bytes) -> Resources:
    """Of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return Resources(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], numbers["SHARED"])


class Driver(GPUDriver):
    def __init__(self, device: Device, log: Log):
        self.device, self.log, self.utils = device, log, Utils(log)
        self.get_current_device = device.native.current_device
        self.set_current_device = device.native.set_device
        self.get_current_stream = device.native.current_stream
        self.get_device_capability = lambda index: CAPABILITY

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return Launcher(self, source, metadata)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        raise NotImplementedError

    def clear_cache(self, cache: Any) -> None: ...


class Launcher:
    """Stands for Triton's: called with the grid, the stream, the function, and the kernel's arguments."""

    def __init__(self, driver: Driver, source: Any, metadata: Any):
        self.driver, self.metadata = driver, metadata
        self.name, self.module = source.fn.__name__, source.fn.__module__
        self.types = list(source.signature.values())

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, launch_metadata: Any, enter: Any,
        leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        device, log = self.driver.device, self.driver.log
        assert (y, z) == (1, 1) and len(arguments) == len(self.types) and function == self.metadata.name
        current = device.native.current_device()
        if stream and stream != device.native.current_stream(current):
            raise LaunchError(f"{self.name}: stream {stream} is not the current one of device {current}")
        given = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        pointers = [v for v, kind in zip(given, self.types, strict=True) if kind.startswith("*")]
        captured = device.capture is not None
        log.launches.append(Launch(self.name, x, self.metadata.num_warps, current, stream, tuple(pointers), captured))
        device.note(self.name, [current], current, stream)
        spans = log.meanings.spans(self.module, self.name) or [1] * len(pointers)
        for number, (address, span) in enumerate(zip(pointers, spans, strict=False)):
            self._check(number, address, span, current)
        meaning = log.meanings.of(self.module)
        if meaning is None:
            log.skipped.add(self.name)
        elif x:
            device.queue(lambda: meaning(self.name, x, given), pointers)

    def _check(self, number: int, address: int, span: int, current: int) -> None:
        if not address and not span:
            return
        device, room = self.driver.device.room_at(address)
        if device != current:
            raise LaunchError(f"{self.name}: argument {number} is on device {device}, and {current} is current")
        if room < span:
            raise LaunchError(f"{self.name}: argument {number} has {room} bytes of the {span} that it reaches over")
