"""A step of several processes against one process on their joined batch: that parts are weighed and summed as they
should be, which a comparison of each process with itself does not see.

The first process does it, in eager, once: where the weights are small, nothing is drawn and no layer looks at several
examples together, for there one process has other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aottrain.errors import NumericsError, is_likely_out_of_memory, lack_text
from aottrain.explain.figures import train_graph
from aottrain.step import Batch
from aottrain.trainer.job import Job
from aottrain.trainer.parallel.world import ALONE
from aottrain.trainer.verify.verification import GRADIENT, Outcome, Reference, Verification, compare

if TYPE_CHECKING:
    from aottrain.config.run import VerifyConfig
    from aottrain.trainer.engines import LossModule

MOST_BYTES = 256 << 20  # of weights, which the first process has all of meanwhile
MOST_PROCESSES = 8  # whose batches it has together


@dataclass(frozen=True)
class NotCompared:
    """Where one process could not run it."""

    why: str


def verify_joined(
    job: Job, step: int, compiled: Outcome, micro_batches: Sequence[Batch], config: VerifyConfig
) -> Verification | NotCompared | str | None:
    """How far the step of all processes is from that of one, or what differs beyond rounding; None where it is not to
    be compared. All take part; micro_batches: this one's parts."""
    module, world = job.module, job.world
    if world.size == 1 or not world.all_hold(_is_comparable(job, compiled)):
        return None
    parts = world.gather([tuple(tensor.cpu() for tensor in batch) for batch in micro_batches])
    wholes = _whole_weights(module)
    outcome = replace(compiled, values=_whole_gradients(module, compiled))

    def compared() -> Verification | NotCompared | str:
        batches = [_joined(batch, job.device) for batch in zip(*parts, strict=True)]
        with _alone(module, wholes):
            try:
                return compare(outcome, Reference(step, module, batches, [nullcontext] * len(batches), config))
            except NumericsError as error:
                return str(error)
            except (MemoryError, RuntimeError) as error:
                if not is_likely_out_of_memory(error):
                    raise
                return NotCompared(lack_text(error, "it"))

    return world.from_first(compared)


def _is_comparable(job: Job, compiled: Outcome) -> bool:
    graph = None if job.step.report is None else train_graph(job.step.report)
    if graph is None or graph.num_draws or any(compiled.ran_eagerly) or job.world.size > MOST_PROCESSES:
        return False
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training for layer in job.module.modules()):
        return False
    names = (name for name, _ in job.module.model.named_parameters())
    return sum(job.module.size_of(name) for name in names) * 4 <= MOST_BYTES


def _joined(parts: Sequence[Batch], device: torch.device) -> Batch:
    return tuple(torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True))


@torch.no_grad()
def _whole_weights(module: LossModule) -> dict[str, nn.Parameter]:
    """By name, where this process has parts of them; of all processes the first one keeps them."""
    if module.shards is None:
        return {}
    parts = dict(module.model.named_parameters())
    wholes = {name: nn.Parameter(module.shards.gather(name, part), part.requires_grad) for name, part in parts.items()}
    return wholes if module.world.is_first else {}


@torch.no_grad()
def _whole_gradients(module: LossModule, compiled: Outcome) -> dict[str, Tensor | None]:
    """All values of an outcome, its gradients whole."""
    values = dict(compiled.values)
    for name in () if module.shards is None else module.shards.shapes:
        part = values[key := f"{GRADIENT}model.{name}"]
        whole = None if part is None else module.shards.gather(name, part)  # type: ignore[union-attr]
        values[key] = whole if module.world.is_first else None
    return values


@contextmanager
def _alone(module: LossModule, wholes: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, this process trains by itself."""
    world, shards = module.world, module.shards
    module.world, module.shards = ALONE, None
    try:
        with nullcontext() if shards is None else shards.replaced(wholes):
            yield
    finally:
        module.world, module.shards = world, shards
