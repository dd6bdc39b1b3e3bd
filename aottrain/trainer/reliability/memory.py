"""Memory that runs out: the plan of next lower peak, then smaller micro-batches; the step is taken again."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from aottrain.errors import allocator_text, is_likely_out_of_memory, is_out_of_memory
from aottrain.step import Batch
from aottrain.trainer.engines import split_batch
from aottrain.trainer.job import Job

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def freed(device: torch.device) -> None:
    """Give back what a failed step left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def take_less_memory(job: Job, micro_batches: Sequence[Batch], error: BaseException) -> str | None:
    """Go one rung down. Returns what ran out and what is another now, as a sentence; None where nothing is left, or
    where `error` is no allocator's."""
    if not is_likely_out_of_memory(error) or not hasattr(job.step, "splits") or job.world.size > 1:
        return None  # of several processes one alone runs out, while the others wait for it in the step
    where = getattr(job.step, "doing", "step")
    text, seems = allocator_text(error), "" if is_out_of_memory(error) else ", it seems,"
    del error
    freed(job.device)
    change = _lower_peak(job, micro_batches) or _halve(job, micro_batches)
    return None if change is None else f"memory ran out{seems} in the {where} ({text}): {change}"


def _lower_peak(job: Job, micro_batches: Sequence[Batch]) -> str | None:
    if job.step.rungs is None:
        return None
    while True:
        try:
            return job.step.rungs.lower_peak(split_batch(micro_batches[0], job.step.splits)[0])
        except (MemoryError, RuntimeError) as error:  # compiling takes memory, too
            if not is_likely_out_of_memory(error):
                raise
        freed(job.device)


def _halve(job: Job, micro_batches: Sequence[Batch]) -> str | None:
    splits = 2 * job.step.splits
    try:
        part = split_batch(micro_batches[0], splits)[0]
        if any(len(split_batch(batch, splits)) != splits for batch in micro_batches):
            return None
    except ValueError:
        return None
    job.step.splits = splits
    norms = any(isinstance(child, BATCH_NORMS) for child in job.module.modules())
    of_norms = "; batch norms see that many at once, too" if norms and job.module.training else ""
    return f"micro-batches of {len(part[0])} examples instead of {2 * len(part[0])}, {splits} times as many{of_norms}"


def rung_of(job: Job) -> dict[str, Any]:
    """For a checkpoint: what memory, or a check that failed, has made of the step."""
    rungs = getattr(job.step, "rungs", None)
    return {"splits": getattr(job.step, "splits", 1), "changes": {} if rungs is None else dict(rungs.changes)}


def put_on_rung(job: Job, rung: dict[str, Any]) -> None:
    """Where the run was that goes on, so that its numbers go on, too. Another engine takes what it has."""
    job.step.splits = rung["splits"]
    if rung["changes"] and job.step.rungs is not None:
        job.step.rungs.take(rung["changes"])
