"""Every lowered op by its kernel, run by `evaluate` and as C++, against eager and float64.

Each in some types, shapes and layouts; with --whole in every combination of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

import aottrain
from aottrain.compiler.lowering.rules import lowered_names
from aottrain.toolchain.native import find_compiler
from tests.compiler.lowering import lowering_rows
from tests.compiler.lowering.lowering_cases import POINTWISE, covering, pointwise_cases
from tests.compiler.lowering.lowering_runs import Case, Planned, differences, evaluated, link, plan, run

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
NUM_CHUNKS = 3
CHUNKS = [sorted(POINTWISE)[i::NUM_CHUNKS] for i in range(NUM_CHUNKS)]


def check(cases: Iterable[Case]) -> None:
    planned = [one for number, case in enumerate(cases) if (one := plan(case, number)).lowered]
    assert planned
    launches = link(planned)
    wrong: list[str] = []
    for one in planned:
        for got in (run(one, launches), run(one, evaluated(one))):
            wrong += [f"{one.case.name}: {text}" for text in differences(one.case, got)]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:20]])


@needs_compiler
@pytest.mark.parametrize("names", CHUNKS, ids=lambda names: f"{names[0]}...")
def test_pointwise_ops(names, whole):
    check(pointwise_cases(names, whole))


@needs_compiler
@pytest.mark.parametrize("family", lowering_rows.FAMILIES, ids=lambda family: family.__name__)
def test_other_ops(family, whole):
    check(family() if whole else covering(family()))


def test_every_lowered_op_has_a_case_that_is_lowered():
    tried = {str(one.case.op) for one in _first_lowered()}
    assert sorted(set(lowered_names()) - tried) == []


def _first_lowered() -> list[Planned]:
    """For each overload one case whose call becomes a kernel."""
    found: dict[str, Planned] = {}
    cases = [case for family in lowering_rows.FAMILIES for case in covering(family())]
    for case in (*pointwise_cases(), *cases):
        name = str(case.op)
        if name not in found and all(value.numel() for value in case.tensors):
            planned = plan(case, 0)
            if planned.lowered:
                found[name] = planned
    return list(found.values())


def test_an_empty_tensor_needs_no_kernel():
    case = Case(torch.ops.aten.exp.default, (torch.empty(0, 3),))
    assert not plan(case, 0).lowered


@pytest.mark.parametrize(
    ("op", "given"),
    [
        (torch.ops.aten.upsample_nearest2d.default, ([12, 10], 3.0, 2.0)),
        (torch.ops.aten._upsample_nearest_exact2d.default, ([12, 10], 3.0, 2.0)),
        (torch.ops.aten.avg_pool2d.default, ([3, 2], [1, 2], [1, 1])),
        (torch.ops.aten.roll.default, ([3], [1])),
    ],
    ids=str,
)
def test_calls_of_images_that_are_lowered(op, given):
    """Where the answer stays if they are not."""
    assert plan(Case(op, (torch.ones(1, 2, 4, 5), *given)), 0).lowered


@pytest.mark.parametrize(("dtype", "lowered"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)])
def test_numbers_of_24_bits_are_drawn_for_types_that_hold_no_more(dtype, lowered):
    draw = torch.ops.aottrain.philox_uniform.default
    given = {"dtype": dtype, "device": torch.device("cpu")}
    assert plan(Case(draw, (torch.tensor([3, 5]), 0, [7]), given), 0).lowered is lowered


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draws_of_halves_are_those_of_the_operator(dtype):
    """Of as many bits as the type holds: one more would be rounded, and up to 1."""
    draw = torch.ops.aottrain.philox_uniform.default
    case = Case(draw, (torch.tensor([2**61 + 12345, 7]), 3, [4097]), {"dtype": dtype, "device": torch.device("cpu")})
    planned = plan(case, 0)
    wanted = draw(*case.args, **case.kwargs)
    for (got,) in (run(planned, link([planned])), run(planned, evaluated(planned))):
        assert torch.equal(got, wanted)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pow_rounds_a_number_to_a_half(dtype):
    """What 2.7 and 1.00201 lose then is a few percent of a large power."""
    x = torch.tensor([0.01, 2.0, 17.3, 30.0, 300.0] * 8).to(dtype)

    def powers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x**2.7, x ** (1 / 3), x**2.0001, torch.pow(1.00201, x)

    for got, wanted in zip(aottrain.compile(powers, capture="trace", kernel="cpp")(x), powers(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps, atol=0)
