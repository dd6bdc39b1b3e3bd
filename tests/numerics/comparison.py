"""Bitwise comparison of a compiled program with eager under the same random draws."""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import aottrain
from tests.numerics.tolerance import RTOL_ATOL, assert_close

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mixed_policy(value: aottrain.ForwardValue) -> str:
    """A policy without a thought: a third each is saved, recomputed and free."""
    return ("save", "recompute", "free")[zlib.crc32(value.name.encode()) % 3]


# Every way to choose what is saved in any program; a number is a budget.
PLANS: tuple[Any, ...] = ("save_all", "min_cut", 1.0, 0.5, 0.1, 0.0, "recompute_all", mixed_policy)


def options(plan: Any) -> dict[str, Any]:
    return {"budget": plan} if isinstance(plan, int | float) else {"partition": plan}


def compiled(target: Any, plan: Any = "min_cut", capture: str = "trace", **more: Any) -> Any:
    """`target` compiled with this plan, raising where it cannot be: no test passes because eager stood in."""
    return aottrain.compile(target, **options(plan), on_unsupported="error", capture=capture, **more)


def same_bits(a: Any, b: Any) -> bool:
    """Equal type, shape and bits: signed zeros and NaN payloads count."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    kind = BITS[a.element_size()]
    return torch.equal(a.view(-1).view(kind), b.view(-1).view(kind))


def assert_same(got: Any, wanted: Any, what: str = "value") -> None:
    """Bitwise equality of two trees of tensors."""
    got_leaves, got_tree = tree_flatten(got)
    wanted_leaves, wanted_tree = tree_flatten(wanted)
    assert got_tree == wanted_tree, f"{what}: another structure"
    for i, (a, b) in enumerate(zip(got_leaves, wanted_leaves, strict=True)):
        assert same_bits(a, b), f"{what}, leaf {i}: {a} is not {b}"


def metadata(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), tuple(value.stride()), value.dtype


def fresh_inputs(inputs: Any) -> Any:
    """Copies with the same layout, leafness and requires_grad."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return out.copy_(value.detach()).requires_grad_(value.requires_grad)

    return [one(value) for value in inputs]


def gradients_of(outputs: Any, inputs: list[Tensor]) -> list[Tensor | None]:
    """Gradients for a fixed tangent of every differentiable output."""
    leaves = [
        v for v in tree_flatten(outputs)[0] if isinstance(v, Tensor) and v.requires_grad and v.grad_fn is not None
    ]
    if not leaves or not inputs:
        return []
    tangents = []
    for v in leaves:
        # In the output's own layout: for another one the compiled backward first copies it, and eager's matrix products
        # would run on other strides, which rounds differently.
        tangents.append(torch.empty_like(v, requires_grad=False))
        tangents[-1].copy_(torch.linspace(-9.0, 7.0, v.numel()).sin().view(v.shape))
    return list(torch.autograd.grad(leaves, inputs, tangents, allow_unused=True))


def run(function: Callable[..., Any], inputs: Any, seed: int = 3, eager: bool = False) -> tuple[Any, ...]:
    """(outputs, gradients, inputs afterwards, generator state afterwards) of one call on copies of the inputs."""
    inputs = fresh_inputs(inputs)
    torch.manual_seed(seed)
    if eager:
        with aottrain.philox_eager():
            out = function(*inputs)
            gradients = gradients_of(out, [v for v in inputs if isinstance(v, Tensor) and v.requires_grad])
    else:
        out = function(*inputs)
        gradients = gradients_of(out, [v for v in inputs if isinstance(v, Tensor) and v.requires_grad])
    return out, gradients, inputs, torch.get_rng_state()


def assert_call_like_eager(function: Callable[..., Any], inputs: Any, plan: Any = "min_cut", calls: int = 2) -> Any:
    """Outputs, gradients, mutated inputs and the generator are eager's, bit for bit. Returns the compiled callable."""
    target = compiled(function, plan)
    for seed in range(calls):
        got, wanted = run(target, inputs, seed), run(function, inputs, seed, eager=True)
        for what, a, b in zip(("output", "gradient", "input", "generator"), got, wanted, strict=True):
            assert_same(a, b, what)
    return target


def train(model: nn.Module, call: Callable[..., Any], batches: Any, eager: bool, lr: float = 0.05) -> dict[str, Any]:
    """A few optimizer steps; everything that a step leaves behind, for each step."""
    torch.manual_seed(11)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    trace: dict[str, Any] = {}
    for step, batch in enumerate(batches):
        with aottrain.philox_eager() if eager else _nothing():
            out = call(*batch)
            loss = out if isinstance(out, Tensor) and out.dim() == 0 else _loss(out)
            loss.backward()
        trace[f"output {step}"] = [v.detach().clone() for v in tree_flatten(out)[0] if isinstance(v, Tensor)]
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            trace[f"gradient of {name} {step}"] = None if grad is None else grad.clone()
        for name, buffer in model.named_buffers():
            trace[f"buffer {name} {step}"] = buffer.detach().clone()
        trace[f"inputs {step}"] = [v.detach().clone() if isinstance(v, Tensor) else v for v in batch]
        trace[f"generator {step}"] = torch.get_rng_state()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        trace[f"parameter {name}"] = parameter.detach().clone()
    return trace


def assert_trains_like_eager(make: Callable[[], nn.Module], batches: Callable[[], Any], plan: Any, **more: Any) -> Any:
    """Several steps of a model, equal in all that they leave behind. Returns the compiled model.

    Bitwise; with kernel="cpp" but for how floats are rounded.
    """
    torch.manual_seed(5)
    eager_model = make()
    model = copy.deepcopy(eager_model)
    target = compiled(model, plan, **more)
    got = train(model, target, batches(), eager=False)
    wanted = train(eager_model, eager_model, batches(), eager=True)
    assert got.keys() == wanted.keys()
    for what in wanted:
        if more.get("kernel") != "cpp":
            assert_same(got[what], wanted[what], what)
            continue
        for a, b in zip(tree_flatten(got[what])[0], tree_flatten(wanted[what])[0], strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor) and b.dtype in RTOL_ATOL:
                assert_close(a, b)
            else:
                assert_same(a, b, what)
    return target


def _loss(out: Any) -> Tensor:
    leaves = [v for v in tree_flatten(out)[0] if isinstance(v, Tensor) and v.requires_grad]
    return torch.stack([v.float().square().mean() for v in leaves]).sum()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """One thread, a fixed seed, and an error for every call that silently would have run eagerly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="aottrain runs this call eagerly")
        yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
