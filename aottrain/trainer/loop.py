"""The training loop, the same for every engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aottrain.config.choices import EAGER_ENGINES
from aottrain.errors import CheckpointError, NumericsError, OutputError, UnsupportedError
from aottrain.metrics import memory
from aottrain.metrics.preserve import preserved
from aottrain.metrics.sinks import Sink, write_summary
from aottrain.metrics.throughput import summarise
from aottrain.ops.random.mode import philox_eager
from aottrain.step import Batch, ClipsItself
from aottrain.trainer.checkpoint import (
    CheckpointFolder,
    Loaded,
    check_storable,
    identity,
    load_model,
    load_optimizer,
    random_state,
    set_random_state,
)
from aottrain.trainer.evaluation import bits_per_byte, evaluating, mean_loss
from aottrain.trainer.job import Job
from aottrain.trainer.meters import History, StepMeter
from aottrain.trainer.nonfinite import BeforeStep
from aottrain.trainer.optim import clip_and_update, learning_rate, set_learning_rate
from aottrain.trainer.progress import Progress
from aottrain.trainer.signals import Stop, graceful_stop
from aottrain.trainer.verify.updates import verify_update
from aottrain.trainer.verify.verification import Outcome, run_compiled, verify_outcome

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig


@dataclass
class Output:
    """Where a run's results go."""

    sinks: Sequence[Sink]
    summary: dict[str, Any]
    """Kept up to date, so that a run that fails leaves one too."""
    summary_path: Path
    checkpoints: CheckpointFolder
    wandb_id: Callable[[], str | None] = lambda: None
    is_complaint_made: bool = False
    """About a summary that cannot be written on the way."""

    def write_summary(self, say: Callable[[str], None]) -> None:
        try:
            write_summary(self.summary_path, self.summary)
        except OutputError as error:  # at the end it must be; until then training goes on
            if not self.is_complaint_made:
                say(f"warning: {error}; going on")
            self.is_complaint_made = True


def fit(job: Job, config: RunConfig, output: Output, resume: Loaded | None = None) -> Stop:
    """Train from step 1, or from the one after `resume`, to `trainer.steps`; says whether a signal ended it before.

    The step must have been prepared (`prepare`). Raises NumericsError: a verified step differs from eager, or a loss or
    gradient norm is not finite; the parameters are then those from before that step.
    """
    trainer, start = config.trainer, resume.step if resume else 0
    total_steps = schedule_steps(config, resume)
    start_streams(config.seed, resume)
    max_skips = trainer.max_skips if trainer.on_nonfinite == "skip" else 0
    meter = StepMeter(job, config.measure, start + 1, trainer.steps)

    with graceful_stop() as stop, Progress(total=trainer.steps, initial=start, name=job.name) as progress:
        history = History(max_skips, output.summary["skipped_steps"], progress.say)
        try:
            for step in range(start + 1, trainer.steps + 1):
                lr = learning_rate(step, config.optimizer.lr, config.lr_schedule, total_steps)
                set_learning_rate(job.optimizer, lr)
                micro_batches = job.batches.at(step)
                if job.step.engine == "aot" and step - start <= config.verify.steps:
                    verify(job, step, micro_batches, config, output, progress)

                logs = step % trainer.log_every == 0 or step in (start + 1, trainer.steps)
                with meter.measure(step, micro_batches):
                    take_step(job, step, lr, micro_batches, config.optimizer.clip_norm, history, logs)
                if step == start + 1 and config.optimizer.target is not None:  # not only when hours have been trained
                    check_storable(job.optimizer.state_dict(), f"{config.optimizer.title}: state_dict")
                output.summary["steps"] = step
                progress.advance()

                ends = step == trainer.steps or stop.signum is not None
                is_asked = stop.takes_save()
                saves = ends or is_asked or (trainer.save_every and step % trainer.save_every == 0)
                evaluates = ends or (trainer.eval_every and step % trainer.eval_every == 0)
                evaluates = evaluates or (saves and trainer.keep_best)
                val_loss = evaluate(job, trainer.eval_batches) if evaluates else None
                if logs or evaluates or saves:
                    history.read()
                    output.summary["skipped_steps"] = history.num_skipped
                if logs or evaluates:
                    write_rows(job, history, meter, output, progress, val_loss)
                if saves:
                    path = save(job, step, config, total_steps, output, progress, val_loss, must=ends)
                    if is_asked and path is not None:
                        progress.say(f"SIGUSR1: a checkpoint was written after step {step}: {path}")
                if ends:
                    break
        finally:
            write_rows(job, history, meter, output, None, None)
            finish_summary(job, history, meter, config, output)
    return stop


