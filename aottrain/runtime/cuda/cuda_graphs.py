"""Run a program's graphs as CUDA graphs: recorded once at fixed addresses, then replayed by one launch each.

A recording reads and writes the same memory in every replay, so a call may only be a replay while nothing that an
earlier call has left there is still referred to. Parameters and buffers are read where they are; what changes from call
to call is copied into memory of the recording first. Outputs and gradients are copied out of it, into fresh memory.
Residuals stay in place. Until the last reference to one of them is gone, further calls run kernel by kernel, and so
does the backward of such a call. Every call that is not replayed is counted, with the reason.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aottrain.compat import copy_all, storage_use_count
from aottrain.compat_dispatch import maker_on
from aottrain.explain.report import Replays
from aottrain.ir.tensor import is_injective
from aottrain.runtime.executor import Runner

# Calls that run kernel by kernel first: kernels are compiled, libraries choose and allocate what they keep.
WARM_UP_CALLS = 2
# How often one graph is recorded anew after its parameters have moved, before it is left alone.
MAX_RECORDINGS = 4
Replay = Callable[[], None]


class Recorder(Protocol):
    """What records. For CUDA its stream capture; tests have one that runs the same again."""

    def queue(self) -> Hashable | None:
        """Which queue a call's work goes to now; None where nothing can be recorded or replayed."""
        ...

    def record(self, run: Runner, inputs: Sequence[Any]) -> tuple[list[Any], Replay]:
        """The results of `run(inputs)`, and what does its work again, from and to the same addresses.

        Nothing need have been computed before the first replay. The inputs are not kept alive.
        """
        ...


class CudaRecorder:
    """Stream capture. Recordings on one stream share a memory pool: their temporaries are never in use at once."""

    # By queue, the pool and the graphs in it: a pool ends with the last of them, and must not be named again.
    _pools: dict[Hashable, tuple[Any, weakref.WeakSet[torch.cuda.CUDAGraph]]] = {}

    def __init__(self, device: torch.device):
        self.device = device

    def queue(self) -> Hashable | None:
        if torch.cuda.is_current_stream_capturing():
            return None  # the caller records something larger
        return self.device.index, torch.cuda.current_stream(self.device).cuda_stream

    def record(self, run: Runner, inputs: Sequence[Any]) -> tuple[list[Any], Replay]:
        queue = self.queue()
        with torch.cuda.device(self.device):
            pool, graphs = self._pools.get(queue, (None, ()))
            if not len(graphs):
                pool, graphs = self._pools[queue] = torch.cuda.graph_pool_handle(), weakref.WeakSet()
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as one that pins batches, may do as they like meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = run(list(inputs))
            graphs.add(graph)
        return results, graph.replay


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


class _Refused(Exception):
    """Why a call cannot be recorded."""


@dataclass(frozen=True)
class _Block:
    """Memory that a recording writes and a result lives in."""

    storage: torch.UntypedStorage
    escapes: bool
    """Whether results in it leave the program."""
    own_references: int
    """How many references the storage has when no caller has one."""

    @property
    def is_free(self) -> bool:
        return storage_use_count(self.storage) <= self.own_references


@dataclass(frozen=True)
class _Location:
    """A result's type, and where in a block (by number) it is."""

    block: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]


