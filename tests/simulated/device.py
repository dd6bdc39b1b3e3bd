"""CUDA devices that are not there, for a CPU build of torch: two of compute capability 9.0.

Their memory is the host's under their names, with addresses, allocation and statistics of its own. An operator runs at
once: on the host (`computes`), or not at all: then it only allocates what it returns, and of memory that nobody writes
there is none, so that a model of any size runs its course. What it did is recorded, with the device and the stream.

`install` changes this process for good, and must come before any backward: tests that want it run in a process of their
own, see test_simulated.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

NUM_DEVICES = 2
SOURCE = Path(__file__).with_suffix(".cpp")
ONLY_OF_A_CPU = "torch is built for CUDA: devices are simulated to a build for CPUs"


@dataclass(frozen=True)
class Done:
    """Something that a stream was given: an operator or a launch. devices: those of its tensors."""

    name: str
    device: int
    stream: int
    devices: frozenset[int] = frozenset()
    thread: int = 0


@dataclass
class Capture:
    """What a graph records instead of running it."""

    stream: int
    device: int
    steps: list[Callable[[], object]] = field(default_factory=list)


@dataclass
class Device:
    """The state of the simulation: `native` is the library, `done` what streams were given since `clear`."""

    native: Any
    computes: bool = True
    done: list[Done] = field(default_factory=list)
    local: Any = field(default_factory=threading.local)

    @property
    def capture(self) -> Capture | None:
        return getattr(self.local, "capture", None)

    def compute(self, on: bool) -> None:
        """Whether operators run on the host from now on; then memory that is taken or freed is filled with NaN."""
        self.computes = on
        self.native.set_poison(on)

    def clear(self) -> None:
        self.done.clear()

    def queue(self, step: Callable[[], object], addresses: Sequence[int] = ()) -> None:
        """Give the current stream something to do: at once, or when the graph that is being captured is replayed.
        addresses: memory that it reads or writes, which must still be there then."""
        if self.capture is not None:
            self.capture.steps.append(partial(self._replayed, step, addresses))
        elif self.computes:
            step()

    def _replayed(self, step: Callable[[], object], addresses: Sequence[int]) -> None:
        for address in addresses:
            if self.room_at(address, pooled=True)[1] < 0:
                raise MemoryError("a graph is replayed that reads or writes memory which was freed since")
        if self.computes:
            step()

    def note(
        self, name: str, devices: Sequence[int] = (), device: int | None = None, stream: int | None = None
    ) -> None:
        device = self.native.current_device() if device is None else device
        stream = self.native.current_stream(device) if stream is None else stream
        self.done.append(Done(name, device, stream, frozenset(devices), threading.get_ident()))

    def room_at(self, address: int, pooled: bool = False) -> tuple[int, int]:
        """The device of an address, -1 for the host, and the bytes from there to its block's end, -1 for a dead one.
        pooled: what was freed in a graph's own pool is still the graph's."""
        device = ctypes.c_int()
        room = self.native.room_at(ctypes.c_int64(address), pooled, ctypes.byref(device))
        return device.value, room


_installed: list[Device] = []


def install() -> Device:
    """The devices; from now on torch.cuda is theirs."""
    if not _installed:
        assert torch.version.cuda is None, ONLY_OF_A_CPU
        torch.ops.load_library(str(library()))
        native = ctypes.CDLL(str(library()))
        for name in ("current_stream", "allocated_bytes", "peak_bytes", "room_at"):
            getattr(native, name).restype = ctypes.c_int64
        native.set_stream.argtypes = (ctypes.c_int, ctypes.c_int64)
        native.set_pool.argtypes = (ctypes.c_int64,)
        assert native.install()
        device = Device(native)
        _installed.append(device)
        from tests.simulated import operators, runtime

        runtime.patch(device)
        operators.register(device)
    return _installed[0]


def library() -> Path:
    """The compiled library, kept in the cache folder by what it is made of."""
    text = SOURCE.read_text(encoding="utf-8")
    name = hashlib.sha256(f"{text}\0{torch.__version__}\0{torch.__file__}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("AOTTRAIN_CACHE_DIR") or Path.home() / ".cache" / "aottrain") / "simulated"
    path = folder / f"{name}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        here = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", str(SOURCE), "-o", str(made)]
            command += [f"-I{here}/include", f"-L{here}/lib", "-lc10", "-ltorch_cpu"]
            subprocess.run(command, check=True)
            os.replace(made, path)
    return path
