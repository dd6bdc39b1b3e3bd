"""When a run's end names CUDA graphs: where they could be asked for, and would be made."""

from __future__ import annotations

import pytest

from aottrain.config.reading import read_config, read_model
from aottrain.tasks.train import _may_replay


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, True),
        ({"partition": {"budget": 0.4}}, True),
        ({"partition": {"budget": "2GiB"}}, False),
        ({"partition": {"budget": "auto"}}, False),
        ({"kernel": {"cuda_graphs": True}}, False),
        ({"engine": {"name": "eager"}}, False),
    ],
)
def test_cuda_graphs_are_named_where_they_would_be_made(values, named):
    config, mistakes = read_model(read_config({"recipe": {"name": "transformer"}, **values})[0])
    assert not mistakes and _may_replay(config) == named
