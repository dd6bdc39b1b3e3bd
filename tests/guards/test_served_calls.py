"""Guards: one compiled callable, before and after a change that its program does not serve."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import aottrain
from tests.numerics.comparison import assert_same, compiled
from tests.numerics.fuzzing import values

ONE, TWO = values((4, 4), torch.float32, 1), values((4, 4), torch.float32, 2)
LONG = values((9,), torch.float32, 3)


def _twice(function: Any, *calls: tuple[Any, ...], between: Callable[[], Any] = lambda: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = aottrain.compile(function, capture="trace")
        for i, args in enumerate(calls):
            if i:
                between()
            fresh = [_copies(args), _copies(args)]
            got, wanted = call(*fresh[0]), function(*fresh[1])
            assert_same((got, fresh[0]), (wanted, fresh[1]), f"call {i}")
            assert got.requires_grad == wanted.requires_grad and got.stride() == wanted.stride()


def _copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same aliasing: views of one base are views of one copy."""
    bases: dict[int, Tensor] = {}
    found = []
    for value in args:
        if isinstance(value, Tensor):
            base = value if value._base is None else value._base
            copy = bases.setdefault(id(base), base.detach().clone())
            copy = copy if value._base is None else copy.as_strided(value.shape, value.stride(), value.storage_offset())
            value = copy.requires_grad_() if value.requires_grad else copy
        found.append(value)
    return tuple(found)


def test_overlapping_inputs() -> None:
    _twice(lambda x, y: x.mul_(2).sum() + y, (LONG[:4], LONG[4:8]), (LONG[:4], LONG[2:6]))
    a, b = nn.Parameter(LONG[:4].clone(), requires_grad=False), LONG[4:8].clone()
    owner = nn.Module()
    owner.register_buffer("b", LONG[:4].clone())

    def step(x: Tensor) -> Tensor:
        owner.b.mul_(2)
        return x + owner.b

    call = aottrain.compile(step, capture="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(b), call(a.detach())
        inside = owner.b[:]
        before = owner.b.clone()
        assert_same(call(inside), before * 4)


def test_same_tensor_twice() -> None:
    _twice(lambda x, y, z: x.add_(1) * y + z, (ONE, ONE, TWO), (ONE, TWO, TWO))


def test_changed_grad_mode() -> None:
    x = ONE.clone().requires_grad_()
    call = compiled(lambda x: x * 2)
    with torch.no_grad():
        call(x)
    assert call(x).requires_grad


def test_changed_autocast() -> None:
    call = compiled(lambda x: x @ x)
    call(ONE)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(ONE).dtype == torch.bfloat16


def test_changed_default_type() -> None:
    call = compiled(lambda x: x.long() * torch.tensor(0.5))
    call(ONE)
    try:
        torch.set_default_dtype(torch.float64)
        assert call(ONE).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_changed_shape() -> None:
    _twice(lambda x: x * x.shape[0], (LONG[:4],), (LONG[:8],))


def test_changed_strides() -> None:
    _twice(lambda x: x * x.stride(0), (ONE,), (ONE.t(),))


def test_changed_type() -> None:
    _twice(lambda x: x / 3 + x.element_size(), (ONE,), (ONE.double(),))


def test_changed_requires_grad() -> None:
    _twice(lambda x: x * 2, (ONE,), (ONE.clone().requires_grad_(),))


def test_changed_number_type() -> None:
    _twice(lambda x, n: x.long() + n, (ONE, 1), (ONE, 1.0))


def test_changed_training_flag() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    call = compiled(model)
    call(ONE)
    model.eval()
    assert_same(call(ONE), model(ONE))


def test_changed_closure() -> None:
    scale = 2.0

    def function(x: Tensor) -> Tensor:
        return x * scale

    def change() -> None:
        nonlocal scale
        scale = 3.0

    _twice(function, (ONE,), (ONE,), between=change)


SCALE = [2.0]


def test_changed_global() -> None:
    def change() -> None:
        SCALE[0] += 1.0

    _twice(lambda x: x * SCALE[0], (ONE,), (ONE,), between=change)


def test_replaced_buffer() -> None:
    model = nn.Module()
    model.register_buffer("b", ONE.clone())
    model.forward = lambda x: x * model.b
    kept = model.b
    _twice(model, (ONE,), (ONE,), between=lambda: setattr(model, "b", TWO.clone()))
    del kept


def test_counted_fallback() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = aottrain.compile(lambda x: x.nonzero(), capture="trace")
        call(ONE)
    assert call.report.num_fallbacks == 1


def test_state_that_changes() -> None:
    seen: list[int] = []

    def function(x: Tensor) -> Tensor:
        seen.append(len(seen))
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = aottrain.compile(function, capture="trace")
        for _ in range(20):
            call(ONE)
    assert len(seen) == 20 and len(call.report.fallbacks) == 2, "past the limit nothing is traced"
