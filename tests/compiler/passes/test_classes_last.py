"""Losses of sequences and images whose classes lie last in memory: what becomes one of rows, and that answers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from aottrain.compiler.graphs.rewriting import verify_views
from aottrain.compiler.passes.rows.classes_last import classes_last
from aottrain.ir.graph import JointGraph, calls
from aottrain.ir.verify import verify_functional, verify_joint
from tests.compiler.programs import joint_inputs, joint_of, leaf
from tests.numerics.tolerance import assert_close

BATCH, TIME, CLASSES = 3, 7, 10


def classes() -> Tensor:
    return torch.arange(BATCH * TIME).view(BATCH, TIME) % CLASSES


def turned(x: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(x.transpose(1, 2), classes(), **options)


def pixels(x: Tensor) -> Tensor:
    return F.cross_entropy(x.view(BATCH, TIME, 1, CLASSES).permute(0, 3, 1, 2), classes()[:, :, None])


def volumes(x: Tensor, w: Tensor) -> Tensor:
    wide = x[:, :, None, None] * w.view(1, 1, 2, 1, CLASSES)
    target = classes().view(BATCH, 1, 1, TIME).expand(BATCH, 2, 1, TIME)
    logits = wide.transpose(1, 2).permute(0, 4, 1, 3, 2)
    return F.cross_entropy(logits, target, reduction="none").square().sum()


def both(x: Tensor) -> Tensor:
    scores = F.log_softmax(x.transpose(1, 2), 1)
    return F.nll_loss(scores, classes()) + scores.exp().view(BATCH, -1).square().sum() + scores.sum(1).cos().sum()


def two_losses(x: Tensor) -> Tensor:
    """Of one log-softmax and one target, which are counted otherwise."""
    scores = F.log_softmax(x.transpose(1, 2), 1)
    return F.nll_loss(scores, classes()) + 3 * F.nll_loss(scores, classes(), reduction="sum", ignore_index=2)


X = leaf(BATCH, TIME, CLASSES)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "mean": (turned, (X,)),
    "sum of some": (lambda x: turned(x, reduction="sum", ignore_index=4), (X,)),
    "each": (lambda x: turned(x, reduction="none") * torch.arange(TIME), (X,)),
    "weighted": (lambda x, w: turned(x, weight=w.detach()), (X, leaf(CLASSES, seed=1))),
    "smoothed": (lambda x: turned(x, label_smoothing=0.1), (X,)),
    "of a product": (lambda x, w: turned(x @ w), (leaf(BATCH, TIME, 5), leaf(5, CLASSES, seed=1))),
    "shifted": (lambda x: F.cross_entropy(x[:, :-1].transpose(1, 2), classes()[:, 1:]), (X,)),
    "from halves": (lambda x: turned(x.float()), (X.detach().bfloat16().requires_grad_(),)),
    "pixels": (pixels, (X,)),
    "volumes": (volumes, (X, leaf(2 * CLASSES, seed=1))),
    "read beside": (both, (X,)),
    "two losses": (two_losses, (X,)),
}


def run(joint: JointGraph, inputs: list[Any]) -> list[Any]:
    return list(fx.Interpreter(fx.GraphModule({}, joint.graph)).run(*inputs))


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_rows_the_answer_is_the_same(name):
    function, given = PROGRAMS[name]
    before = joint_of(function, *given)
    after = classes_last(before)
    verify_joint(after)
    verify_functional(after)
    verify_views(after)
    names = {str(node.target) for node in calls(after.graph)}
    assert {"aten.nll_loss_forward.default", "aten.nll_loss_backward.default"} <= names
    assert not any("nll_loss2d" in name for name in names)
    inputs = joint_inputs(before, given)
    for ours, theirs in zip(run(after, inputs), run(before, inputs), strict=True):
        if theirs is not None:
            assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
            assert_close(ours, theirs)


def test_logits_from_a_product_are_neither_copied_nor_turned():
    x, w = leaf(BATCH, TIME, 5), leaf(5, CLASSES, seed=1)
    names = [str(node.target) for node in calls(classes_last(joint_of(lambda x, w: turned(x @ w), x, w)).graph)]
    assert not any("permute" in name or "clone" in name or "transpose" in name for name in names)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda x: F.cross_entropy(x, classes()[:, :7]), leaf(BATCH, CLASSES, TIME)),  # as they lie
        (lambda x: F.cross_entropy(x.flatten(0, 1), classes().flatten()), X),
        (lambda x: F.cross_entropy(x[:, ::2].transpose(1, 2)[:, :1], classes()[:, ::2] * 0), X),  # one class
        (lambda x: F.cross_entropy(x.transpose(1, 2), classes()[:0], reduction="none"), leaf(0, TIME, CLASSES)),
    ],
)
def test_what_stays(function, given):
    joint = joint_of(function, given)
    assert classes_last(joint) is joint
