"""whole_writes: writes to whole tensors become operators without running the program again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aottrain.compiler.joint import functional
from aottrain.compiler.joint.whole_writes import without_whole_writes
from aottrain.ir.graph import calls, info
from aottrain.ir.ops import OpKind
from aottrain.ir.text import graph_text
from aottrain.ir.verify import verify_functional, verify_joint
from tests.compiler.programs import leaf, targets, traced
from tests.numerics.comparison import assert_call_like_eager


def statistics(mean, var, count, x):
    count += 1
    return F.batch_norm(x, mean, var, training=True, momentum=0.1)


def read_between(buffer, x):
    before = buffer + x
    buffer.mul_(2).add_(x.detach())
    between = buffer + x
    same = buffer.sub_(1)
    buffer.clamp_(max=3.0)
    return before, between, same + x, buffer


def activations(x):
    h = x * 2
    again = F.relu(h, inplace=True)
    return F.leaky_relu(h + 1, 0.1, inplace=True) + again


def filled(x, mask, rows):
    h = (x + 1).masked_fill_(mask, 0.5)
    zeros = torch.zeros_like(h)
    zeros.copy_(h).index_put_((rows,), torch.ones(2, 3), accumulate=True)
    return zeros.fill_(2.0) + h


def viewed_afterwards(buffer, x):
    h = (x * buffer.add_(1).detach().clone()).mul_(2)
    return h.t() * h, buffer[0]


WHOLE = {
    "viewed afterwards": (viewed_afterwards, lambda: [torch.ones(3, 3), leaf(3, 3)]),
    "statistics": (statistics, lambda: [torch.zeros(3), torch.ones(3), torch.tensor(0), leaf(4, 3)]),
    "read between": (read_between, lambda: [torch.ones(3), leaf(3)]),
    "activations": (activations, lambda: [leaf(4)]),
    "filled": (filled, lambda: [leaf(2, 3), torch.tensor([True, False, True]), torch.tensor([0, 0])]),
}


def of_a_view(buffer, x):
    buffer[0] = 1.0
    return buffer * x


def with_a_view(buffer, x):
    rows = buffer.t()
    buffer.add_(1)
    return rows * x


def with_a_later_view(x):
    h = x * 2
    h.add_(1)
    h.t().mul_(3)
    return h


def another_type(x):
    h = x * 2
    h.eq_(2.0)
    return h * x


def metadata(x):
    h = x * 2
    h.squeeze_(0)
    return h.add_(1)


VIEWS = {
    "of a view": (of_a_view, lambda: [torch.zeros(3, 3), leaf(3, 3)]),
    "with a view": (with_a_view, lambda: [torch.zeros(3, 3), leaf(3, 3)]),
    "with a later view": (with_a_later_view, lambda: [leaf(3, 3)]),
    "another type": (another_type, lambda: [leaf(3)]),
    "metadata": (metadata, lambda: [leaf(1, 3)]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_are_not_replayed(name, monkeypatch):
    function, inputs = WHOLE[name]
    joint = traced(function, *inputs())
    before = targets(joint.graph)
    monkeypatch.setattr(functional, "_replayed", lambda *given: pytest.fail("the program ran again"))
    after = functional.functionalize(joint)
    assert not any(info(node).writes for node in calls(after.graph)) and targets(joint.graph) == before
    verify_joint(after)
    verify_functional(after)
    assert_call_like_eager(function, inputs())


@pytest.mark.parametrize("name", WHOLE)
def test_the_program_is_that_of_the_replay(name, monkeypatch):
    function, inputs = WHOLE[name]
    direct = functional.functionalize(traced(function, *inputs()))
    monkeypatch.setattr(functional, "without_whole_writes", lambda joint: None)
    replayed = functional.functionalize(traced(function, *inputs()))
    assert _computed(direct.graph) == _computed(replayed.graph) and direct.signature == replayed.signature


@pytest.mark.parametrize("name", WHOLE)
def test_memory_and_the_result_of_a_write_are_one(name):
    """A graph may name either: what reads the memory later reads what was written last."""
    function, inputs = WHOLE[name]
    expected = functional.functionalize(traced(function, *inputs()))
    joint = traced(function, *inputs())
    for node in calls(joint.graph):
        if info(node).writes:
            node.replace_all_uses_with(node.args[0])
    assert graph_text(functional.functionalize(joint).graph) == graph_text(expected.graph)


def _computed(graph):
    """Which views there are differs: a replay makes those of written memory anew."""
    return [info(node).name for node in calls(graph) if info(node).kind is not OpKind.VIEW]


@pytest.mark.parametrize("name", VIEWS)
def test_views_and_other_layouts_are_replayed(name):
    function, inputs = VIEWS[name]
    joint = traced(function, *inputs())
    assert any(info(node).writes for node in calls(joint.graph)), "the program mutates nothing: a test of nothing"
    assert without_whole_writes(joint) is None
    assert_call_like_eager(function, inputs())