@dataclass
class _Recording:
    """A recorded graph, and where its inputs and results are."""

    queue: Hashable
    """That it was recorded for, see `Recorder.queue`."""
    replay: Replay
    inputs: list[int | Tensor | None]
    """For each the address where it must be, a buffer that it is copied into, or None for None."""
    results: list[int | _Location | None]
    """For each the number of the input that it is, its location, or None. The same tensor has the same object."""
    blocks: list[_Block]
    forward: _Recording | None = None
    """Of a backward, the forward's recording that its residuals come from."""
    _places: list[_Location] = field(default_factory=list)
    _whole: list[tuple[list[_Location], list[Tensor]]] = field(default_factory=list)
    """Of each type, the results that are copied as they are, and where replays leave them."""
    _words: list[tuple[int, Tensor]] = field(default_factory=list)
    """Other blocks with results that are copied, by number, as words."""
    _kept: list[tuple[int, Tensor]] = field(default_factory=list)
    """What stays where it is, by the identity of its place."""

    def mismatch(self, inputs: Sequence[Tensor | None]) -> bool:
        """Whether an input is elsewhere than it was."""
        for source, value in zip(self.inputs, inputs, strict=True):
            if (source is None) != (value is None):
                return True
            if isinstance(source, int) and value is not None and value.data_ptr() != source:
                return True
            if isinstance(source, Tensor) and value is not None and value.shape != source.shape:
                return True
        return False

    def run(self, inputs: list[Tensor | None]) -> list[Any]:
        self.load(inputs)
        self.replay()
        tensors = self._copied()
        for block, words in self._words:
            copy = torch.empty_like(words)
            copy.copy_(words)
            located = [place for place in self._places if place.block == block]
            tensors.update((id(place), place.tensor(copy.untyped_storage())) for place in located)
        for place, kept in self._kept:
            tensors[place] = kept.detach()
        return [
            result if result is None else inputs[result] if isinstance(result, int) else tensors[id(result)]
            for result in self.results
        ]

    def _copied(self) -> dict[int, Tensor]:
        """Copies of the results that are a block each, by the identity of their places: one call for each type."""
        tensors: dict[int, Tensor] = {}
        for places, sources in self._whole:
            make = maker_on(sources[0].device)
            copies = [make(place.shape, place.stride, place.dtype) for place in places]
            copy_all(copies, sources)
            tensors.update(zip(map(id, places), copies, strict=True))
        return tensors

    def prepare(self) -> None:
        """Look at each block of the results from here on: what a replay has to copy, and what it leaves where it is."""
        self._places = list({id(place): place for place in self.results if isinstance(place, _Location)}.values())
        counts = Counter(place.block for place in self._places)
        whole: dict[torch.dtype, tuple[list[_Location], list[Tensor]]] = {}
        for place in self._places:
            block = self.blocks[place.block]
            made = place.tensor(block.storage)
            if not block.escapes:
                self._kept.append((id(place), made))
            elif counts[place.block] == 1 and made.nbytes == block.storage.nbytes() and is_injective(made):
                for column, value in zip(whole.setdefault(place.dtype, ([], [])), (place, made), strict=True):
                    column.append(value)  # type: ignore[attr-defined]
            elif place.block not in [number for number, _ in self._words]:
                self._words.append((place.block, _words(block.storage)))
        self._whole = list(whole.values())

    def load(self, inputs: Sequence[Tensor | None]) -> None:
        pairs = [
            (buffer, value) for buffer, value in zip(self.inputs, inputs, strict=True) if isinstance(buffer, Tensor)
        ]
        for buffer, value in pairs:
            buffer.copy_(value)  # type: ignore[arg-type]


@dataclass
class RecordedRunner:
    """A runner of one graph, recorded once it has been called often enough."""

    runner: Runner
    recorder: Recorder
    counts: Replays
    stays: Sequence[bool]
    """Of each input, whether it is read where it is."""
    num_escaping: int
    """How many leading results leave the program; the others are residuals."""
    forward: RecordedRunner | None = None
    """Of a backward: the runner whose residuals are its first inputs."""
    recording: _Recording | None = None
    _num_calls: int = 0
    _num_recordings: int = 0
    _disabled_reason: str = ""
    """Why it is never recorded again."""
    _lock: Any = field(default_factory=threading.Lock)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if not self._lock.acquire(blocking=False):
            return self._run_plainly(inputs, "another thread runs it")
        try:
            queue = self.recorder.queue()
            if reason := self._obstacle(inputs, queue):
                return self._run_plainly(inputs, reason)
            if self.recording is None:
                try:
                    self.recording = self._record(inputs, queue)
                except Exception as error:  # whatever it is: nothing has been computed yet, and the runner will tell
                    refused = isinstance(error, _Refused)
                    failure = f"recording failed: {type(error).__name__}: {_line(error)}"
                    self._disabled_reason = str(error) if refused else failure
                    return self._run_plainly(inputs, self._disabled_reason)
            values = list(inputs)
            inputs.clear()
            self.counts.replays += 1
            return self.recording.run(values)
        finally:
            self._lock.release()

    def _run_plainly(self, inputs: list[Any], reason: str) -> list[Any]:
        self.counts.plain[reason] = self.counts.plain.get(reason, 0) + 1
        return self.runner(inputs)

    def _obstacle(self, inputs: Sequence[Any], queue: Hashable | None) -> str:
        """Why this call cannot be a replay, nor be recorded."""
        if self._disabled_reason:
            return self._disabled_reason
        if queue is None:
            return "a larger CUDA graph is being recorded"
        if self.forward is not None and self.recording and self.recording.forward is not self.forward.recording:
            self._forget()
        if self.recording is not None:
            if self.recording.queue != queue:
                return "another stream"
            if not all(block.escapes or block.is_free for block in self.recording.blocks):
                return "residuals of an earlier call are still alive"
            if not self.recording.mismatch(inputs):
                return ""
            if self.forward is not None:
                return "its forward was no replay"
            self._forget()
        self._num_calls += 1
        if self._num_calls <= WARM_UP_CALLS:
            return "warm-up"
        if self.forward is not None and not self._follows_replay(inputs):
            return "its forward was no replay"
        return "parameters keep moving" if self._num_recordings >= MAX_RECORDINGS else ""

    def _forget(self) -> None:
        """Tensors in it that are still referred to keep their memory."""
        self.recording, self._num_calls = None, 0

    def _follows_replay(self, inputs: Sequence[Any]) -> bool:
        """Whether these residuals are where the forward's recording left them."""
        addresses = self._residual_addresses()
        return addresses is not None and all(
            address is None or value is None or value.data_ptr() == address
            for address, value in zip(addresses, inputs, strict=False)
        )

    def _residual_addresses(self) -> list[int | None] | None:
        """For each residual where the forward's replays leave it; None where that changes from call to call."""
        assert self.forward is not None
        recording = self.forward.recording
        if recording is None:
            return None
        addresses: list[int | None] = []
        for result in recording.results[self.forward.num_escaping :]:
            if isinstance(result, _Location) and not recording.blocks[result.block].escapes:
                storage = recording.blocks[result.block].storage
                addresses.append(storage.data_ptr() + result.offset * result.dtype.itemsize)
            else:
                address = recording.inputs[result] if isinstance(result, int) else None
                addresses.append(address if isinstance(address, int) else None)
        return addresses

    def _record(self, inputs: Sequence[Any], queue: Hashable) -> _Recording:
        stays = list(self.stays)
        if self.forward is not None:
            addresses = self._residual_addresses() or []
            stays = [*(address is not None for address in addresses), *stays[len(addresses) :]]
        self._num_recordings += 1
        sources = [_input_source(v, stay or isinstance(v, nn.Parameter)) for v, stay in zip(inputs, stays, strict=True)]
        values = [value if isinstance(source, int) else source for value, source in zip(inputs, sources, strict=True)]
        recording = _Recording(queue, lambda: None, sources, [], [], self.forward.recording if self.forward else None)
        recording.load(inputs)
        results, recording.replay = self.recorder.record(self.runner, values)
        _locate_results(recording, results, values, self.num_escaping)
        del results
        recording.prepare()
        recording.blocks = [_Block(b.storage, b.escapes, storage_use_count(b.storage)) for b in recording.blocks]
        self.counts.recordings += 1
        return recording


