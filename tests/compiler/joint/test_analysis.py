"""analyse: what a call writes, and where its outputs' memory comes from."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from aottrain.compiler.joint.analysis import analyse
from aottrain.errors import UnsupportedError
from tests.compiler.programs import captured, leaf


def mutated(function, *args):
    return analyse(captured(function, *args)).mutated


def test_a_view_made_under_no_grad_is_no_view_to_autograd():
    def program(x):
        y = x * 2
        with torch.no_grad():
            return y, y[1:]

    with pytest.raises(UnsupportedError, match="output 1 is a new leaf"):
        analyse(captured(program, leaf(4)))


def data_mul(a, b):
    a.data.mul_(2)
    return b * 2


def out_argument(a, b):
    torch.add(b, 1, out=a)
    return b * 2


def through_a_view(a, b):
    a.view(-1)[::2].add_(b.sum().detach())
    return b * 2


def detached(a, b):
    a.detach().mul_(2)
    return b * 2


def nothing_but_zero(a, b):
    a.add_(0)
    return b * 2


WRITERS = [data_mul, out_argument, through_a_view, detached, nothing_but_zero]


@pytest.mark.parametrize("function", WRITERS, ids=lambda f: f.__name__)
def test_every_way_of_writing_is_seen(function):
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    assert mutated(function, a, b) == (0,)
    assert torch.equal(a, torch.ones(2, 2)), "analysis ran on the real tensors"


def test_reading_is_not_writing():
    assert mutated(lambda a, b: (a.clone().add_(1), b.t(), (a * 1).mul_(2)), torch.ones(2, 2), torch.ones(2, 2)) == ()


def test_embedding_that_renormalises_is_refused_or_seen():
    weight, index = torch.ones(4, 2) * 9, torch.tensor([1])
    with contextlib.suppress(UnsupportedError):
        assert mutated(lambda w, i: F.embedding(i, w, max_norm=1.0), weight, index) == (0,)
    assert torch.equal(weight, torch.ones(4, 2) * 9)


def test_batch_norm_in_evaluation_writes_nothing():
    args = (torch.zeros(3), torch.ones(3), torch.randn(4, 3))
    assert mutated(lambda m, v, x: F.batch_norm(x, m, v, training=False), *args) == ()


def set_data(a, b):
    a.data = b.clone()
    return b * 2


def resized(a, b):
    a.resize_(1)
    return b * 2


def transposed(a, b):
    a.t_()
    return b * 2


def gains_a_gradient(a, b):
    a.requires_grad_()
    return b * 2


@pytest.mark.parametrize("function", [resized, transposed, gains_a_gradient], ids=lambda f: f.__name__)
def test_metadata_mutation_is_refused(function):
    with pytest.raises(UnsupportedError, match="in place"):
        analyse(captured(function, torch.ones(2, 3), torch.ones(2, 3)))


def test_other_memory_behind_an_input_is_refused():
    with pytest.raises(UnsupportedError, match=r"puts other memory behind a tensor by \.data"):
        analyse(captured(set_data, torch.ones(2, 3), torch.ones(2, 3)))


def test_whether_gradients_are_needed():
    def needs(function, *args):
        return analyse(captured(function, *args)).needs_gradient

    assert needs(lambda x: x * 2, leaf(2)) and not needs(lambda x: x * 2, torch.ones(2))
    assert not needs(lambda x: x.detach() * 2, leaf(2)) and not needs(lambda x: x.argmax(), leaf(2))
    with torch.no_grad():
        assert not needs(lambda x: x * 2, leaf(2))


def test_results_are_described_in_order():
    known = analyse(captured(lambda x: {"a": x * 2, "b": [3, x, None]}, leaf(2)))
    assert known.is_tensor == (True, False, True, False) and known.leaves == (None, 3, None, None)
    assert [value.requires_grad for value in known.outputs] == [True, True]
    assert len(known.computed) == 1, "an input that is returned is not computed"


def test_results_that_are_no_plain_tensors_are_refused():
    with pytest.raises(UnsupportedError):
        analyse(captured(lambda x: (x * 2).to_sparse(), torch.eye(2)))
    with pytest.raises(UnsupportedError):
        analyse(captured(lambda x: {"thing": object(), "x": x * 2}, torch.ones(2)))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.unfold(1, 2, 1).slice_scatter(x.unfold(1, 2, 1)[:1], 0, 0, 1),
        lambda x: x.unfold(0, 2, 1).select_scatter(x[:, :2] * 3, 0, 0),
    ],
    ids=["slice", "select"],
)
def test_copies_whose_elements_share_their_memory_are_refused(program):
    """The tangent of such a result would be put into its strides, and lose all but one of those elements."""
    with pytest.raises(UnsupportedError, match="share their memory"):
        analyse(captured(program, leaf(4, 4)))


def test_copies_of_other_views_are_analysed():
    program = analyse(captured(lambda x: x.t().slice_scatter(x.t()[:1] * 2, 0, 0, 1), leaf(4, 4)))
    assert program.needs_gradient