def take_step(
    job: Job,
    step: int,
    lr: float,
    micro_batches: Sequence[Batch],
    clip_norm: float | None,
    history: History,
    logs: bool,
) -> None:
    """Gradients, clipping, update. Where a loss or norm is not finite, the update leaves itself out.

    On a GPU reading a loss would wait for the device, so whether it is finite is read at log steps only. Where the run
    goes on after it, parameters, the optimizer's state and buffers are those from before it on every device; random
    numbers are drawn again on the CPU alone.
    """
    before = BeforeStep(job.module) if history.max_skips else None
    result = job.step(micro_batches)
    grad_norm = clip_and_update(job.optimizer, job.module.parameters(), clip_norm, result.loss)
    if before is not None:
        before.put_buffers_back(result.loss, grad_norm)
    history.add(step, lr, result, grad_norm)
    on_cpu, num_skipped = job.device.type == "cpu", history.num_skipped
    if logs or on_cpu:
        history.read()
    if before is not None and on_cpu and history.num_skipped > num_skipped:
        before.put_random_numbers_back()
    job.optimizer.zero_grad(set_to_none=True)


def schedule_steps(config: RunConfig, resume: Loaded | None) -> int:
    """How long the learning-rate schedule is: as told, else as in the run that goes on, else this run's steps.

    So it does not depend on where a run stops.
    """
    if config.lr_schedule.total_steps is not None:
        return config.lr_schedule.total_steps
    return resume.state["schedule_steps"] if resume else config.trainer.steps


def start_streams(seed: int, resume: Loaded | None) -> None:
    """Random numbers start anew here, whatever building and compiling drew, or go on where the checkpoint was."""
    if resume:
        set_random_state(resume.state["random"])
        return
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore(job: Job, resume: Loaded) -> None:
    """Put model and optimizer back to where the checkpoint was; `fit` does so with the random streams. ResumeError:
    it is of another model or optimizer."""
    load_model(job.module.model, resume)
    load_optimizer(job.optimizer, resume)


def prepare(job: Job, check: Callable[[], None] = lambda: None) -> tuple[float, int | None]:
    """Compile: one call that leaves no trace. Returns its seconds and, on CUDA, the most memory held meanwhile.

    check: is called where the engine has compiled and run nothing yet; what it raises ends this.

    Eager has nothing to prepare: 0.0, None; its optimizer, where that is generated, compiles in its first step.
    """
    if job.step.engine in EAGER_ENGINES:
        return 0.0, None
    on_cuda = job.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(job.device)
    start_s = time.perf_counter()
    with preserved(job.module):
        batches = job.batches.at(1)[:1]
        if job.step.compile_for is not None:
            job.step.compile_for(batches[0])
            check()
        job.step(batches)
        prepare_optimizer(job)
        if on_cuda:
            torch.cuda.synchronize(job.device)
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


def verify(
    job: Job, step: int, micro_batches: Sequence[Batch], config: RunConfig, output: Output, progress: Progress
) -> None:
    """Check this step's compiled numbers against eager's, and its generated update against torch's, before it is
    taken."""
    try:
        compiled = run_compiled(job.step, job.module, micro_batches)
        _verify_outcome(job, step, micro_batches, compiled, config, output, progress)
        _verify_update(job, step, compiled, config, output, progress)
    except torch.cuda.OutOfMemoryError:  # that eager does not fit may be why the step is compiled
        torch.cuda.empty_cache()
        output.summary["verify_note"] = "what it is compared with does not fit in memory"
        progress.say(f"step {step} could not be verified: what it is compared with does not fit in memory")


def _verify_outcome(
    job: Job,
    step: int,
    micro_batches: Sequence[Batch],
    compiled: Outcome,
    config: RunConfig,
    output: Output,
    progress: Progress,
) -> None:
    eager, summary = sum(compiled.ran_eagerly), output.summary
    if eager:
        of_all = f"{eager} of {len(micro_batches)} micro-batches"
        part = "the step runs" if eager == len(micro_batches) else f"of step {step} {of_all} run"
        summary["verify_note"] = f"{part} eagerly: see fallbacks"
    if eager == len(micro_batches):
        progress.say(f"step {step} runs eagerly, so there is nothing to verify")
        return
    try:
        verification = verify_outcome(step, compiled, job.step, job.module, micro_batches, config.verify, philox_eager)
    except NumericsError as error:
        if not config.verify.bisect or job.step.explain is None:
            raise
        suspect = micro_batches[(error.micro_batch or compiled.ran_eagerly.index(False) + 1) - 1]
        raise NumericsError(f"{error}\n{job.step.explain(suspect)}") from error
    summary["verify_max_error"] = max(verification.max_error, summary.get("verify_max_error") or 0.0)
    progress.say(
        f"verified step {step} against eager: largest relative error {verification.loss_error:.1e} of the loss, "
        f"{verification.grad_error:.1e} of a gradient or buffer"
        + (f" ({verification.worst})" if verification.grad_error else "")
        + ("" if verification.noise is None else f"; eager's own rounding error is up to {verification.noise:.1e}")
        + (f"; {of_all} run eagerly" if eager else "")
    )


