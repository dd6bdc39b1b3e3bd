"""The figures that need the whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aottrain.metrics import memory
from aottrain.metrics.throughput import percentile, summarise, utilisation
from aottrain.trainer.job import Job
from aottrain.trainer.meters import History, StepMeter

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig
    from aottrain.trainer.loop import Output


def finish_summary(job: Job, history: History, meter: StepMeter, config: RunConfig, output: Output) -> None:
    """The figures that need the whole run."""
    output.summary["skipped_steps"] = history.num_skipped
    if history.scale is not None:
        output.summary.update(loss_scale=history.scale, overflowed_steps=history.num_overflows)
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
    flops_per_s, device = output.summary["model_flops_per_s"], output.summary.get("device") or ""
    output.summary["mfu"] = utilisation(flops_per_s, device, config.trainer.precision)
    if job.batches.examples_per_epoch:
        output.summary["epochs"] = output.summary["steps"] * samples_per_step / job.batches.examples_per_epoch
    output.summary["save_ms"] = percentile(meter.saves.ms, 0.5)
    output.summary["idle_share"] = meter.timer.idle_share
    output.summary["peak_bytes"] = meter.peak_bytes
    output.summary["peak_rss_bytes"] = memory.peak_rss_bytes()
    if history.losses:
        output.summary["first_loss"], output.summary["last_loss"] = history.losses[0], history.losses[-1]
    elif history.window.losses:  # of the checkpoint, after which no step was left
        output.summary["last_loss"] = history.window.losses[-1]
