"""What the page and the terminal both show of a compiled program: its figures, and its values in reading order."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

from aottrain.explain.records import Collective
from aottrain.explain.report import CompileReport, Gap, GraphReport, MemoryTimeline, ValueRecord
from aottrain.ir.settings.budget import budget_text
from aottrain.ir.units import format_bytes, format_count, format_flops, format_percent, format_seconds

_SAME = 1e-6  # shares of a step


def with_optimizer(report: CompileReport, optimizer_bytes: int) -> CompileReport:
    """`report` with the optimizer's state in the memory of its training programs.

    A compiler of forward and backward does not see that state, but a measured peak holds it. What was already reserved
    is taken to be it.
    """
    graphs = [_with_optimizer(graph, optimizer_bytes) if graph.mode == "train" else graph for graph in report.graphs]
    return dataclasses.replace(report, graphs=graphs, fallbacks=list(report.fallbacks))


def _with_optimizer(graph: GraphReport, optimizer_bytes: int) -> GraphReport:
    unseen = max(optimizer_bytes - graph.memory.get("reserved", 0), 0)

    def moved(memory: dict[str, int]) -> dict[str, int]:
        rest = max(memory.get("reserved", 0) - optimizer_bytes, 0)
        return {**memory, "reserved": rest, "optimizer": optimizer_bytes} if optimizer_bytes else memory

    timeline = graph.timeline and dataclasses.replace(graph.timeline, fixed=moved(graph.timeline.fixed))
    peak = graph.predicted_peak_bytes + unseen
    return dataclasses.replace(graph, memory=moved(graph.memory), predicted_peak_bytes=peak, timeline=timeline)


def headline(graph: GraphReport) -> list[tuple[str, str]]:
    """The figures that one looks at first, as (name, value)."""
    figures = [
        (
            "partition",
            graph.partition if graph.budget is None else f"{graph.partition}, budget {budget_text(graph.budget)}",
        ),
        ("kernels", kernel_text(graph)),
        ("forward", format_flops(graph.forward_flops)),
    ]
    if graph.mode == "train":
        share = graph.recompute_flops / graph.forward_flops if graph.forward_flops else 0.0
        figures += [
            ("backward", format_flops(graph.backward_flops)),
            ("recompute", f"{format_flops(graph.recompute_flops)} ({format_percent(share)} of the forward)"),
            *([("  of a step's time", gap_text(graph.gap))] if graph.gap is not None else []),
            ("saved for backward", format_bytes(graph.saved_bytes)),
            ("  min_cut would save", format_bytes(graph.min_cut_saved_bytes)),
            ("  save_all would save", format_bytes(graph.save_all_bytes)),
        ]
    return [
        *figures,
        ("predicted peak", format_bytes(graph.predicted_peak_bytes) + uncounted(graph)),
        *([("  predicted for a backward", str(graph.tangents))] if str(graph.tangents) else []),
        *([("collectives", collectives_text(graph))] if graph.collectives.calls else []),
        ("arena", format_bytes(graph.arena_bytes) if graph.arena_bytes else "none"),
        *([("memory traffic", traffic_text(graph))] if graph.traffic is not None else []),
        ("random draws per call", format_count(graph.num_draws)),
        ("graph sizes", ", ".join(f"{name} {format_count(size)} nodes" for name, size in graph.num_nodes.items())),
        ("compile time", format_seconds(graph.compile_s)),
    ]


def gap_text(gap: Gap) -> str:
    """`12.1 % by the cost model; a plan of this peak adds at least 12.0 %`."""
    added, least = (seconds / gap.step_s if gap.step_s else 0.0 for seconds in (gap.added_s, gap.least_added_s))
    if added - least < _SAME:
        return f"{format_percent(added)} by the cost model; no plan of this peak adds less"
    return f"{format_percent(added)} by the cost model; a plan of this peak adds at least {format_percent(least)}"


def collectives_text(graph: GraphReport) -> str:
    """`14, 1.20 MiB into each process; 3.10 ms on the link by the cost model, of it 400 us exposed (12.9 %); the first
    sum leaves after 23.0 % of the backward`."""
    all_of = graph.collectives
    share = all_of.exposed_s / all_of.link_s if all_of.link_s else 0.0
    exposed = f"{format_seconds(all_of.exposed_s)} exposed ({format_percent(share)})"
    times = f"{format_seconds(all_of.link_s)} on the link by the cost model, of it {exposed}"
    first = all_of.first_sum
    leaves = "" if first is None else f"; the first sum leaves after {format_percent(first)} of the backward"
    return f"{format_count(len(all_of))}, {format_bytes(all_of.num_bytes)} into each process; {times}{leaves}"


COLLECTIVE_COLUMNS = ("bytes in", "starts", "waited for", "on the link", "hidden", "exposed", "call")


def collective_rows(collectives: Iterable[Collective]) -> list[list[str]]:
    """Under COLLECTIVE_COLUMNS, in the order in which they are started; instants are from the start of the half."""
    return [
        [
            format_bytes(each.num_bytes),
            *map(format_seconds, (each.start_s, each.wait_s, each.link_s, each.hidden_s, each.exposed_s)),
            str(each),
        ]
        for each in collectives
    ]


def uncounted(graph: GraphReport) -> str:
    """What the predicted peak leaves out, as an appendix to the figure."""
    return "" if graph.counts_workspaces else ", without what library calls allocate inside themselves"


LABELS = {"saved": "saved activations", "reserved": "reserved for others", "arena": "arena of temporaries"}


def memory_rows(graph: GraphReport) -> list[tuple[str, int]]:
    """(category, bytes) at the predicted peak, largest first, without the empty ones."""
    rows = ((LABELS.get(name, name), size) for name, size in graph.memory.items() if size)
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def top_of(timeline: MemoryTimeline) -> str:
    """When the memory is at its top: `while aten.mm.default runs in blocks.2.up, in the backward`."""
    half = "forward" if timeline.peak < timeline.num_forward else "backward"
    if not timeline.at and timeline.num_forward < timeline.peak == len(timeline.live) - 1:
        return "when a gradient is copied into .grad, which lies in memory otherwise"
    if not timeline.at:
        return f"before the first op of the {half}"
    module = f" in {timeline.at_module}" if timeline.at_module else ""
    return f"while {timeline.at} runs{module}, in the {half}"


def binned(values: Sequence[int], num_bins: int) -> list[int]:
    """Where in `values` the largest of each of at most `num_bins` stretches of equal length stands."""
    count = min(num_bins, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    return [max(range(a, b), key=values.__getitem__) for a, b in itertools.pairwise(edges)]


def signed_bytes(num_bytes: int | None) -> str:
    """A change: `-1.50 MiB`, `+4.00 KiB`, `none`; not known: ``."""
    if num_bytes is None:
        return ""
    return f"{'+' if num_bytes > 0 else '-'}{format_bytes(abs(num_bytes))}" if num_bytes else "none"


def by_module(values: Iterable[ValueRecord]) -> list[tuple[str, int, int]]:
    """(module path, number of values, bytes), largest first; values outside any module are under "(no module)"."""
    totals: dict[str, tuple[int, int]] = {}
    for value in values:
        count, num_bytes = totals.get(value.module, (0, 0))
        totals[value.module] = (count + 1, num_bytes + value.num_bytes)
    rows = [(module or "(no module)", count, num_bytes) for module, (count, num_bytes) in totals.items()]
    return sorted(rows, key=lambda row: (-row[2], row[0]))


def bytes_by_kind(values: Iterable[ValueRecord], most: int = 24) -> dict[str, int]:
    """{module path: bytes}, largest first, repeated blocks together: `blocks.*.mlp`. What is beyond `most` of them is
    under "others"."""
    totals: dict[str, int] = {}
    for module, _, num_bytes in by_module(values):
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
        totals[kind] = totals.get(kind, 0) + num_bytes
    ordered = sorted(totals.items(), key=lambda row: (-row[1], row[0]))
    rest = sum(num_bytes for _, num_bytes in ordered[most:])
    return dict(ordered[:most]) | ({"others": rest} if rest else {})


def by_size(values: Iterable[ValueRecord]) -> list[ValueRecord]:
    """Saved values: the largest first."""
    return sorted(values, key=lambda value: (-value.num_bytes, -value.recompute_flops, value.name))


def by_cost(values: Iterable[ValueRecord]) -> list[ValueRecord]:
    """Recomputed values: the dearest first, and so the views, which cost nothing, last."""
    return sorted(values, key=lambda value: (-value.recompute_flops, -value.num_bytes, value.name))


def traffic_text(graph: GraphReport) -> str:
    """What its kernels move of the least that they could; "" where that is not counted."""
    if graph.traffic is None:
        return ""
    moved, least = format_bytes(graph.traffic.moved), format_bytes(graph.traffic.least)
    return f"{moved} moved, at least {least} ({graph.traffic.ratio:.2f})"


def kernel_text(graph: GraphReport) -> str:
    """What the graphs run as: how many kernels were generated, or why it is not what was asked for."""
    if graph.kernels:
        return f"{graph.kernel}, {format_count(len(graph.kernels))} generated"
    return graph.kernel + (f" ({graph.kernel_reason})" if graph.kernel_reason else "")


def train_graph(report: CompileReport) -> GraphReport | None:
    """The program that training runs: the last one with a backward; None if there is none."""
    graphs = [graph for graph in report.graphs if graph.mode == "train"]
    return graphs[-1] if graphs else None
