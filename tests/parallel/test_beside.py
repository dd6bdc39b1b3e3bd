"""What several processes do, in one: beside a stand-in for the other, whatever they leave out is another number."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import aottrain
from aottrain.compiler.link import flights
from aottrain.compiler.link.flights import place_flights
from aottrain.compiler.link.room import fusion_model
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.passes.collectives import talks, with_collectives
from aottrain.ir.flights import start_of
from aottrain.ir.graph import calls, required_spec
from aottrain.measure.links import Link
from aottrain.ops import collectives
from aottrain.ops.collectives import COPIES, PARTS
from aottrain.toolchain.native import find_compiler
from aottrain.trainer.checkpoint import Loaded
from aottrain.trainer.engines import LossModule
from aottrain.trainer.parallel import together
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.world import World
from tests.compiler.programs import joint_inputs, joint_of, run_parts
from tests.numerics.comparison import assert_same
from tests.numerics.tolerance import assert_close_as_sums
from tests.parallel.beside import BOTH, FACTOR, GROUP, Beside
from tests.parallel.sums import MODELS, batches_of, loss
from tests.skips import NO_COMPILER

own = torch.ops.aottrain_parallel
ROWS = 12 * 24  # of a gradient: so many tokens, each a sum over the width of the layers above
CPP = pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)
either = pytest.mark.parametrize("rank", [0, 1])


@pytest.fixture
def rank():
    return 0


@pytest.fixture
def beside(rank, monkeypatch):
    both = Beside(rank)
    monkeypatch.setattr(collectives, "_functional", lambda: both)
    monkeypatch.setattr(World, "group", GROUP)
    yield both
    assert not both.under_way, "nothing waits for what was started"


def values(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def layouts():
    """Dense and not, with and without an offset, and a number."""
    a, b, c, d = values((5, 3), (4, 6), (3, 2), ())
    return [a, b.t(), b[1:3], b[:, 1:4], c[:, :1].expand(3, 4), d]


def rows_of(value, rank):
    """This process's part of the rows, the last of which are zeros."""
    count = -(-value.shape[0] // 2)
    padded = torch.cat([value, value.new_zeros(2 * count - value.shape[0], *value.shape[1:])])
    return padded[rank * count : (rank + 1) * count]


def gathered(shard, rank):
    return torch.cat([shard * FACTOR ** (place != rank) for place in range(2)])


def waited(beside, results):
    """Of results that share memory; nothing of them is there before."""
    assert all(bool(result.isnan().all()) for result in results) and len(beside.under_way) == 1
    return [own.arrived(result) for result in results]


def test_sums_are_of_both_and_leave_what_they_are_given(beside):
    given = layouts()
    before = [value.clone() for value in given]
    each = [own.all_sum(value, GROUP) for value in given[:3]]
    assert_same(each, [value * BOTH for value in given[:3]])
    assert [one.stride() for one in each] == [value.clone().stride() for value in given[:3]]
    together = own.sum_start(given, GROUP)
    assert_same(waited(beside, together), [value * BOTH for value in given])
    assert [one.stride() for one in together] == [value.clone().stride() for value in given]
    assert_same(given, before)


@either
def test_rows_are_gathered_without_their_padding(beside):
    shard, other = values((3, 4), (2,))
    for rows in (5, 6):
        whole = own.gather_rows(shard, rows, 2, GROUP)
        assert_same(whole, gathered(shard, beside.rank)[:rows])
        assert whole.untyped_storage().nbytes() == whole.nbytes
        (started,) = waited(beside, [own.gather_start(shard.t().contiguous().t(), rows, 2, GROUP)])
        assert_same(started, whole)
    assert_same(own.gather_rows(other, 3, 2, GROUP), gathered(other, beside.rank)[:3])


@either
def test_each_gets_its_rows_of_a_sum(beside):
    given = layouts()[:4]
    before = [value.clone() for value in given]
    wanted = [rows_of(value, beside.rank) * BOTH for value in given]
    assert_same([own.scatter_sum(value, 2, GROUP) for value in given], wanted)
    assert_same(waited(beside, own.scatter_start(given, 2, GROUP)), wanted)
    assert_same(given, before)


def test_what_is_planned_is_what_they_give(beside):
    """Shapes, types and layouts, before anything runs."""
    a, b, c = layouts()[:3]
    made = [
        lambda a, b, c: own.all_sum(a, GROUP),
        lambda a, b, c: own.gather_rows(a, 9, 2, GROUP),
        lambda a, b, c: own.scatter_sum(a, 2, GROUP),
        lambda a, b, c: [own.arrived(one) for one in own.sum_start([a, b, c], GROUP)],
        lambda a, b, c: own.arrived(own.gather_start(a, 9, 2, GROUP)),
        lambda a, b, c: [own.arrived(one) for one in own.scatter_start([a, b, c], 2, GROUP)],
    ]
    for make in made:
        with FakeTensorMode() as mode:
            planned = make(*(mode.from_tensor(value) for value in (a, b, c)))
        for one, other in zip(*(x if isinstance(x, list) else [x] for x in (planned, make(a, b, c))), strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def model_of(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    (batch,) = batches_of(name, 1)
    return model, batch


@pytest.mark.parametrize(("name", "kernel"), [("unused", "aten"), pytest.param("tied", "cpp", marks=CPP)])
def test_gradients_are_summed_in_the_backward(beside, name, kernel):
    model, batch = model_of(name)
    reference = copy.deepcopy(model)
    loss(reference, batch).backward()
    call = aottrain.compile(
        LossModule(model, loss), reduce_over=GROUP, kernel=kernel, capture="trace", on_unsupported="error"
    )
    call(*batch).backward()
    assert beside.most > 0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert_close_as_sums(ours.grad, theirs.grad * BOTH, ROWS)


@pytest.mark.parametrize(
    ("rank", "name", "partition", "kernel"),
    [
        (0, "tied", {"budget": 0.0}, "aten"),
        (0, "odd", {}, "aten"),
        (1, "odd", {}, "aten"),
        pytest.param(0, "plain", {}, "cpp", marks=CPP),
    ],
)
def test_weights_are_gathered_and_gradients_cut(beside, name, partition, kernel):
    model, batch = model_of(name)
    reference, module = copy.deepcopy(model), LossModule(model, loss)
    module.shards = Shards(model, World(beside.rank, 2, "shard"))
    with torch.no_grad():
        for (what, whole), part in zip(reference.named_parameters(), model.parameters(), strict=True):
            flat = whole.reshape(1) if what == "scale" else whole
            assert_same(part.detach(), rows_of(flat.detach(), beside.rank))
            flat.copy_(gathered(part, beside.rank)[: len(flat)])
    wanted = loss(reference, batch)
    wanted.backward()
    call = aottrain.compile(module, kernel=kernel, capture="trace", on_unsupported="error", **partition)
    found = call(*batch)
    found.backward()
    torch.testing.assert_close(found, wanted)
    for part, whole in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = rows_of(whole.grad.reshape(part.grad.shape[0] if not whole.ndim else whole.shape), beside.rank)
        assert_close_as_sums(part.grad, gradient * BOTH, ROWS)
        assert gradient.any() or (name, beside.rank) == ("odd", 1)  # there the stand-in's scale is 0


@pytest.mark.parametrize(("rank", "partition"), [(0, {"budget": 0.0}), (1, {})])
def test_gradients_of_parts_are_summed_over_replicas_too(beside, partition):
    model, batch = model_of("tied")
    reference, module = copy.deepcopy(model), LossModule(model, loss)
    world = World(2 + beside.rank, 4, "shard", replicas=2, groups=object())
    assert (world.num_parts, world.num_copies, world.part) == (2, 2, beside.rank) and not world.is_of_first_replica
    module.shards = Shards(model, world)
    with torch.no_grad():
        for whole, part in zip(reference.parameters(), model.parameters(), strict=True):
            assert_same(part.detach(), rows_of(whole.detach(), beside.rank))
            whole.copy_(gathered(part, beside.rank)[: len(whole)])
    loss(reference, batch).backward()
    options = {"kernel": "aten", "capture": "trace", "on_unsupported": "error", **partition}
    call = aottrain.compile(module, reduce_over=world.copies_group, **options)
    call(*batch).backward()
    for part, whole in zip(model.parameters(), reference.parameters(), strict=True):
        wanted = rows_of(whole.grad, beside.rank) * BOTH * BOTH
        assert_close_as_sums(part.grad, wanted, ROWS)
    told = [str(each) for each in call.report.graphs[-1].collectives]
    assert any(line.endswith("2, parts)") for line in told) and any(line.endswith(", copies)") for line in told)


def in_parts(function, *inputs, group=GROUP, strategy="save_all"):
    joint = with_collectives(group, joint_of(function, *inputs))
    return joint, aottrain.apply_partition(joint, aottrain.plan_partition(joint, strategy))


def layers(count):
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count)))


