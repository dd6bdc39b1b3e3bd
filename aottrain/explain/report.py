"""What a compile did and why, as plain data: read by people, tests, the HTML page and wandb."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aottrain.explain.late import Late
from aottrain.explain.records import Collectives, Diagram, KernelRecord, Refusal
from aottrain.explain.traffic import Traffic
from aottrain.ir.settings.budget import Budget, budget_text
from aottrain.ir.settings.decisions import Record, merged
from aottrain.ir.settings.files import write_text_whole
from aottrain.ir.units import format_bytes


@dataclass(frozen=True)
class StageRecord:
    """One stage of the pipeline."""

    name: str
    seconds: float
    """Wall time."""
    num_nodes_before: int
    num_nodes_after: int
    after: str = ""
    """The graph's text, "" where not kept."""
    note: str = ""
    cpu_seconds: float = 0.0
    """Processor time, of compilers run beside too."""


@dataclass(frozen=True)
class ValueRecord:
    """One forward value that is saved for, or recomputed in, the backward."""

    name: str
    """Of its node in the joint graph."""
    op: str
    """ATen overload."""
    module: str
    """Module path, "" if none."""
    source: str
    """As "file.py:line"."""
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Size of its storage."""
    recompute_flops: int
    """What recomputing it alone costs."""
    reason: str
    """Why this was decided."""
    recompute_s: float | None = None
    """By the cost model: of a recomputed value the seconds of its op; of a saved one what the step would take longer if
    it were recomputed, with all that this needs (None: it may not be)."""
    peak_change: int | None = None
    """Bytes by which the step's peak would change then (None: not simulated)."""


@dataclass(frozen=True)
class AliveRecord:
    """A storage that is alive at the peak."""

    name: str
    op: str
    module: str
    shape: tuple[int, ...]
    num_bytes: int
    category: str


@dataclass(frozen=True)
class MemoryTimeline:
    """Predicted bytes over one call and its backward."""

    fixed: dict[str, int]
    """Alive throughout, by category."""
    categories: tuple[str, ...]
    live: tuple[tuple[int, ...], ...]
    """For each instant (before the forward, while each of its ops that allocates runs, and so for the backward) the
    bytes of each of `categories`."""
    num_forward: int
    """How many instants, the first ones, are the forward's."""
    peak: int
    """The instant of the most."""
    at: str = ""
    """The op that runs then, `at_module` its module."""
    at_module: str = ""
    alive: tuple[AliveRecord, ...] = ()
    """The largest of the `num_alive` storages that are alive then."""
    num_alive: int = 0

    @property
    def fixed_bytes(self) -> int:
        return sum(self.fixed.values())

    @property
    def totals(self) -> list[int]:
        """Bytes alive at each instant."""
        return [self.fixed_bytes + sum(instant) for instant in self.live]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return self.fixed_bytes + sum(self.live[self.peak])

    @property
    def memory(self) -> dict[str, int]:
        """Bytes at the peak, by category."""
        return {**self.fixed, **dict(zip(self.categories, self.live[self.peak], strict=True))}


@dataclass(frozen=True)
class Gap:
    """What recompute adds to a step, and what it must add: seconds by the cost model, op by op."""

    step_s: float
    """Every op once."""
    added_s: float
    """What the plan computes twice."""
    least_added_s: float
    """What every plan whose peak is not higher must compute twice, if not more."""


@dataclass(frozen=True)
class Fallback:
    """A call that ran eagerly."""

    reason: str
    """What could not be compiled."""
    source: str = ""
    """Where it was written."""
    count: int = 1
    """How often it happened."""
    is_fault: bool = False
    """No call did, but a fault of the compiler left a program's operators to run one by one."""


@dataclass
class Replays:
    """What cuda_graphs=True came to in one program; it grows with each call of its forward and its backward."""

    reason: str = ""
    """Why neither is recorded, "" where they may be."""
    recordings: int = 0
    replays: int = 0
    plain: dict[str, int] = field(default_factory=dict)
    """Calls that ran kernel by kernel, by reason."""

    def __str__(self) -> str:
        if self.reason:
            return f"nothing is recorded: {self.reason}"
        plain = "".join(f"; {count} kernel by kernel: {reason}" for reason, count in self.plain.items())
        return f"{self.recordings} recorded, {self.replays} calls replayed{plain}"


