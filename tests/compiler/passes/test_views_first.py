"""views_first: parts of elementwise work and of padding are computed where they are read, with eager's values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import leaf
from tests.numerics.tolerance import assert_close_as_sums

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def gate(x: Tensor, b: Tensor) -> Tensor:
    left, right = (x + b).chunk(2, -1)
    return F.relu(left) * right.exp()


def after_an_activation(x: Tensor, b: Tensor) -> Tensor:
    """Whose gradient is made of the result."""
    left, right = torch.tanh(x * b).chunk(2, -1)
    return F.relu(left) * right.exp()


def heads(x: Tensor, b: Tensor) -> Tensor:
    q, k, v = (x * b).view(128, 4, 3, 16).unbind(2)
    return (q * k).exp() + v.sin()


def groups(x: Tensor, b: Tensor) -> Tensor:
    """Parts of a view that the repeated numbers of an operand do not have."""
    left, right = (x * b[..., None, None]).view(2, 32, 16, 16).chunk(2, 1)
    return left.exp() * right.sin()


def gate_of_turns(x: Tensor, b: Tensor) -> Tensor:
    """Whose bias has a gradient, a sum of what takes turns."""
    x = x + b
    left, right = x[:, ::2], x[:, 1::2]
    return left.clamp(max=1) * torch.sigmoid(right)


def pairs_in_float64(x: Tensor, b: Tensor) -> Tensor:
    """Which are rounded, and summed along what they take turns in."""
    left, right = (x * b).double().view(256, 64, 2).unbind(-1)
    turned = torch.stack((left * 3 - right, left + right * 2), -1).flatten(1)
    return turned.float() + turned.sum(1, keepdim=True).float()


def rounded_pairs(x: Tensor, b: Tensor) -> Tensor:
    left, right = (x * b).double().view(256, 64, 2).unbind(-1)
    return torch.stack((left * 3 - right, left + right * 2), -1).flatten(1).float()


def shifts(x: Tensor, w: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 3, 0))
    return torch.tanh(sum(padded[i : i + 256] * w[i] for i in range(4)))


def blurred(x: Tensor) -> Tensor:
    return (x[:, :-1, :-1] + 2 * x[:, 1:, :-1] + x[:, :-1, 1:].sin() + x[:, 1:, 1:]) / 4


def cropped_then_padded(x: Tensor) -> Tensor:
    """Zeros take the place of what was there."""
    return F.pad(F.pad(x, (-2, 1)), (3, -1)).exp()


def only_zeros(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 9, 0))[:5].exp() + x[:5]


def one_part_as_it_is(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A part is a result, whose memory is that of the whole."""
    left, right = (x + b).chunk(2, -1)
    return left, right.sin()


def padded_with_infinite(x: Tensor) -> Tensor:
    return F.pad(x, (2, 2), value=-torch.inf)[:, 1:66].exp()


def packed_heads(x: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Of which the gradients are stacked, and turned around; a stack whose rows are short is not."""
    q, k, v = (x * c).view(4, 64, 3, 8, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return q.sin() * k, v.exp()


def packed_along_rows(x: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    q, k = x.view(4, 64, 2, 8, 16).transpose(1, 3).split((3, 5), 1)
    return (q * c[:16]).sin(), (k * c[16:32]).exp()


def joined_then_copied(x: Tensor, c: Tensor) -> Tensor:
    halves = x.view(4, 64, 2, 8, 24).unbind(2)
    joined = torch.stack((halves[0].exp(), halves[1] * c[:24]), 1)
    return torch.cat((joined, joined.sin()), 1).transpose(1, 2).contiguous()


def larger_and_joined(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(torch.cat((F.interpolate(x, scale_factor=2), y), 1))


PROGRAMS = {
    "larger and joined": (larger_and_joined, (leaf(4, 5, 32, 32), leaf(4, 5, 64, 64, seed=1))),
    "packed heads": (packed_heads, (leaf(4, 64, 384), leaf(384, seed=1))),
    "packed along rows": (packed_along_rows, (leaf(4, 64, 256), leaf(384, seed=1))),
    "joined, then copied": (joined_then_copied, (leaf(4, 64, 384), leaf(384, seed=1))),
    "gate": (gate, (leaf(256, 128), leaf(128, seed=1))),
    "after an activation": (after_an_activation, (leaf(256, 128), leaf(128, seed=1))),
    "heads": (heads, (leaf(128, 192, seed=2), leaf(192, seed=1))),
    "groups": (groups, (leaf(2, 4, 8, 256), leaf(2, 4, seed=1))),
    "gate of turns": (gate_of_turns, (leaf(256, 128), leaf(128, seed=1))),
    "pairs in float64": (pairs_in_float64, (leaf(256, 128), leaf(128, seed=1))),
    "rounded pairs": (rounded_pairs, (leaf(256, 128), leaf(128, seed=1))),
    "shifts": (shifts, (leaf(256, 64), leaf(4, 64, seed=1))),
    "blurred": (blurred, (leaf(8, 65, 63),)),
    "cropped, then padded": (cropped_then_padded, (leaf(256, 128),)),
    "only zeros": (only_zeros, (leaf(300, 64),)),
    "a part as it is": (one_part_as_it_is, (leaf(256, 128), leaf(128, seed=1))),
    "padded with infinite numbers": (padded_with_infinite, (leaf(256, 64),)),
    "across memory": (gate, (leaf(128, 256).t(), leaf(128, seed=1))),
}
REWRITTEN = (
    "larger and joined",
    "gate",
    "after an activation",
    "heads",
    "shifts",
    "blurred",
    "across memory",
    "gate of turns",
    "rounded pairs",
)


def _inputs(name: str) -> list[Tensor]:
    return [value.detach().requires_grad_() for value in PROGRAMS[name][1]]


@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_eagers(name):
    function, inputs = PROGRAMS[name][0], _inputs(name)
    compiled = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    got, wanted = ([out] if isinstance(out := f(*inputs), Tensor) else list(out) for f in (compiled, function))
    cotangents = [torch.linspace(-1, 1, out.numel()).view(out.shape) for out in wanted]
    gradients = [torch.autograd.grad(outs, inputs, cotangents) for outs in (got, wanted)]
    for one, other in zip([*got, *gradients[0]], [*wanted, *gradients[1]], strict=True):
        assert one.stride() == other.stride()
        assert_close_as_sums(one, other, 256)


@needs_compiler
def test_gradients_of_packed_heads_are_one_kernel():
    """They were stacked by one, and turned around by another."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.view(4, 64, 3, 8, 16).permute(2, 0, 3, 1, 4)
        return q.sin(), k.exp(), v.tanh()

    compiled = aottrain.compile(program, kernel="cpp", capture="trace", on_unsupported="error")
    assert len([line for line in compiled.prepare(leaf(4, 64, 384)).kernels if "backward" in str(line)]) == 1


@needs_compiler
@pytest.mark.parametrize("name", REWRITTEN)
def test_the_forward_is_one_kernel(name):
    """The whole was made by one, in memory, and its parts read by another."""
    function, inputs = PROGRAMS[name][0], _inputs(name)
    compiled = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    kernels = [line for line in compiled.prepare(*inputs).kernels if "forward" in str(line)]
    assert len(kernels) == 1
