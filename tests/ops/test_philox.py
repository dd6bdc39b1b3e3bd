"""Philox draws: the published answers, and numbers that depend on (seed, draw, element) and on nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from aottrain.ops.random import philox
from aottrain.ops.random.philox import new_state, philox_words, reference_uniform
from aottrain.toolchain.native import find_compiler

CPU = torch.device("cpu")
draws = torch.ops.aottrain
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def state_of(seed: int, offset: int = 0) -> torch.Tensor:
    return torch.tensor([signed(seed), signed(offset)], dtype=torch.int64)


def philox_plain(counter: list[int], key: list[int]) -> list[int]:
    """The algorithm in plain integers, as the paper writes it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def words_of(counter: list[int], key: list[int]) -> list[int]:
    block, position = counter[0] | counter[1] << 32, counter[2] | counter[3] << 32
    words = philox_words(state_of(key[0] | key[1] << 32, position), 0, signed(block), 1, CPU)
    return [int(word) for word in words]


ONES = 0xFFFFFFFF
# Random123's kat_vectors for philox4x32-10.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, answer", KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, answer):
    assert philox_plain(counter, key) == answer
    assert words_of(counter, key) == answer


@pytest.mark.parametrize("block", [0, 1, 2**31, 2**32 - 1, 2**33 + 5, 2**60])
@pytest.mark.parametrize("seed, offset, draw", [(0, 0, 3), (2**63 - 2, 7, 0), (12345678901234567, 2**32 - 1, 1)])
def test_blocks_follow_the_documented_layout(block, seed, offset, draw):
    position = offset + draw
    counter = [block & ONES, block >> 32, position & ONES, position >> 32]
    words = philox_words(state_of(seed, offset), draw, block, 2, CPU)
    assert [int(word[0]) for word in words] == philox_plain(counter, [seed & ONES, seed >> 32])
    block += 1
    counter = [block & ONES, block >> 32, position & ONES, position >> 32]
    assert [int(word[1]) for word in words] == philox_plain(counter, [seed & ONES, seed >> 32])


def test_element_uses_lane_of_its_block():
    out = draws.philox_uniform(state_of(99), 4, [11], dtype=torch.float32, device=CPU)
    for element in range(11):
        word = philox_plain([element // 4, 0, 4, 0], [99, 0])[element % 4]
        assert float(out[element]) == (word >> 8) * 2.0**-24


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 63, 64, 65, 1023, 4099])
def test_the_native_draw_equals_its_definition(count):
    for seed, offset, draw in ((0, 0, 0), (2**63 - 1, 5, 9), (77, 2**32 - 1, 1)):
        state = state_of(seed, offset)
        native = draws.philox_uniform(state, draw, [count], dtype=torch.float32, device=CPU)
        reference = reference_uniform(state, draw, [count], dtype=torch.float32, device=CPU)
        assert native.shape == (count,) and torch.equal(native, reference)


def test_without_a_compiler_the_numbers_are_the_same(monkeypatch):
    for size in ([7, 9], [5, 16385]):  # the latter is shared by threads
        with monkeypatch.context() as patch:
            with_compiler = draws.philox_uniform(state_of(5), 1, size, dtype=torch.float32, device=CPU)
            patch.setattr(philox, "load", lambda *source: None)
            without = draws.philox_uniform(state_of(5), 1, size, dtype=torch.float32, device=CPU)
        assert torch.equal(without, with_compiler)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["philox_uniform", "philox_normal"])
def test_chunks_do_not_show(monkeypatch, dtype, kind):
    draw = getattr(draws, kind)
    if kind == "philox_normal":
        monkeypatch.setattr(philox, "load", lambda *source: None)  # whose logarithms and angles round otherwise
    whole = draw(state_of(3), 2, [1001], dtype=dtype, device=CPU)
    monkeypatch.setitem(philox._CHUNK, "cpu", 16)
    monkeypatch.setattr(philox, "load", lambda *source: None)
    assert torch.equal(draw(state_of(3), 2, [1001], dtype=dtype, device=CPU), whole)
    # A prefix is the prefix: an element's number does not depend on how many others there are.
    assert torch.equal(draw(state_of(3), 2, [37], dtype=dtype, device=CPU), whole[:37])