@dataclass
class Tangents:
    """For which backward a program's peak is predicted; it grows where the backward runs for other gradients."""

    defined: tuple[bool, ...] = ()
    """Whether the gradient of each differentiable result comes; () where all do."""
    others: list[tuple[bool, ...]] = field(default_factory=list)
    """Such tuples, of calls whose peak is not predicted."""

    def __str__(self) -> str:
        expected = f"from result {self.defined.index(True)} of {len(self.defined)} alone" if self.defined else ""
        others = [" and ".join(str(i) for i, flag in enumerate(mask) if flag) for mask in self.others]
        ran = f"the backward also ran from {', from '.join(others)}, for which there is no prediction" if others else ""
        return "; ".join(filter(None, (expected, ran)))


@dataclass(frozen=True)
class GraphReport(Late):
    """One compiled program (one set of guards). All sizes in bytes, all times in seconds."""

    mode: str
    """One of "train" (forward and backward) and "inference" (forward alone)."""
    partition: str
    budget: Budget | None
    kernel: str
    stages: tuple[StageRecord, ...]
    saved: tuple[ValueRecord, ...]
    recomputed: tuple[ValueRecord, ...]
    saved_bytes: int
    """Distinct residual storages without parameters, buffers and batch."""
    min_cut_saved_bytes: int
    save_all_bytes: int
    predicted_peak_bytes: int
    memory: dict[str, int]
    """Predicted bytes alive at the predicted peak, by category (parameters, buffers, batch, gradients, saved,
    temporaries, workspaces, outputs, reserved, arena). Workspaces are what calls allocate inside themselves, without
    `counts_workspaces` by rule alone; the arena holds temporaries that are used again from step to step."""
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    num_nodes: dict[str, int]
    """Joint, forward, backward."""
    forward_text: str
    backward_text: str
    num_draws: int
    """Random draws per call."""
    curve: tuple[tuple[int, float], ...] = ()
    """Of each plan that a budget could choose: (peak in bytes, seconds of recompute)."""
    kernels: tuple[str, ...] = ()
    """Names of generated kernels; () where every op runs through ATen."""
    num_kernel_functions: int = 0
    """That these kernels are: equal ones are one."""
    arena_bytes: int = 0
    kernel_reason: str = ""
    """Why `kernel` is not what was asked for."""
    library_calls: dict[str, int] = field(default_factory=dict)
    """Calls outside of generated kernels, by operator."""
    tuned_calls: dict[str, int] = field(default_factory=dict)
    """Calls whose code hangs on the model of the processor, not on its instructions alone, by operator."""
    timeline: MemoryTimeline | None = None
    counts_workspaces: bool = True
    loss_heads: tuple[str, ...] = ()
    """What was decided about each cross-entropy, where one may be computed in chunks."""
    layouts: str = ""
    """What was decided about the layouts of convolutions, and why; "" where there are none."""
    traffic: Traffic | None = None
    """None where operators run one by one, and for symbolic sizes."""
    gap: Gap | None = field(default_factory=lambda: None)
    """None where nothing is trained."""
    cuda_graphs: Replays | None = None
    """None where none are wanted."""
    tangents: Tangents = field(default_factory=Tangents)
    """For which the peak is predicted."""
    collectives: Collectives = field(default_factory=Collectives)
    """Calls that talk to other processes, in the order in which they are started, with what of them is exposed."""
    capture: str = ""  # "dynamo" or "trace"
    inputs: tuple[str, ...] = ()
    """Types and shapes of what a call is given, parameters and buffers not among them."""
    num_parameters: int = 0
    """Elements of the parameters that it reads."""
    machine: str = ""
    """On which it was compiled, and when: a line."""
    decisions: Record = field(default_factory=Record)
    """What was decided by measuring, or instead of it."""
    diagrams: Sequence[Diagram] = ()
    """What its pictures show: the joint graph, the forward and the backward; found when it is read."""
    kernel_records: tuple[KernelRecord, ...] = field(default_factory=tuple)
    """The functions that `kernels` are."""
    refusals: tuple[Refusal, ...] = field(default_factory=tuple)
    """Fusions that were not made, and why."""
    guards: tuple[str, ...] = ()
    """For which calls this program is, a line each."""

    @property
    def compile_s(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def recomputed_bytes(self) -> int:
        """Of the values that the backward computes again: what saving each of them would take."""
        return sum(value.num_bytes for value in self.recomputed)

    def __repr__(self) -> str:
        budget = "" if self.budget is None else f" {budget_text(self.budget)}"
        sizes = f"saved {format_bytes(self.saved_bytes)}, predicted peak {format_bytes(self.predicted_peak_bytes)}"
        return f"<GraphReport: {self.mode}, {self.partition}{budget}, kernel {self.kernel}, {sizes}>"


@dataclass(frozen=True)
class GraphBreak:
    """Where TorchDynamo cut a program into several graphs: what it could not trace, where that was written, how often
    it was met while compiling. That alone runs in Python; what lies before and after it is compiled."""

    reason: str
    source: str = ""
    count: int = 1


Renderer = Callable[["CompileReport", bool], str]
_renderer: list[Renderer] = []


def set_renderer(render: Renderer) -> None:
    """What draws a report as HTML. Presentation stands above this module, so the package hands it down, once.

    render: called with the report, and whether the page is to stand alone, or to be shown within another one.
    """
    _renderer[:] = [render]


MEANING_OF_BREAKS = "a peak, and a budget, is of each graph, not of the step; capture='trace' often makes one graph"


@dataclass(repr=False)
class CompileReport:
    """Everything one compiled callable has done so far: it grows as new input signatures are compiled.

    `print` shows it as a page of text, a notebook as a page with pictures, which `save` writes; `explain` lists every
    value.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    target: str = ""
    """What was compiled, by its name."""
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    """Where TorchDynamo cut it."""

    def clear(self) -> None:
        """What was compiled is gone."""
        for records in (self.graphs, self.fallbacks, self.graph_breaks):
            records.clear()

    @property
    def breaks_text(self) -> str:
        """What graph breaks mean for peaks and budgets; "" where there are none."""
        if not self.graph_breaks:
            return ""
        places = "; ".join(f"{graph_break.source} ({graph_break.reason})" for graph_break in self.graph_breaks)
        return f"{MEANING_OF_BREAKS}; TorchDynamo broke at {places}"

    @property
    def num_fallbacks(self) -> int:
        return sum(fallback.count for fallback in self.fallbacks)

    @property
    def num_eager_calls(self) -> int:
        """Calls that no compiled program ran."""
        return sum(fallback.count for fallback in self.fallbacks if not fallback.is_fault)

    @property
    def compile_s(self) -> float:
        return sum(graph.compile_s for graph in self.graphs)

    @property
    def decisions(self) -> Record:
        """Of all programs, each question once."""
        return merged(graph.decisions for graph in self.graphs)

    @property
    def main_graph(self) -> GraphReport | None:
        """The program that the headline is about: the training program that saves most. None before the first."""
        return max(self.graphs, key=lambda graph: (graph.mode == "train", graph.saved_bytes), default=None)

    def __str__(self) -> str:
        from aottrain.explain.summary import summarise  # it reads this module

        return summarise(self)

    def __repr__(self) -> str:
        name = f" of {self.target}" if self.target else ""
        saved = max((graph.saved_bytes for graph in self.graphs), default=0)
        counted = ((len(self.graphs), "program"), (self.num_fallbacks, "fallback"))
        counts = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counted)
        return f"<CompileReport{name}: {counts}, saved {format_bytes(saved)}; print it, or .save(path)>"

    def save(self, path: str | Path) -> Path:
        """Write the report as one HTML file that needs no network; gives its path."""
        write_text_whole(path := Path(path), _renderer[0](self, True))
        return path

    def _repr_html_(self) -> str:
        return _renderer[0](self, False)

    def show(self) -> None:
        """In a notebook the page with pictures, below the cell; elsewhere in the browser, from a temporary file."""
        ipython = sys.modules.get("IPython")
        if ipython is not None and ipython.get_ipython() is not None:
            ipython.display.display(self)
            return
        path = self.save(Path(tempfile.mkdtemp(prefix="aottrain-"), "report.html"))
        if not webbrowser.open(path.as_uri()):
            print(f"no browser to be opened here: {path}")

    def explain(self, *, max_rows: int | None = 20) -> str:
        """What was decided and why, as tables: memory over the step, what is saved, what is computed again, and what
        each saved value costs and brings. `max_rows` bounds each table of values; None prints all rows."""
        from aottrain.explain.tables import explain  # it reads this module

        return explain(self, max_rows=max_rows)


def add_fallback(report: CompileReport, reason: str, source: str = "", *, is_fault: bool = False) -> bool:
    """Count a call that ran eagerly, or a fault; True where this reason is new."""
    return _count(report.fallbacks, Fallback(reason, source, is_fault=is_fault))


def add_graph_break(report: CompileReport, reason: str, source: str = "") -> bool:
    """Count a place where TorchDynamo cut the program; True where it is new."""
    return _count(report.graph_breaks, GraphBreak(reason, source))


def _count(counted: list[Any], one: Any) -> bool:
    for i, record in enumerate(counted):
        if record.reason == one.reason and (record.source == one.source or not one.source):
            counted[i] = replace(record, count=record.count + 1)
            return False
    counted.append(one)
    return True