def sizes(node):
    return [required_spec(source).nbytes for source in node.all_input_nodes]


@pytest.mark.parametrize("most_bytes", [1, 300, 600, 1 << 20])
def test_sums_leave_as_soon_as_a_bucket_is_full_and_change_nothing(beside, most_bytes):
    model, x = layers(4), torch.randn(2, 8)
    joint, parts = in_parts(model, x)
    placed = place_flights(parts, most_bytes)
    assert placed.forward is parts.forward
    inputs = joint_inputs(joint, [*model.parameters(), x])
    assert_same(run_parts(placed, inputs), run_parts(parts, inputs))
    starts = [node for node in calls(placed.backward) if node.target is own.sum_start.default]
    whole = sum(sum(sizes(node)) for node in starts)
    assert whole == 4 * (8 * 8 + 8) * 4
    for node in starts[:-1]:
        assert sum(sizes(node)) >= most_bytes > sum(sizes(node)[:-1])
    # What a bucket has is there before it leaves, and the next gradient is made after.
    order = {node: place for place, node in enumerate(placed.backward.nodes)}
    for node, after in zip(starts, starts[1:], strict=False):
        assert order[node] < max(order[source] for source in after.all_input_nodes)
    assert len(starts) == {1: 8, 300: 3, 600: 2, 1 << 20: 1}[most_bytes]


