"""Before the first step: random streams, what a checkpoint brings along, compiling."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aottrain.config.choices import EAGER_ENGINES
from aottrain.data.order import step_generator
from aottrain.errors import ResumeError, UnsupportedError
from aottrain.metrics.preserve import preserved
from aottrain.step import Batch, ClipsItself
from aottrain.trainer.checkpoint import Loaded, load_model, load_optimizer
from aottrain.trainer.job import Job
from aottrain.trainer.optim import adopt
from aottrain.trainer.parallel.together import part_of_state
from aottrain.trainer.parallel.world import ALONE, World
from aottrain.trainer.reliability.identity import Changes
from aottrain.trainer.reliability.memory import put_on_rung, take_less_memory
from aottrain.trainer.reliability.streams import set_random_state

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig

_STREAMS_OF_RANKS, _STEPS = 1 << 61, 1 << 40  # no step's number gets there, and a run has fewer steps


def schedule_steps(config: RunConfig, resume: Loaded | None) -> int:
    """How long the learning-rate schedule is: as told, else as in the run that goes on, else this run's steps.

    So it does not depend on where a run stops.
    """
    if config.lr_schedule.total_steps is not None:
        return config.lr_schedule.total_steps
    return resume.state["schedule_steps"] if resume else config.trainer.steps


def start_streams(seed: int, resume: Loaded | None, world: World = ALONE) -> None:
    """Random numbers start anew here, whatever building and compiling drew, or go on where the checkpoint was.

    Each process draws others than the first, which draws those of one alone. Where as many as before go on, each goes
    on where it was; else all begin anew, from the seed and the step.
    """
    if resume:
        states = [resume.state["random"], *resume.state.get("random_of_others", ())]
        if len(states) == world.size:
            try:
                set_random_state(states[world.rank])
            except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
                raise ResumeError(f"{resume.path}: its random numbers are none ({type(error).__name__})") from error
            return
        seed = mixed_seed(seed, world.rank, resume.step)
    elif world.rank:
        seed = mixed_seed(seed, world.rank, 0)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mixed_seed(seed: int, rank: int, step: int) -> int:
    """A seed of its own for each process that begins after a step."""
    return step_generator(seed, _STREAMS_OF_RANKS + rank * _STEPS + step).initial_seed()


def restore(job: Job, resume: Loaded, changes: Changes | None = None) -> None:
    """Put model and optimizer back to where the checkpoint was; `fit` does so with the random streams. changes: what
    is to be as in this run. ResumeError: it is of another model or optimizer."""
    changes = changes or Changes()
    if changes.optimizer_begins_anew:  # whose state may be of other parameters, in another order
        resume = replace(resume, state={**resume.state, "optimizer": {**resume.state["optimizer"], "state": {}}})
    resume = part_of_state(job, resume)
    load_model(job.module.model, resume)
    if not changes.optimizer_begins_anew:
        own = [{key: group[key] for key in changes.of_groups & group.keys()} for group in job.optimizer.param_groups]
        before = [dict(group) for group in job.optimizer.param_groups]
        load_optimizer(job.optimizer, resume)
        try:
            adopt(job.optimizer, before)
        except ValueError as error:
            raise ResumeError(f"{resume.path}: is not of this optimizer: {error}") from error
        for group, values in zip(job.optimizer.param_groups, own, strict=True):
            group.update(values)
    try:
        job.load_state_beside(resume.state)
    except (KeyError, RuntimeError) as error:
        raise ResumeError(f"{resume.path}: its averages are of another model") from error
    if "rung" in resume.state:
        splits = 1 if "data.batch_size" in changes.keys else resume.state["rung"]["splits"]  # noqa: SIM118
        put_on_rung(job, {**resume.state["rung"], "splits": splits})


def follow_first(job: Job, batches: Sequence[Batch]) -> None:
    """The first process compiles, and the others take what it has decided: what is measured in each of them may differ,
    and with it the order of what they say to each other."""
    if job.world.size == 1 or job.step.compile_for is None or job.step.rungs is None:
        return

    def decisions() -> dict[str, Any] | None:
        job.step.compile_for(batches[0])  # type: ignore[misc]
        report = job.step.report
        return None if report is None or not report.graphs else report.decisions.to_dict()

    decided = job.world.from_first(decisions)
    if decided is not None and not job.world.is_first:
        job.step.rungs.follow(decided)


def prepare(
    job: Job, check: Callable[[], None] = lambda: None, say: Callable[[str], None] | None = None
) -> tuple[float, int | None]:
    """Compile: one call that leaves no trace. Returns its seconds and, on CUDA, the most memory held meanwhile.

    check: is called where the engine has compiled and run nothing yet; what it raises ends this. say: takes a line
    where memory runs out and another plan is taken; None: the allocator's error is raised.

    Eager has nothing to prepare: 0.0, None; its optimizer, where that is generated, compiles in its first step.
    """
    if job.step.engine in EAGER_ENGINES:
        return 0.0, None
    on_cuda = job.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(job.device)
    start_s = time.perf_counter()
    batches = job.batches.at(1)[:1]
    while True:
        try:
            follow_first(job, batches)
            with preserved(job.module):
                if job.step.compile_for is not None:
                    job.step.compile_for(batches[0])
                    check()
                job.step(batches)
                prepare_optimizer(job)
                if on_cuda:
                    torch.cuda.synchronize(job.device)
            break
        except (MemoryError, RuntimeError) as error:
            if say is None or (change := take_less_memory(job, batches, error)) is None:
                raise
        say(change)
    seconds = time.perf_counter() - start_s
    return seconds, torch.cuda.max_memory_allocated(job.device) if on_cuda else None


def prepare_optimizer(job: Job) -> None:
    """Compile its update, where kernels are generated for it. Where that fails the run goes on with torch's own, as
    `engine.on_unsupported=eager` says; UnsupportedError under "error"."""
    if not isinstance(job.optimizer, ClipsItself):
        return
    try:
        job.optimizer.prepare()
    except UnsupportedError as error:
        if job.torch_optimizer is None:
            raise
        other = job.torch_optimizer()
        other.load_state_dict(job.optimizer.state_dict())
        job.optimizer, job.optimizer_kernel = other, f"torch ({error})"
