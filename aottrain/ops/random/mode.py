"""One dispatch mode that turns each random ATen op into a functional Philox draw.

It is used twice, so that both sides see the same numbers: while a program is traced, and around eager code that must
draw what the compiled program draws (`philox_eager`). Draws are numbered in program order; p = 0 and p = 1 draw nothing
in eager and never reach this mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from aottrain.compat import TorchDispatchMode
from aottrain.compat_dispatch import all_named, arrived_whole, take_apart
from aottrain.errors import UnsupportedError
from aottrain.ops.random.philox import SIGNIFICAND_BITS, new_state
from aottrain.ops.random.ranges import check_integers, check_number, check_types, check_values

aten = torch.ops.aten
_draws = torch.ops.aottrain

# Tagged as drawing random numbers, but they draw only where their dropout probability is above 0.
_ATTENTION = tuple(
    getattr(aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_attention_math_for_mps",
    )
    if hasattr(aten, name)
)


class _MathAttention(TorchFunctionMode):
    """Inside it attention with dropout is taken apart into products, softmax and dropout, as it always is on a CPU: the
    fused kernels of a GPU draw their mask inside, where no one can draw it again."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = all_named(func, args, kwargs)
        place = _DROPOUT_PLACES.get(func)
        if place is None or not kwargs.get("dropout_p", args[place] if len(args) > place else 0.0):
            return func(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **kwargs)


