"""Symbolic sizes: one program for many shapes, by both front ends, and eager's values at each of them."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
from tests.conformance.harness import FRONTENDS
from tests.sampling import crossed

ROWS = ((3, 4), (5, 6), (2, 10), (9, 8), (3, 4))


class Block(nn.Module):
    """Linear, norm, dropout, batch norm over batch*length, attention; also returns a view, a number and a shape."""

    def __init__(self, dropout: float = 0.25):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.batch_norm, self.dropout = nn.LayerNorm(16), nn.BatchNorm1d(8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        batch, length, _ = x.shape
        h = self.dropout(self.second(self.norm(F.gelu(self.first(x)))))
        h = self.batch_norm(h.reshape(batch * length, -1)).view(batch, length, -1)
        q = h.view(batch, length, 2, 4).transpose(1, 2)
        mixed = torch.softmax(q @ q.transpose(-1, -2) / 2, -1) @ q
        return mixed.transpose(1, 2).reshape(batch, length, 8), h[:, : length // 2], batch * length + 1, x.shape


def check(
    target: Callable[..., Any],
    make: Callable[[Any], Sequence[Any]],
    shapes: Sequence[Any],
    frontend: str,
    **options: Any,
) -> Any:
    """Equal outputs, gradients, states at every shape; gives the compiled target's report."""
    reference = copy.deepcopy(target) if isinstance(target, nn.Module) else target
    options = {"dynamic": True, "rng": "eager", "on_unsupported": "error", **options}
    compiled = aottrain.compile(target, capture=frontend, **options)
    for i, shape in enumerate(shapes):
        seen = []
        for call in (reference, compiled):
            torch.manual_seed(i)
            inputs = make(shape)
            out = call(*inputs)
            tensors = [v for v in (out if isinstance(out, tuple) else [out]) if isinstance(v, Tensor)]
            rest = [(type(v), v) for v in (out if isinstance(out, tuple) else []) if not isinstance(v, Tensor)]
            differentiated = [v for v in tensors if v.requires_grad][: 1 + i % 2]  # at times an output goes unused
            leaves = [v for v in inputs if isinstance(v, Tensor) and v.requires_grad]
            if isinstance(call, nn.Module):
                leaves += list(call.parameters())
            tangents = [torch.randn_like(v) for v in differentiated]
            gradients = (
                torch.autograd.grad(differentiated, leaves, tangents, allow_unused=True) if differentiated else ()
            )
            state = list(call.buffers()) if isinstance(call, nn.Module) else []
            after = [v for v in inputs if isinstance(v, Tensor)]
            seen.append(([*tensors, *gradients, *state, *after], rest, torch.get_rng_state()))
        assert seen[0][1] == seen[1][1]
        assert torch.equal(seen[0][2], seen[1][2])
        for eager, got in zip(seen[0][0], seen[1][0], strict=True):
            assert (eager is None) == (got is None)
            if eager is not None:
                assert torch.equal(eager, got) and eager.stride() == got.stride() and eager.dtype == got.dtype
    return compiled.report


@pytest.mark.parametrize(("frontend", "budget"), crossed(FRONTENDS, (None, 0.3), one_in=2))
def test_one_program_serves_all_batches_and_lengths(frontend: str, budget: float | None) -> None:
    report = check(Block(), lambda shape: [torch.randn(*shape, 8)], ROWS, frontend, budget=budget)
    assert len(report.graphs) == 1 and not report.fallbacks


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_size_of_one_or_a_branch_has_a_program_of_its_own(frontend: str) -> None:
    def branches(x: Tensor) -> Tensor:
        return x.sin() * x.shape[0] if x.shape[0] > 6 else x.cos().expand(3, *x.shape)

    report = check(branches, lambda n: [torch.randn(n, 2, requires_grad=True)], (4, 9, 5, 12, 1, 4, 7), frontend)
    assert len(report.graphs) == 3


