"""What each of several processes is given: its part of a batch, and random numbers of its own."""

from __future__ import annotations

import pytest
import torch

from aottrain.data.batches import MadeBatches
from aottrain.data.parts import PartBatches
from aottrain.errors import ConfigError
from aottrain.trainer.parallel.world import World
from aottrain.trainer.preparing import start_streams


def whole(size: int) -> MadeBatches:
    def make(count, generator):
        return torch.rand(count, 3, generator=generator), torch.randint(9, (count,), generator=generator)

    return MadeBatches(make, size, 2, 1, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_together_are_the_batch(size):
    batches = whole(6)
    parts = [PartBatches(batches, rank, size) for rank in range(size)]
    for of_parts, batch in [
        *zip(zip(*(part.at(5) for part in parts), strict=True), batches.at(5), strict=True),
        *zip(zip(*(part.held_out(2) for part in parts), strict=True), batches.held_out(2), strict=True),
    ]:
        for place, tensor in enumerate(batch):
            assert torch.equal(torch.cat([part[place] for part in of_parts]), tensor)
    assert parts[0].batch_size == 6


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ConfigError, match=r"a batch of tensors \[6, 3\], \[6\] cannot be divided among 4 processes"):
        PartBatches(whole(6), 0, 4).at(1)


def test_each_process_draws_other_numbers_and_the_first_those_of_one_alone():
    drawn = []
    for world in (World(), World(0, 3), World(1, 3), World(2, 3)):
        start_streams(7, None, world)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 3
