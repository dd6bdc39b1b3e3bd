"""The processes that do one run together, as each of them sees the others.

What they must do alike is decided by all (`total`, `largest`) or by the first (`from_first`). One process alone is a
world too, whose every method gives what it is given.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from aottrain.compat_distributed import imagined_processes
from aottrain.config.launch import place
from aottrain.errors import AottrainError, ParallelError
from aottrain.ops.collectives import COPIES, PARTS
from aottrain.trainer.parallel.alike import check_settings
from aottrain.trainer.parallel.meeting import fresh
from aottrain.trainer.parallel.replicas import Groups, grouped
from aottrain.trainer.parallel.watch import watching

if TYPE_CHECKING:
    from aottrain.config.parallel import ParallelConfig
from aottrain.config.run import RunConfig

T = TypeVar("T")

GLOO = "gloo"  # what connects processes on CPUs
_CHUNK = 1 << 20  # bytes that are summed up at once
_BUCKET_BYTES = 25 << 20  # of gradients that are summed at once after a backward, as torch's DDP has it


@dataclass(eq=False)
class World:
    """All processes of a run."""

    rank: int = 0
    size: int = 1
    mode: str = "none"
    """As `parallel.name`."""
    timeout: timedelta = timedelta(minutes=10)
    store: Any = None
    """Where processes leave texts for each other; None for one alone, and where others are imagined."""
    replicas: int = 1
    """Under `shard`, how often all weights are there, in parts."""
    groups: Groups | None = field(default=None, repr=False)
    """Where there are several replicas."""
    num_agreements: int = field(default=0, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    @property
    def num_parts(self) -> int:
        """Into how many parts weights are cut; under `ddp` each process has them whole."""
        return self.size // self.replicas if self.mode == "shard" else 1

    @property
    def num_copies(self) -> int:
        """How many processes hold the same."""
        return self.size // self.num_parts

    @property
    def part(self) -> int:
        """Which one this process holds."""
        return self.rank % self.num_parts

    @property
    def is_of_first_replica(self) -> bool:
        return self.rank < self.num_parts

    @property
    def group(self) -> str:
        """The name of the process group of all."""
        return str(torch.distributed.group.WORLD.group_name)  # type: ignore[union-attr]

    @property
    def parts_group(self) -> str:
        """The name, in programs, of the group of processes that hold all parts together."""
        return self.group if self.groups is None else PARTS

    @property
    def copies_group(self) -> str:
        """The name, in programs, of the group of processes that hold the same."""
        return self.group if self.groups is None else COPIES

    def sum(self, value: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(value)
        return value

    def sum_of_parts(self, value: Tensor) -> Tensor:
        """Over the processes that hold all weights together, in place."""
        if self.num_parts > 1:
            torch.distributed.all_reduce(value, group=None if self.groups is None else self.groups.parts)
        return value

    def _sum_of_copies(self, value: Tensor) -> None:
        torch.distributed.all_reduce(value, group=None if self.groups is None else self.groups.copies)

    def total(self, number: float) -> float:
        return number if self.size == 1 else self.sum(torch.tensor(number, dtype=torch.float64)).item()

    def largest(self, number: int) -> int:
        if self.size == 1:
            return number
        value = torch.tensor(number)
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
        return int(value)

    def all_hold(self, flag: bool) -> bool:
        """Whether it is so in each process."""
        return flag if self.size == 1 else not self.largest(int(not flag))

    def gather(self, value: T) -> list[T]:
        """Of each process what it gives, plain values, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives in the first process, plain values; what it raises there is raised by all."""
        if self.size == 1:
            return make()
        sent: list[Any] = [None, None]
        if self.is_first:
            try:
                sent[0] = make()
            except AottrainError as error:
                sent[1] = error
        torch.distributed.broadcast_object_list(sent)
        if sent[1] is not None:
            raise sent[1]
        return sent[0]

    def agree(self, what: str, text: str) -> None:
        """ParallelError names both sides where another process says something else of `what`, or says nothing in time.
        Texts go through the store, so that processes that differ do not meet in a collective."""
        if self.size == 1 or self.store is None:  # where the others are imagined
            return
        self.num_agreements += 1
        key = f"aottrain/{self.num_agreements}/"
        self.store.set(f"{key}{self.rank}", f"{what}\n{text}")
        for other in range(self.size):
            try:
                self.store.wait([f"{key}{other}"], self.timeout)
            except Exception as error:
                text = f"process {other} has not come to where process {self.rank} is ({what})"
                raise ParallelError(f"{text} within {self.timeout.total_seconds():g} s") from error
            theirs = self.store.get(f"{key}{other}").decode()
            if theirs != f"{what}\n{text}":
                raise ParallelError(_difference(what, self.rank, f"{what}\n{text}", other, theirs))

    def broadcast(self, module: nn.Module) -> None:
        """Parameters and buffers of the first process to all."""
        if self.size > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                torch.distributed.broadcast(tensor.data if tensor.is_contiguous() else _dense(tensor), 0)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Running statistics follow from each process's own examples; where they are read they are the first one's."""
        if self.size > 1:
            for buffer in module.buffers():
                torch.distributed.broadcast(buffer if buffer.is_contiguous() else _dense(buffer), 0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Of each parameter over the processes that hold the same, in buckets. One that has a gradient somewhere has
        one everywhere."""
        if self.num_copies == 1:
            return
        has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        self._sum_of_copies(has)
        for bucket in _buckets([p for p, count in zip(parameters, has.tolist(), strict=True) if count]):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._sum_of_copies(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def compare(self, module: nn.Module, step: int) -> None:
        """ParallelError: some weight, or part of one, has not the same bits in all processes that hold it."""
        if self.num_copies == 1:
            return
        named = list(module.named_parameters())
        sums = torch.stack([_checksum(parameter) for _, parameter in named]).cpu()
        everyones: list[Any] = [None] * self.num_copies
        torch.distributed.all_gather_object(everyones, sums, group=None if self.groups is None else self.groups.copies)
        for number, theirs in enumerate(everyones):
            other = number * self.num_parts + self.part
            wrong = [name for (name, _), same in zip(named, (theirs == sums).tolist(), strict=True) if not same]
            if wrong:
                text = f"after step {step} {wrong[0]} is another in process {other} than in process {self.rank}"
                raise ParallelError(f"{text}, and so are {len(wrong) - 1} of {len(named) - 1} others")


ALONE = World()


def _dense(tensor: Tensor) -> Tensor:
    """All elements of a tensor without gaps, in the order in which they lie."""
    return tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _checksum(tensor: Tensor) -> Tensor:
    """Of its bits, each byte weighted by its place: int64, wrapping."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(tensor.detach().contiguous().view(-1).view(torch.uint8).split(_CHUNK)):
        places = torch.arange(part.numel(), device=part.device) + number * _CHUNK
        total += (part * (places * 2654435761 + 1)).sum()
    return total


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Of one type each, the last parameters first: their gradients are there first."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        if bucket and (size >= _BUCKET_BYTES or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _difference(what: str, rank: int, mine: str, other: int, theirs: str) -> str:
    """Both sides, from the first line in which they differ."""
    lines = itertools.zip_longest(mine.splitlines(), theirs.splitlines(), fillvalue="nothing more")
    here, there = next((a, b) for a, b in lines if a != b)
    return f"the processes differ in {what}: process {rank} has `{here}`, process {other} has `{there}`"


@contextmanager
def joined(config: RunConfig) -> Iterator[tuple[World, RunConfig]]:
    """Inside, the processes that torchrun has started are connected: the world, and the configuration as this process
    is to take it. All but the first write into a folder that is removed at the end.

    ParallelError: another process has ended, or does not answer within `parallel.timeout`.
    """
    here = place()
    if here.size == 1:
        yield ALONE, config
        return
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=config.parallel.timeout)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and config.device != "cpu" else GLOO
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store = fresh(store, rank, size, timeout)
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except Exception as error:
        raise ParallelError(f"the {here.size} processes cannot be connected: {error}") from error
    prefixed = torch.distributed.PrefixStore("aottrain", store)
    replicas = config.parallel.replicas
    world = World(rank, size, config.parallel.name, timeout, prefixed, replicas)
    with losing_others(world):
        check_settings(world, config)
        output_dir = world.from_first(lambda: config.output_dir)
        with (
            tempfile.TemporaryDirectory(prefix="aottrain-rank-") as own,
            grouped(rank, size, replicas, timeout) as world.groups,
        ):
            if not world.is_first:
                logger = replace(config.logger, name="csv")
                config = replace(config, output_dir=own, logger=logger)
            world.agree("output folder", output_dir)
            with watching(prefixed, rank, size, timeout):
                yield world, config
    torch.distributed.destroy_process_group()


@contextmanager
def losing_others(world: World) -> Iterator[None]:
    """Inside, what breaks because another process has ended, or does not answer, is a ParallelError."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or isinstance(error, ParallelError) or not is_of_connection(error):
            raise
        text = str(error).strip().splitlines()[0]
        lost = f"process {world.rank} has lost another one, which has ended or does not answer"
        raise ParallelError(f"{lost}: {text}") from error


@contextmanager
def imagined(parallel: ParallelConfig) -> Iterator[World]:
    """Inside, this process is the first of `parallel.world`, to plan for; one alone where that is null."""
    if parallel.world is None:
        yield ALONE
        return
    size, replicas = parallel.world, parallel.replicas
    with imagined_processes(size, GLOO), grouped(0, size, replicas, timedelta(minutes=1)) as groups:
        yield World(0, size, parallel.name, replicas=replicas, groups=groups)


def is_of_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because of another process."""
    text = str(error)
    return isinstance(error, torch.distributed.DistError) or "gloo" in text or "NCCL" in text
