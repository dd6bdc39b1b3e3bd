"""trainer.deterministic: what it sets, for as long as the run lasts, and what it says."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from aottrain.config.run import RunConfig, TrainerConfig
from aottrain.errors import UnsupportedError
from aottrain.tasks.measuring import determinism
from aottrain.tasks.measuring.determinism import as_deterministic_as_asked, what_hangs_on_the_model
from tests.explain.example import train_graph

ASKED = RunConfig(trainer=TrainerConfig(deterministic=True))


def settings():
    fills = torch.utils.deterministic.fill_uninitialized_memory
    known = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.get_num_threads()
    return *known, fills, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_settings_last_as_long_as_the_run():
    before = settings()
    with as_deterministic_as_asked(RunConfig()):
        assert settings() == before
    with as_deterministic_as_asked(ASKED):
        assert settings()[0] and not settings()[1] and settings()[3:] == (False, ":4096:8")
        torch.set_num_threads(2)
    assert settings() == before


def test_an_operator_without_a_fixed_order_is_named():
    before = settings()
    with pytest.raises(UnsupportedError, match="trainer.deterministic=true: .*put_"), as_deterministic_as_asked(ASKED):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    assert settings() == before
    with pytest.raises(RuntimeError, match="something else"), as_deterministic_as_asked(ASKED):
        raise RuntimeError("something else")


def test_it_implies_one_thread_and_the_fixed_model_unless_they_are_given():
    assert (determinism.num_threads(RunConfig()), determinism.num_threads(ASKED)) == (None, 1)
    trainer = dataclasses.replace(ASKED.trainer, num_threads=4)
    assert determinism.num_threads(dataclasses.replace(ASKED, trainer=trainer)) == 4
    assert (determinism.decisions_asked(RunConfig()), determinism.decisions_asked(ASKED)) == ("measured", "default")
    assert determinism.decisions_asked(dataclasses.replace(ASKED, decisions="a/run")) == "a/run"


def test_what_keeps_another_machine_from_the_same_bits_is_named():
    graph = train_graph()
    assert what_hangs_on_the_model(RunConfig(), graph) == []
    (line,) = what_hangs_on_the_model(ASKED, graph)
    assert "the same bits on every machine" in line
    (line,) = what_hangs_on_the_model(ASKED, dataclasses.replace(graph, tuned_calls={"aten.mm.default": 3}))
    assert line.endswith("3 mm.default")