@pytest.mark.parametrize("size", [0, 1, 3, 1023, 1024, 1025, 300_000])
def test_normal_numbers_of_a_compiler_are_those_of_tensor_ops(size):
    """Up to the rounding of a logarithm near 1, of its root, and of an angle of up to 2 pi; whatever the threads."""
    out = draws.philox_normal(state_of(9, 4), 1, [size], dtype=torch.float32, device=CPU)
    wide = philox.reference_normal(state_of(9, 4), 1, [size], dtype=torch.float32, device=CPU)
    assert (out - wide).abs().max() < 2e-6 if size else out.shape == (0,)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(draws.philox_normal(state_of(9, 4), 1, [size], dtype=torch.float32, device=CPU), out)
    finally:
        torch.set_num_threads(threads)
    part = draws.philox_normal(state_of(9, 4), 1, [size // 3], dtype=torch.float32, device=CPU)
    assert torch.equal(part, out[: size // 3])
    low = draws.philox_normal(state_of(9, 4), 1, [size], dtype=torch.bfloat16, device=CPU)
    assert torch.equal(low, out.bfloat16())


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
def test_the_compilers_numbers_can_be_made():
    """Tensor ops would stand in, and round otherwise."""
    assert philox.load(philox.NATIVE) is not None


def test_integer_chunks_do_not_show(monkeypatch):
    whole = draws.philox_randint(state_of(3), 2, -5, 1000, [333], device=CPU)
    monkeypatch.setitem(philox._CHUNK, "cpu", 16)
    assert torch.equal(draws.philox_randint(state_of(3), 2, -5, 1000, [333], device=CPU), whole)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shape_does_not_matter_only_the_logical_index(dtype):
    flat = draws.philox_uniform(state_of(8), 0, [24], dtype=dtype, device=CPU)
    assert torch.equal(draws.philox_uniform(state_of(8), 0, [2, 3, 4], dtype=dtype, device=CPU).view(-1), flat)
    assert draws.philox_uniform(state_of(8), 0, [], dtype=dtype, device=CPU) == flat[0]
    assert draws.philox_uniform(state_of(8), 0, [3, 0, 2], dtype=dtype, device=CPU).shape == (3, 0, 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_range_and_moments(dtype):
    out = draws.philox_uniform(state_of(1), 0, [400_000], dtype=dtype, device=CPU)
    assert out.dtype == dtype
    wide = out.double()
    assert wide.min() >= 0.0 and wide.max() < 1.0
    step = 2.0 ** -{torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    # Five standard errors; a type with few bits lies half a step low.
    assert abs(wide.mean() - (0.5 - step / 2)) < 5 * math.sqrt(1 / 12 / 400_000)
    assert abs(wide.var() - 1 / 12) < 1e-3
    assert torch.equal(torch.unique((wide / step).frac()), torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_word_does_not_round_to_one(dtype):
    words = [torch.full((1,), ONES, dtype=torch.int64)] * 4
    for value in philox._uniform(words, dtype):
        assert value.item() < 1.0
    for value in philox._normal(words, dtype):
        assert math.isfinite(value.item())
    for value in philox._normal([torch.zeros(1, dtype=torch.int64)] * 4, dtype):
        assert math.isfinite(value.item())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_normal_moments(dtype):
    out = draws.philox_normal(state_of(2), 0, [400_000], dtype=dtype, device=CPU).double()
    assert out.isfinite().all()
    assert abs(out.mean()) < 5 / math.sqrt(400_000)
    assert abs(out.var() - 1) < 2e-2
    assert abs((out**3).mean()) < 3e-2 and abs((out**4).mean() - 3) < 8e-2
    assert abs(torch.corrcoef(torch.stack([out[::2], out[1::2]]))[0, 1]) < 0.02


@pytest.mark.parametrize("low, high", [(0, 2), (-3, 4), (5, 6), (0, 2**40), (-(2**62), 2**62 - 1)])
def test_integers_lie_in_range(low, high):
    out = draws.philox_randint(state_of(2), 0, low, high, [20_000], device=CPU)
    assert out.dtype == torch.int64 and int(out.min()) >= low and int(out.max()) < high
    if high - low <= 7:
        counts = torch.bincount(out - low, minlength=high - low).double() / 20_000
        assert (counts - 1 / (high - low)).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["philox_uniform", "philox_normal"])
def test_seed_draw_and_offset_each_change_the_numbers(kind):
    def draw(seed, offset, number):
        return getattr(draws, kind)(state_of(seed, offset), number, [1000], dtype=torch.float64, device=CPU)

    base = draw(1, 0, 0)
    assert torch.equal(draw(1, 0, 0), base)
    others = [draw(2, 0, 0), draw(1 + 2**32, 0, 0), draw(1, 1, 0), draw(1, 2**32, 0), draw(1, 0, 2)]
    for i, one in enumerate([base, *others]):
        for two in others[i:]:
            assert (one == two).sum() < 2
    # Draw numbers continue an offset: (offset 3, draw 0) is (offset 0, draw 3).
    assert torch.equal(draw(1, 3, 0), draw(1, 0, 3))


def test_drawing_leaves_state_and_generator_alone():
    state, before = state_of(4, 2), torch.get_rng_state()
    draws.philox_normal(state, 0, [10], dtype=torch.float32, device=CPU)
    assert state.tolist() == [4, 2] and torch.equal(torch.get_rng_state(), before)


def test_new_state_takes_one_seed_of_torchs_generator():
    torch.manual_seed(5)
    first, second = new_state(CPU), new_state(CPU)
    torch.manual_seed(5)
    assert first.tolist() == [int(torch.randint(0, 2**63 - 1, (1,))), 0]
    assert second.tolist() == [int(torch.randint(0, 2**63 - 1, (1,))), 0]
    with torch.device("meta"):
        assert new_state(CPU).device.type == "cpu"


def test_fake_tensors_have_the_real_ones_metadata():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = torch.zeros(2, dtype=torch.int64)
        for kind in ("philox_uniform", "philox_normal"):
            fake = getattr(draws, kind)(state, 0, [2, 3], dtype=torch.float16, device=CPU)
            assert (fake.shape, fake.stride(), fake.dtype) == ((2, 3), (3, 1), torch.float16)
        assert draws.philox_randint(state, 0, 0, 9, [4], device=CPU).dtype == torch.int64


def test_draws_are_functional_ops_to_the_compiler():
    from aottrain.ir.ops import OpKind, is_pure, op_info

    for name in ("philox_uniform", "philox_normal", "philox_randint"):
        target = getattr(draws, name).default
        assert op_info(target).kind is OpKind.RANDOM and is_pure(target)