def _cases() -> dict[str, tuple[Callable[..., Any], Callable[[Any], Sequence[Any]], Sequence[Any], int]]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, 8 - x.shape[-1] % 8)).reshape(-1, 8).cumsum(0)

    def masked(x: Tensor) -> Tensor:
        n = x.shape[1]
        return x.masked_fill(torch.ones(n, n).tril().logical_not(), float("-inf")).softmax(-1)

    def written(x: Tensor, out: Tensor) -> Tensor:
        out[: x.shape[0]] += x.detach() * 2
        out.add_(1)
        return x * out.sum()

    def pieces(x: Tensor) -> tuple[Tensor, ...]:
        first, second = x.split([x.shape[0] - 2, 2])
        return first * 2, second.t(), x.chunk(2)[0]

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=0) / x.size(0) ** 0.5

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        return F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 2).flatten(1).mean(1)

    def positions(x: Tensor, table: Tensor) -> Tensor:
        return x + F.embedding(torch.arange(x.shape[0]).flip(0), table)

    def strided(x: Tensor) -> Tensor:
        return (x.as_strided((x.shape[0] - 1, 2), (1, 1)) * torch.linspace(0, 1, 2)).contiguous()

    def scaled_noise(x: Tensor) -> Tensor:
        return x * torch.rand(x.shape[0], 1) + torch.randn_like(x) * F.dropout(x, 0.5)

    return {
        "padded": (padded, lambda n: [leaf(3, n)], (5, 7, 13, 21), 2),
        "masked": (masked, lambda n: [leaf(2, n, n)], (5, 7, 12), 1),
        "written": (written, lambda n: [leaf(n, 3), torch.zeros(n + 2, 3)], (5, 7, 12), 1),
        "pieces": (pieces, lambda n: [leaf(n, 4)], (6, 8, 10), 1),
        "losses": (losses, lambda s: [leaf(*s, 11), torch.randint(0, 11, s)], ((3, 4), (5, 2), (6, 6)), 1),
        "convolved": (
            convolved,
            lambda s: [leaf(*s), leaf(4, 3, 3, 3)],
            ((2, 3, 8, 8), (3, 3, 8, 10), (4, 3, 12, 8)),
            2,
        ),
        "transposed input": (lambda x: (x * 2).sum(0), lambda s: [leaf(*s).t()], ((3, 4), (5, 7), (6, 9)), 1),
        "positions": (positions, lambda n: [leaf(n, 4), leaf(40, 4)], (3, 9, 30), 1),
        "strided": (strided, lambda n: [leaf(n)], (5, 9, 12), 3),
        "noise": (scaled_noise, lambda n: [leaf(n, 3)], (4, 9, 14), 1),
        "broadcast": (lambda x, y: (x + y).sin().sum(1), lambda s: [leaf(s[0], s[1]), leaf(s[1])], ((3, 4), (7, 5)), 1),
    }


