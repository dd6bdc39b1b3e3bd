"""Runs one stage: times it, checks its law, keeps the record for the report."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import fx

from aottrain.compiler.graphs.source_locations import raised_at
from aottrain.compiler.joint.analysis import CapturedTensors
from aottrain.errors import AottrainError, UnsupportedError, is_out_of_memory
from aottrain.explain.report import StageRecord
from aottrain.guards.assigned import Unforeseen
from aottrain.ir.graph import calls
from aottrain.ir.text import graph_text

T = TypeVar("T")
_ADDRESS = re.compile(r"<([\w.]+) object at 0x\w+>")
_HIGHER_ORDER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")  # as torch.cond, where a mode meets it
_watchers: list[Callable[[str], None]] = []
_frozen: list[bool] = []  # True, once the program was seen to have frozen objects


@contextmanager
def stages_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, `tell` hears the name of each stage as it begins, of every compile in this process."""
    _watchers.append(tell)
    try:
        yield
    finally:
        _watchers.remove(tell)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Inside, no garbage is collected: graphs are many objects that live on, and to look through them again and again
    takes an eighth of a compile. Nor is it at once after that: what was made counts as old, and is looked through when
    all is."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not _has_frozen():  # what the program has frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _has_frozen() -> bool:
    """Whether the program froze objects. Once seen it is remembered: the interpreter counts them one by one, which is
    20 ms for 400,000."""
    if not _frozen and gc.get_freeze_count():
        _frozen.append(True)
    return bool(_frozen)


@dataclass
class StageLog:
    """The records of one compile, in order."""

    records: list[StageRecord] = field(default_factory=list)
    num_nodes: int = 0
    _looked: tuple[fx.Graph, int, str] | None = None
    """The graph that was looked at last, with what was found."""

    def trace(self, name: str, stage: Callable[..., T], *args: Any, check: Callable[[T], None] | None = None) -> T:
        """Like `run`, for a stage that runs the user's code: whatever that raises, but for allocators, means that it
        cannot be traced."""
        try:
            return self.run(name, stage, *args, check=check)
        except (AottrainError, CapturedTensors, Unforeseen):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines() or [""]
            line = _ADDRESS.sub(r"\1", lines[0])  # the same each time
            reason = f"{name}: {type(error).__name__}: {line[:200]}"
            if operator := _HIGHER_ORDER.search(line):
                reason = (
                    f"torch.ops.higher_order.{operator[1]}: the functions that it calls have no program of their own"
                )
            raise UnsupportedError(reason, raised_at(error)) from error

    def annotate(self, note: str) -> None:
        """Say something about the stage that ran last."""
        self.records[-1] = replace(self.records[-1], note=note)

    def run(self, name: str, stage: Callable[..., T], *args: Any, check: Callable[[T], None] | None = None) -> T:
        """`stage(*args)`; `check` raises where the stage broke its law. Verification counts into the stage's time."""
        for tell in _watchers:
            tell(name)
        start, start_cpu = time.perf_counter(), _processor_seconds()
        out = stage(*args)
        if check is not None:
            check(out)
        graph = getattr(out, "graph", None)
        num_nodes, text = self._look_at(graph) if isinstance(graph, fx.Graph) else (self.num_nodes, "")
        seconds = time.perf_counter() - start
        cpu_seconds = _processor_seconds() - start_cpu
        self.records.append(StageRecord(name, seconds, self.num_nodes, num_nodes, text, cpu_seconds=cpu_seconds))
        self.num_nodes = num_nodes
        return out

    def _look_at(self, graph: fx.Graph) -> tuple[int, str]:
        """How many calls a graph has, and its text. Most passes leave most programs as they are."""
        if self._looked is None or self._looked[0] is not graph:
            self._looked = graph, len(calls(graph)), graph_text(graph)
        return self._looked[1:]


def _processor_seconds() -> float:
    """Of this process, and of the compilers that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
