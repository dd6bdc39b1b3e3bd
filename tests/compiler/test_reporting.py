"""The report of a compile is what the compile did."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compiler import reporting
from tests.compiler.programs import leaf
from tests.numerics.comparison import compiled
from tests.zoo import Mlp


def report_of(plan, model=None, x=None):
    return compiled(model or Mlp(), plan).prepare(torch.randn(32, 16) if x is None else x)


def test_flops_are_those_of_the_matrix_products():
    report = report_of("min_cut")
    forward = 2 * 32 * 16 * 64 + 2 * 32 * 64 * 8
    # The input needs no gradient: the first layer has one product in the backward, the second two.
    backward = 2 * 32 * 16 * 64 + 2 * 2 * 32 * 64 * 8
    assert forward <= report.forward_flops <= 2 * forward
    assert backward <= report.backward_flops <= 2 * backward
    again = report_of("recompute_all")
    assert again.recompute_flops >= report.recompute_flops + 2 * 32 * 16 * 64


def test_saved_values_are_described():
    report = report_of("save_all")
    assert report.saved_bytes == sum(record.num_bytes for record in report.saved) == report.save_all_bytes
    for record in report.saved:
        assert record.op.startswith(("aten.", "aottrain.")) and record.reason and record.shape and record.dtype
    assert {record.module for record in report.saved} >= {"up"}
    assert any(record.source.startswith("zoo.py:") for record in report.saved)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        x = self.norm(x).view(2, 4, 4, 16)
        return F.scaled_dot_product_attention(x, x, x).sigmoid()


def test_items_of_a_tuple_are_named_by_their_op_and_have_its_cost():
    saved = report_of("save_all", Normed()).saved
    attention = [record for record in saved if "attention" in record.op]
    assert attention and all(record.recompute_flops == 2 * 8 * 4 * 4 * (16 + 16) for record in attention)
    assert not any("getitem" in record.op for record in saved)
    again = report_of("recompute_all", Normed()).recomputed
    norms = [record for record in again if "batch_norm" in record.op]
    assert [(record.shape, record.dtype, record.num_bytes) for record in norms] == [((32, 16), "float32", 0)]


def test_saved_bytes_count_neither_parameters_nor_the_batch():
    report = compiled(lambda x, w: x @ w, "save_all").prepare(leaf(64, 64), leaf(64, 64, seed=1))
    assert report.saved_bytes == 0 and report.saved == ()


def test_stages_are_in_order_and_timed():
    report = report_of("min_cut")
    order = [
        "capture",
        "analyse",
        "trace_joint",
        "functionalize",
        "simplify",
        "chunk_loss_heads",
        "plan_partition",
        "apply_partition",
        "schedule",
        "make_kernels",
        "link",
        "describe",
    ]
    assert [stage.name for stage in report.stages] == order
    assert all(stage.seconds >= 0 for stage in report.stages) and report.compile_s > 0
    assert report.num_nodes["joint"] > 0 < report.num_nodes["backward"]


def test_texts_are_deterministic():
    for plan in ("save_all", "min_cut", 0.5):
        first, second = report_of(plan), report_of(plan)
        assert first.forward_text == second.forward_text and first.backward_text == second.backward_text
        assert first.saved == second.saved and first.recomputed == second.recomputed
        assert "0x" not in first.forward_text


def test_an_inference_program_saves_nothing():
    with torch.no_grad():
        report = report_of("min_cut")
    assert report.mode == "inference" and report.saved == () and report.backward_text == ""
    assert report.saved_bytes == report.min_cut_saved_bytes == report.save_all_bytes == 0


def test_the_traffic_of_a_program_is_counted_when_it_is_read(monkeypatch):
    """A gate's forward reads two and writes one, its backward reads three and writes two; operators are not counted."""
    counted = []

    def traffic_of(*given):
        counted.append(given)
        return real(*given)

    real = reporting.traffic_of
    monkeypatch.setattr(reporting, "traffic_of", traffic_of)
    x, gate = (torch.randn(512, 640, requires_grad=True) for _ in range(2))
    call = aottrain.compile(lambda x, gate: F.silu(gate) * x, kernel="cpp", capture="trace")
    call(x, gate).sum().backward()
    (graph,) = call.report.graphs
    assert not counted and graph.traffic is not None
    assert (graph.traffic.moved, graph.traffic.least, graph.traffic.ratio) == (8 * x.nbytes, 8 * x.nbytes, 1.0)
    assert "10.0 MiB moved, at least 10.0 MiB (1.00)" in str(call.report)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(graph.traffic)))
    assert copied.moved == 8 * x.nbytes and len(counted) == 1
    call = aottrain.compile(lambda x: x.sin(), kernel="aten", capture="trace")
    call(x)
    assert call.report.graphs[0].traffic is None and "MiB moved" not in str(call.report)
