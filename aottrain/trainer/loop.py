"""The training loop, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aottrain.errors import NumericsError, OutputError, is_likely_out_of_memory
from aottrain.metrics import memory
from aottrain.metrics.sinks import Row, Sink, write_summary
from aottrain.ops.random.mode import philox_eager
from aottrain.step import Batch
from aottrain.trainer.checkpoint import CheckpointFolder, Loaded, check_storable
from aottrain.trainer.evaluation import add_sample, evaluate, held_out_figures, note_held_out
from aottrain.trainer.finishing import finish_summary
from aottrain.trainer.job import Job
from aottrain.trainer.meters import NONFINITE, SPIKE, History, StepMeter
from aottrain.trainer.optim import clip_and_update, learning_rate, set_learning_rate
from aottrain.trainer.parallel.together import agree, is_ending, share_peak
from aottrain.trainer.preparing import schedule_steps, start_streams
from aottrain.trainer.progress import Progress
from aottrain.trainer.reliability.culprit import first_bad_tensor
from aottrain.trainer.reliability.flight import FlightRecord
from aottrain.trainer.reliability.memory import take_less_memory
from aottrain.trainer.reliability.profile import StepProfile
from aottrain.trainer.reliability.rollback import BadStepError, Copy
from aottrain.trainer.reliability.saving import Saving, state_of
from aottrain.trainer.reliability.sentinel import Sentinel
from aottrain.trainer.reliability.signals import Stop, graceful_stop
from aottrain.trainer.reliability.spikes import Window
from aottrain.trainer.reliability.undo import BeforeStep, Undo
from aottrain.trainer.verify.checking import verify
from aottrain.trainer.verify.verification import Verification
from aottrain.trainer.weights.lora import unreached

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig


_RECENT = 50  # step times by which the share of checks is told


@dataclass
class Output:
    """Where a run's results go."""

    sinks: Sequence[Sink]
    summary: dict[str, Any]
    """Kept up to date, so that a run that fails leaves one too."""
    summary_path: Path
    checkpoints: CheckpointFolder
    run_ids: Callable[[], dict[str, str | None]] = lambda: {"wandb_id": None}
    """Of the record that a logger keeps, by the names that a checkpoint has them under."""
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
    start_streams(config.seed, resume, job.world)
    several = job.world.size > 1
    with graceful_stop(several) as stop, Progress(total=trainer.steps, initial=start, name=job.name) as progress:
        run = Run(job, config, output, progress, start, schedule_steps(config, resume), resume)
        try:
            with run.saving:
                if run.owed is not None or start >= trainer.steps:  # killed between its last checkpoint and its figures
                    run.catch_up(stop)
                while run.step < trainer.steps and not (run.is_ended or job.patience.is_over):
                    try:
                        run.take_next(stop)
                    except BadStepError as bad:
                        run.go_back(bad)
            share_peak(job.world, run.meter)
        except BaseException as error:
            write_rows(job, run.history, run.meter, output, None, None, run.flight)
            run.flight.write(output.summary_path.parent, error, {"step": run.step, **output.summary})
            raise
        finally:
            write_rows(job, run.history, run.meter, output, None, None, run.flight)
            finish_summary(job, run.history, run.meter, config, output)
    return stop


