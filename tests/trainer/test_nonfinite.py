"""`trainer.on_nonfinite=skip`: a step whose loss or gradient norm is not finite is as if it had not been."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aottrain.errors import NumericsError
from aottrain.step import StepResult
from aottrain.tasks import train
from aottrain.trainer import loop
from aottrain.trainer.checkpoint import load
from aottrain.trainer.loop import take_step
from aottrain.trainer.meters import History
from aottrain.trainer.optim import update
from aottrain.trainer.reliability.streams import random_state
from tests.trainer.test_run import same


@pytest.fixture
def spoiled(monkeypatch):
    """spoiled({step: "loss" or "gradient norm"}): these are not finite in these steps of runs from now on; returns what
    was there before and after each of these steps, by its number."""
    take_step, seen = loop.take_step, {}

    def state_of(job):
        parts = {"model": job.module.state_dict(), "optimizer": job.optimizer.state_dict()["state"]}
        return {**torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, parts), "random": random_state()}

    def spoil(steps: dict[int, str]) -> dict:
        def taking(job, step, *given):
            if step not in steps:
                return take_step(job, step, *given)
            good, before = job.step, state_of(job)

            def broken(micro_batches) -> StepResult:
                result = good(micro_batches)
                torch.rand(3)  # whatever the engine, it has drawn
                if steps[step] == "loss":
                    return StepResult(result.loss * math.nan, result.num_samples, result.num_tokens)
                next(iter(job.module.parameters())).grad.view(-1)[0] = math.inf
                return result

            job.step = broken
            try:
                take_step(job, step, *given)
            finally:
                job.step = good
                seen[step] = before, state_of(job)
            return None

        monkeypatch.setattr(loop, "take_step", taking)
        return seen

    return spoil


SKIP = {"on_nonfinite": "skip", "max_skips": 2}


@pytest.mark.parametrize("engine", ["eager", "aot"])
def test_it_is_left_out_said_and_counted(tiny, left_by, spoiled, capsys, engine):
    seen = spoiled({3: "loss", 5: "gradient norm"})
    config = tiny(engine, trainer={"steps": 6, **SKIP})
    assert train.run(config) == 0
    assert seen.keys() == {3, 5}
    for step, (before, after) in seen.items():
        assert same(before, after), step
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert lines == [
        "step 3 is left out: the loss is nan (1 of at most 2)",
        "step 5 is left out: the gradient norm is inf (2 of at most 2)",
    ]
    summary = left_by(config).summary
    assert summary["status"] == "finished" and summary["steps"] == 6 and summary["skipped_steps"] == 2
    assert [row["step"] for row in left_by(config).rows] == list("123456")


def test_a_model_whose_logits_are_not_finite_writes_nothing_and_its_run_ends_well(tiny, left_by, capsys):
    made_wrong = {"optimizer": {"name": "sgd", "lr": 1e30, "clip_norm": None}, "lr_schedule": {"warmup_steps": 0}}
    trainer = {"steps": 2, "eval_every": 1, "sample_bytes": 5, "sample_at_evals": True, "on_nonfinite": "skip"}
    config = tiny(trainer=trainer, **made_wrong)
    assert train.run(config) == 0
    out, text = capsys.readouterr().out, "no text can be written: the model's logits are not finite"
    assert f"warning: after step 1 {text}; going on\n" in out and f"warning: {text}\n" in out
    assert left_by(config).summary["status"] == "finished"
    assert not Path(config.output_dir, "sample.txt").exists()


def test_one_too_many_ends_the_run(tiny, left_by, spoiled):
    seen = spoiled(dict.fromkeys((2, 3, 4), "loss"))
    config = tiny(trainer={"steps": 6, **SKIP})
    with pytest.raises(NumericsError, match="step 4: the loss is nan; .*; trainer.max_skips=2 steps have been"):
        train.run(config)
    assert same(seen[4][0]["model"], seen[4][1]["model"])
    assert left_by(config).summary["skipped_steps"] == 2 and left_by(config).summary["status"] == "failed"


def test_a_run_that_goes_on_is_bitwise_the_one_that_was_not_stopped_and_has_its_count(tiny, left_by, spoiled, tmp_path):
    settings = {"lr_schedule": {"total_steps": 6}}
    spoiled({2: "loss", 5: "gradient norm"})
    straight = tiny(trainer={"steps": 6, **SKIP}, output_dir=str(tmp_path / "straight"), **settings)
    first, second = (tiny(trainer={"steps": steps, **SKIP}, resume="auto", **settings) for steps in (3, 6))
    for config in (straight, first, second):
        assert train.run(config) == 0
    assert left_by(second).losses == left_by(straight).losses
    states = [load(Path(run.output_dir, "checkpoints", "step_00000006.pt")).state for run in (straight, second)]
    assert all(same(states[0][part], states[1][part]) for part in ("model", "optimizer", "random", "skipped_steps"))
    assert left_by(second).summary["skipped_steps"] == left_by(straight).summary["skipped_steps"] == 2
    # the key may be another one in a run that goes on
    third = tiny(trainer={"steps": 7}, resume="auto", **settings)
    assert train.run(third) == 0


def module_with_statistics():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def job_of(module: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu") -> SimpleNamespace:
    def step(batches) -> StepResult:
        loss = module(batches[0]).square().mean()
        loss.backward()
        return StepResult(loss.detach(), len(batches[0]), 0)

    module.norm_of_all = lambda norm: norm
    return SimpleNamespace(module=module, optimizer=optimizer, step=step, device=torch.device(device), scaling=None)


MADE = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "adam, which waits": lambda parameters: torch.optim.Adam(parameters, 0.1, foreach=True),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("at", [1, 3])
def test_statistics_and_the_optimizer_stay_too_and_a_device_is_not_waited_for(made, device, at):
    """On CUDA, too, which is played here: what is not finite is not read before a log step, and what was drawn is."""
    good, bad = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.full((8, 3), math.nan)
    kept, said = [], []
    for batches in ([good] * 4, [*[good] * (at - 1), bad, *[good] * (5 - at)]):
        module = module_with_statistics()
        job = job_of(module, MADE[made](module.parameters()), device)
        history = History(max_skips=1, say=said.append)
        torch.manual_seed(5)
        for step, batch in enumerate(batches, 1):
            state = torch.get_rng_state()
            take_step(job, step, 0.1, [batch], 1.0, history, logs=False)
            if batch is bad and device == "cuda":
                assert not torch.equal(torch.get_rng_state(), state) and not said
                torch.set_rng_state(state)  # so that both runs draw alike
        assert history.num_skipped == int(device == "cpu" and len(batches) > 4)
        history.read()
        kept.append({"module": module.state_dict(), "state": job.optimizer.state_dict()["state"]})
    assert same(*kept)
    assert said == [f"step {at} is left out: the loss is nan (1 of at most 1)"]


def test_momentum_that_torch_makes_in_a_step_that_is_left_out_is_none():
    """Its fused SGD takes memory as it finds it, and fills it in a step that is taken."""
    for _ in range(20):  # memory that is used again holds what was in it
        spent = torch.full((4096,), 7.0)
        del spent
        parameter = nn.Parameter(torch.zeros(4096))
        unused = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter, unused], lr=1.0, momentum=0.9, fused=True)
        for loss in (math.nan, 1.0):
            parameter.grad = torch.ones(4096)
            update(optimizer, torch.tensor(loss))
        assert parameter.eq(-1).all() and unused not in optimizer.state
