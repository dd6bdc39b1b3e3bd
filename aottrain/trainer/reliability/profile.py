"""`profile=step`: three steps after the warm-up under torch.profiler, as a trace for Perfetto or chrome://tracing.

`profile=memory`: each allocation of these steps. On a CPU a trace, too, whose events named [memory] have the
allocator's own bytes; on CUDA the allocator's history and segments, as https://pytorch.org/memory_viz shows them, after
these steps and where memory runs out.
"""

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

FILES = {"step": "trace.json", "memory": "memory.json"}
SNAPSHOT = "memory.pickle"
_HISTORY = 100_000  # events that CUDA's allocator keeps
_NUM_STEPS = 3


class StepProfile:
    """Each generated kernel has its name, its modules and its lines in the trace; each step its number."""

    def __init__(self, config: RunConfig, start: int, folder: Path, say: Callable[[str], None], device: str = "cpu"):
        # Not the step whose memory is measured, which is under a profiler of its own.
        first = min(start + config.measure.warmup_steps + 2, max(config.trainer.steps - _NUM_STEPS + 1, start + 1))
        self._steps = range(first, first + _NUM_STEPS) if config.profile else range(0)
        self._last = min(first + _NUM_STEPS - 1, config.trainer.steps)
        self._of_memory = config.profile == "memory"
        self._has_history = self._of_memory and device == "cuda"
        self._folder, self._say = folder, say
        self._profile: profile | None = None
        if self._has_history:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)

    def note_out_of_memory(self, step: int) -> None:
        """In this step; on a CPU the plan's memory over the step stands in compile_report.html."""
        if self._has_history:
            self._write(f"memory_at_{step}.pickle", torch.cuda.memory._dump_snapshot)

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Around a step."""
        if step not in self._steps or self._has_history:
            yield
            if step == self._last and self._has_history:
                self._write(SNAPSHOT, torch.cuda.memory._dump_snapshot)
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities, record_shapes=True, profile_memory=self._of_memory)
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
        self._write(FILES["memory" if self._of_memory else "step"], self._profile.export_chrome_trace)

    def _write(self, name: str, write: Callable[[str], object]) -> None:
        path = self._folder / name
        try:
            write(str(path))
            self._say(f"profile: {path}")
        except (OSError, RuntimeError) as error:
            self._say(f"warning: {path}: cannot be written: {error}; going on")
