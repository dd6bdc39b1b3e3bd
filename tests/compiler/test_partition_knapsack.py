"""The knapsack against every subset; its capacity is a promise."""

from __future__ import annotations

import itertools
import random

import pytest

from aottrain.compiler.partition.knapsack import knapsack


def best_value(sizes, values, capacity):
    subsets = itertools.chain.from_iterable(itertools.combinations(range(len(sizes)), n) for n in range(len(sizes) + 1))
    return max(sum(values[i] for i in s) for s in subsets if sum(sizes[i] for i in s) <= capacity)


@pytest.mark.parametrize("seed", range(80))
def test_against_every_subset(seed):
    rng = random.Random(seed)
    count = rng.randint(0, 9)
    sizes = [rng.choice([0, rng.randint(1, 60)]) for _ in range(count)]
    values = [rng.random() * 10 for _ in range(count)]
    capacity = rng.randint(0, 120)
    chosen = knapsack(sizes, values, capacity)
    assert chosen == sorted(set(chosen))
    assert sum(sizes[i] for i in chosen) <= capacity
    assert sum(values[i] for i in chosen) == pytest.approx(best_value(sizes, values, capacity))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("resolution", [1, 7, 100])
def test_a_coarse_unit_never_passes_the_capacity(seed, resolution):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 10**9) for _ in range(12)]
    values = [rng.random() for _ in range(12)]
    capacity = rng.randint(0, 4 * 10**9)
    chosen = knapsack(sizes, values, capacity, resolution)
    assert sum(sizes[i] for i in chosen) <= capacity


def test_a_fine_unit_is_near_the_best():
    rng = random.Random(1)
    sizes = [rng.randint(1, 10**7) for _ in range(12)]
    values = [rng.random() for _ in range(12)]
    capacity = sum(sizes) // 2
    chosen = knapsack(sizes, values, capacity)
    assert sum(values[i] for i in chosen) >= 0.95 * best_value(sizes, values, capacity)


def test_items_of_no_size_are_always_taken():
    assert knapsack([0, 5, 0], [0.0, 9.0, 1.0], 0) == [0, 2]
    assert knapsack([0, 5, 0], [0.0, 9.0, 1.0], 4) == [0, 2]
    assert knapsack([0, 5, 0], [0.0, 9.0, 1.0], 5) == [0, 1, 2]


def test_everything_where_everything_fits():
    assert knapsack([3, 4, 5], [0.0, 0.0, 0.0], 12) == [0, 1, 2]
    assert knapsack([], [], 10) == []


def test_one_item_too_large_for_all():
    assert knapsack([100, 1], [1e9, 1.0], 99) == [1]


def test_value_beats_size_and_number():
    assert knapsack([6, 5, 5], [10.0, 6.0, 6.0], 10) == [1, 2]
    assert knapsack([6, 5, 5], [13.0, 6.0, 6.0], 10) == [0]