# Where each function takes the probability of dropout, if not by name.
_DROPOUT_PLACES: dict[Any, int] = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class PhiloxMode(TorchDispatchMode):
    """Inside it every random op draws from (seed, offset) `state`; None takes a seed from torch at the first use.

    Raises UnsupportedError for an explicit `generator=` and for random ops that have no functional form here.
    """

    def __init__(self, state: Tensor | None = None):
        super().__init__()
        self.state = state
        self.num_draws = 0
        self._attention = _MathAttention() if torch.cuda.is_available() else None

    def __enter__(self) -> Any:
        if self._attention is not None:
            self._attention.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._attention is not None:
            self._attention.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if arrived_whole(func, args, kwargs):
            with self:
                return take_apart(func, args, kwargs)
        return self.drawn(func, args, kwargs)

    def drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives that is not to be taken apart."""
        rule = RULES.get(func)
        if rule is None:
            if torch.Tag.nondeterministic_seeded in func.tags:
                _check_no_draw(func, args, kwargs)
            return func(*args, **kwargs)
        if kwargs.pop("generator", None) is not None:
            raise UnsupportedError(
                f"{func} is given an explicit generator=; only torch's default generator is compiled"
            )
        check_types(func, args, kwargs)
        return rule(self, *args, **kwargs)

    def _next(self, device: torch.device) -> tuple[Tensor, int]:
        if self.state is None:
            self.state = new_state(device)
        self.num_draws += 1
        return self.state, self.num_draws - 1

    def uniform(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers in [0, 1), contiguous; of a complex type both parts are."""
        if dtype.is_complex:
            return torch.complex(*self.uniform((2, *size), dtype.to_real(), device).unbind())
        state, draw = self._next(device)
        return _draws.philox_uniform(state, draw, list(size), dtype=dtype, device=device)

    def normal(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Standard normal numbers, contiguous; of a complex type either part has half of the variance."""
        if dtype.is_complex:
            return torch.complex(*(self.normal((2, *size), dtype.to_real(), device) * math.sqrt(0.5)).unbind())
        state, draw = self._next(device)
        return _draws.philox_normal(state, draw, list(size), dtype=dtype, device=device)

    def integers(self, low: int, high: int, size: Sequence[int], device: torch.device) -> Tensor:
        """int64 numbers in [low, high), contiguous."""
        state, draw = self._next(device)
        return _draws.philox_randint(state, draw, low, high, list(size), device=device)


@contextmanager
def philox_eager() -> Iterator[PhiloxMode]:
    """Eager code inside draws the numbers that a compiled call would draw from the same torch generator state.

    One seed is taken from torch's default generator, at the first draw.
    """
    with PhiloxMode() as mode:
        yield mode


def _check_no_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func in _ATTENTION:
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if not arguments.get("dropout_p"):
            return
        raise UnsupportedError(f"{func} draws its dropout mask inside the kernel; use the math attention with dropout")
    raise UnsupportedError(f"{func} draws random numbers in a way that has no functional form")


def _real_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which a comparison with a probability is drawn."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _fill_like(source: Tensor, value: Tensor, **options: Any) -> Tensor:
    """`value` with the strides that eager's *_like op gives."""
    out = torch.empty_like(source, **options)
    return value.to(out.dtype) if out.is_contiguous() else out.copy_(value)


def _bernoulli(mode: PhiloxMode, like: Tensor, p: Any) -> Tensor:
    if isinstance(p, Tensor):
        check_values(((p >= 0) & (p <= 1)).all(), "bernoulli expects all elements of p to be in [0, 1]")
    else:
        check_number(0 <= p <= 1, f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    probability_type = p.dtype if isinstance(p, Tensor) else like.dtype
    return mode.uniform(like.shape, _real_type(probability_type), like.device) < p


def _bernoulli_(mode: PhiloxMode, self: Tensor, p: Any = 0.5) -> Tensor:
    return self.copy_(_bernoulli(mode, self, p))


def _bernoulli_probabilities(mode: PhiloxMode, self: Tensor) -> Tensor:
    return _fill_like(self, _bernoulli(mode, self, self), memory_format=torch.contiguous_format)


def _bernoulli_p(mode: PhiloxMode, self: Tensor, p: float = 0.5) -> Tensor:
    return _fill_like(self, _bernoulli(mode, self, p), memory_format=torch.contiguous_format)


def _native_dropout(mode: PhiloxMode, self: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    check_number(0 <= p <= 1, f"dropout probability has to be between 0 and 1, but got {p}")
    if train is False or p == 0.0:
        return self.clone(), torch.ones_like(self, dtype=torch.bool)
    # In the type that `bernoulli_` has, which eager calls on a CPU and a trace with symbolic sizes does not.
    mask = mode.uniform(self.shape, _real_type(self.dtype), self.device) < 1.0 - p
    return self * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


def _factory(dtype: torch.dtype | None, device: Any) -> tuple[torch.dtype, torch.device]:
    return dtype or torch.get_default_dtype(), torch.device(device if device is not None else "cpu")


def _rand(mode: PhiloxMode, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return mode.uniform(size, *_factory(dtype, device))


def _randn(mode: PhiloxMode, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return mode.normal(size, *_factory(dtype, device))


def _rand_like(mode: PhiloxMode, self: Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    dtype, device = dtype or self.dtype, torch.device(device if device is not None else self.device)
    return _fill_like(self, mode.uniform(self.shape, dtype, device), dtype=dtype, device=device, **_layout(options))


def _randn_like(mode: PhiloxMode, self: Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    dtype, device = dtype or self.dtype, torch.device(device if device is not None else self.device)
    return _fill_like(self, mode.normal(self.shape, dtype, device), dtype=dtype, device=device, **_layout(options))


def _layout(options: dict[str, Any]) -> dict[str, Any]:
    memory_format = options.get("memory_format")
    return {} if memory_format is None else {"memory_format": memory_format}


def _uniform_(mode: PhiloxMode, self: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    check_number(low <= high, f"uniform_ expects from <= to, but found from={low} > to={high}")
    if self.is_complex():
        _uniform_(mode, torch.view_as_real(self), low, high)
        return self
    return self.copy_(mode.uniform(self.shape, self.dtype, self.device) * (high - low) + low)


def _normal_(mode: PhiloxMode, self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    check_number(std >= 0, f"normal expects std >= 0.0, but found std {std}")
    if self.is_complex():  # eager adds the mean to both parts
        _normal_(mode, torch.view_as_real(self), mean, std * math.sqrt(0.5))
        return self
    return self.copy_(mode.normal(self.shape, self.dtype, self.device) * std + mean)


def _normal_of(mode: PhiloxMode, mean: Any, std: Any = 1.0) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std
    if isinstance(std, Tensor):
        check_values((std >= 0).all(), "normal expects all elements of std >= 0.0")
    else:
        check_number(std >= 0, f"normal expects std >= 0.0, but found std {std}")
    shape = torch.broadcast_shapes(*(v.shape for v in (mean, std) if isinstance(v, Tensor)))
    return mode.normal(shape, like.dtype, like.device).mul_(std).add_(mean)  # in place: the type of `like` stays


def _normal_number(
    mode: PhiloxMode, mean: float, std: float, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    dtype, device = _factory(dtype, device)
    return _normal_(mode, torch.empty(size, dtype=dtype, device=device), mean, std)


def _rrelu(
    mode: PhiloxMode, self: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1.0 / 3, training: bool = False
) -> Tensor:
    check_number(lower <= upper, "Lower bound should be less than or equal to the upper bound")
    self = self.contiguous()  # as the kernel's result is
    if not training:
        return torch.nn.functional.leaky_relu(self, (lower + upper) / 2)
    slope = mode.uniform(self.shape, _real_type(self.dtype), self.device) * (upper - lower) + lower
    noise.copy_(torch.where(self <= 0, slope, 1.0))
    return self * noise


def _rrelu_(mode: PhiloxMode, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return self.copy_(_rrelu(mode, self, *args, **kwargs))


def _exponential_(mode: PhiloxMode, self: Tensor, rate: float = 1.0) -> Tensor:
    check_number(rate > 0, f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    # Never 0, as in eager: many programs divide by it or take its logarithm, as F.gumbel_softmax does.
    draw_type = _real_type(self.dtype)
    uniform = mode.uniform(self.shape, draw_type, self.device)
    return self.copy_(torch.log1p(-uniform).clamp_(max=-torch.finfo(draw_type).eps / 2) * (-1.0 / rate))


def _log_normal_(mode: PhiloxMode, self: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    check_number(std > 0, f"log_normal_ expects std > 0.0, but found std={std}")
    return self.copy_((mode.normal(self.shape, _real_type(self.dtype), self.device) * std + mean).exp())


def _cauchy_(mode: PhiloxMode, self: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    check_number(sigma > 0, f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    uniform = mode.uniform(self.shape, _real_type(self.dtype), self.device)
    return self.copy_(torch.tan((uniform - 0.5) * math.pi) * sigma + median)


def _geometric_(mode: PhiloxMode, self: Tensor, p: float) -> Tensor:
    check_number(0 < p < 1, f"geometric_ expects p to be in (0, 1), but got p={p}")
    uniform = mode.uniform(self.shape, _real_type(self.dtype), self.device)
    return self.copy_((torch.log1p(-uniform) / math.log1p(-p)).floor() + 1.0)


def _randint(mode: PhiloxMode, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _randint_low(mode, 0, high, size, **options)


def _randint_low(
    mode: PhiloxMode, low: int, high: int, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    check_integers(low, high, dtype or torch.int64)
    return mode.integers(low, high, size, torch.device(device if device is not None else "cpu")).to(
        dtype or torch.int64
    )


def _randint_like(mode: PhiloxMode, self: Tensor, high: int, **options: Any) -> Tensor:
    return _randint_like_low(mode, self, 0, high, **options)


def _randint_like_low(
    mode: PhiloxMode, self: Tensor, low: int, high: int, *, dtype: Any = None, device: Any = None, **options: Any
) -> Tensor:
    device = torch.device(device if device is not None else self.device)
    check_integers(low, high, dtype or self.dtype)
    value = mode.integers(low, high, self.shape, device)
    return _fill_like(self, value, dtype=dtype or self.dtype, device=device, **_layout(options))


def _random_limit(dtype: torch.dtype) -> int:
    """One past the largest integer that `random_()` draws: all those that the type represents exactly."""
    if dtype.is_floating_point:
        return 2 ** SIGNIFICAND_BITS[dtype] + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + (dtype != torch.int64)


def _random_(mode: PhiloxMode, self: Tensor) -> Tensor:
    return self.copy_(mode.integers(0, _random_limit(self.dtype), self.shape, self.device))


def _random_to_(mode: PhiloxMode, self: Tensor, to: int) -> Tensor:
    check_integers(0, to, self.dtype)
    return self.copy_(mode.integers(0, to, self.shape, self.device))


def _random_from_(mode: PhiloxMode, self: Tensor, low: int, to: int | None) -> Tensor:
    high = _random_limit(self.dtype) if to is None else to
    check_integers(low, high, self.dtype)
    return self.copy_(mode.integers(low, high, self.shape, self.device))


def _randperm(mode: PhiloxMode, n: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    device = torch.device(device if device is not None else "cpu")
    return torch.argsort(mode.integers(0, 2**62, (n,), device), stable=True).to(dtype or torch.int64)


def _multinomial(mode: PhiloxMode, self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """With replacement by inverting the distribution function; without, the largest of an exponential race."""
    valid = (self.max() < math.inf) & (self.min() >= 0)
    check_values(valid, "probability tensor contains either `inf`, `nan` or element < 0")
    check_values((self.sum(-1) != 0).all(), "invalid multinomial distribution (sum of probabilities <= 0)")
    if replacement:
        cumulative = self.to(_real_type(self.dtype)).cumsum(-1)
        shape = (*self.shape[:-1], num_samples)
        level = mode.uniform(shape, cumulative.dtype, self.device) * cumulative[..., -1:]
        return torch.searchsorted(cumulative, level, right=True).clamp_(max=self.shape[-1] - 1)
    race = -torch.log1p(-mode.uniform(self.shape, _real_type(self.dtype), self.device))
    # A weight of 0 is never drawn, also not where its exponential number is 0.
    return torch.topk(torch.where(self > 0, self / race, -1.0), num_samples, dim=-1).indices


RULES: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: _bernoulli_,
    aten.bernoulli_.Tensor: _bernoulli_,
    aten.bernoulli.default: _bernoulli_probabilities,
    aten.bernoulli.p: _bernoulli_p,
    aten.native_dropout.default: _native_dropout,
    aten.rand.default: _rand,
    aten.randn.default: _randn,
    aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.uniform_.default: _uniform_,
    aten.normal_.default: _normal_,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.float_float: _normal_number,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: _rrelu_,
    aten.exponential_.default: _exponential_,
    aten.log_normal_.default: _log_normal_,
    aten.cauchy_.default: _cauchy_,
    aten.geometric_.default: _geometric_,
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.random_.default: _random_,
    aten.random_.to: _random_to_,
    getattr(aten.random_, "from"): _random_from_,
    aten.randperm.default: _randperm,
    aten.multinomial.default: _multinomial,
}