@pytest.mark.parametrize(("name", "frontend"), crossed(_cases(), FRONTENDS, one_in=2))
def test_equals_eager(name: str, frontend: str) -> None:
    target, make, shapes, num_programs = _cases()[name]
    for options in ({}, {"partition": "recompute_all"}):
        report = check(target, make, shapes, frontend, **options)
        assert len(report.graphs) <= num_programs, [graph.forward_text for graph in report.graphs]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_marked_dimension_is_dynamic_and_the_others_are_not(frontend: str) -> None:
    def make(shape: tuple[int, int]) -> list[Tensor]:
        x = torch.randn(*shape)
        torch._dynamo.mark_dynamic(x, 0)
        return [x, torch.ones(3, 1, requires_grad=True)]

    def target(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.view(x.shape[0], -1, 1), w).relu().sum(1)

    report = check(target, make, ((4, 8), (5, 8), (64, 8), (4, 6), (9, 6)), frontend, dynamic=False)
    assert len(report.graphs) == 2


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_past_the_limit_one_warning_and_eager(frontend: str) -> None:
    compiled = aottrain.compile(lambda x: x.sin() * 2, capture=frontend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(2, 24):
            x = torch.randn(n)
            assert torch.equal(compiled(x), x.sin() * 2)
    assert len(compiled.report.graphs) == 16 and compiled.report.num_fallbacks == 6
    assert ["16 programs" in str(warning.message) for warning in caught] == [True]


def test_second_derivatives_at_another_size() -> None:
    compiled = aottrain.compile(lambda x: (x.sin() * x.shape[0]).sum(), dynamic=True)
    for n in (4, 6, 9):
        x = torch.randn(n, requires_grad=True)
        (first,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.equal(second, -x.detach().sin() * n)
    assert len(compiled.report.graphs) == 1


def test_masks_differ_from_call_to_call_and_follow_the_seed_at_every_size() -> None:
    compiled = aottrain.compile(lambda x: F.dropout(x, 0.5), dynamic=True, capture="trace")
    for n in (64, 96, 200):
        x = torch.ones(n, requires_grad=True)
        torch.manual_seed(n)
        state = torch.get_rng_state()
        first, second = compiled(x), compiled(x)
        torch.set_rng_state(state)
        assert torch.equal(first, compiled(x)) and not torch.equal(first, second)
        (gradient,) = torch.autograd.grad(first.sum(), x)
        assert torch.equal(gradient, first.detach())
    assert len(compiled.report.graphs) == 1


def test_what_cannot_be_traced_with_symbols_is_compiled_for_each_size() -> None:
    def hashes(x: Tensor) -> Tensor:
        return x * {4: 2.0, 5: 3.0}[x.shape[0]]

    for n in (4, 5, 4):
        x = torch.randn(n)
        compiled = aottrain.compile(hashes, dynamic=True, capture="trace", on_unsupported="error")
        assert torch.equal(compiled(x), hashes(x))


def test_what_no_guard_holds_is_refused_for_each_size_too() -> None:
    """The trace for one size looks at nothing that the one for all sizes has found already."""
    count = itertools.count()
    compiled = aottrain.compile(lambda x: x * next(count), dynamic=True, capture="trace")
    assert [compiled(torch.ones(2))[0].item() for _ in range(3)] == [0, 1, 2]
    assert "the program can reach a count" in compiled.report.fallbacks[0].reason


@pytest.mark.parametrize("dynamic", (None, True))
def test_the_registered_backend_takes_symbolic_sizes_and_floats(dynamic: bool | None) -> None:
    from aottrain.compiler.frontends.dynamo import backend

    class Scaled(nn.Module):
        eps, scale = 1e-5, 2.0

        def forward(self, x: Tensor, n: int) -> tuple[Tensor, int]:
            return F.layer_norm(x, x.shape[-1:], eps=self.eps)[:n] * self.scale + n, x.shape[0] + n

    module = Scaled()
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    for eps, scale, n, shape in (
        (1e-5, 2.0, 3, (4, 4)),
        (1e-1, 2.0, 4, (5, 5)),
        (1e-1, 3.0, 5, (6, 6)),
        (1e-5, 2.0, 6, (7, 7)),
    ):
        module.eps, module.scale = eps, scale
        x = torch.randn(shape, requires_grad=True)
        eager, got = module(x, n), compiled(x, n)
        assert torch.equal(eager[0], got[0]) and eager[1] == got[1] and type(got[1]) is int
        gradients = [torch.autograd.grad(out.sin().sum(), x)[0] for out in (eager[0], got[0])]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_loss_that_torch_takes_apart_wrongly_is_compiled_for_each_size(frontend: str):
    """make_fx with symbolic sizes, and with it torch.compile, gives 1.575 for the first."""
    x, y = torch.tensor([[0.1, -0.2, 0.3, 0.4], [1, 0, -1, 0.5]]), torch.tensor([[0, 2, -1, 1], [3, -1, 0, 0]])

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, y)

    call = aottrain.compile(loss, capture=frontend, dynamic=True)
    for count in (2, 1):
        assert torch.equal(call(x[:count], y[:count]), loss(x[:count], y[:count]))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_such_a_loss_whose_targets_make_the_sizes_fixed(frontend: str):
    x = torch.tensor([[0.1, -0.2, 0.3, 0.4], [1, 0, -1, 0.5]])

    def loss(x: Tensor) -> Tensor:
        return F.multilabel_margin_loss(x, torch.tensor([[0, 2, -1, 1], [3, -1, 0, 0]]))

    assert torch.equal(aottrain.compile(loss, capture=frontend, dynamic=True)(x), loss(x))


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("p, training", [(0.5, False), (0.0, True)])
def test_a_dropout_that_drops_nothing_is_its_argument(frontend, p, training):
    """By torch's Python, which runs for open sizes, it is a copy."""

    def function(x):
        kept = F.dropout(x, p, training)
        kept.mul_(2)
        return kept, x.sum()

    compiled = aottrain.compile(function, capture=frontend, dynamic=True, on_unsupported="error")
    for rows in (3, 5):
        x = torch.ones(rows, 4)
        kept, total = compiled(x)
        assert kept is x and total.item() == 8 * rows and x.eq(2).all()


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_stacked_recurrent_layers_drop_out_between_them(frontend: str, kind: type[nn.RNNBase]) -> None:
    """By torch's Python, which runs for open sizes, nothing is dropped there."""
    layers = kind(3, 5, 3, dropout=0.5, batch_first=True, bidirectional=True)
    compiled = aottrain.compile(
        copy.deepcopy(layers), capture=frontend, dynamic=True, rng="eager", on_unsupported="error", kernel="aten"
    )
    for batch in (2, 6, 5):
        seen = []
        for call in (layers, compiled):
            torch.manual_seed(batch)
            call.zero_grad()
            x = torch.randn(batch, 4, 3, requires_grad=True)
            out, last = call(x)
            states = last if isinstance(last, tuple) else (last,)
            sum(value.square().sum() for value in (out, *states)).backward()
            seen.append([out, *states, x.grad, *(p.grad for p in call.parameters()), torch.get_rng_state()])
        torch.testing.assert_close(*seen, check_stride=True)
    assert len(compiled.report.graphs) == 1


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_dropout_of_everything_draws_all_the_same(frontend: str) -> None:
    """By torch's Python it draws nothing, and what is drawn later is other numbers."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 1.0), torch.rand(2)

    check(function, lambda n: [torch.randn(n, 3, requires_grad=True)], (4, 9), frontend)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("mode, rank", [("nearest", 1), ("linear", 1), ("bilinear", 2), ("bicubic", 2)])
def test_an_image_that_a_factor_leaves_as_large_is_copied(frontend: str, mode: str, rank: int) -> None:
    """As a factor of 1.1 does below ten pixels. By torch's Python it is computed from the factor there, too."""

    def resized(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=1.1, mode=mode)

    compiled = aottrain.compile(resized, capture=frontend, dynamic=True, on_unsupported="error", kernel="aten")
    for length in (14, 5, 23, 7, 12):
        x = torch.randn(2, 3, *range(length, length + rank), requires_grad=True)
        tangent = torch.randn_like(resized(x))
        (wanted,), (found,) = (torch.autograd.grad(call(x), x, tangent) for call in (resized, compiled))
        torch.testing.assert_close(compiled(x), resized(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(compiled.report.graphs) == 3


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_loss_of_one_sample_has_no_dimension(frontend: str) -> None:
    """By torch's Python it has one."""

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.multi_margin_loss(x, target, reduction="none")

    report = check(loss, lambda n: [torch.randn(n, requires_grad=True), torch.tensor(1)], (4, 6, 3), frontend)
    assert len(report.graphs) == 1


TEXTS: dict[str, Callable[[int, int], str]] = {
    "shown": lambda rows, columns: f"{rows}x{columns}",
    "padded": lambda rows, columns: f"{rows:04d}",
    "joined": lambda rows, columns: "x".join(map(str, [rows, columns])),
    "in a list": lambda rows, columns: f"{[rows, columns]}",
    "quotient and truth": lambda rows, columns: f"{rows / columns} {rows > 4}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_size_in_a_text_is_its_number(name: str) -> None:
    """In one that is returned, and in one that chooses a value. (A trace reads it; TorchDynamo has its own way.)"""

    def texts(x: Tensor) -> tuple[Any, ...]:
        text = TEXTS[name](*x.shape)
        return x * {"3x4": 2.0, "0005": 3.0, "[2, 10]": 4.0}.get(text, 1.0), text

    check(texts, lambda shape: (torch.randn(shape, requires_grad=True),), ROWS, "trace")


class PlusWidth(torch.autograd.Function):
    """A product whose second gradient has the width of the first factor added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0) + x.shape[1]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_size_in_a_custom_backward_is_not_a_stride_of_the_gradient(frontend: str) -> None:
    """TorchDynamo reads it from there in its second program, and the gradient of a sum has strides of its own. (Which
    symbol stands for two that are equal hangs on the names of the arguments.)"""

    def programs(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return PlusWidth.apply(x, w), PlusWidth.apply(x * 2, w).sum()

    compiled = aottrain.compile(programs, capture=frontend, dynamic=True, on_unsupported="error")
    for shape in ((3, 4), (1, 6), (1, 7)):
        x, w = torch.randn(shape, requires_grad=True), torch.randn(shape[1], requires_grad=True)
        found = []
        for call in (programs, compiled):
            first, second = call(x, w)
            found += torch.autograd.grad(first.sum() + second, w)
        assert torch.equal(*found)
