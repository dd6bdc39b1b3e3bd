"""late_gradients: which gradients of weights wait for the end of the backward; what that does to peak and values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.ir.graph import calls, results, storage_root
from aottrain.metrics.memory import watch_cpu_peak
from tests.compiler.programs import captured, joint_inputs, joint_of, run_joint, run_parts
from tests.numerics.comparison import assert_same

WIDTH = 192
WEIGHT = 4 * WIDTH**2  # bytes


class Tower(nn.Module):
    """Wide images of few channels first, then few rows through large weights."""

    def __init__(self, layers: int = 4):
        super().__init__()
        self.wide = nn.Linear(8, 8)
        self.narrow = nn.Linear(8 * 64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x):
        h = self.narrow(F.gelu(self.wide(x)).flatten(1))
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()


def halves(rows: int, strategy: str = "min_cut", budget: float | None = None):
    torch.manual_seed(0)
    model, x = Tower(), torch.randn(rows, 64, 8)
    joint = joint_of(model, x)
    return joint, apply_partition(joint, plan_partition(joint, strategy, budget)), captured(model, x).primals


def large_gradients_last(parts) -> int:
    """How many of the last products give gradients of weights."""
    returned = {storage_root(node) for node in results(parts.backward) if node is not None}
    products = [node for node in calls(parts.backward) if node.target is torch.ops.aten.mm.default]
    return next(i for i, node in enumerate(reversed(products)) if node not in returned)


@pytest.mark.parametrize("plan", [("min_cut", None), ("save_all", None), ("recompute_all", None), ("budget", 0.0)])
def test_of_few_rows_large_gradients_wait(plan):
    joint, parts, primals = halves(4, *plan)
    assert large_gradients_last(parts) >= 5
    inputs = joint_inputs(joint, primals)
    assert_same(run_parts(parts, inputs), run_joint(joint, inputs))


def test_of_many_rows_none_waits():
    _, parts, _ = halves(512)
    assert large_gradients_last(parts) < 3  # the first layers' own


def test_where_the_peak_is_elsewhere_the_order_stays():
    def widened(x, first, second):
        h = torch.tanh(torch.tanh(x @ first) @ second)
        return (h[:, None] * torch.linspace(0, 1, 4096)[:, None]).sin().square().mean()

    x, first, second = (torch.randn(n, WIDTH, requires_grad=n == WIDTH) for n in (4, WIDTH, WIDTH))
    joint = joint_of(widened, x, first, second)
    assert large_gradients_last(apply_partition(joint, plan_partition(joint))) == 1


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
def test_the_peak_is_lower_and_as_predicted(kernel):
    torch.manual_seed(0)
    model, x = Tower(12), torch.randn(8, 64, 8)
    call = aottrain.compile(model, capture="trace", kernel=kernel)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with watch_cpu_peak([*model.parameters(), x]) as peak:
            call(x).backward()
    (graph,) = call.report.graphs
    assert peak.num_bytes == graph.predicted_peak_bytes
    state = sum(4 * p.numel() for p in model.parameters())
    # All gradients, and less than one more: without waiting, what the first layer keeps lies beside them.
    assert graph.predicted_peak_bytes < 2 * state + 4 * x.numel() + WEIGHT
