"""Guards on where in memory the inputs of TorchDynamo's graphs lie."""

from __future__ import annotations

import random

import pytest
import torch

import aottrain


def test_a_number_that_python_draws_is_in_no_guard():
    """The graph runs eagerly, and it does not exist yet where guards are asked."""

    def program(x, y):
        return x.add_(y * random.uniform(1, 2))

    compiled, memory = aottrain.compile(program), torch.arange(6.0)
    with pytest.warns(UserWarning, match="Python's random numbers"):
        for seed, x in enumerate((torch.ones(4), memory[:4], torch.ones(4))):
            expected = x.clone()
            random.seed(seed)
            wanted = program(expected, memory[2:].clone()), random.random()
            random.seed(seed)
            got = compiled(x, memory[2:].clone()), random.random()
            assert torch.equal(got[0], wanted[0]) and got[1] == wanted[1] and torch.equal(x, expected)
    assert compiled.report.num_fallbacks == 3
