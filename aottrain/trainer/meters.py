"""What a run measures of itself: the time and the memory of its steps, and their losses, without waiting for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from aottrain.metrics import memory
from aottrain.metrics.sinks import Row
from aottrain.metrics.throughput import Pauses, StepTimer
from aottrain.step import Batch, StepResult
from aottrain.trainer.reliability.rollback import BadStepError
from aottrain.trainer.reliability.spikes import Window

if TYPE_CHECKING:
    from aottrain.config.run import MeasureConfig
    from aottrain.trainer.job import Job


NONFINITE, SPIKE = "nonfinite", "spike"


def memory_step(measure: MeasureConfig, first_step: int, last_step: int) -> int | None:
    """The step whose memory is measured, the first after the warm-up; None where none is."""
    return min(first_step + measure.warmup_steps, last_step) if measure.memory else None


class StepMeter:
    """Times every step but one: on a CPU, the first after the warm-up runs under the memory profiler instead."""

    def __init__(self, job: Job, measure: MeasureConfig, first_step: int, last_step: int):
        self.job = job
        self.timer = StepTimer(job.device)
        self.saves = Pauses()
        """Of checkpoints on the way; after the last one no step waits."""
        self.on_cuda = job.device.type == "cuda"
        self.memory_step = memory_step(measure, first_step, last_step)
        self._cpu_peak = memory.Peak()
        self._cuda_counts = False
        self.highest: int | None = None
        """Of all processes of the run, where there are several and it has ended."""

    @contextmanager
    def measure(self, step: int, micro_batches: Sequence[Batch]) -> Iterator[None]:
        if step != self.memory_step:
            with self.timer.time(step):
                yield
        elif self.on_cuda:
            torch.cuda.reset_peak_memory_stats(self.job.device)
            self._cuda_counts = True
            with self.timer.time(step):
                yield
        else:
            alive = memory.alive_tensors(self.job.module, self.job.optimizer, micro_batches)
            alive += [] if self.job.averages is None else self.job.averages.values.values()
            with memory.watch_cpu_peak(alive) as self._cpu_peak:
                yield

    @property
    def peak_bytes(self) -> int | None:
        """Bytes at the highest point of a step, since the warm-up; None before."""
        if self.highest is not None:
            return self.highest
        if self.on_cuda:
            return torch.cuda.max_memory_allocated(self.job.device) if self._cuda_counts else None
        return self._cpu_peak.num_bytes


class History:
    """Loss and gradient norm of each step, left on the device until a log step reads them all at once."""

    def __init__(
        self,
        max_skips: int = 0,
        num_skipped: int = 0,
        say: Callable[[str], None] = print,
        policies: Mapping[str, str] | None = None,
        window: Window | None = None,
    ) -> None:
        """max_skips: how many steps of a run may be left out; with 0 the first one raises. num_skipped: of these, how
        many there were before; say: takes a line about each. policies: for NONFINITE and SPIKE one of raise, skip and
        rollback, as the configuration has them. window: what tells spikes."""
        self.max_skips, self.num_skipped, self.say = max_skips, num_skipped, say
        default = "skip" if max_skips else "raise"
        self.policies = policies or {NONFINITE: default, SPIKE: default}
        self.window = window or Window(None)
        self.losses: list[float] = []
        self.scale: float | None = None
        """By which the last loss that was read was multiplied, where losses are scaled."""
        self.num_overflows = 0
        """Steps that were left out since the run's start here because gradients of a scaled loss were not finite."""
        self._unread: list[tuple[int, float, torch.Tensor, torch.Tensor, StepResult, float | None, Any]] = []
        self._read: list[dict] = []

    def add(
        self,
        step: int,
        lr: float,
        result: StepResult,
        grad_norm: torch.Tensor,
        limit: float | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """limit: a loss above it is a spike. scale: by which it was multiplied before the backward."""
        self._unread.append((step, lr, result.loss, grad_norm.detach().to(result.loss), result, limit, scale))

    def read(self) -> None:
        """Fetch what has been added. BadStepError, a NumericsError, names the first step whose loss or gradient norm is
        not finite, or whose loss is a spike, and that is not to be left out, or one too many."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        values = torch.stack([torch.stack((loss, norm)) for _, _, loss, norm, *_ in unread]).tolist()
        for (step, lr, _, _, result, *_), (loss, norm) in zip(unread, values, strict=True):
            self.losses.append(loss)
            row = {"step": step, "train/loss": loss, "train/lr": lr, "train/grad_norm": norm}
            self._read.append({**row, "num_samples": result.num_samples, "num_tokens": result.num_tokens})
        for (step, *_, limit, scale), (loss, norm) in zip(unread, values, strict=True):
            if scale is None or not self._overflows(step, loss, norm, float(scale)):
                self._judge(step, loss, norm, limit)

    def _overflows(self, step: int, loss: float, norm: float, scale: float) -> bool:
        """Whether the scale of a finite loss was too large; with one below 1 gradients are not finite by themselves."""
        self.scale = scale
        if math.isfinite(norm) or not math.isfinite(loss) or scale < 1:
            return False
        self.num_overflows += 1
        self.say(f"step {step} is left out: gradients overflow with the loss times {scale:g}; half of that is next")
        return True

    def _judge(self, step: int, loss: float, norm: float, limit: float | None) -> None:
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                self._leave_out(step, f"the {name} is {value}", self.policies[NONFINITE])
                return
        if limit is not None and loss > limit:
            why = f"the loss {loss:.6g} is a spike: above {limit:.6g}, by the last {len(self.window.losses)} losses"
            self._leave_out(step, why, self.policies[SPIKE])
            return
        self.window.losses.append(loss)

    def _leave_out(self, step: int, why: str, policy: str) -> None:
        if policy == "rollback":
            raise BadStepError(step, why, policy)
        if policy == "raise" or self.num_skipped >= self.max_skips:
            left_out = policy == "skip" and self.max_skips
            many = f"; trainer.max_skips={self.max_skips} steps have been left out already" if left_out else ""
            raise BadStepError(step, f"{why}; the parameters are those from before it{many}", "raise")
        self.num_skipped += 1
        self.say(f"step {step} is left out: {why} ({self.num_skipped} of at most {self.max_skips})")

    def forget(self, num_losses: int, recent: Sequence[float]) -> None:
        """The run goes back to where so many losses had been read, the last of them `recent`."""
        del self.losses[num_losses:]
        self._unread, self._read = [], []
        self.window = Window(self.window.deviations, recent)

    def take_rows(self, step_ms: dict[int, float]) -> list[Row]:
        """One row for each step that was read since the last call, with its time where it has one."""
        rows, self._read = self._read, []
        for row in rows:
            num_samples, num_tokens = row.pop("num_samples"), row.pop("num_tokens")
            milliseconds = step_ms.get(row["step"])
            if milliseconds:
                row["perf/step_ms"] = milliseconds
                row["perf/samples_per_s"] = num_samples * 1e3 / milliseconds
                if num_tokens:
                    row["perf/tokens_per_s"] = num_tokens * 1e3 / milliseconds
        return rows
