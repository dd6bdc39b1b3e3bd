"""Running sums of our own: which scans they do, and that the values are eager's."""

from __future__ import annotations

import math

import pytest
import torch

import aottrain
from aottrain.ops.scans import SCANS, scan
from aottrain.toolchain.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
INF, NAN = math.inf, math.nan


def own_calls(function, *inputs):
    """What runs outside of kernels in the forward, by name; the results are compared with eager's."""
    step = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    out, expected = step(*inputs), function(*inputs)
    torch.testing.assert_close(out, expected)
    calls = step.report.graphs[0].library_calls
    return {name: count for name, count in calls.items() if "cumsum" in name}


@pytest.mark.parametrize(
    ("shape", "dim", "sums", "logarithms"),
    [
        ((4, 33, 20), 1, True, True),
        ((33, 65), 0, True, True),
        ((4, 9, 3, 5), -3, True, True),
        ((20, 33), -1, False, True),  # rows: a load of its own for each
        ((3, 33), 1, False, False),
        ((4, 33, 2), 1, False, False),
    ],
)
def test_scans_over_neighbours_are_our_own(shape, dim, sums, logarithms):
    x = torch.randn(shape)
    names = own_calls(lambda x: (x.cumsum(dim), x.logcumsumexp(dim)), x)
    assert names == {
        "aten.cumsum.default" + " (own cumsum)" * sums: 1,
        "aten.logcumsumexp.default" + " (own logcumsumexp)" * logarithms: 1,
    }


def test_other_types_and_layouts_stay_atens():
    x = torch.randn(8, 33, 20)
    assert "own" not in str(own_calls(lambda x: x.transpose(1, 2).cumsum(1), x))
    assert "own" not in str(own_calls(lambda x: x.double().cumsum(1), x))
    assert "own" not in str(own_calls(lambda x: (x > 0).cumsum(1), x))
    assert "own" not in str(own_calls(lambda x: x.cumsum(1, dtype=torch.float64), x))


def test_gradients_of_a_recurrence_in_logarithms_are_eagers():
    """minGRU's: the backward scans, too, in the other direction."""
    x = torch.randn(2, 40, 24)

    def function(x):
        kept = torch.cumsum(-torch.nn.functional.softplus(x), dim=1)
        return (kept + torch.logcumsumexp(x - kept, dim=1)).sin().sum()

    step = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    mine, eager = (x.clone().requires_grad_() for _ in range(2))
    step(mine).backward()
    function(eager).backward()
    torch.testing.assert_close(mine.grad, eager.grad, rtol=1e-4, atol=1e-4)
    assert all("own" in name for name in step.report.graphs[0].library_calls if "cumsum" in name)


@pytest.mark.parametrize("shape", [(3, 300, 70), (70, 300), (1, 1, 16), (2, 5, 8)])
@pytest.mark.parametrize("name", ["cumsum", "logcumsumexp"])
def test_values_are_as_exact_as_eagers(name, shape):
    """Sums are eager's bit for bit, for ATen adds in float64, too."""
    x = torch.randn(shape) * 5
    dim = 1
    mine, eager, exact = scan(name, x, dim), getattr(torch, name)(x, dim), getattr(torch, name)(x.double(), dim)
    if name == "cumsum":
        assert torch.equal(mine, eager)
    assert (mine - exact).abs().max() <= 1.5 * (eager - exact).abs().max() + 1e-12


@pytest.mark.parametrize(
    "numbers",
    [
        (-INF, -INF, 1.0, 2.0), (1.0, INF, INF, 2.0), (1.0, NAN, 2.0, -INF), (-INF,) * 4, (INF, -INF, 3.0, NAN),
        (1e4, -1e4, 1e4, 3e4), (-INF, NAN, 1.0, 2.0), (3e38, 3e38, -3e38, 0.0), (-3e38, -3e38, -3e38, -3e38),
        (-80.0, 0.0, -1e-9, 80.0),
    ],
)  # fmt: skip
def test_infinite_numbers_and_nan_go_on_as_in_eager(numbers):
    columns = torch.tensor(numbers).view(4, 1).expand(4, 70).contiguous()
    for x, dim in ((columns, 0), (columns.t().contiguous(), 1)):
        for name in ("cumsum", "logcumsumexp"):
            torch.testing.assert_close(scan(name, x, dim), getattr(torch, name)(x, dim), equal_nan=True)


def test_results_go_where_they_are_asked():
    x, out = torch.randn(4, 9, 16), torch.empty(4, 9, 16)
    for name, function in SCANS.items():
        assert function(x, 1, out=out) is out, name
        torch.testing.assert_close(out, getattr(torch, name.split()[1])(x, 1))
