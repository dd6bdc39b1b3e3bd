"""The knapsacks against every subset; their capacity is a promise."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys

import pytest

from aottrain.errors import UnsupportedError
from tests.compiler.partition.knapsack import dp, greedy, ilp

needs_scipy = pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="scipy is not installed")
EXACT = (dp, pytest.param(ilp, marks=needs_scipy))
SOLVERS = (greedy, *EXACT)


def best_value(sizes, values, capacity):
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(sizes)), n) for n in range(len(sizes) + 1))
    return max(sum(values[i] for i in s) for s in subsets if sum(sizes[i] for i in s) <= capacity)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(80))
def test_against_every_subset(solver, seed):
    rng = random.Random(seed)
    count = rng.randint(0, 9)
    sizes = [rng.choice([0, rng.randint(1, 60)]) for _ in range(count)]
    values = [rng.random() * 10 for _ in range(count)]
    capacity = rng.randint(0, 120)
    chosen = solver(sizes, values, capacity)
    assert chosen == sorted(set(chosen))
    assert sum(sizes[i] for i in chosen) <= capacity
    value, best = sum(values[i] for i in chosen), best_value(sizes, values, capacity)
    assert best / 2 <= value <= best + 1e-9 if solver is greedy else value == pytest.approx(best)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(10))
def test_sizes_of_memory_and_values_of_seconds(solver, seed):
    rng = random.Random(seed)
    sizes = [rng.choice([1, 4, 6]) * 2**20 * rng.randint(1, 5) + rng.randint(0, 1) * 512 for _ in range(12)]
    values = [rng.random() * 1e-4 for _ in range(12)]
    capacity = sum(sizes) // 3
    chosen = solver(sizes, values, capacity)
    assert sum(sizes[i] for i in chosen) <= capacity
    least = {greedy: 0.5, dp: 0.98, ilp: 1 - 1e-9}[solver]
    assert sum(values[i] for i in chosen) >= least * best_value(sizes, values, capacity)


def test_greedy_takes_one_large_item_where_it_is_worth_more():
    assert greedy([1, 100], [2.0, 99.0], 100) == [1]


def test_without_scipy_the_integer_program_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UnsupportedError, match="pip install scipy"):
        ilp([1, 2], [1.0, 1.0], 2)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("resolution", [1, 7, 100])
def test_a_coarse_unit_never_passes_the_capacity(seed, resolution):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 10**9) for _ in range(12)]
    values = [rng.random() for _ in range(12)]
    capacity = rng.randint(0, 4 * 10**9)
    chosen = dp(sizes, values, capacity, resolution)
    assert sum(sizes[i] for i in chosen) <= capacity


def test_a_fine_unit_is_near_the_best():
    rng = random.Random(1)
    sizes = [rng.randint(1, 10**7) for _ in range(12)]
    values = [rng.random() for _ in range(12)]
    capacity = sum(sizes) // 2
    chosen = dp(sizes, values, capacity)
    assert sum(values[i] for i in chosen) >= 0.95 * best_value(sizes, values, capacity)


@pytest.mark.parametrize("solver", SOLVERS)
def test_items_of_no_size_are_always_taken(solver):
    assert solver([0, 5, 0], [0.0, 9.0, 1.0], 0) == [0, 2]
    assert solver([0, 5, 0], [0.0, 9.0, 1.0], 4) == [0, 2]
    assert solver([0, 5, 0], [0.0, 9.0, 1.0], 5) == [0, 1, 2]


@pytest.mark.parametrize("solver", SOLVERS)
def test_everything_where_everything_fits(solver):
    assert solver([3, 4, 5], [0.0, 0.0, 0.0], 12) == [0, 1, 2]
    assert solver([], [], 10) == []


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_item_too_large_for_all(solver):
    assert solver([100, 1], [1e9, 1.0], 99) == [1]


@pytest.mark.parametrize("solver", EXACT)
def test_value_beats_size_and_number(solver):
    assert solver([6, 5, 5], [10.0, 6.0, 6.0], 10) == [1, 2]
    assert solver([6, 5, 5], [13.0, 6.0, 6.0], 10) == [0]
