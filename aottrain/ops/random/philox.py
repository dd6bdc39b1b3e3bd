"""The random ops of a compiled program: draws as pure functions of (seed, draw number, element): Philox4x32-10.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.

A draw never advances hidden state, so recomputing it in the backward gives the same numbers by construction.

Layout of a draw. The state is an int64 tensor (seed, offset). Element e of draw d uses lane e % 4 of the block whose
key is the seed's two 32-bit halves and whose counter is (e // 4 as two words, offset + d as two words). e is the
logical (row-major) index, so the numbers do not depend on strides.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import disable_modes
from aottrain.compat_dispatch import register_fake
from aottrain.ops.native.philox import PHILOX_ELEMENT, PHILOX_NORMALS, PHILOX_ROWS
from aottrain.ops.native.shared import with_parts
from aottrain.ops.philox_constants import FLOAT_BITS, KEY_STEPS, MULTIPLIERS, NUM_ROUNDS
from aottrain.toolchain.native import Source, load

_MASK = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# Blocks per chunk: four int64 words of a chunk stay in a core's second-level cache on a CPU.
_CHUNK = {"cpu": 1 << 14}
SIGNIFICAND_BITS = {torch.float64: 53, torch.float32: FLOAT_BITS, torch.float16: 11, torch.bfloat16: 8}


def philox_words(state: Tensor, draw: int, start: int, num_blocks: int, device: torch.device) -> tuple[Tensor, ...]:
    """The four 32-bit words (as int64 tensors of length num_blocks) of blocks start .. start + num_blocks of a draw."""
    if state.device.type == "cpu":
        seed, offset = (int(v) for v in state.tolist())
    else:
        seed, offset = state[0], state[1]  # stays on the device: no synchronisation
    counter = torch.arange(start, start + num_blocks, dtype=torch.int64, device=device)
    position = offset + draw
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2 = torch.zeros_like(counter) + (position & _MASK)
    c3 = torch.zeros_like(counter) + ((position >> 32) & _MASK)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(NUM_ROUNDS):
        # The 64-bit product wraps as a signed number; masking after the shift makes its halves right.
        p0, p1 = c0.mul_(MULTIPLIERS[0]), c2.mul_(MULTIPLIERS[1])
        high0, high1 = (p0 >> 32).bitwise_and_(_MASK), (p1 >> 32).bitwise_and_(_MASK)
        low0, low1 = p0.bitwise_and_(_MASK), p1.bitwise_and_(_MASK)
        c0 = high1.bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = high0.bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = low1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _MASK, (k1 + KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _fill(
    state: Tensor,
    draw: int,
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    lanes: int,
    convert: Callable[[tuple[Tensor, ...]], Tensor],
) -> Tensor:
    """A contiguous tensor of `size`, a view of no other; convert maps the words of n blocks to n rows of `lanes`
    values."""
    num_elements = math.prod(size)
    num_blocks = -(-num_elements // lanes)
    out = torch.empty(size, dtype=dtype, device=device)
    flat = out.view(-1)
    chunk = _CHUNK.get(device.type, num_blocks) or 1
    for start in range(0, num_blocks, chunk):
        count = min(chunk, num_blocks - start)
        part = flat[start * lanes : (start + count) * lanes]
        part.copy_(convert(philox_words(state, draw, start, count, device)).view(-1)[: part.numel()])
    return out


def _uniform(words: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Uniform numbers in [0, 1) with as many bits as the type's significand holds, so that 1 is never rounded to."""
    if dtype == torch.float64:
        pairs = ((words[0], words[1]), (words[2], words[3]))
        return [((low >> 5) * 67108864 + (high >> 6)).to(dtype) * 2.0**-53 for low, high in pairs]
    bits = SIGNIFICAND_BITS[dtype]
    return [(word >> (32 - bits)).to(dtype) * 2.0**-bits for word in words]


