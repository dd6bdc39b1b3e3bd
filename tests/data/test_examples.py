"""A data set of one's own in batches: every example once in an epoch, and what a step sees follows from the seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from aottrain.data.examples import ExampleBatches, Examples, split
from aottrain.errors import RecipeError

CPU = torch.device("cpu")


def batches(given, batch_size=4, accumulate=1, seed=1, held_out=0.2):
    return ExampleBatches(*split(given, held_out), batch_size, accumulate, seed, CPU, "mine:numbers")


def numbers(made, steps):
    return torch.cat([batch[0] for step in steps for batch in made.at(step)]).tolist()


def test_an_epoch_sees_every_example_to_train_on_once_and_the_next_in_another_order():
    made = batches(TensorDataset(torch.arange(15)), held_out=0.2)
    first, second = numbers(made, (1, 2, 3)), numbers(made, (4, 5, 6))
    assert sorted(first) == sorted(second) == list(range(12)) and first != second
    assert numbers(made, (2,)) == first[4:8]  # whatever was asked before
    assert first != numbers(batches(TensorDataset(torch.arange(15)), seed=2), (1, 2, 3))


def test_a_batch_may_lie_in_two_epochs():
    made = batches(TensorDataset(torch.arange(7)), held_out=0.2)
    seen = numbers(made, (1, 2, 3))
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))


def test_micro_batches_are_the_parts_of_one_batch():
    data = TensorDataset(torch.arange(40))
    whole, parts = batches(data, batch_size=8), batches(data, batch_size=4, accumulate=2)
    assert numbers(whole, (1, 2)) == numbers(parts, (1, 2)) and len(parts.at(1)) == 2


def test_what_is_held_out_is_never_trained_on_and_starts_again_where_it_is_short():
    made = batches(TensorDataset(torch.arange(20)), held_out=0.2)
    assert [batch[0].tolist() for batch in made.held_out(2)] == [[16, 17, 18, 19]] * 2
    assert set(numbers(made, range(1, 9))) == set(range(16))
    assert made.notes == ("data: mine:numbers, 16 examples, 4 held out",)


def test_a_pair_is_what_to_train_on_and_what_is_held_out():
    made = batches((TensorDataset(torch.arange(4)), TensorDataset(torch.arange(10, 12))))
    assert sorted(numbers(made, (1,))) == [0, 1, 2, 3]
    assert made.held_out(1)[0][0].tolist() == [10, 11, 10, 11]
    assert made.fingerprint == "mine:numbers, 4 + 2 examples"


class Cropped:
    """Draws while it is read."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.rand(2), np.float32(np.random.rand()), random.random(), index


def test_what_an_example_draws_follows_from_seed_and_step_and_leaves_no_trace():
    made = batches(Cropped())
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    wanted = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    (once,), (again,), (other,) = made.at(1), made.at(1), made.at(2)
    assert (torch.rand(1), np.random.rand(), random.random()) == wanted
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
    assert not torch.equal(once[0], other[0]) and once[1].dtype == torch.float32 and once[3].dtype == torch.int64


def test_what_is_no_data_set_is_said():
    with pytest.raises(RecipeError, match=r"must give a data set .*; it gave generator"):
        split((i for i in range(3)), 0.1)
    for size in (0, 1):
        with pytest.raises(RecipeError, match=f"gave 0 examples to train on and {size} held out"):
            split([torch.zeros(1)] * size, 0.1)
    with pytest.raises(RecipeError, match=r"an example must be a tensor, .*, 1 is \(str\)"):
        Examples(["a", "b"], 1, 2)[0]
    with pytest.raises(RecipeError, match=r"must be alike: example \d is \['int64\[\d\]'\], \d is \['int64\[\d\]'\]"):
        batches([torch.tensor([1]), torch.tensor([1, 2]), torch.tensor([1])], batch_size=2).at(1)
