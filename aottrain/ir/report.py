"""What a compile did and why, as plain data: read by people, tests, the HTML page and wandb."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from aottrain.ir.budget import Budget


@dataclass(frozen=True)
class StageRecord:
    """One stage of the pipeline. `seconds` is wall time; `before` and `after` are graph texts ("" where not kept)."""

    name: str
    seconds: float
    num_nodes_before: int
    num_nodes_after: int
    after: str = ""
    note: str = ""


@dataclass(frozen=True)
class ValueRecord:
    """One forward value that is saved for, or recomputed in, the backward.

    name: node name in the joint graph; op: ATen overload; module: module path ("" if none); source: "file.py:line";
    num_bytes: size of its storage; recompute_flops: what recomputing it alone costs; reason: why this was decided.
    """

    name: str
    op: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    recompute_flops: int
    reason: str


@dataclass(frozen=True)
class Fallback:
    """A call that ran eagerly: what could not be compiled, where it was written, how often it happened."""

    reason: str
    source: str = ""
    count: int = 1


@dataclass(frozen=True)
class GraphReport:
    """One compiled program (one set of guards). All sizes in bytes, all times in seconds.

    saved_bytes: distinct residual storages without parameters, buffers and batch.
    memory: predicted bytes alive at the predicted peak, by category (parameters, buffers, batch, gradients,
        saved, temporaries, outputs, reserved).
    """

    mode: str  # "train": forward and backward; "inference": forward alone
    partition: str
    budget: Budget | None
    kernel: str
    stages: tuple[StageRecord, ...]
    saved: tuple[ValueRecord, ...]
    recomputed: tuple[ValueRecord, ...]
    saved_bytes: int
    min_cut_saved_bytes: int
    save_all_bytes: int
    predicted_peak_bytes: int
    memory: dict[str, int]
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    num_nodes: dict[str, int]  # joint, forward, backward
    forward_text: str
    backward_text: str
    num_draws: int  # random draws per call
    # Of each plan that a budget could choose: (peak in bytes, seconds of recompute).
    curve: tuple[tuple[int, float], ...] = ()
    kernels: tuple[str, ...] = ()  # names of generated kernels; () where every op runs through ATen
    arena_bytes: int = 0
    loss_heads: tuple[str, ...] = ()  # what was decided about each cross-entropy, where one may be computed in chunks

    @property
    def compile_s(self) -> float:
        return sum(stage.seconds for stage in self.stages)


@dataclass
class CompileReport:
    """Everything one compiled callable has done so far: it grows as new input signatures are compiled."""

    graphs: list[GraphReport] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)

    @property
    def num_fallbacks(self) -> int:
        return sum(fallback.count for fallback in self.fallbacks)

    @property
    def compile_s(self) -> float:
        return sum(graph.compile_s for graph in self.graphs)


def add_fallback(report: CompileReport, reason: str) -> bool:
    """Count a call that ran eagerly; True where this reason is new."""
    for i, known in enumerate(report.fallbacks):
        if known.reason == reason:
            report.fallbacks[i] = replace(known, count=known.count + 1)
            return False
    report.fallbacks.append(Fallback(reason))
    return True
