"""Options that are misspelt: the nearest one and all that there are. Targets that are none."""

from __future__ import annotations

import inspect

import pytest
import torch

import aottrain
from aottrain.compiler.options import options_from_dict


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: aottrain.compile(torch.cos, bugdet=1), "bugdet is not known; did you mean budget?; allowed: part"),
        (lambda: aottrain.bisect(torch.cos, torch.ones(2), kernels="cpp"), "kernels is not known; did you mean"),
        (lambda: options_from_dict({"bugdet": 1}), "options['bugdet'] is not known; did you mean budget?; allowed: pa"),
        (lambda: aottrain.compile(torch.cos, xyz=1), "xyz is not known; allowed: partition, budget, kernel, capture,"),
    ],
)
def test_a_misspelt_option_is_told_with_the_nearest_one(call, told):
    with pytest.raises(aottrain.ConfigError) as raised:
        call()
    assert str(raised.value).startswith(told) and isinstance(raised.value, TypeError)


def test_all_misspelt_options_are_told_at_once():
    with pytest.raises(aottrain.ConfigError) as raised:
        aottrain.compile(torch.cos, bugdet=1, kernle="cpp")
    assert len(raised.value.mistakes) == 2
    assert "budget" in inspect.signature(aottrain.compile).parameters


@pytest.mark.parametrize(
    ("target", "told"),
    [(torch.nn.Linear, r"the class Linear; compile a module of it: Linear\(\.\.\.\)"), (3, "target is a int")],
)
def test_a_target_that_is_none_is_told(target, told):
    with pytest.raises(aottrain.ConfigError, match=told):
        aottrain.compile(target)
