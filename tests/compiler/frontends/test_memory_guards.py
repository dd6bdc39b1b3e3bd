"""Guards on where in memory the inputs of TorchDynamo's graphs lie."""

from __future__ import annotations

import random

import pytest
import torch

import aottrain


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
def test_a_number_that_python_draws_is_an_input_without_memory(kernel):
    """It does not exist yet where guards are asked."""

    def program(x):
        return x.mul_(random.uniform(1, 2)) + random.random()

    compiled = aottrain.compile(program, kernel=kernel, on_unsupported="error")
    for seed in range(3):
        values = [torch.arange(4.0), torch.arange(4.0)]
        random.seed(seed)
        wanted = program(values[0]), random.random()
        random.seed(seed)
        got = compiled(values[1]), random.random()
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(values[1], values[0])


def test_memory_that_overlaps_is_guarded_beside_such_a_number():
    def program(x, y):
        return x.add_(y * random.random())

    compiled = aottrain.compile(program, kernel="aten")
    memory = torch.arange(6.0)
    for x, y in ((torch.ones(4), torch.ones(4)), (memory[:4], memory[2:])):
        copies = torch.cat([x, y]).clone()
        random.seed(0)
        wanted = copies[:4] + copies[4:] * random.random()
        random.seed(0)
        torch.testing.assert_close(compiled(x, y), wanted)
