"""The section of a RunConfig about the processes that train one model together."""

from __future__ import annotations

from dataclasses import dataclass

from aottrain.config.choices import CHECKPOINTS, PARALLELS
from aottrain.config.schema import setting


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the processes that torchrun starts train one model."""

    name: str = setting("none", one_of=PARALLELS)
    """What each process holds: ddp all weights, shard a part of each and its optimizer's state; none is one process."""
    timeout: float = setting(600.0, above=0, high=1_000_000)  # as torch counts it, in 2^31 milliseconds at most
    """Seconds that a process waits for the others, in compiling and checkpoints too, before the run ends."""
    latency: float | None = setting(None, above=0)
    """Seconds that one collective takes whatever its bytes, for the plan; null measures it, or is 1e-4."""
    bandwidth: float | None = setting(None, above=0)
    """Bytes that a process takes in from the others in a second, for the plan; null measures it, or is 1e9."""
    replicas: int = setting(1, low=1)
    """How often all weights are there, in parts, each time held by as many processes that follow each other."""
    replica_latency: float | None = setting(None, above=0)
    """Seconds that one sum between replicas takes whatever its bytes, for the plan; null measures it, or is 1e-4."""
    replica_bandwidth: float | None = setting(None, above=0)
    """Bytes that a process takes in from other replicas in a second, for the plan; null measures it, or is 1e9."""
    world: int | None = setting(None, low=2)
    """Processes that task=plan plans for, of which none is started: what each holds and sends; null is one."""
    checkpoints: str = setting("whole", one_of=CHECKPOINTS)
    """whole: the first process gathers all and writes it; parts: each writes what it holds, to a folder they share."""
    compare_every: int = setting(100, low=0)
    """Steps between two comparisons of weights that several processes hold, which must be the same bits; 0 is none."""