class Cutting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        return own.gather_rows(part, 2 * len(part), 2, PARTS)

    @staticmethod
    def backward(ctx, gradient):
        return own.scatter_sum(gradient, 2, PARTS)


class Cut(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.randn(4, 8) for _ in range(6))

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(x @ Cutting.apply(part))
        return x


def test_what_was_cut_goes_on_to_the_other_replicas_while_more_is_cut(beside):
    """Each bucket's parts are summed over replicas when the bucket after it has left, and nothing waits in between."""
    model, x = Cut(), torch.randn(2, 8)
    joint, halves = in_parts(model, x, group=COPIES)
    placed = place_flights(halves, 512, joins=False)
    inputs = joint_inputs(joint, [*model.parameters(), x])
    assert_same(run_parts(placed, inputs), run_parts(halves, inputs))
    names = {own.scatter_start.default: "cut", own.sum_start.default: "sum", own.arrived.default: "there"}
    gathered = {node for node in calls(placed.backward) if "gather" in str(start_of_arrival(node))}
    order = [names[n.target] for n in calls(placed.backward) if n.target in names and n not in gathered]
    bucket = ["cut", *["there"] * 2, "sum"]  # of two parts each: the one before arrives when this one has left
    assert order[:5] == ["cut", *bucket] and order.count("sum") == order.count("cut") == 3
    assert order[5:9] == bucket and order[9:] == [*["there"] * 2, "sum", *["there"] * 6]


def start_of_arrival(node):
    return start_of(node).target if node.target is own.arrived.default else ""


def test_what_a_message_costs_is_worth_many_bytes(monkeypatch):
    """A bucket is an eighth of all, the last ones less, but no less than what the link carries in its latency."""
    monkeypatch.setattr(flights, "LEAST_BYTES", 1)
    _, parts = in_parts(layers(16), torch.randn(2, 8))
    counts = []
    for latency_s in (0.0, 2.0):
        monkeypatch.setattr(flights, "link_of", lambda node, latency_s=latency_s: Link(latency_s, 1000.0))
        starts = [node for node in calls(place_flights(parts).backward) if node.target is own.sum_start.default]
        counts.append((len(starts), *(sum(sizes(starts[place])) for place in (0, -2))))
    assert counts == [(9, 576, 288), (3, 2016, 2016)]


