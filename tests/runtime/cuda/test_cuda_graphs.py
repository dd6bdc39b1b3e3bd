"""CUDA graphs without a device: when a call is recorded, replayed or neither, and what is never shared."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.runtime.cuda import cuda_graphs
from aottrain.runtime.cuda.cuda_graphs import MAX_RECORDINGS, WARM_UP_CALLS
from tests.numerics.comparison import assert_same
from tests.runtime.recorders import Again, Broken

ALIVE = "residuals of an earlier call are still alive"
PLAIN_FORWARD = "its forward was no replay"


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    """The recorder of the program that is compiled next."""
    made = Again()
    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", lambda device: made)
    return made


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = dropout

    def forward(self, x):
        return self.last(F.dropout(torch.sigmoid(self.norm(self.first(x))), self.dropout, self.training))


def pair(model, **options):
    """The model compiled with and without graphs: same weights, same program."""
    plain = copy.deepcopy(model)
    known = {"capture": "trace", "kernel": "aten", "on_unsupported": "error", **options}
    return aottrain.compile(model, cuda_graphs=True, **known), aottrain.compile(plain, **known)


def batches(count, rows=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator) for _ in range(count)]


def counts(compiled):
    return compiled.report.graphs[0].cuda_graphs


def train(model, given, lr=0.1):
    torch.manual_seed(5)
    losses = []
    for x in given:
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None
    return losses, [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_training_is_bitwise_that_of_the_same_kernels(kernel, dropout):
    graphs, plain = pair(Net(dropout), kernel=kernel)
    assert_same(train(graphs, batches(8)), train(plain, batches(8)))
    found = counts(graphs)
    assert found.recordings == 2 and found.replays == 2 * (8 - WARM_UP_CALLS)
    assert found.plain == {"warm-up": 2 * WARM_UP_CALLS} and "12 calls replayed" in graphs.report.explain()


def test_without_the_option_nothing_is_recorded():
    _, plain = pair(Net())
    train(plain, batches(4))
    assert counts(plain) is None


def gradients(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def warmed(model, **options):
    graphs, plain = pair(model, **options)
    for compiled in (graphs, plain):
        train(compiled, batches(4), lr=0.0)
    return graphs, plain


def test_two_forwards_before_a_backward_share_no_memory():
    graphs, plain = warmed(Net())
    before = dict(counts(graphs).plain)
    for compiled in (graphs, plain):
        first, second = (compiled(x).square().mean() for x in batches(2))
        (first - 3 * second).backward()
    assert_same(gradients(graphs), gradients(plain))
    now = counts(graphs).plain
    assert now[ALIVE] == 1 and now[PLAIN_FORWARD] == 1 and now["warm-up"] == before["warm-up"]


def test_gradients_of_micro_batches_add_up_in_memory_of_their_own():
    graphs, plain = warmed(Net())
    replays = counts(graphs).replays
    for compiled in (graphs, plain):
        for x in batches(3):
            compiled(x).square().mean().backward()
    assert_same(gradients(graphs), gradients(plain))
    assert counts(graphs).replays == replays + 6


def test_what_a_call_returned_is_left_alone():
    graphs, _ = warmed(Net())
    first, *others = batches(3)
    out = graphs(first)
    out.sum().backward()
    held = [out, *(parameter.grad for parameter in graphs.parameters())]
    known = [value.detach().clone() for value in held]
    for parameter in graphs.parameters():
        parameter.grad = None
    replays = counts(graphs).replays
    for x in others:
        graphs(x).square().sum().backward()
    assert counts(graphs).replays == replays + 4
    assert_same([value.detach() for value in held], known)


def test_a_retained_graph_can_be_run_again():
    graphs, plain = warmed(Net())
    for compiled in (graphs, plain):
        loss = compiled(batches(1)[0]).square().mean()
        loss.backward(retain_graph=True)
        compiled(batches(2)[1])  # while the residuals of the first are alive
        loss.backward()
    assert_same(gradients(graphs), gradients(plain))
    assert counts(graphs).plain[ALIVE] == 1


def test_a_forward_without_a_backward_frees_the_recording_when_it_is_dropped():
    graphs, _ = warmed(Net())
    x = batches(1)[0]
    out = graphs(x)
    del out
    graphs(x).sum().backward()
    assert ALIVE not in counts(graphs).plain


def test_another_stream_is_not_replayed_on(recorder):
    graphs, plain = warmed(Net())
    recorder.stream = 1
    for compiled in (graphs, plain):
        compiled(batches(1)[0]).sum().backward()
    assert_same(gradients(graphs), gradients(plain))
    assert counts(graphs).plain["another stream"] == 2
    recorder.stream = None
    graphs(batches(1)[0])
    assert counts(graphs).plain["a larger CUDA graph is being recorded"] == 1


def test_moved_parameters_are_recorded_anew_and_not_for_ever():
    graphs, plain = pair(Net())
    for turn in range(MAX_RECORDINGS + 1):
        for compiled in (graphs, plain):
            for parameter in compiled.parameters():
                parameter.data = parameter.data.clone() * 1.5
            train(compiled, batches(4), lr=0.01)
        assert counts(graphs).recordings == 2 * min(turn + 1, MAX_RECORDINGS)
    assert_same(list(graphs.parameters()), list(plain.parameters()))
    assert counts(graphs).plain["parameters keep moving"] > 0


def test_where_recording_fails_every_call_is_run(monkeypatch):
    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", Broken)
    graphs, plain = pair(Net())
    assert_same(train(graphs, batches(5)), train(plain, batches(5)))
    found = counts(graphs)
    reason = "recording failed: RuntimeError: operation not permitted when stream is capturing"
    assert found.plain[reason] == 3 and found.recordings == found.replays == 0


def test_a_thread_that_finds_the_recording_in_use_runs_the_kernels(monkeypatch):
    graphs, plain = warmed(Net())
    x, inside, go_on = batches(1)[0], threading.Event(), threading.Event()
    replay = cuda_graphs._Recording.run

    def slow(self, given):
        inside.set()
        assert go_on.wait(30)
        return replay(self, given)

    monkeypatch.setattr(cuda_graphs._Recording, "run", slow)
    found = []

    @torch.no_grad()
    def call():
        found.append(graphs(x))

    graphs.eval(), plain.eval()  # another program: without statistics to update it may be called at once
    go_on.set()
    for _ in range(WARM_UP_CALLS + 1):
        call()
    inside.clear(), go_on.clear()
    other = threading.Thread(target=call)
    other.start()
    assert inside.wait(30)
    call()
    go_on.set()
    other.join()
    assert graphs.report.graphs[1].cuda_graphs.plain["another thread runs it"] == 1
    with torch.no_grad():
        assert_same(found, [plain(x)] * len(found))


def test_each_pattern_of_tangents_has_a_recording():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            return torch.exp(self.a(x)), torch.tanh(self.b(x))

    graphs, plain = pair(Two())
    for compiled in (graphs, plain):
        for turn in range(12):
            outs = compiled(batches(1)[0])
            outs[turn % 2].sum().backward()
    assert_same(gradients(graphs), gradients(plain))
    assert counts(graphs).recordings == 3


def test_a_saved_output_that_was_modified_is_an_error():
    """As without a recording: the residual is the very tensor that left the program."""
    model = nn.Linear(6, 3)
    graphs = aottrain.compile(lambda x: torch.exp(model(x)), cuda_graphs=True, capture="trace", kernel="aten")
    for _ in range(4):
        out = graphs(batches(1)[0])
        out.sum().backward()
    out = graphs(batches(1)[0])
    assert counts(graphs).replays > 4
    with torch.no_grad():
        out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_calls_without_gradients(capture):
    graphs, plain = pair(Net().eval(), capture=capture)
    with torch.no_grad():
        assert_same([graphs(x) for x in batches(6)], [plain(x) for x in batches(6)])
    assert counts(graphs).replays == 6 - WARM_UP_CALLS


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"budget": "1GiB"}, "the budget bounds the bytes of a step"),
        ({"kernel": lambda module, examples: module}, "runs the graphs in its own way"),
        ({"rng": "eager"}, "has an effect that a replay would not have"),
        ({"dynamic": True}, "sizes are symbolic"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_never_recorded_says_why(options, reason):
    graphs, _ = pair(Net(dropout=0.5), **options)
    graphs(batches(1)[0]).sum().backward()
    assert reason in counts(graphs).reason and reason in str(counts(graphs))


def test_a_device_that_records_nothing_is_named(monkeypatch):
    monkeypatch.delitem(cuda_graphs.RECORDERS, "cpu")
    graphs, _ = pair(Net())
    graphs(batches(1)[0])
    assert counts(graphs).reason == "the program has values on cpu"
