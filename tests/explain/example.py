"""A compile report written by hand: what the report's tests print and draw."""

from __future__ import annotations

from dataclasses import replace

from aottrain.explain.records import Collective, Collectives
from aottrain.explain.report import (
    AliveRecord,
    CompileReport,
    Fallback,
    GraphReport,
    MemoryTimeline,
    StageRecord,
    ValueRecord,
)

MIB = 1024 * 1024


def value(name: str, op: str, module: str, shape: tuple[int, ...], reason: str, **changes) -> ValueRecord:
    num_bytes = 4
    for size in shape:
        num_bytes *= size
    fields = {"source": "transformer.py:41", "dtype": "float32", "num_bytes": num_bytes, "recompute_flops": num_bytes}
    return ValueRecord(name=name, op=op, module=module, shape=shape, reason=reason, **{**fields, **changes})


def train_graph(num_blocks: int = 4) -> GraphReport:
    saved, recomputed = [], []
    for block in range(num_blocks):
        path = f"blocks.{block}"
        saved += [
            value(
                f"addmm_{block}",
                "aten.addmm.default",
                f"{path}.attention.qkv",
                (16, 128, 384),
                "in the minimum cut: recomputing it would need a matrix product",
                recompute_flops=201_000_000,
            ),
            value(
                f"logsumexp_{block}",
                "aten._scaled_dot_product_attention.default",
                f"{path}.attention",
                (16, 4, 128),
                "never recomputed: expensive",
                recompute_flops=67_000_000,
            ),
        ]
        recomputed.append(
            value(
                f"gelu_{block}",
                "aten.gelu.default",
                f"{path}.mlp.act",
                (16, 128, 512),
                "within the budget it is cheaper to recompute than to keep",
            )
        )
    stages = (
        StageRecord("capture", 0.41, 0, 310),
        StageRecord("joint", 0.62, 310, 705, note="12 tangents"),
        StageRecord("functionalize", 0.21, 705, 690),
        StageRecord("simplify", 0.05, 690, 640),
        StageRecord("partition", 0.18, 640, 640, note="cut of 41 values"),
        StageRecord("split", 0.04, 640, 702),
    )
    return GraphReport(
        mode="train",
        partition="budget",
        budget=0.4,
        kernel="aten",
        stages=stages,
        saved=tuple(saved),
        recomputed=tuple(recomputed),
        saved_bytes=13 * MIB,
        min_cut_saved_bytes=22 * MIB,
        save_all_bytes=61 * MIB,
        predicted_peak_bytes=44 * MIB,
        num_draws=12,
        forward_flops=3_200_000_000,
        backward_flops=6_400_000_000,
        memory={
            "parameters": 12 * MIB,
            "gradients": 9 * MIB,
            "saved": 13 * MIB,
            "temporaries": 8 * MIB,
            "batch": 2 * MIB,
        },
        recompute_flops=16_800_000,
        num_nodes={"joint": 640, "forward": 310, "backward": 392},
        forward_text="graph():\n    %x : f32[16, 128] = <placeholder>\n    return (%x,)",
        backward_text="graph():\n    return ()",
    )


def timeline() -> MemoryTimeline:
    """21 MiB throughout; up to 23 more in the backward."""
    live = [(i * MIB, 0, 0, 4 * MIB, 0) for i in range(14)]
    live += [((13 - i) * MIB, min(i, 9) * MIB, 0, (8 + i % 4) * MIB, i % 2 * MIB // 2) for i in range(14)]
    peak = max(range(28), key=lambda i: sum(live[i]))
    alive = (
        AliveRecord("addmm_3", "aten.addmm.default", "blocks.3.attention.qkv", (16, 128, 384), 3 * MIB, "saved"),
        AliveRecord("mm_7", "aten.mm.default", "blocks.1.mlp", (2048, 512), 4 * MIB, "temporaries"),
    )
    fixed = {"parameters": 12 * MIB, "buffers": 0, "batch": 2 * MIB, "reserved": 7 * MIB}
    names = ("saved", "gradients", "outputs", "temporaries", "workspaces")
    return MemoryTimeline(fixed, names, tuple(live), 14, peak, "aten.mm.default", "blocks.1.mlp", alive, 9)


def report_with_timeline() -> CompileReport:
    graph = train_graph()
    priced = [replace(value, recompute_s=1.5e-3, peak_change=-MIB) for value in graph.saved[:3]]
    priced += [replace(graph.saved[3], recompute_s=2e-6, peak_change=0), *graph.saved[4:]]
    found = timeline()
    changes = {"memory": found.memory, "predicted_peak_bytes": max(found.totals), "counts_workspaces": False}
    return CompileReport(graphs=[replace(graph, saved=tuple(priced), timeline=found, **changes)])


def report_with_collectives() -> CompileReport:
    """A gather of which nothing is hidden, and a sum that leaves after a fifth of the backward, half hidden."""
    gather = Collective("forward", "gather_start(float32[4])", False, 2 * MIB, 0.0, 0.0, 2e-3, 2e-3)
    leaving = Collective("backward", "sum_start(float32[8])", True, 4 * MIB, 2e-3, 8e-3, 4e-3, 2e-3)
    graph = replace(train_graph(), collectives=Collectives((gather, leaving), 5e-3, 10e-3))
    return CompileReport(graphs=[graph])


def report() -> CompileReport:
    return CompileReport(graphs=[train_graph()])


def report_with_fallbacks() -> CompileReport:
    fallback = Fallback("aten.nonzero has a data-dependent shape <unbounded>", "model.py:12", count=3)
    return CompileReport(graphs=[train_graph(2), train_graph(3)], fallbacks=[fallback])


SUMMARY = {
    "peak_bytes": int(44.2 * MIB),
    "eager_saved_bytes": 84 * MIB,
    "step_ms_median": 41.3,
    "step_ms_p90": 44.0,
    "recipe": "transformer",
    "device": "cpu",
}
