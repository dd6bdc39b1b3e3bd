"""What a node costs: the roofline, and times measured for each distinct call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aottrain.compiler.partition.costs import op_cost as cost
from aottrain.compiler.partition.costs.op_cost import node_bytes, node_seconds, price_of
from aottrain.ir.graph import calls
from aottrain.measure.rates import Rates
from tests.compiler.programs import joint_of, leaf
from tests.measure.clocks import Clock


def program(x, w):
    return (x @ w).sin().sum(0)


@pytest.fixture
def nodes():
    return {node.name: node for node in calls(joint_of(program, leaf(64, 64), leaf(64, 64, seed=1)).graph)}


def test_the_roofline_uses_the_rates_of_the_device(nodes, monkeypatch):
    flops, num_bytes = 2 * 64**3, 3 * 64 * 64 * 4
    fast_memory = Rates(bytes_per_s=1e15, op_overhead_s=1.0, flops_by_dtype={torch.float32: 1e6})
    monkeypatch.setattr(cost, "rates_for", lambda device: fast_memory)
    assert node_seconds(nodes["mm"]) == pytest.approx(flops / 1e6 + 1.0)
    fast_products = Rates(bytes_per_s=1e6, op_overhead_s=1.0, flops_by_dtype={torch.float32: 1e15})
    monkeypatch.setattr(cost, "rates_for", lambda device: fast_products)
    assert node_seconds(nodes["mm"]) == pytest.approx(num_bytes / 1e6 + 1.0)


def attention_seconds(queries: int, keys: int, causal: bool) -> dict[str, float]:
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    joint = joint_of(attend, leaf(1, 2, queries, 8), leaf(1, 2, keys, 8, seed=1), leaf(1, 2, keys, 8, seed=2))
    found = {str(node.target): node_seconds(node) for node in calls(joint.graph) if "attention" in str(node.target)}
    return {"backward" if "backward" in name else "forward": seconds for name, seconds in found.items()}


@pytest.mark.parametrize(("queries", "keys"), [(32, 32), (16, 48), (48, 16)])
def test_attention_costs_the_arithmetic_that_its_mask_leaves(queries: int, keys: int, monkeypatch) -> None:
    only_arithmetic = Rates(bytes_per_s=1e18, op_overhead_s=0.0, flops_by_dtype={torch.float32: 1.0})
    monkeypatch.setattr(cost, "rates_for", lambda device: only_arithmetic)
    whole, causal = attention_seconds(queries, keys, False), attention_seconds(queries, keys, True)
    scores = 1 * 2 * queries * keys
    assert whole == {"forward": 2 * scores * (8 + 8), "backward": 2 * scores * (3 * 8 + 2 * 8)}
    share = sum(j <= i for i in range(queries) for j in range(keys)) / (queries * keys)
    assert causal == pytest.approx({name: share * seconds for name, seconds in whole.items()})


def test_measured_prices_fall_back_to_the_roofline(nodes, monkeypatch):
    monkeypatch.setattr(
        cost, "call_seconds", lambda calls: tuple(7.0 if "mm" in str(call.target) else None for call in calls)
    )
    price = price_of("measured", nodes["mm"].graph)
    assert price(nodes["mm"]) == 7.0 and price(nodes["sin"]) == node_seconds(nodes["sin"])


def test_measured_prices_of_a_program(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    Clock(monkeypatch)
    price = price_of("measured", nodes["mm"].graph)
    seconds = {name: price(node) for name, node in nodes.items()}
    assert all(value >= 0 for value in seconds.values()) and seconds["mm"] > 0
    again = price_of("measured")  # measures when asked, and finds what is kept
    assert {name: again(node) for name, node in nodes.items()} == seconds


def test_the_roofline_is_one_of_the_prices():
    price = price_of("roofline")
    joint = joint_of(lambda x: (x @ x).sin() @ x, leaf(8, 8))
    assert [price(node) for node in calls(joint.graph)] == [node_seconds(node) for node in calls(joint.graph)]


def test_a_lookup_costs_the_rows_that_it_reads_not_the_table():
    def bytes_of(num_rows):
        joint = joint_of(lambda table, indices: F.embedding(indices, table).sin(), leaf(num_rows, 16), torch.arange(50))
        (node,) = (node for node in joint.graph.nodes if "embedding" in node.name and "backward" not in node.name)
        return node_bytes(node)

    assert bytes_of(100) == bytes_of(100_000) == 2 * 50 * 16 * 4 + 50 * 8
    assert bytes_of(10) == (10 + 50) * 16 * 4 + 50 * 8
