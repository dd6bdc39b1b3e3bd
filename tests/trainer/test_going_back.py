"""`rollback` and spikes: seen before anything moves, bounded in number; and the tensor that was the first to be bad."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from aottrain.data.batches import SourceBatches
from aottrain.errors import NumericsError
from aottrain.step import StepResult
from aottrain.tasks import train
from aottrain.trainer import loop
from aottrain.trainer.checkpoint import load
from aottrain.trainer.engines import LossModule
from aottrain.trainer.reliability.culprit import first_bad_tensor
from aottrain.trainer.reliability.spikes import Window
from aottrain.trainer.reliability.streams import random_state
from aottrain.trainer.reliability.undo import RandomNumbers
from tests.trainer.test_run import same


@pytest.fixture
def spoiled(monkeypatch):
    """spoiled({step: factor}): the losses of these batches are so many times what they are, whenever they come; returns
    the batch numbers that were asked for."""
    take_step, at, asked = loop.take_step, SourceBatches.at, []
    monkeypatch.setattr(SourceBatches, "at", lambda batches, number: (asked.append(number), at(batches, number))[1])

    def spoil(factors: dict[int, float]) -> list[int]:
        asked.clear()

        def taking(job, *given):
            good, factor = job.step, factors.get(asked[-1], 1.0)

            def broken(batches) -> StepResult:
                result = good(batches)
                return StepResult(result.loss * factor, result.num_samples, result.num_tokens)

            job.step = broken
            try:
                take_step(job, *given)
            finally:
                job.step = good

        monkeypatch.setattr(loop, "take_step", taking)
        return asked

    return spoil


def state_of(config) -> dict:
    return load(sorted(Path(config.output_dir, "checkpoints").glob("step_*.pt"))[-1]).state


ROLLBACK = {"steps": 9, "on_nonfinite": "rollback", "rollback_every": 3, "max_rollbacks": 2, "log_every": 1}


def test_averaged_weights_go_back_as_well(tiny, spoiled, tmp_path, monkeypatch):
    """They are those of a run that never met the batches that are left out."""
    at = SourceBatches.at
    spoiled({5: math.nan})
    went_back = tiny(trainer={**ROLLBACK, "ema": 0.5})
    assert train.run(went_back) == 0
    monkeypatch.undo()
    monkeypatch.setattr(SourceBatches, "at", lambda batches, number: at(batches, number + 2 * (number > 3)))
    straight = tiny(trainer={"steps": 9, "ema": 0.5}, output_dir=str(tmp_path / "straight"))
    assert train.run(straight) == 0
    got, wanted = (state_of(config)["averages"] for config in (went_back, straight))
    assert got["num_updates"] == wanted["num_updates"] == 9
    for name, value in wanted["values"].items():
        torch.testing.assert_close(got["values"][name], value, rtol=0, atol=0)


def test_the_run_goes_back_to_its_copy_and_on_with_other_batches(tiny, left_by, spoiled, capsys):
    asked = spoiled({5: math.nan})
    config = tiny(trainer=ROLLBACK)
    assert train.run(config) == 0
    assert asked[-11:] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert [row["step"] for row in left_by(config).rows] == list("123456789")
    summary = left_by(config).summary
    assert summary["rollbacks"] == 1 and summary["steps"] == 9 and state_of(config)["batches_left_out"] == 2
    assert "back to step 3, and on with other batches (1 of at most 2 times); 2 steps'" in capsys.readouterr().out
    assert not math.isnan(float(left_by(config).losses[4]))


def test_a_run_that_went_back_goes_on_bitwise(tiny, left_by, spoiled, tmp_path):
    schedule, runs = {"total_steps": 9}, []
    for steps, name, resume in ((9, "a", None), (6, "b", None), (9, "b", "auto")):
        spoiled({5: math.inf})
        trainer = {**ROLLBACK, "steps": steps}
        runs.append(tiny(trainer=trainer, lr_schedule=schedule, output_dir=str(tmp_path / name), resume=resume))
        assert train.run(runs[-1]) == 0
    assert left_by(runs[2]).losses == left_by(runs[0]).losses
    states = [state_of(run) for run in (runs[0], runs[2])]
    keys = ("model", "optimizer", "random", "batches_left_out", "rollbacks")
    assert all(same(states[0][key], states[1][key]) for key in keys)


def test_too_often_ends_the_run(tiny, left_by, spoiled):
    spoiled(dict.fromkeys(range(4, 40), math.nan))
    with pytest.raises(NumericsError, match="step 4: the loss is nan.*max_rollbacks=2 times the run has gone back"):
        train.run(tiny(trainer=ROLLBACK))
    assert left_by(tiny()).summary["rollbacks"] == 2


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
def test_a_spike_is_seen_before_anything_moves(tiny, left_by, spoiled, policy, capsys):
    spoiled({25: 3.0})
    more = {"on_spike": policy, "rollback_every": 24}
    config = tiny(trainer={"steps": 26, **more}, lr_schedule={"total_steps": 26})
    if policy == "raise":
        with pytest.raises(NumericsError, match="step 25: the loss .* is a spike: above .* those from before it$"):
            train.run(config)
        return
    assert train.run(config) == 0
    printed, summary = capsys.readouterr().out, left_by(config).summary
    assert {"skip": "step 25 is left out: the loss", "rollback": "step 25: the loss"}[policy] in printed
    assert (summary["skipped_steps"], summary["rollbacks"]) == ((1, 0) if policy == "skip" else (0, 1))


def test_a_spike_moves_neither_weights_nor_state_nor_random_numbers(tiny, fit_job, spoiled):
    states = []
    for factors in ({}, {21: 9.0}):
        spoiled(factors)
        steps = 20 + bool(factors)
        config = tiny(trainer={"steps": steps, "on_spike": "skip"}, lr_schedule={"total_steps": 30})
        job, _ = fit_job(config)
        states.append([job.module.state_dict(), job.optimizer.state_dict()["state"], random_state()])
    assert same(*states)


def test_where_losses_hardly_differ_a_spike_is_a_share_of_them():
    assert Window(10.0, [2.0] * 19).limit() is None
    assert Window(10.0, [2.0] * 20).limit() == pytest.approx(2.02)
    assert Window(None, [2.0] * 20).limit() is None
    assert Window(1.0, [1.0, 3.0] * 10).limit() == pytest.approx(2 + 1.4826)


class Bad(nn.Module):
    def __init__(self, where: str):
        super().__init__()
        self.inner, self.where = nn.Linear(3, 3), where

    def forward(self, x):
        y = self.inner(x)
        mask = torch.full_like(y, -math.inf).triu(1)  # an infinity that is meant
        y = y + (y + mask).softmax(-1)
        if self.where == "forward":
            y = (y - y).log() * 0
        if self.where == "backward":
            y = y - y.detach() + y.detach() + (y - y.detach()).sqrt()
        return y.square().mean()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("forward", r"first in the forward: nan of aten.mul.Tensor \[2, 3\] \(model, test_going_back.py:\d+\)"),
        ("backward", r"first in the backward: the gradient of SqrtBackward \(test_going_back.py:\d+\)"),
        ("nowhere", "eager's numbers are finite in the same step"),
        ("weight", "model.inner.weight itself was not finite before the step"),
        ("batch", r"the batch has a number that is not finite, in a tensor of shape \[2, 3\]"),
    ],
)
def test_the_first_bad_tensor_has_a_name_and_a_line(where, expected):
    torch.manual_seed(0)
    module, x = LossModule(Bad(where), lambda model, batch: model(*batch)), torch.ones(2, 3)
    if where == "weight":
        module.model.inner.weight.data[0, 0] = math.nan
    if where == "batch":
        x[0, 0] = math.inf
    state = random_state()
    text = first_bad_tensor(module, [(x,)], nullcontext, RandomNumbers())
    assert re.match(expected, text), text
    assert same(random_state(), state) and module.model.inner.weight.grad is None
