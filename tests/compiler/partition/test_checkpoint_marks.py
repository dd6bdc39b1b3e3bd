"""torch.utils.checkpoint decides what is saved, by both front ends and under every strategy; the plan says so."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import aottrain
from aottrain.compiler.partition.strategies import find_demand, plan_partition
from aottrain.ir.graph import Mark, marks_of
from tests.compiler.programs import joint_of, leaf
from tests.sampling import crossed
from tests.zoo import FeedForward, WrappedBlocks

WIDTH, ROWS, NUM_BLOCKS = 16, 8, 3
ROW_BYTES = ROWS * WIDTH * 4  # of a block's result
FRONTENDS = ("dynamo", "trace")
PARTITIONS = ("min_cut", "save_all", "recompute_all")


def block():
    return FeedForward(WIDTH, activation=torch.tanh, dropout=0.0)


def region(policy=None, **options):
    if policy is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, use_reentrant=False, **options)


def always(policy):
    return region(lambda *args, **kwargs: policy)


def saved_bytes(wrap, frontend="trace", partition="min_cut"):
    torch._dynamo.reset()
    model = WrappedBlocks(block, NUM_BLOCKS, wrap)
    compiled = aottrain.compile(model, capture=frontend, partition=partition, on_unsupported="error")
    compiled(leaf(ROWS, WIDTH)).sum().backward()
    assert not compiled.report.fallbacks
    return compiled.report.graphs[0].saved_bytes


@pytest.mark.parametrize(
    ("reentrant", "partition", "frontend"), crossed((False, True), ("min_cut", "save_all"), FRONTENDS, one_in=2)
)
def test_a_checkpointed_block_saves_its_result_alone(reentrant, partition, frontend):
    wrap = functools.partial(checkpoint, use_reentrant=reentrant)
    assert saved_bytes(wrap, frontend, partition) == NUM_BLOCKS * ROW_BYTES
    assert saved_bytes(None, frontend, partition) >= 5 * NUM_BLOCKS * ROW_BYTES


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_a_policy_saves_is_saved_beside_the_blocks_results(frontend, partition):
    products = region([torch.ops.aten.addmm.default])
    # `up` is four times as wide as a block's result, which recompute_all computes again from the saved `down`.
    assert saved_bytes(products, frontend, partition) == 5 * NUM_BLOCKS * ROW_BYTES


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_preferences_yield_to_bytes_and_orders_do_not(frontend):
    nothing = NUM_BLOCKS * ROW_BYTES
    assert saved_bytes(always(CheckpointPolicy.MUST_RECOMPUTE), frontend) == nothing
    assert saved_bytes(always(CheckpointPolicy.PREFER_RECOMPUTE), frontend) == nothing
    everything = saved_bytes(None, frontend, "save_all")
    assert (
        saved_bytes(always(CheckpointPolicy.MUST_SAVE), frontend, "recompute_all")
        >= everything - NUM_BLOCKS * ROW_BYTES
    )
    assert saved_bytes(always(CheckpointPolicy.PREFER_SAVE), frontend) <= saved_bytes(
        always(CheckpointPolicy.MUST_SAVE), frontend
    )


def test_the_plan_says_that_the_user_marked_it():
    joint = joint_of(lambda x: checkpoint(lambda y: y.sin().exp().sin().cos(), x * 2, use_reentrant=False), leaf(8))
    plan = plan_partition(joint, "min_cut")
    assert [plan.reasons[name] for name in plan.saved] == ["enters or leaves a region of torch.utils.checkpoint"]
    assert plan.recomputed and {plan.reasons[name] for name in plan.recomputed} == {"marked by torch.utils.checkpoint"}


def test_a_policys_own_marks_are_on_the_nodes():
    wrap = region(lambda ctx, op, *a, **k: op == torch.ops.aten.exp.default)
    joint = joint_of(lambda x: wrap(lambda y: y.sin().exp().cos(), x), leaf(8))
    marks = {node.name: marks_of(node)[0][1] for node in joint.graph.nodes if marks_of(node)}
    assert marks["exp"] is Mark.MUST_SAVE and marks["sin"] is Mark.PREFER_RECOMPUTE


def test_values_of_two_regions_are_not_merged():
    def f(x):
        one, two = (checkpoint(lambda y: y.sin().exp().cos(), x, use_reentrant=False) for _ in range(2))
        return one * two + x.sin().exp().cos()

    joint = joint_of(f, leaf(8))
    exponentials = [node for node in joint.graph.nodes if "exp" in str(node.target)]
    assert len(exponentials) == 3 and len({marks_of(node) for node in exponentials}) == 3
    saved = plan_partition(joint, "save_all").saved
    assert [node.name in saved for node in exponentials] == [False, False, True]


def test_a_tuple_is_marked_as_far_as_what_is_taken_out_of_it():
    """What a region returns it does not mark, nor the sort that it is taken from; the index stays within."""

    def marks(function):
        return {node.name: mark for node, mark in find_demand(joint_of(function, leaf(4, 4))).marks.items()}

    def sorts(y):
        return y.sin().sort(-1)[0]

    recompute, save = (always(getattr(CheckpointPolicy, name)) for name in ("MUST_RECOMPUTE", "MUST_SAVE"))
    alone = marks(lambda x: recompute(sorts, x * 2).exp())
    assert {"sin", "getitem_1"} <= alone.keys() and not {"sort", "getitem"} & alone.keys()
    nested = marks(lambda x: recompute(lambda y: save(sorts, y.cos()).exp(), x * 2).exp())
    assert nested["sin"] is nested["getitem_1"] is Mark.MUST_SAVE
    assert nested["sort"] is nested["getitem"] is Mark.MUST_RECOMPUTE


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_random_values_in_eagers_stream_are_saved_against_the_mark(frontend):
    torch._dynamo.reset()
    f = aottrain.compile(
        lambda x: checkpoint(lambda y: torch.dropout(y.sin(), 0.5, True).exp(), x, use_reentrant=False),
        capture=frontend,
        rng="eager",
        on_unsupported="error",
    )
    f(leaf(64)).sum().backward()
    reasons = [value.reason for value in f.report.graphs[0].saved]
    assert "must: not repeatable, though marked by torch.utils.checkpoint" in reasons


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_region_that_writes_outer_memory_runs_eagerly(frontend):
    torch._dynamo.reset()
    m = nn.BatchNorm1d(3)
    f = aottrain.compile(lambda x: checkpoint(m, x, use_reentrant=False), capture=frontend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f(leaf(4, 3)).sum().backward()
    assert m.num_batches_tracked == 2, "eager runs the block twice"
    assert len(f.report.fallbacks) == 1


def test_a_reentrant_region_that_returns_what_it_is_given_runs_eagerly():
    """Eager's backward of one starts a backward of its own, from results that it made itself."""
    call = aottrain.compile(
        lambda x: checkpoint(lambda y: y.view(-1), x, use_reentrant=True) * 2, capture="trace", on_unsupported="error"
    )
    with pytest.raises(aottrain.UnsupportedError, match="a result of a reentrant"):
        call(leaf(4, 4))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_a_reentrant_region_closes_over_gets_no_gradient_where_no_argument_needs_one(frontend):
    x, y = leaf(4).detach(), leaf(4)
    step = aottrain.compile(
        lambda x, y: checkpoint(lambda x: (y * x).sin(), x, use_reentrant=True) + y, capture=frontend
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(x, y).sum().backward()
    assert torch.equal(y.grad, torch.ones(4))
