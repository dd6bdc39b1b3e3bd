"""Memory as the allocators saw it, in bytes.

CUDA counts for itself. A CPU does not, so one step runs under torch's profiler, which records every allocation and
release, and the peak above the start is the largest running sum. What was alive at the start is counted by storage.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from aottrain.metrics.preserve import preserved
from aottrain.runtime.arena import held_bytes, release_idle
from aottrain.step import Batch

_LIMIT = Path("/sys/fs/cgroup/memory.max")


def total_bytes(device: torch.device) -> int:
    """The memory of a device; of a CPU what the machine, or this process's container, has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        total = min(total, int(_LIMIT.read_text(encoding="utf-8")))
    return total


def distinct_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind tensors that are alive: views and ties count once, None not at all."""
    return sum(dict(_storage(tensor) for tensor in tensors if tensor is not None).values())


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()  # the address of the storage itself: empty ones share a data pointer


def alive_tensors(module: nn.Module, optimizer: torch.optim.Optimizer | None, batches: Iterable[Batch]) -> list:
    """What a training step finds in memory: parameters, gradients, buffers, optimizer state, its micro-batches."""
    parameters = list(module.parameters())
    states = optimizer.state.values() if optimizer is not None else ()
    state_tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    batch_tensors = [tensor for batch in batches for tensor in batch]
    return [*parameters, *(p.grad for p in parameters), *module.buffers(), *state_tensors, *batch_tensors]


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far: everything, Python and libraries included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class Peak:
    """Of a watched block."""

    num_bytes: int | None = None
    """Largest sum of bytes alive within it; None until it has ended."""


@contextmanager
def watch_cpu_peak(alive: Iterable[torch.Tensor | None] = ()) -> Iterator[Peak]:
    """Count the CPU allocator's bytes inside the block, on top of `alive`, the tensors that exist throughout it.

    Slow (the profiler records every allocation): time nothing inside it.
    """
    peak = Peak()
    # Arenas and blocks that compiled programs keep make no events when they are used again, and the profiler misses
    # the release of what it has not seen taken. So what they keep is taken anew under its eyes.
    take_again = release_idle()
    start_bytes = distinct_bytes(alive) + held_bytes()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes its own two lines to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        take_again()
        yield peak
    peak.num_bytes = start_bytes + _largest_sum(record)


def _largest_sum(record: profile) -> int:
    """The allocator's raw events, in order of time; the profiler's own tables keep only sums for each operator."""
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    on_cpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    now = largest = 0
    for event in sorted(on_cpu, key=lambda event: event.start_ns()):  # stable: equal times keep their order
        now += event.nbytes()
        largest = max(largest, now)
    return largest


def eager_saved_bytes(module: nn.Module, batch: Batch) -> int:
    """What autograd keeps between the forward and the backward of an eager `module(*batch)`.

    Distinct storages, without parameters, buffers and the batch. Gradients, buffers and random streams are untouched.
    """
    own = [*module.parameters(), *module.buffers(), *batch]
    own_storages = {_storage(tensor)[0] for tensor in own}
    kept: list[torch.Tensor] = []  # alive until counted, so that no two storages share an address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()  # saving the tensor itself would tie an output to its own graph in a cycle
        kept.append(detached)
        return detached

    with preserved(module), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*batch)
        num_bytes = distinct_bytes(tensor for tensor in kept if _storage(tensor)[0] not in own_storages)
        del output
    return num_bytes
