"""What decides a comparison of values with their own extrema is saved: a second run may round otherwise."""

import pytest
import torch

from aottrain.compiler.partition.comparisons import _COMPARISONS, _MOVING, _SELECTING, _WITHIN, decided_once
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.ir.graph import calls
from tests.compiler.programs import joint_of, leaf
from tests.sampling import crossed

PROGRAMS = {
    "amax": lambda x: x.softmax(0).amax(1),
    "amin": lambda x: x.softmax(0).amin(1, keepdim=True),
    "max": lambda x: x.softmax(0).max() + x,
    "min": lambda x: x.softmax(0).min() + x,
    "median": lambda x: x.softmax(0).median() * x,
    "norm": lambda x: torch.linalg.vector_norm(x.softmax(0), float("inf"), 1),
    "aminmax": lambda x: torch.stack(torch.aminmax(x.softmax(0), dim=1)),
    "scatter": lambda x: x.cos().scatter_reduce(1, torch.zeros_like(x, dtype=torch.long), x.softmax(0), "amax"),
    "written out": lambda x: (p := x.softmax(0)) * (p == p.amax(1, keepdim=True)) * x.sin(),
    "the largest two": lambda x: (p := x.softmax(0)) * (p >= p.topk(2, dim=1).values[:, 1:]).to(x.dtype) * x.sin(),
    "sorted": lambda x: (p := x.softmax(0)) * (p.sort(1)[0].unsqueeze(2)[:, 3] < p) * x.sin(),
}
NO_DERIVATIVE = "aminmax has no derivative"
PLANS = [("min_cut", None), ("recompute_all", None), ("budget", 0.0), ("budget", 0.5)]
COMPARISONS = tuple(getattr(torch.ops.aten, name).Tensor for name in ("eq", "ge", "lt"))


def compared(graph) -> list[str]:
    return [node.name for node in calls(graph) if node.target in COMPARISONS]


@pytest.mark.parametrize(("program", "plan"), crossed(PROGRAMS, PLANS, one_in=2))
def test_the_backward_compares_nothing_again(program, plan):
    if program == "aminmax" and torch.__version__ < "2.12":
        pytest.skip(f"torch {torch.__version__}: {NO_DERIVATIVE}")
    joint = joint_of(PROGRAMS[program], leaf(4, 6))
    once = decided_once(joint)
    assert once and {node.name for node in once} == set(compared(joint.graph))
    parts = apply_partition(joint, plan_partition(joint, *plan))
    assert parts.backward is not None and compared(parts.backward) == []


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_a_formula_compares_within_itself_is_saved(plan):
    joint = joint_of(lambda x: torch.cdist(x.softmax(0), x.cos(), p=float("inf")), leaf(4, 6))
    names = {node.name for node in decided_once(joint)}
    chosen = plan_partition(joint, *plan)
    assert names == {"_softmax", "cos"} <= set(chosen.saved)
    assert all("compared with" in chosen.reasons[name] or "must" in chosen.reasons[name] for name in names)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.amax(1),  # an input is the same both times
        lambda x: x.softmax(0).relu() * (x.sin() > 0.5),
        lambda x: x.softmax(0).max(1)[0] * x.sin().amax().detach(),  # places are saved
        lambda x: torch.where(x.exp() > x.sin(), x, 2 * x),
    ],
)
def test_other_comparisons_may_be_made_again(program):
    assert not decided_once(joint_of(program, leaf(4, 6)))


def test_every_name_is_an_operator():
    spaces = torch.ops.aten, torch.ops.aottrain
    names = {*_COMPARISONS, *_SELECTING, *_MOVING, *_WITHIN}
    assert [name for name in sorted(names) if not any(hasattr(space, name) for space in spaces)] == []
