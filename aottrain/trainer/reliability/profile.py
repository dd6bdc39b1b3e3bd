"""`profile=step`: three steps after the warm-up under torch.profiler, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from aottrain.runtime.labels import labelled_launches

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig

FILE = "trace.json"
_NUM_STEPS = 3


class StepProfile:
    """Each generated kernel has its name, its modules and its lines in the trace; each step its number."""

    def __init__(self, config: RunConfig, start: int, folder: Path, say: Callable[[str], None]):
        # Not the step whose memory is measured, which is under a profiler of its own.
        first = min(start + config.measure.warmup_steps + 2, max(config.trainer.steps - _NUM_STEPS + 1, start + 1))
        self._steps = range(first, first + _NUM_STEPS) if config.profile == "step" else range(0)
        self._last = min(first + _NUM_STEPS - 1, config.trainer.steps)
        self._path, self._say = folder / FILE, say
        self._profile: profile | None = None

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Around a step."""
        if step not in self._steps:
            yield
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
        try:
            with labelled_launches(), torch.profiler.record_function(f"step {step}"):
                yield
        finally:
            if step == self._last:
                self._end()

    def _end(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        try:
            self._profile.export_chrome_trace(str(self._path))
            self._say(f"profile: {self._path}")
        except (OSError, RuntimeError) as error:
            self._say(f"warning: {self._path}: cannot be written: {error}; going on")
