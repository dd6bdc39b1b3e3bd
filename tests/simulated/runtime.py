"""torch.cuda of the simulated devices: streams, events, graphs, memory and settings."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.simulated.device import NUM_DEVICES, Capture, Device

TOTAL_BYTES = 80 << 30
CAPABILITY = (9, 0)
_numbers = itertools.count(1)
PROPERTIES = SimpleNamespace(
    name="simulated sm_90", major=9, minor=0, total_memory=TOTAL_BYTES, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
    gcnArchName="", is_integrated=0, uuid="0",
)  # fmt: skip


def _index(device: Any, native: Any) -> int:
    if device is None:
        return native.current_device()
    if isinstance(device, int):
        return device if device >= 0 else native.current_device()
    found = torch.device(device).index
    return native.current_device() if found is None else found


def patch(device: Device) -> None:
    """Put the simulation in the place of what a CPU build lacks."""
    cuda, native = torch.cuda, device.native
    made: dict[str, Any] = {
        **_devices(native), **_memory(native), **_streams(device), **_graphs(device),
        "_initialized": True, "_lazy_init": lambda: None, "init": lambda: None, "is_initialized": lambda: True,
        "_lazy_call": lambda function, **_: function(), "_is_in_bad_fork": lambda: False,
        "default_generators": tuple(torch.Generator(f"cuda:{i}") for i in range(NUM_DEVICES)),
    }  # fmt: skip
    known = {name: getattr(cuda, name) for name in made if hasattr(cuda, name)}
    for module in [module for name, module in sys.modules.items() if name.split(".")[:2] == ["torch", "cuda"]]:
        for name, value in made.items():
            if module is cuda or (name in known and vars(module).get(name) is known[name]):
                setattr(module, name, value)
    from torch.cuda.amp import common

    clone = torch.UntypedStorage.clone

    def cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A storage by its constructor is one of the devices that torch was built for."""
        if storage.device.type != "cuda":
            return clone(storage)
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return memory.clone().untyped_storage()

    torch.UntypedStorage.clone = cloned
    common.amp_definitely_not_available = lambda: False


def _devices(native: Any) -> dict[str, Any]:
    def exchange(index: int) -> int:
        before = native.current_device()
        if index >= 0:
            native.set_device(index)
        return before

    def set_device(device: Any) -> None:
        native.set_device(_index(device, native))

    return {
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: native.current_device(),
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": lambda index: exchange(index),  # TorchDynamo knows each function once
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: CAPABILITY,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "synchronize": lambda device=None: None,
    }


def _memory(native: Any) -> dict[str, Any]:
    def allocated(device: Any = None) -> int:
        return native.allocated_bytes(_index(device, native))

    return {
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": lambda device=None: native.peak_bytes(_index(device, native)),
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(_index(device, native)),
        "mem_get_info": lambda device=None: (TOTAL_BYTES - allocated(device), TOTAL_BYTES),
        "empty_cache": lambda: None,
    }


def _streams(device: Device) -> dict[str, Any]:
    native = device.native

    class Stream:
        """cuda_stream: what kernels are launched on; that of the default stream is 0."""

        def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None):
            self.device_index = _index(device, native)
            self.device = torch.device("cuda", self.device_index)
            self.stream_id = self.cuda_stream = next(_numbers) * 16 if stream_id is None else stream_id

        def wait_stream(self, other: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and (other.device_index, other.stream_id) == (
                self.device_index,
                self.stream_id,
            )

        def __hash__(self) -> int:
            return hash((self.device_index, self.stream_id))

    class Event:
        def __init__(self, **options: Any): ...
        def record(self, stream: Any = None) -> None: ...
        def wait(self, stream: Any = None) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    def current_stream(device: Any = None) -> Stream:
        index = _index(device, native)
        return Stream(index, stream_id=native.current_stream(index))

    @contextlib.contextmanager
    def stream(chosen: Stream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before = native.current_device(), native.current_stream(chosen.device_index)
        native.set_device(chosen.device_index)
        native.set_stream(chosen.device_index, chosen.stream_id)
        try:
            yield
        finally:
            native.set_stream(chosen.device_index, before[1])
            native.set_device(before[0])

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(device, stream_id=0),
        "set_stream": lambda chosen: native.set_stream(chosen.device_index, chosen.stream_id),
    }


def _graphs(device: Device) -> dict[str, Any]:
    native = device.native

    class CUDAGraph:
        """What was given to its stream while it was captured; a replay does the same at the same addresses."""

        def __init__(self, keep_graph: bool = False):
            self.steps: list[Callable[[], object]] = []
            self.pool_id = None

        def replay(self) -> None:
            if device.capture is not None:
                raise RuntimeError("a graph is replayed while another is captured")
            device.note("replay")
            for step in self.steps:
                step()

        def pool(self) -> Any:
            return self.pool_id

        def reset(self) -> None:
            self.steps.clear()

    @contextlib.contextmanager
    def graph(
        cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        side = stream or torch.cuda.Stream()
        cuda_graph.pool_id = pool or graph_pool_handle()
        with torch.cuda.stream(side):
            device.local.capture = Capture(side.stream_id, side.device_index, cuda_graph.steps)
            native.set_pool(cuda_graph.pool_id[1])
            try:
                yield
            except BaseException:
                cuda_graph.steps.clear()
                raise
            finally:
                native.set_pool(0)
                device.local.capture = None

    def graph_pool_handle() -> tuple[int, int]:
        return 0, next(_numbers)

    return {
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": graph_pool_handle,
        "is_current_stream_capturing": lambda: device.capture is not None,
    }
