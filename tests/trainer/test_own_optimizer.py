"""An optimizer and a schedule that a target names: they run as they are, with all that the trainer does around them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from aottrain.config.run import LrScheduleConfig, OptimizerConfig
from aottrain.errors import CheckpointError, ConfigError, RecipeError
from aottrain.tasks import train
from aottrain.tasks.building.build import build_job
from aottrain.trainer.checkpoint import check_storable
from aottrain.trainer.optim import (
    build_optimizer,
    clip_and_update,
    learning_rate,
    optimizer_state_bytes,
)
from aottrain.trainer.reliability.identity import check_identity, identity
from aottrain.trainer.weights.groups import parameter_groups
from tests.trainer import own_programs

HERE = "tests.trainer.own_programs"


def own(name: str, **config) -> OptimizerConfig:
    target = name if ":" in name else f"{HERE}:{name}"
    return OptimizerConfig(**{"name": "custom", "target": target, "weight_decay": 0.0, **config})


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_it_is_given_its_options_and_the_rate():
    made = build_optimizer(model(), own("Sign", lr=0.25, options={"momentum": 0.5}))
    (group,) = made.param_groups
    assert type(made) is own_programs.Sign and (group["lr"], group["momentum"]) == (0.25, 0.5)
    assert len(group["params"]) == 6


@pytest.mark.parametrize(("everything", "decays"), [(False, [0.1, 0.0]), (True, [0.1])])
def test_it_decays_matrices_or_all_where_it_takes_a_decay(everything, decays):
    config = own("Decaying", weight_decay=0.1, decay_norms_and_biases=everything)
    assert [group["weight_decay"] for group in build_optimizer(model(), config).param_groups] == decays
    assert len(parameter_groups(model(), config)) == len(decays)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (own("Sign", weight_decay=0.1), "optimizer.weight_decay=0.1: .*Sign takes no weight_decay; give 0"),
        (own("Sign", options={"lr": 1.0}), "optimizer.options.lr: write optimizer.lr"),
        (own("Sign", options={"momentun": 1.0}), "Sign takes no momentun; did you mean momentum"),
        (own("stairs"), "must be a class of torch.optim.Optimizer, it is a function"),
        (own("math:inf"), "is not a callable, .* has a float there"),
        (own("torch.nn:Linear"), "must be a class of torch.optim.Optimizer, it is a class"),
        (own("NeedsClosure"), "needs a closure"),
        (own("torch.optim:LBFGS"), "needs a closure"),
        (own("Refusing"), "cannot be built: tests/trainer/own_programs.py:.*: ValueError: only matrices"),
    ],
)
def test_what_does_not_fit_is_one_line(config, says):
    with pytest.raises(ConfigError, match=says) as raised:
        build_optimizer(model(), config)
    assert len(raised.value.mistakes) == 1


def test_a_step_with_a_number_that_is_not_finite_is_left_out():
    parameter = nn.Parameter(torch.zeros(2))
    made = own_programs.Sign([parameter], lr=0.5)
    for loss, expected in ((math.nan, 0.0), (1.0, -0.5)):
        parameter.grad = torch.ones(2)
        clip_and_update(made, [parameter], 1.0, torch.tensor(loss))
        assert parameter.tolist() == [expected] * 2


@pytest.mark.parametrize(
    "config",
    [own("Sign"), own("Reading"), own("torch.optim:Adam"), own("torch.optim:Adafactor"), own("torch.optim:SGD")],
)
def test_its_state_is_known_before_the_first_step(config):
    trained = model()
    made = build_optimizer(trained, config)
    before = torch.get_rng_state()
    expected = optimizer_state_bytes(trained, config)
    assert torch.equal(torch.get_rng_state(), before) and not made.state
    trained(torch.ones(2, 3)).sum().backward()
    made.step()
    values = [value for state in made.state.values() for value in state.values()]
    assert expected == sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))


SIGN = {"name": "custom", "target": f"{HERE}:Sign", "weight_decay": 0.0, "options": {"momentum": 0.8}, "lr": 1e-3}


def test_a_run_with_it_resumes_bitwise_and_says_what_it_is(tiny, left_by, tmp_path, capsys):
    schedule = {"name": "custom", "target": f"{HERE}:stairs", "options": {"height": 0.25}, "total_steps": 6}
    schedule["warmup_steps"] = 2
    given = {"optimizer": SIGN, "lr_schedule": schedule}
    straight = tiny(trainer={"steps": 6, "accumulate": 2}, **given, output_dir=str(tmp_path / "straight"))
    assert train.run(straight) == 0
    said = f"optimizer {HERE}:Sign: its own step, not compiled, after torch's clipping"
    assert said in capsys.readouterr().out
    for steps in (3, 6):
        config = tiny(trainer={"steps": steps, "accumulate": 2}, resume="auto", **given)
        assert train.run(config) == 0
    assert left_by(config).losses == left_by(straight).losses
    states = [torch.load(f"{run.output_dir}/checkpoints/step_00000006.pt") for run in (config, straight)]
    means = [[value["mean"] for value in state["optimizer"]["state"].values()] for state in states]
    assert len(means[0]) > 0 and all(torch.equal(*pair) for pair in zip(*means, strict=True))
    summary = left_by(straight).summary
    assert summary["optimizer"] == f"{HERE}:Sign" and summary["optimizer_bytes"] > 0
    assert [float(row["train/lr"]) for row in left_by(straight).rows] == [5e-4, 1e-3, 1e-3] + [2.5e-4] * 3


def test_what_a_checkpoint_cannot_give_back_is_said_after_the_first_step(tiny):
    config = tiny(optimizer={**SIGN, "target": f"{HERE}:Keeping", "options": None})
    with pytest.raises(CheckpointError, match=r"Keeping: state_dict\['state'\]\[0\]\['history'\]\[0\] is a object"):
        train.run(config)
    check_storable({"a": [torch.zeros(1), None, (1.0, "x", True)]}, "x")


def test_a_factor_that_is_none_is_said_before_training(tiny):
    with pytest.raises(RecipeError, match="must give a factor of at least 0; for step 1 of 4 it gave 'high'"):
        build_job(tiny(lr_schedule={"name": "custom", "target": f"{HERE}:rising_beyond"}))


@pytest.mark.parametrize(
    ("name", "rates"),
    [("linear", {5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1, 200: 0.1}), ("wsd", {5: 0.5, 90: 1.0, 100: 0.55, 110: 0.1})],
)
def test_straight_lines(name, rates):
    schedule = LrScheduleConfig(name=name, warmup_steps=10, min_lr_ratio=0.1, decay_fraction=0.2)
    assert {step: learning_rate(step, 1.0, schedule, 110) for step in rates} == pytest.approx(rates)


def test_a_checkpoint_from_before_a_setting_had_its_default(tiny, tmp_path):
    now = identity(tiny(), "data")
    then = {key: value for key, value in now.items() if key not in ("optimizer.decay_norms_and_biases", "data.target")}
    check_identity(then, now, tmp_path)
    with pytest.raises(Exception, match="decay_norms_and_biases: False in the checkpoint, True in this run"):
        check_identity(then, identity(tiny(optimizer={"decay_norms_and_biases": True}), "data"), tmp_path)