class Run:
    """The loop's state between two steps."""

    def __init__(
        self,
        job: Job,
        config: RunConfig,
        output: Output,
        progress: Progress,
        start: int,
        total_steps: int,
        resume: Loaded | None,
    ):
        self.job, self.config, self.output, self.progress = job, config, output, progress
        self.start, self.total_steps, self.step, self.is_ended = start, total_steps, start, False
        self.flight = FlightRecord()
        trainer, before = config.trainer, resume.state if resume else {}
        self.num_left_out = before.get("batches_left_out", 0)
        """Steps whose batches going back has left out."""
        policies = {NONFINITE: trainer.on_nonfinite, SPIKE: trainer.on_spike}
        max_skips = trainer.max_skips if "skip" in policies.values() else 0
        window = Window(None if trainer.on_spike == "ignore" else trainer.spike_deviations, before.get("losses", ()))
        self.history = History(max_skips, output.summary["skipped_steps"], self.say, policies, window)
        self.meter = StepMeter(job, config.measure, start + 1, trainer.steps)
        self.sentinel = Sentinel(job, config.verify, start, self._verify, self.say)
        folder, device = output.summary_path.parent, job.device.type
        self.profile = StepProfile(config, start, folder, self.say, device, lambda: job.step.report)
        self.undo = Undo(job.module, job.optimizer if trainer.on_oom == "replan" else None)
        self.saving = Saving(output.checkpoints, trainer.save == "background", self.say)
        self.samples = trainer.sample_at_evals
        self.owed: dict[str, Any] | None = before.get("owed")
        """Of an evaluation after the last step that a signal has ended: whether it was due, and that step's row."""
        if resume is not None:
            job.own_figures = dict(before.get("val_metrics") or {})
            note_held_out(job, output.summary, before.get("val_loss"))
        self.copy: Copy | None = None
        self._keep_copy("rollback" in policies.values())

    def say(self, line: str) -> None:
        self.flight.note(line)
        self.progress.say(line)

    def _verify(self, step: int, micro_batches: Sequence[Batch]) -> Verification | None:
        scaling = self.job.scaling
        by_one_scale = nullcontext() if scaling is None else scaling.fixed(self.job.module)
        with self.progress.aside("checking against eager", is_rare=True), by_one_scale:
            return verify(self.job, step, micro_batches, self.config, self.output, self.progress)

    def _keep_copy(self, is_wanted: bool) -> None:
        if is_wanted:
            recent = list(self.history.window.losses)
            self.copy = Copy.of(self.job, self.step, len(self.history.losses), recent)

    def take_next(self, stop: Stop) -> None:
        """One step, and what is due after it."""
        job, trainer, output, history = self.job, self.config.trainer, self.output, self.history
        step = self.step + 1
        lr = learning_rate(step, self.config.optimizer.lr, self.config.lr_schedule, self.total_steps)
        set_learning_rate(job.optimizer, lr)
        micro_batches = job.batches.at(step + self.num_left_out)
        logs = step % trainer.log_every == 0 or step in (self.start + 1, trainer.steps)
        verification = self._take(step, lr, micro_batches, logs)
        if step == self.start + 1 and self.config.optimizer.target is not None:  # not only when hours have been trained
            check_storable(job.optimizer.state_dict(), f"{self.config.optimizer.title}: state_dict")
        self.step = output.summary["steps"] = step
        self.progress.advance()
        agree(job, self.config.parallel, step, stop)

        is_last, is_asked = step == trainer.steps, stop.takes_save()
        ends = is_last or stop.signum is not None
        copies = self.copy is not None and step % trainer.rollback_every == 0
        saves = is_last or is_asked or bool(trainer.save_every and step % trainer.save_every == 0)
        is_due = trainer.eval_every > 0 and step % trainer.eval_every == 0
        evaluates = is_last or is_due or (saves and trainer.keep_best)
        if logs or evaluates or ends or saves or copies:
            history.read()
            output.summary["skipped_steps"] = history.num_skipped
        val_loss = self.evaluate(stop) if evaluates else None
        if is_due and val_loss is not None:
            self._judge(val_loss)
        if evaluates and stop.signum is not None:  # amid it: another step would be followed by another evaluation
            ends = True
        ends = ends or job.patience.is_over
        saves = saves or ends
        if verification is not None:
            output.summary.update(verify_checks=self.sentinel.num_checks, verify_drift=self.sentinel.drift)
        if logs or evaluates or saves or verification:  # what a checkpoint has behind it is not lost with the process
            error = None if verification is None else verification.max_error
            is_shown = logs or evaluates or ends
            row = write_rows(job, history, self.meter, output, self.progress, val_loss, self.flight, error, is_shown)
            self.owed = {"is_due": is_due, "row": dict(row)} if evaluates and val_loss is None and row else None
        self._keep_copy(copies)
        self.saving.collect()
        if saves:
            with nullcontext() if ends else self.meter.saves.time():
                self.saving.save(step, state_of(self), val_loss, partial(self._saved, step, is_asked), must=ends)
        self.is_ended = ends

    def evaluate(self, stop: Stop) -> float | None:
        """The loss on held-out data; None where a signal has ended it: a run that goes on does it then."""
        with self.progress.aside("evaluating"):
            return evaluate(self.job, self.config.trainer.eval_batches, partial(is_ending, self.job.world, stop))

    def catch_up(self, stop: Stop) -> None:
        """The evaluation after the step that this run goes on from, where that run did not get to its end."""
        job, owed, output, step = self.job, self.owed, self.output, self.step
        val_loss = self.evaluate(stop)
        if val_loss is None:
            self.is_ended = True
            return
        note_held_out(job, output.summary, val_loss)
        self.owed = None
        if owed is None:
            return
        row = {**owed["row"], **held_out_figures(job, val_loss)}
        for sink in output.sinks:  # in place of that step's row without these figures
            sink.rewind(step - 1)
            sink.write([row])
        self.progress.log(row)
        if owed["is_due"]:
            self._judge(val_loss)
        self._keep_copy(self.copy is not None)
        self.saving.save(step, state_of(self), val_loss, partial(self._saved, step, False), must=False)

    def _judge(self, val_loss: float) -> None:
        """What an evaluation decides that is due after this step."""
        trainer, step = self.config.trainer, self.step
        if self.samples:
            add_sample(self.job, step, trainer.sample_bytes, self.output.summary_path.parent, self.say)
        self.job.patience.add(val_loss, self.job.own_figures)
        if self.job.patience.is_over and step < trainer.steps:
            self.say(f"ends after step {step}: {self.job.patience}")

    def _saved(self, step: int, is_asked: bool, path: Path) -> None:
        self.output.summary["checkpoint"] = str(path)
        if is_asked:
            self.say(f"SIGUSR1: a checkpoint was written after step {step}: {path}")

    def _take(self, step: int, lr: float, micro_batches: Sequence[Batch], logs: bool) -> Verification | None:
        """The step itself, checked first where it is its turn; again where memory runs out in it."""
        job, trainer = self.job, self.config.trainer
        while True:
            times = list(self.meter.timer.step_ms.values())[-_RECENT:]
            verification = self.sentinel.look(step, micro_batches, times)
            replans = trainer.on_oom == "replan"
            before = self.undo.before()
            limit, num_skipped = self.history.window.limit(), self.history.num_skipped
            try:
                with self.profile.watch(step), self.meter.measure(step, micro_batches):
                    clip = self.config.optimizer.clip_norm
                    is_first = step == self.start + 1
                    take_step(job, step, lr, micro_batches, clip, self.history, logs, limit, before, is_first)
                    if job.averages is not None:
                        job.averages.update_after(self.history, num_skipped)
            except BadStepError as bad:
                explained = self._explained(bad, step, micro_batches, before)
                if bad.step == step:
                    before.put_rest_back()
                raise explained from None
            except (MemoryError, RuntimeError) as error:
                if is_likely_out_of_memory(error):
                    self.profile.note_out_of_memory(step)
                if not replans or before.is_taken or not is_likely_out_of_memory(error):
                    raise
                change = take_less_memory(job, micro_batches, error)
                if change is None:
                    raise
            else:
                if self.history.num_skipped > num_skipped and job.device.type == "cpu":
                    self.say(f"step {step}: {self._culprit(micro_batches, before)}")
                return verification
            before.put_all_back()  # here, where the error holds nothing of the step any more
            self.note_replan(step, change)

    def note_replan(self, step: int, change: str) -> None:
        self.output.summary["replans"] = [*self.output.summary.get("replans", ()), {"step": step, "what": change}]
        self.say(f"step {step}: {change}; the step is taken again")
        self.sentinel.asked = True

    def _culprit(self, micro_batches: Sequence[Batch], before: BeforeStep) -> str:
        is_compiled = self.job.step.engine == "aot"
        draws = philox_eager if is_compiled else nullcontext
        return first_bad_tensor(self.job.module, micro_batches, draws, before.random)

    def _explained(
        self, bad: BadStepError, step: int, micro_batches: Sequence[Batch], before: BeforeStep
    ) -> BadStepError:
        """With the tensor that was the first. Weights are those that the step began with; a step that was read later,
        as devices have it, is not taken again."""
        if bad.step == step and "spike" not in bad.why:
            bad = BadStepError(step, f"{bad.why}; {self._culprit(micro_batches, before)}", bad.policy)
        return bad

    def go_back(self, bad: BadStepError) -> None:
        """To the newest copy; the bad error itself where its policy is another, or where that was too often."""
        summary, most = self.output.summary, self.config.trainer.max_rollbacks
        number = summary.get("rollbacks", 0) + 1
        if bad.policy != "rollback" or self.copy is None or number > most:
            many = f"; trainer.max_rollbacks={most} times the run has gone back already" if number > most else ""
            raise NumericsError(f"{bad}{many}")
        summary["rollbacks"] = number
        target = self.copy
        self.num_left_out += bad.step - target.step
        target.put_back(self.job)
        self.history.forget(target.num_losses, target.recent)
        self.step = self.output.summary["steps"] = target.step
        self.progress.go_back_to(target.step)
        for sink in self.output.sinks:
            sink.rewind(target.step)
        self.say(
            f"{bad}: back to step {target.step}, and on with other batches ({number} of at most {most} times); "
            f"{self.num_left_out} steps' batches are left out"
        )


