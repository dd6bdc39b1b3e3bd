"""How long steps took. One clock for every engine; a device is waited for only where a figure is read."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

# Dense FLOP/s of tensor cores, bfloat16 with float32 sums and TF32, by what a device's name has in it; the first that
# matches. From NVIDIA's data sheets: "H100 Tensor Core GPU" (2023), "H200 Tensor Core GPU" (2024), "A100 80GB" (2022),
# "A10" (2021), "L4" and "L40S" (2023), which print twice these for sparse matrices; A10G by AWS.
PEAKS = (
    ("H100 PCIe", {"bf16": 756e12, "fp32": 378e12}),
    ("H100 NVL", {"bf16": 835e12, "fp32": 417e12}),
    ("H100", {"bf16": 989.4e12, "fp32": 494.7e12}),
    ("H200", {"bf16": 989.4e12, "fp32": 494.7e12}),
    ("A100", {"bf16": 312e12, "fp32": 156e12}),
    ("A10G", {"bf16": 70e12, "fp32": 35e12}),
    ("A10", {"bf16": 125e12, "fp32": 62.5e12}),
    ("L40S", {"bf16": 362e12, "fp32": 183e12}),
    ("L4", {"bf16": 121e12, "fp32": 60e12}),
)


def utilisation(flops_per_s: float | None, device: str, precision: str) -> float | None:
    """Model FLOP/s over the device's peak (MFU: Chowdhery et al., 2022, appendix B); None where the peak is not known.

    fp32 is over TF32's peak, whether or not the run multiplies in it."""
    peaks = next((peaks for name, peaks in PEAKS if name in device), {})
    peak = peaks.get("bf16" if precision in ("bf16_weights", "fp16") else precision)
    return flops_per_s / peak if flops_per_s and peak else None


class StepTimer:
    """Milliseconds of each timed step, under its step number.

    CPU: wall time. CUDA: events recorded in the stream around the step, so that timing does not make the host wait;
    `read` waits for the last of them.
    """

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.step_ms: dict[int, float] = {}
        self._pending: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._num_asked = self._num_idle = 0

    @property
    def idle_share(self) -> float | None:
        """Of the steps that began while nobody waited for the device, before how many it had nothing left to do: what
        the host does then takes longer than what the device does. None on a CPU, and where there were none."""
        return self._num_idle / self._num_asked if self._num_asked else None

    @contextmanager
    def time(self, step: int) -> Iterator[None]:
        if self.on_cuda:
            if self._pending:  # none after a read, which waits
                self._num_asked += 1
                self._num_idle += self._pending[-1][2].query()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._pending.append((step, start, end))
        else:
            start_s = time.perf_counter()
            yield
            self.step_ms[step] = (time.perf_counter() - start_s) * 1e3

    def read(self) -> dict[int, float]:
        """All times so far. On CUDA this waits for the steps that are still running."""
        for step, start, end in self._pending:
            end.synchronize()
            self.step_ms[step] = start.elapsed_time(end)
        self._pending.clear()
        return self.step_ms


class Pauses:
    """Milliseconds that the run's own thread did something else between steps, by the clock; one for each time."""

    def __init__(self) -> None:
        self.ms: list[float] = []

    @contextmanager
    def time(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.ms.append((time.perf_counter() - start_s) * 1e3)


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest value that at least `fraction` of all are not above; None for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else None


def summarise(
    step_ms: Sequence[float],
    *,
    warmup_steps: int,
    samples_per_step: int,
    tokens_per_step: int,
    flops_per_step: int | None = None,
) -> dict[str, float | int | None]:
    """step_ms_median, step_ms_p90, tokens_per_s, samples_per_s, model_flops_per_s and num_timed_steps.

    The first `warmup_steps` are left out, but never more than half, so that a short run has a figure too. Rates are
    those of the median step. tokens_per_s is None where examples have no tokens. Model FLOP/s count the model's own
    products, never recomputation: they are comparable between engines. No peak of the device is assumed.
    """
    timed = list(step_ms)[min(warmup_steps, len(step_ms) // 2) :]
    median = percentile(timed, 0.5)
    per_s = 1e3 / median if median else None
    return {
        "step_ms_median": median,
        "step_ms_p90": percentile(timed, 0.9),
        "tokens_per_s": tokens_per_step * per_s if per_s and tokens_per_step else None,
        "samples_per_s": samples_per_step * per_s if per_s else None,
        "model_flops_per_s": flops_per_step * per_s if per_s and flops_per_step else None,
        "num_timed_steps": len(timed),
    }
