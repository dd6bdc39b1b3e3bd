"""predict_peak against the CPU allocator's own events, on programs whose ops need no workspace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aottrain.compiler.partition.peak import predict_peak
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.runtime.executor import aten_runner
from tests.compiler.programs import joint_inputs, joint_of, leaf

KIB = 1024
SIDE = 128  # a value of 128 x 128 float32 is 64 KiB: far above the scalars that events also count


def chain(x):
    return x.sin().exp().tanh().cos() * 2


def branches(x, y):
    a, b = (x * y).sigmoid(), (x + y).exp()
    return (a * b).log1p() + a


def views(x, w):
    h = (x * w).t().sin()
    top, bottom = h.split(SIDE // 2)
    return (top * bottom).exp().sum(0)


def products(x, w):
    return ((x @ w).relu() @ w).tanh()


def dropouts(x, y):
    return F.dropout((x * y).sin(), 0.5) * y.exp()


PROGRAMS = {f.__name__: f for f in (chain, branches, views, products, dropouts)}


def measured_peak(run):
    """Highest number of bytes alive above the start while run() runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        keep = run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    del keep
    return peak


@pytest.mark.parametrize("strategy", ["save_all", "min_cut", "recompute_all"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_prediction_equals_the_allocators_events(program, strategy):
    function = PROGRAMS[program]
    args = [leaf(SIDE, SIDE, seed=i) for i in range(function.__code__.co_argcount)]
    joint = joint_of(function, *args)
    parts = apply_partition(joint, plan_partition(joint, strategy))
    inputs = joint_inputs(joint, args)
    num_early = len(args) + 1
    forward, backward = aten_runner(parts.forward), aten_runner(parts.backward)

    def step():
        values = forward(inputs[:num_early])
        count = len(values) - len(parts.residuals)
        outputs, residuals = values[:count], values[count:]
        del values
        # As autograd does: its engine holds the tangents to the end, and the boxed list alone the residuals.
        tangents = [t.clone() for t in inputs[num_early:]]
        boxed = [*residuals, *tangents]
        del residuals
        return outputs, tangents, backward(boxed)

    with torch.no_grad():
        step()
        measured = measured_peak(step)
    fixed = sum(v.untyped_storage().nbytes() for v in args)
    predicted = predict_peak(parts).total - fixed
    assert abs(predicted - measured) <= 0.01 * measured + 4 * KIB, (predicted / KIB, measured / KIB)


def test_categories_sum_to_the_total():
    joint = joint_of(branches, leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=1))
    for strategy in ("save_all", "min_cut", "recompute_all"):
        peak = predict_peak(apply_partition(joint, plan_partition(joint, strategy)))
        assert sum(peak.memory.values()) == peak.total and min(peak.memory.values()) >= 0


def test_reserved_bytes_are_added():
    joint = joint_of(chain, leaf(SIDE, SIDE))
    parts = apply_partition(joint, plan_partition(joint, "min_cut"))
    assert predict_peak(parts, reserved_bytes=1000).total == predict_peak(parts).total + 1000


def test_saving_less_never_predicts_more_for_a_deep_chain():
    def deep(x):
        for _ in range(12):
            x = x.sin().exp()
        return x

    joint = joint_of(deep, leaf(SIDE, SIDE))
    peak = {s: predict_peak(apply_partition(joint, plan_partition(joint, s))).total for s in ("save_all", "min_cut")}
    assert peak["min_cut"] <= peak["save_all"]


def test_items_of_a_tuple_that_nothing_reads_are_there_while_the_op_runs():
    with torch.no_grad():
        joint = joint_of(lambda x: x.sort(0).values, torch.ones(SIDE, SIDE))
    peak = predict_peak(apply_partition(joint, plan_partition(joint, "min_cut")))
    unit = SIDE * SIDE * 4
    assert peak.total == unit + unit + 2 * unit  # the input, the sorted values, and their int64 positions