def take_step(
    job: Job,
    step: int,
    lr: float,
    micro_batches: Sequence[Batch],
    clip_norm: float | None,
    history: History,
    logs: bool,
    limit: float | None = None,
    before: BeforeStep | None = None,
    is_first: bool = False,
) -> None:
    """Gradients, clipping, update. Where a loss or norm is not finite, or the loss above `limit`, the update leaves
    itself out. before: what is put back then.

    On a GPU reading a loss would wait for the device, so whether it is finite is read at log steps only. Where the run
    goes on after it, parameters, the optimizer's state and buffers are those from before it on every device; random
    numbers are drawn again on the CPU alone.
    """
    if before is None and history.max_skips:
        before = Undo(job.module).before()
    result = job.step(micro_batches)
    if is_first and (names := unreached(job.module)):
        history.say(f"warning: this step gave the adapters of {', '.join(names)} no gradient: they were not called")
    judged = result.loss if limit is None else torch.where(result.loss > limit, torch.inf, result.loss)
    job.step.doing = "optimizer"
    scale = None if job.scaling is None else job.scaling.unscale(job.optimizer)
    grad_norm = clip_and_update(job.optimizer, job.module.parameters(), clip_norm, judged, job.module.norm_of_all)
    if job.scaling is not None:
        job.scaling.update()
    if before is not None:
        before.is_taken = True
        if history.max_skips:
            before.put_buffers_back(judged, grad_norm)
    history.add(step, lr, result, grad_norm, limit, scale)
    on_cpu, num_skipped = job.device.type == "cpu", history.num_skipped
    if logs or on_cpu:
        history.read()
    if before is not None and on_cpu and history.num_skipped > num_skipped:
        before.random.put_back()
    job.optimizer.zero_grad(set_to_none=True)


def write_rows(
    job: Job,
    history: History,
    meter: StepMeter,
    output: Output,
    progress: Progress | None,
    val_loss: float | None,
    flight: FlightRecord,
    verify_error: float | None = None,
    logs: bool = True,
) -> Row | None:
    """Give the sinks a row for each step since the last time; the newest, which this gives back, has what is measured
    only now and then. logs: whether it is shown."""
    rows = history.take_rows(meter.timer.read())
    if not rows:
        return None
    rows[-1] = {
        **rows[-1],
        **held_out_figures(job, val_loss),
        "verify/max_error": verify_error,
        "memory/peak_bytes": meter.peak_bytes,
        "memory/peak_rss_bytes": memory.peak_rss_bytes(),
    }
    note_held_out(job, output.summary, val_loss)
    for row in rows:
        flight.add(row)
    for sink in output.sinks:
        sink.write(rows)
    if progress is not None and logs:
        progress.log(rows[-1])
        output.write_summary(progress.say)
    return rows[-1]
