"""Triton's driver for the simulated devices: each launch is checked, and run on the host as `evaluate` says, or not.

Triton's front end sees each kernel; whether it becomes sm_90's machine code, too, as on a device, is `Log.compiles`.
A launch is refused where a device would go wrong: memory that was freed, is too short or is another device's, a stream
of another device, more threads than the kernel's registers allow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.compiler import make_backend

from tests.simulated.device import Device
from tests.simulated.judging import resources
from tests.simulated.meanings import Meanings
from tests.simulated.runtime import CAPABILITY, PROPERTIES

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
    kernel: str = ""  # the key of what was compiled, in `Log.compiled`


@dataclass(frozen=True)
class Compiled:
    """A kernel as Triton was asked for it: its source with types and alignments, and its options."""

    source: Any
    metadata: Any


class LaunchError(RuntimeError):
    """A launch that a device would not survive."""


@dataclass
class Log:
    """launches: since `clear`; compiled: what was launched, by module and name; skipped: kernels that have no meaning
    here, whose launches since `clear` compute nothing. compiles: whether kernels become machine code, or Triton's front
    end alone has seen them, which takes a tenth of the time."""

    compiles: bool = False

    launches: list[Launch] = field(default_factory=list)
    compiled: dict[str, Compiled] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    meanings: Meanings = field(default_factory=Meanings)

    def clear(self) -> None:
        self.launches.clear()
        self.skipped.clear()


_logs: list[Log] = []
_handles: list[Launcher] = []  # of kernels, in the place of the driver's: number i + 1 is a function


def install_driver(device: Device) -> Log:
    """Triton runs on the simulated devices from now on."""
    if not _logs:
        driver = Driver(device, Log())
        triton.runtime.driver.set_active(driver)
        triton.compiler.compile = compiler_of(driver)
        _logs.append(driver.log)
    return _logs[0]


class Utils:
    """What Triton asks of the driver when it loads what it compiled."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": PROPERTIES.shared_memory_per_block_optin, "max_num_regs": _REGISTERS,
            "multiprocessor_count": PROPERTIES.multi_processor_count, "warpSize": 32,
        }  # fmt: skip

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        found = resources(binary)
        most = min(1024, _REGISTERS // max(found.registers, 1) // 32 * 32)
        return name, name, found.registers, found.spilled // 4, most

    def unload_module(self, module: Any) -> None: ...


@dataclass(frozen=True)
class Accepted:
    """Stands for a compiled kernel where Triton's front end alone has seen the source. asm: what the text of its
    machine code would say of its arguments, with Triton's two scratch pointers."""

    run: Launcher
    function: int
    metadata: Any
    asm: dict[str, str]
    packed_metadata: tuple[int, ...] = ()

    def launch_metadata(self, grid: Any, stream: Any, *arguments: Any) -> None:
        return None


def compiler_of(driver: Driver) -> Callable[..., Any]:
    """In the place of `triton.compile`."""
    whole = triton.compiler.compile

    def compile_kernel(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        if driver.log.compiles:
            return whole(source, target=target, options=options, **more)
        backend = make_backend(target)
        chosen = backend.parse_options(dict(options or {}, **source.parse_options()))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        own = backend.get_codegen_implementation(chosen), backend.get_module_map()
        source.make_ir(target, chosen, *own, context)
        metadata = SimpleNamespace(**{**chosen.__dict__, "name": source.name, "shared": 0})
        launcher = Launcher(driver, source, metadata)
        _handles.append(launcher)
        kinds = [
            "64" if kind.startswith("*") or kind == "i64" else "32" for kind in launcher.types if kind != "constexpr"
        ]
        text = ", ".join(f".param .u{bits} p{i}" for i, bits in enumerate([*kinds, "64", "64"]))
        return Accepted(launcher, len(_handles), metadata, {"ptx": f".visible .entry {source.name}({text})"})

    return compile_kernel


_POINTER = ctypes.c_void_p
_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, *[ctypes.c_uint] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER)
failures: list[BaseException] = []  # of launches by the function below, which has no way to raise


@_KERNEL
def launch_kernel(handle: Any, x: int, *rest: Any) -> int:
    """Stands for cuLaunchKernel: 0, or 1 where the launch is refused."""
    y, z, threads, _, _, _, stream, arguments, _ = rest
    launcher = _handles[handle - 1]
    assert threads == 32 * launcher.metadata.num_warps
    pointers = [ctypes.c_void_p.from_address(arguments[i]).value or 0 for i in range(len(launcher.types))]
    nulls = [ctypes.c_void_p.from_address(arguments[len(pointers) + i]).value for i in range(2)]
    try:
        assert nulls == [None, None]
        launcher(x, y, z, stream or 0, handle, (), None, None, None, *pointers)
    except BaseException as error:
        failures.append(error)
        return 1
    return 0


class Driver(GPUDriver):
    def __init__(self, device: Device, log: Log):
        self.device, self.log, self.utils = device, log, Utils()
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
        raise LaunchError("nothing is timed here")

    def get_empty_cache_for_benchmark(self) -> Any:
        raise LaunchError("nothing is timed here")

    def clear_cache(self, cache: Any) -> None: ...


class Launcher:
    """Stands for Triton's: called with the grid, the stream, the function, and the kernel's arguments."""

    def __init__(self, driver: Driver, source: Any, metadata: Any):
        self.driver, self.metadata = driver, metadata
        self.name, self.module = source.fn.__name__, source.fn.__module__
        self.types = list(source.signature.values())
        self.source, self.key = source, f"{self.module} {self.name} {source.hash()[:8]}"

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, launch_metadata: Any, enter: Any,
        leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        device, log = self.driver.device, self.driver.log
        assert (y, z) == (1, 1) and len(arguments) == len(self.types)
        assert function == self.metadata.name or _handles[function - 1] is self
        current = device.native.current_device()
        if stream and stream != device.native.current_stream(current):
            raise LaunchError(f"{self.name}: stream {stream} is not the current one of device {current}")
        given = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        pointers = [v for v, kind in zip(given, self.types, strict=True) if kind.startswith("*")]
        captured = device.capture is not None
        warps = self.metadata.num_warps
        log.launches.append(Launch(self.name, x, warps, current, stream, tuple(pointers), captured, self.key))
        if self.key not in log.compiled:
            log.compiled[self.key] = Compiled(self.source, self.metadata)
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
