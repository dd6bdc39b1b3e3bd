"""Small programs, forward and backward, of a few kernels each: by `evaluate`, and as C++ of one library.

Each is here for something that a lowering, a schedule or a renderer could get wrong. What ATen's operators give for the
same graph is the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aottrain.compiler.codegen.evaluation import evaluate, memory_of
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.graph import JointGraph
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.runtime.executor import aten_runner
from aottrain.runtime.launch import Launch, scheduled_runner
from aottrain.toolchain.native import find_compiler
from tests.compiler.lowering.lowering_runs import linked
from tests.compiler.programs import joint_inputs, joint_of
from tests.numerics.fuzzing import values

F32, BF16 = torch.float32, torch.bfloat16


def leaf(*shape: int, seed: int = 1) -> Tensor:
    return values(shape, F32, seed).requires_grad_()


TOKENS = torch.tensor([[0, 3, 3], [6, 1, 0]])
X, Y, ROW, TABLE = leaf(6, 40), leaf(6, 40, seed=2), leaf(40, seed=3), leaf(7, 40, seed=4)
WIDE, LONG, IMAGES = leaf(130, 160, seed=5), leaf(2, 9001, seed=6), leaf(2, 3, 8, 8, seed=7)
WHOLE = torch.arange(-20, 20).view(5, 8)


def _chain(x: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, (300,))) * x.softmax(-1)


def _gates(x: Tensor) -> Tensor:
    """As of a recurrent step."""
    take, keep, new, show = x.chunk(4, 1)
    return show.sigmoid() * (keep.sigmoid() * 0.5 + take.sigmoid() * new.tanh()).tanh()


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1).flatten(-2)


def _groups(gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    """Rows of groups, and sums of the channels in them."""
    wide = gradient.to(mean.dtype)
    total = (wide * 3).sum((2, 3), keepdim=True)
    return total, wide.exp() - total, torch.ops.aottrain.group_norm_sums_in_rows(gradient, x, mean, rstd)


def _of_groups(channels: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = (2, 3, channels, size), (2, 3, 1, 1)
    x, y = (values(shapes[0], dtype, seed) for seed in (13, 14))
    return x, y, values(shapes[1], F32, 15), values(shapes[1], F32, 16)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "softmax": (lambda x: x.softmax(-1), (X,)),
    "log softmax": (lambda x: x.log_softmax(-1), (X,)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (40,), w, b), (X, ROW, leaf(40, seed=8))),
    "rms norm": (lambda x, w: F.rms_norm(x, (40,), w, 0.25), (X, ROW)),
    "activations": (lambda x: (F.gelu(x), F.silu(x), x.sigmoid(), F.elu(x), F.leaky_relu(x), F.softplus(x)), (X,)),
    "variance": (lambda x: (x.var(-1), x.mean(0), x.amax(-1)), (X,)),
    "division": (lambda x, y, i: (x / y, x.fmod(y), torch.floor_divide(i, 3), i % 7), (X, Y, WHOLE)),
    "bounds": (lambda x: (x.clamp(-0.5, 0.7), x.tril(2), x.nan_to_num(1.0), torch.lerp(x, x * 2, 0.7)), (X,)),
    "parts": (lambda x, y: F.pad(torch.cat([x[:, 3:9], y[:, ::2]], 1), (2, 1), value=0.5), (X, Y)),
    "embedding": (lambda w, tokens: F.embedding(tokens, w).tanh(), (TABLE, TOKENS)),
    "lookup": (lambda w, tokens: F.embedding(tokens, w).tanh(), (TABLE.detach(), TOKENS)),
    "dropout": (lambda x: F.dropout(x.exp(), 0.3), (X,)),
    "low precision": (lambda x, y: ((x.bfloat16() * y.bfloat16()).exp() + 1).float(), (X, Y)),
    "sums over rows": (lambda x: (x.exp().sum(0), (x * 2).sum()), (WIDE,)),
    "sums over long rows": (lambda x: (x.exp().sum(0), x.exp().mean(0), (x.bfloat16() * 2).sum(0)), (WIDE,)),
    "sums in another order": (lambda x: x.view(130, 20, 8).exp().sum(0).t().contiguous(), (WIDE,)),
    "across memory": (lambda x, y: x.t().contiguous() * 2 + y, (WIDE, leaf(160, 130, seed=9))),
    "long rows": (lambda x: (x.softmax(-1), x.sum(-1)), (LONG,)),
    "pooling": (lambda x: F.max_pool2d(x * 2, 3, 2, 1), (IMAGES,)),
    "slices": (lambda x, y: x[1:, 3:9] * y[:5, 2:8], (X, Y)),
    "heads": (lambda x: (x.sin().view(2, 3, 5, 8).transpose(1, 2) * 3).reshape(2, 5, 24).cos(), (X,)),
    "held rows": (lambda x: _chain(_chain(x)), (leaf(3, 300, seed=10),)),
    "far angles": (lambda x: ((x * 1e9).sin(), (x * 1e9).cos()), (X.detach(),)),
    "zeros": (lambda x: 1 / torch.where(x > 0, 0.0, -0.0), (X.detach(),)),
    "all negative": (lambda x: (-1 - x.abs()).amax(-1), (X,)),
    "casts": (lambda x: (x.bool().float(), (x * 9).long().double(), x.half().float()), (X,)),
    "gate of chunks": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (leaf(6, 3, 80),)),
    "gate of slices": (lambda x: F.silu(x[:, :20]) * x[:, 20:], (X,)),
    "gates": (_gates, (leaf(3, 8, 5, seed=11),)),
    "interleaved": (_turned, (X, leaf(20, seed=12).detach())),
    "stacked": (lambda x, y: (torch.stack((x.sin(), y.exp())), torch.stack((x.exp(), y.sin(), x), 1)), (X, Y)),
    "parts that are read": (lambda x: torch.cat((x.exp(), x.sin(), x.t().exp().t()), 1).softmax(1), (X,)),
    "parts of images": (
        lambda x: torch.cat((x.exp(), x.sin()), 1).contiguous(memory_format=torch.channels_last),
        (IMAGES.detach().contiguous(memory_format=torch.channels_last).requires_grad_(),),
    ),
    "parts of one": (lambda x: torch.cat((x[:1].exp(), x[1:2].sin()), 0) * x[:2], (X,)),
    "sums in rows": (_groups, _of_groups(5, 75, F32)),
    "sums in long rows": (_groups, _of_groups(2, 9001, F32)),
    "sums in rows of low precision": (_groups, _of_groups(4, 130, BF16)),
    "sums in rows across memory": (
        _groups,
        tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in _of_groups(20, 40, F32)),
    ),
    "cross entropy": (F.cross_entropy, (X, torch.tensor([0, 5, 39, -100, 2, 2]))),
}


@pytest.fixture(scope="module")
def planned(request) -> dict[str, tuple[JointGraph, list[Tensor], Schedule]]:
    """Of the programs that are asked for."""
    found = {}
    asked = {getattr(item, "callspec", None) and item.callspec.params.get("name") for item in request.session.items}
    for number, name in enumerate(PROGRAMS):
        if name not in asked:
            continue
        function, given = PROGRAMS[name]
        joint = joint_of(function, *given)
        plan = schedule(joint.graph)
        calls = tuple(_renamed(call, number) if isinstance(call, KernelCall) else call for call in plan.calls)
        found[name] = joint, joint_inputs(joint, given), replace(plan, calls=calls)
    return found


def _renamed(call: KernelCall, number: int) -> KernelCall:
    return replace(call, kernel=replace(call.kernel, name=f"program_{number}_{call.kernel.name}"))


def check(joint: JointGraph, given: list[Tensor], plan: Schedule, launches: dict[str, Launch]) -> None:
    assert plan.kernels, "nothing is lowered"
    wanted = aten_runner(joint.graph)(list(given))
    got = scheduled_runner(joint.graph, plan, launches)(list(given))
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        if not b.dtype.is_floating_point:
            assert torch.equal(a, b), f"result {i}"
            continue
        scale = float(b.abs().nan_to_num(0, 0, 0).max())
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6 * max(scale, 1.0), equal_nan=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_evaluated(planned, name):
    joint, given, plan = planned[name]

    def launch(call: KernelCall) -> Launch:
        def run(buffers: Sequence[Tensor]) -> None:
            evaluate(call.kernel, [memory_of(b, p.span) for b, p in zip(buffers, call.kernel.parameters, strict=True)])

        return run

    check(joint, given, plan, {call.kernel.name: launch(call) for call in plan.kernels})


@pytest.fixture(scope="module")
def library(planned) -> dict[str, Launch]:
    return linked([call for _, _, plan in planned.values() for call in plan.kernels])


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_cpp(planned, library, name):
    check(*planned[name], library)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("wrong", [7, -1])
@pytest.mark.parametrize("name", ["embedding", "lookup"])
def test_a_wrong_index_is_told(planned, library, name, wrong):
    """Also where no gradient is taken, of which the rows are looked for once more."""
    joint, given, plan = planned[name]
    tokens = given[1].clone()
    tokens[1, 2] = wrong
    with pytest.raises(IndexError):
        scheduled_runner(joint.graph, plan, library)([given[0], tokens, *given[2:]])