def _normal(words: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Standard normal numbers by the Box-Muller transform (Annals of Mathematical Statistics 29, 1958)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    uniform = _uniform(words, wide)
    out = []
    for first, second in zip(uniform[::2], uniform[1::2], strict=True):
        radius = (-2.0 * torch.log(1.0 - first)).sqrt_()  # 1 - u lies in (0, 1]: the logarithm is finite
        angle = second * (2.0 * math.pi)
        out += [(radius * angle.cos()).to(dtype), (radius * angle.sin()).to(dtype)]
    return out


def _integer(words: Sequence[Tensor], low: int, high: int) -> list[Tensor]:
    """Integers in [low, high): 63 random bits modulo the range, as eager's own generator does."""
    pairs = ((words[0], words[1]), (words[2], words[3]))
    return [((((a & 0x7FFFFFFF) << 32) | b) % (high - low)) + low for a, b in pairs]


def _stack(columns: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(columns), dim=1)


_library = torch.library.Library("aottrain", "DEF")
_library.define("philox_uniform(Tensor state, int draw, SymInt[] size, *, ScalarType dtype, Device device) -> Tensor")
_library.define("philox_normal(Tensor state, int draw, SymInt[] size, *, ScalarType dtype, Device device) -> Tensor")
_library.define("philox_randint(Tensor state, int draw, int low, int high, SymInt[] size, *, Device device) -> Tensor")


# The same numbers as `philox_words` with `_uniform` give, and with `_normal` up to rounding, some twenty times faster
# than sequences of tensor ops on a CPU.
NATIVE = Source(
    with_parts("$INTEGERS\n$INLINE\n$BITS\n$FMA\n$LOG\n$QUADRANT\n")
    + (PHILOX_ELEMENT + PHILOX_ROWS + PHILOX_NORMALS)
    + """\
#define FILL(NAME, ROW) \\
extern "C" void NAME(u64 seed, u64 position, i64 count, float* out, i64 threads) { \\
  enum { CHUNK = 1 << 14 }; \\
  _Pragma("omp parallel for schedule(static) num_threads(threads)") \\
  for (i64 start = 0; start < count; start += CHUNK) { \\
    ROW(seed, position, (u64)start, count - start < CHUNK ? count - start : CHUNK, out + start); \\
  } \\
}
FILL(philox_uniform_float, philox_row)
FILL(philox_normal_float, philox_normal_row)
""",
    ("-fopenmp", "-fno-trapping-math"),
)


def _native(name: str, state: Tensor, draw: int, size: Sequence[int], device: Any) -> Tensor | None:
    """A float32 draw by C++; None where there is none."""
    if torch.device(device).type != "cpu" or state.device.type != "cpu":
        return None
    library = load(NATIVE)
    if library is None:
        return None
    seed, offset = state.tolist()
    out = torch.empty(size, dtype=torch.float32)
    word, whole = ctypes.c_uint64, ctypes.c_int64
    getattr(library, name)(
        word(seed & _MASK64),
        word((offset + draw) & _MASK64),
        whole(out.numel()),
        ctypes.c_void_p(out.data_ptr()),
        whole(torch.get_num_threads()),
    )
    return out


def _philox_uniform(state: Tensor, draw: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    out = _native("philox_uniform_float", state, draw, size, device) if dtype == torch.float32 else None
    return out if out is not None else reference_uniform(state, draw, size, dtype=dtype, device=device)


def reference_uniform(state: Tensor, draw: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    """The definition of philox_uniform, in tensor ops: runs everywhere, and is what every other version must equal."""
    lanes = 2 if dtype == torch.float64 else 4
    return _fill(state, draw, size, dtype, torch.device(device), lanes, lambda words: _stack(_uniform(words, dtype)))


def _philox_normal(state: Tensor, draw: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    wide = dtype == torch.float64
    out = None if wide else _native("philox_normal_float", state, draw, size, device)
    return out.to(dtype) if out is not None else reference_normal(state, draw, size, dtype=dtype, device=device)


def reference_normal(state: Tensor, draw: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    """The definition of philox_normal, in tensor ops: every other version equals it up to the rounding of logarithms
    and angles."""
    lanes = 2 if dtype == torch.float64 else 4
    return _fill(state, draw, size, dtype, torch.device(device), lanes, lambda words: _stack(_normal(words, dtype)))


def _philox_randint(state: Tensor, draw: int, low: int, high: int, size: Sequence[int], *, device: Any) -> Tensor:
    return _fill(
        state, draw, size, torch.int64, torch.device(device), 2, lambda words: _stack(_integer(words, low, high))
    )


_library.impl("philox_uniform", _philox_uniform, "CompositeExplicitAutograd")
_library.impl("philox_normal", _philox_normal, "CompositeExplicitAutograd")
_library.impl("philox_randint", _philox_randint, "CompositeExplicitAutograd")


@register_fake(_library, "philox_uniform")
def _(state: Tensor, draw: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


@register_fake(_library, "philox_normal")
def _(state: Tensor, draw: int, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


@register_fake(_library, "philox_randint")
def _(state: Tensor, draw: int, low: int, high: int, size: Sequence[int], *, device: Any) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device=device)


def new_state(device: torch.device) -> Tensor:
    """The (seed, offset) of one call: the seed comes from torch's default generator, which advances by one draw."""
    with disable_modes():  # under philox_eager, too, the seed of a compiled call comes from torch's generator
        seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu")
        state = torch.cat([seed, torch.zeros_like(seed)])
    return state if device.type == "cpu" else state.to(device, non_blocking=True)