def _input_source(value: Any, stays: bool) -> int | Tensor | None:
    """Where a recording reads an input."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise _Refused("an input is no tensor")
    if stays:
        return value.data_ptr()
    if value.is_conj() or value.is_neg() or _overlaps(value):
        raise _Refused("an input overlaps itself, or is lazily conjugated or negated")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _overlaps(value: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))


def _locate_results(recording: _Recording, results: list[Any], values: Sequence[Any], num_escaping: int) -> None:
    """Fill in where each result of a recorded run is. Raises _Refused where a replay could not give the same."""
    input_numbers = {id(value): i for i, value in enumerate(values) if value is not None}
    input_storages = {
        value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor) and value.numel()
    }
    locations: dict[int, _Location] = {}
    block_numbers: dict[int, int] = {}
    escapes_by_block: dict[int, set[bool]] = {}
    for position, value in enumerate(results):
        if value is None or id(value) in input_numbers:
            recording.results.append(None if value is None else input_numbers[id(value)])
            continue
        if id(value) not in locations:
            locations[id(value)] = _location_of(value, recording, block_numbers, input_storages)
        location = locations[id(value)]
        escapes_by_block.setdefault(location.block, set()).add(position < num_escaping)
        recording.results.append(location)
    shared = [block for block, escapes in escapes_by_block.items() if len(escapes) > 1]
    if any(sum(location.block == block for location in locations.values()) > 1 for block in shared):
        raise _Refused("an output shares its memory with what is saved for the backward")
    recording.blocks = [_Block(b.storage, True in escapes_by_block[i], 0) for i, b in enumerate(recording.blocks)]


def _location_of(
    value: Any, recording: _Recording, block_numbers: dict[int, int], input_storages: set[int]
) -> _Location:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        raise _Refused("a result is no strided tensor")
    storage = value.untyped_storage()
    if storage.device != _device_of(recording, storage.device):
        raise _Refused(f"a result is on {storage.device}")
    if value.numel() and storage.data_ptr() in input_storages:
        raise _Refused("a result is a view of an input")
    if value.is_conj() or value.is_neg():
        raise _Refused("a result is lazily conjugated or negated")
    number = block_numbers.setdefault(storage.data_ptr() or id(value), len(recording.blocks))
    if number == len(recording.blocks):
        recording.blocks.append(_Block(storage, False, 0))
    return _Location(number, value.dtype, value.storage_offset(), tuple(value.shape), value.stride())


def _device_of(recording: _Recording, default: torch.device) -> torch.device:
    """That of the inputs which are copied, or of the first result."""
    devices = [source.device for source in recording.inputs if isinstance(source, Tensor)]
    return devices[0] if devices else recording.blocks[0].storage.device if recording.blocks else default


def _words(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, in the largest integers that it divides into: copies move several of them at a time."""
    dtype = torch.uint8 if storage.nbytes() % 8 else torch.int64
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]