def test_peaks_of_programs_that_talk_are_not_kept():
    """They hang on what is under way, which follows from the link."""
    joint, _ = in_parts(layers(2), torch.randn(2, 8))
    alone = joint_of(layers(2), torch.randn(2, 8))
    options = CompileOptions("budget", 0.5, "cpp")
    assert [bool(fusion_model(each, options).key()) for each in (joint, alone)] == [False, True]


def test_what_talks_to_nobody_stays_as_it_is():
    model, x = layers(1), torch.randn(2, 8)
    joint = joint_of(model, x)
    assert not talks(joint, None) and talks(joint, GROUP)
    with torch.no_grad():
        assert talks(in_parts(Gathering(layers(1)), x, group=None)[0], None)
    parts = aottrain.apply_partition(joint, aottrain.plan_partition(joint, "save_all"))
    assert place_flights(parts) is parts


class Gathering(torch.nn.Module):
    """Parts of weights, all gathered first, as a model's are."""

    def __init__(self, model):
        super().__init__()
        self.parts = torch.nn.ParameterList(rows_of(layer.weight.detach(), 0) for layer in model)

    def forward(self, x):
        for weight in [own.gather_rows(part, 2 * len(part), 2, GROUP) for part in self.parts]:
            x = torch.tanh(x @ weight)
        return x


def of_forward(count, ahead):
    with torch.no_grad():
        joint, parts = in_parts(Gathering(layers(count)), torch.randn(2, 8), group=None)
    return parts.forward, place_flights(parts, ahead, joins=False).forward


@pytest.mark.parametrize(("ahead", "most"), [(256, 2), (512, 3), (1 << 20, 4)])
def test_gathers_are_started_ahead_and_no_further(beside, ahead, most):
    """Of 256 bytes each."""
    plain, placed = of_forward(6, ahead)
    under_way, seen = 0, []
    for node in calls(placed):
        under_way += (node.target is own.gather_start.default) - (node.target is own.arrived.default)
        seen.append(under_way)
    assert max(seen) == most and seen[-1] == 0
    assert [node.target is own.gather_start.default for node in calls(placed)][:most] == [True] * most
    readers = [node for node in calls(plain) if node.target is own.gather_rows.default]
    order = list(calls(plain))
    assert all(order[order.index(node) + 1] in node.users for node in readers), "where they are read first"


@either
def test_a_checkpoint_has_whole_weights_in_the_first_process_alone(beside):
    model, _ = model_of("odd")
    shards = Shards(model, World(beside.rank, 2, "shard"))
    optimizer = torch.optim.AdamW(model.parameters())
    for number, part in enumerate(model.parameters()):
        part.grad = torch.full_like(part, number + 1.0)
    optimizer.step()
    means = {name: part.detach() + 1 for name, part in model.named_parameters()}
    averages = {"values": means, "count": 3}
    module = SimpleNamespace(model=model, shards=shards)
    job = SimpleNamespace(
        module=module, optimizer=optimizer, state_beside=lambda: {"averages": averages, "patience": None}
    )
    state = together.whole_state(job)
    assert state["averages"]["count"] == 3
    for number, (name, part) in enumerate(model.named_parameters()):
        for key, found in {
            None: (state["model"][name], part.detach()),
            "exp_avg": (state["optimizer"]["state"][number]["exp_avg"], optimizer.state[part]["exp_avg"]),
            "averages": (state["averages"]["values"][name], means[name]),
        }.items():
            whole, own_part = found
            shape = shards.shapes[name]
            wanted = gathered(own_part, beside.rank)[: shape[0] if shape else 1].view(shape)
            assert whole is None if beside.rank else torch.equal(whole, wanted), (name, key)
        assert state["optimizer"]["state"][number]["step"] == 1
    if not beside.rank:
        back = together.part_of_state(job, Loaded(Path("x"), 1, state)).state
        assert_same(back["model"], model.state_dict())
        assert_same(back["averages"]["values"], means)
        assert_same(back["optimizer"]["state"], optimizer.state_dict()["state"])
