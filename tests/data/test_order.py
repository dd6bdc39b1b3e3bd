"""Which examples a step takes: by arithmetic, each once in an epoch, the same wherever a run begins."""

from __future__ import annotations

import numpy as np
import pytest

from aottrain.data.order import fixed_split, in_epochs, keys_of, permuted


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 65_537])
def test_a_permutation_has_each_number_once(size):
    for key in (0, 1, 2**63):
        keys = np.full(size, key, dtype=np.uint64)
        assert sorted(permuted(np.arange(size), size, keys).tolist()) == list(range(size))


def test_a_point_of_a_large_one_costs_as_much_as_of_a_small_one():
    size = 10**12 + 7
    places = np.array([0, 1, size - 1, size, 5 * size + 3])
    numbers = in_epochs(places, size, seed=3)
    assert ((numbers >= 0) & (numbers < size)).all() and len(set(numbers.tolist())) == 5
    assert np.array_equal(in_epochs(places[2:], size, seed=3), numbers[2:])


def test_epochs_and_seeds_are_shuffled_unlike():
    orders = {tuple(in_epochs(epoch * 50 + np.arange(50), 50, seed)) for epoch in range(20) for seed in range(20)}
    assert len(orders) == 400 and all(sorted(order) == list(range(50)) for order in orders)


def test_every_place_of_an_epoch_is_as_likely_for_an_example():
    """Of 4,000 epochs of 10 examples each comes about 400 times to each place: chi-squared of 81 degrees of freedom."""
    places = np.arange(40_000)
    numbers = in_epochs(places, 10, seed=0)
    counts = np.zeros((10, 10))
    np.add.at(counts, (places % 10, numbers), 1)
    assert ((counts - 400) ** 2 / 400).sum() < 150  # 6 standard deviations


def test_keys_differ_by_place_and_seed():
    keys = np.concatenate([keys_of(seed, np.arange(1000)) for seed in range(10)])
    assert len(set(keys.tolist())) == 10_000
    assert 0.49 < np.unpackbits(keys.view(np.uint8)).mean() < 0.51


def test_a_split_is_the_same_each_time_and_has_all():
    train, rest = fixed_split(1000, 100)
    assert sorted([*train, *rest]) == list(range(1000)) and len(rest) == 100
    assert np.array_equal(fixed_split(1000, 100)[1], rest)
    assert 300 < rest.mean() < 700  # not one end


def test_the_order_is_that_of_every_other_machine_and_version():
    """A run that goes on sees what it would have seen; sizes that are powers of two, and those beside them."""
    assert in_epochs(np.arange(8), 8, 7).tolist() == [3, 2, 0, 1, 4, 5, 7, 6]
    assert in_epochs(np.arange(9), 9, 7).tolist() == [3, 2, 0, 8, 4, 5, 7, 6, 1]
    assert fixed_split(16, 4)[1].tolist() == [0, 6, 10, 13]