def _verify_update(
    job: Job, step: int, compiled: Outcome, config: RunConfig, output: Output, progress: Progress
) -> None:
    if not isinstance(job.optimizer, ClipsItself):
        return  # torch's own
    names = {parameter: name for name, parameter in job.module.named_parameters()}
    verification = verify_update(step, job.optimizer, names, compiled.gradients, config.optimizer)
    largest = output.summary.get("verify_update_error") or 0.0
    output.summary["verify_update_error"] = max(verification.error, largest)
    progress.say(
        f"verified its update against torch's in float64: largest relative error {verification.error:.1e}"
        + (f" ({verification.worst})" if verification.error else "")
    )


def evaluate(job: Job, num_batches: int) -> float | None:
    """Mean loss over the same held-out batches each time, eager, whatever engine trains."""
    if num_batches == 0:
        return None
    with evaluating(job.module):
        return mean_loss(job.module, job.module.shares, job.batches.held_out(num_batches))


def write_rows(
    job: Job, history: History, meter: StepMeter, output: Output, progress: Progress | None, val_loss: float | None
) -> None:
    """Give the sinks a row for each step since the last time; the newest has what is measured only now and then."""
    rows = history.take_rows(meter.timer.read())
    if not rows:
        return
    rows[-1] = {
        **rows[-1],
        "val/loss": val_loss,
        "memory/peak_bytes": meter.peak_bytes,
        "memory/peak_rss_bytes": memory.peak_rss_bytes(),
    }
    if val_loss is not None:
        output.summary["val_loss"] = val_loss
        if (bits := bits_per_byte(val_loss, job.batches)) is not None:
            output.summary["val_bits_per_byte"] = bits
    for sink in output.sinks:
        sink.write(rows)
    if progress is not None:
        progress.log(rows[-1])
        output.write_summary(progress.say)


def save(
    job: Job,
    step: int,
    config: RunConfig,
    total_steps: int,
    output: Output,
    progress: Progress,
    val_loss: float | None,
    *,
    must: bool,
) -> Path | None:
    """Write a checkpoint. One that fails on the way is said and passed over: None; CheckpointError if it is the last.
    """
    state = {
        "identity": identity(config, job.batches.fingerprint),
        "schedule_steps": total_steps,
        "model": job.module.model.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "random": random_state(),
        "wandb_id": output.wandb_id(),
        "skipped_steps": output.summary["skipped_steps"],
        "decisions": None if job.step.report is None else job.step.report.decisions.to_dict(),
        "torch": str(torch.__version__),  # a plain string: its own class would need code to load
    }
    try:
        path = output.checkpoints.save(step, state, val_loss, progress.say)
    except CheckpointError as error:
        if must:
            raise
        progress.say(f"going on without a checkpoint: {error}")
        return None
    output.summary["checkpoint"] = str(path)
    return path


def finish_summary(job: Job, history: History, meter: StepMeter, config: RunConfig, output: Output) -> None:
    """The figures that need the whole run."""
    output.summary["skipped_steps"] = history.num_skipped
    step_ms = meter.timer.read()
    samples_per_step = job.batches.batch_size * config.trainer.accumulate
    output.summary.update(
        summarise(
            [step_ms[step] for step in sorted(step_ms)],
            warmup_steps=config.measure.warmup_steps,
            samples_per_step=samples_per_step,
            tokens_per_step=job.batches.tokens_per_batch * config.trainer.accumulate,
            flops_per_step=job.flops_per_sample * samples_per_step if job.flops_per_sample else None,
        )
    )
    if job.batches.examples_per_epoch:
        output.summary["epochs"] = output.summary["steps"] * samples_per_step / job.batches.examples_per_epoch
    output.summary["peak_bytes"] = meter.peak_bytes
    output.summary["peak_rss_bytes"] = memory.peak_rss_bytes()
    if history.losses:
        output.summary["first_loss"], output.summary["last_loss"] = history.losses[0], history.losses[-1]
