"""The arithmetic of shared state, and what kernels hold within themselves by rule."""

import dataclasses

import pytest
import torch
from torch import nn

from aottrain.compiler.absent.step_time import StepTime, moving
from aottrain.ir.settings.devices import DEVICES
from aottrain.ir.tensor import tensor_spec
from aottrain.measure.calls import OpCall
from aottrain.measure.decisions import deciding
from aottrain.measure.rates import rates_for
from aottrain.measure.workspaces import product_workspace_bytes, workspace_bytes
from aottrain.tasks.planning.sharing import state_of, whole_step

H100 = DEVICES["h100-sxm"]


def _state(precision="bf16"):
    blocks = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(4))  # of 400 bytes each
    return state_of(nn.ModuleDict({"blocks": blocks, "head": nn.Linear(10, 5, bias=False)}), 3600, 0, precision)


def test_each_device_holds_its_part_and_two_blocks():
    state = _state()
    assert (state.parameters, state.trained, state.root, state.block) == (1800, 1800, 200, 400)
    assert state.held(1) == {"parameters": 1800, "optimizer": 3600}
    assert state.held(4) == {"parameters": 450, "gradient shards": 450, "optimizer": 900, "unsharded": 500 + 1000}


def test_exchanges_run_beside_calls():
    state, target = _state(), dataclasses.replace(H100, world=4)
    total = 2 * 900 * 0.75 + 1800 * 0.75  # gathered twice in halves, reduced once
    assert state.exchange_s(4, target)[0] == pytest.approx(total / target.link_bytes_per_s)
    assert state.exchange_s(16, target)[0] > state.exchange_s(4, target)[0]  # between machines
    assert state.exchange_s(4, DEVICES["rtx-4090"])[0] > 0 and state.exchange_s(1, target) == (0.0, 0.0)
    slow = dataclasses.replace(target, link_bytes_per_s=1.0)
    assert whole_step(StepTime(compute_s=1.0), state, slow)[2] > total
    assert whole_step(StepTime(compute_s=1.0), state, target)[2] == pytest.approx(1.0, rel=1e-3)
    half = dataclasses.replace(target, link_bytes_per_s=total / 0.5)
    first = (200 + 400) * 0.5 * 0.75 / total * 0.5  # a gather that nothing runs beside
    assert whole_step(StepTime(compute_s=1.0), state, half)[2] == pytest.approx(1.0 + first, rel=1e-3)


def test_the_update_reads_and_writes_what_it_must_once():
    state = _state()
    update, _, _ = whole_step(StepTime(), state, H100, clips=False)
    moved = 3 * 1800 + 2 * 3600  # parameters and moments both ways, gradients one
    assert update.traffic_s == pytest.approx(moving(moved, H100).traffic_s)
    assert whole_step(StepTime(), state, H100, 2)[0].traffic_s > update.traffic_s


def test_what_a_step_is_limited_by():
    step = StepTime(compute_s=2.0, traffic_s=3.0, gaps_s=1.0, launch_s=5.0)
    assert (step.device_s, step.seconds, step.limit) == (6.0, 6.0, "bandwidth")
    assert (dataclasses.replace(step, compute_s=4.0).limit, dataclasses.replace(step, gaps_s=4.0).limit) == (
        "compute", "launches")  # fmt: skip
    waiting = dataclasses.replace(step, launch_s=7.0)
    assert (waiting.seconds, waiting.limit, (waiting + step).launch_s) == (7.0, "launches", 12.0)
    assert step.times(3) == StepTime(6.0, 9.0, 3.0, 15.0)


def test_a_specification_answers_what_would_be_measured():
    def spec(heads, time):
        return tensor_spec(torch.empty(2, heads, time, 64, dtype=torch.bfloat16, device="meta"))

    op = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    call = OpCall(op, (spec(8, 100), spec(8, 100), spec(2, 100), spec(2, 100), spec(8, 100)))
    with deciding("default", H100) as ledger:
        assert workspace_bytes([call]).num_bytes == (4 * 2 * 8 * 128 * 65 + 2 * 2 * 8 * 100 * 64 * 2,)
        assert product_workspace_bytes(torch.device("cuda")) == 32 << 20
        rates = rates_for(torch.device("cuda"))
        assert rates.flops_per_s(torch.bfloat16) == pytest.approx(989.4e12 * 0.7)
        assert rates.flops_per_s(torch.bfloat16) * rates.attention == pytest.approx(989.4e12 * 0.38)
        assert ledger.record(torch.device("cuda")).machine == {"device": "h100-sxm"}
        with deciding("default") as inner:  # a plan within a plan is for the same device
            assert inner.target is H100
