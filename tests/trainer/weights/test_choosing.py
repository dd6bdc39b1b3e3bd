"""Frozen parts, parts of the learning rate, averaged weights, and runs that end when they learn no more."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from aottrain.cli import main
from aottrain.config.extensions.recipes import load_recipe
from aottrain.config.run import OptimizerConfig
from aottrain.errors import ConfigError
from aottrain.trainer.checkpoint import load
from aottrain.trainer.evaluation import Patience
from aottrain.trainer.optim import build_optimizer, optimizer_state_bytes, set_learning_rate
from aottrain.trainer.weights.averaging import Averages
from aottrain.trainer.weights.groups import depth_factors, freeze, parameter_groups
from aottrain.trainer.weights.naming import matches

TINY = {"num_layers": 2, "width": 8, "num_heads": 2, "context": 8, "dropout": 0.0}


def transformer() -> nn.Module:
    recipe = load_recipe("transformer")
    torch.manual_seed(0)
    return recipe.build(recipe.Options(**TINY))


@pytest.mark.parametrize(
    ("name", "pattern", "does"),
    [
        ("model.blocks.1.attention.qkv.bias", "blocks.1", True),
        ("model.blocks.1.attention.qkv.bias", "qkv", True),
        ("model.blocks.1.attention.qkv.bias", "*.bias", True),
        ("model.blocks.1.attention.qkv.bias", "blocks.*.qkv", True),
        ("model.blocks.10.attention.qkv.bias", "blocks.1", False),
        ("model.blocks.1.attention.qkv.bias", "attention.out", False),
        ("model.blocks.1.attention.qkv.bias", "kv", False),
    ],
)
def test_what_a_pattern_matches(name, pattern, does):
    assert matches(name, pattern) is does


def test_frozen_parts_are_those_that_are_named():
    model = freeze(transformer(), ("token_embedding", "blocks.0"))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(("token_emb", "blocks.0."))}
    grouped = sum(len(group["params"]) for group in parameter_groups(model, OptimizerConfig()))
    assert grouped == len(list(model.parameters())) - len(frozen)
    with pytest.raises(ConfigError, match=r"trainer.freeze=token_embeding: matches no parameter .*; did you mean tok"):
        freeze(model, ("token_embeding",))
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        freeze(model, ("*",))


def test_each_group_has_its_part_of_the_rate():
    model = transformer()
    config = OptimizerConfig(lr_factors=("blocks.1:0.5", "blocks.1.expand:3"), layer_decay=0.5)
    depths = depth_factors(model, 0.5)
    assert depths["token_embedding.weight"] == depths["position_embedding.weight"] == 0.125
    assert (depths["blocks.0.expand.bias"], depths["blocks.1.expand.bias"], depths["final_norm.bias"]) == (0.25, 0.5, 1)
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, 8.0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert found["token_embedding.weight"] == 1.0 and found["final_norm.weight"] == 8.0
    assert found["blocks.1.contract.weight"] == 2.0 and found["blocks.1.expand.weight"] == 12.0
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all((decays[id(p)] > 0) == (p.ndim >= 2) for p in model.parameters())
    one = OptimizerConfig(target="torch.optim:SGD", lr_factors=("blocks.1:0.5",))
    assert optimizer_state_bytes(model, one) == 0  # of a class, which is asked by trying


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"lr_factors": ("blocks.1",)}, r"optimizer.lr_factors=blocks.1: each must be pattern:factor"),
        ({"lr_factors": ("blocks.1:-1",)}, r"each must be pattern:factor, a factor above 0"),
        ({"lr_factors": ("expnd:2",)}, r"optimizer.lr_factors=expnd: matches no parameter .*; did you mean .*expand"),
    ],
)
def test_wrong_parts_of_the_rate_are_told(config, says):
    with pytest.raises(ConfigError, match=says):
        build_optimizer(transformer(), OptimizerConfig(**config))
    with pytest.raises(ConfigError, match="optimizer.layer_decay=0.5: the model repeats no block"):
        build_optimizer(nn.Linear(2, 2), OptimizerConfig(layer_decay=0.5))


def test_averages_are_those_of_swa_utils():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    freeze(model, ("0",))
    averages = Averages(model, 0.75)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for step in range(4):
        with torch.no_grad():
            model[1].weight.add_(step + 1.0)
        averages.update()
        reference.update_parameters(model)
    own = model[1].weight.detach().clone()
    assert averages.values.keys() == {"1.weight", "1.bias"}
    with averages.applied():
        assert torch.equal(model[1].weight, reference.module[1].weight) and not torch.equal(model[1].weight, own)
    assert torch.equal(model[1].weight, own)


def test_patience_ends_after_so_many_losses_that_are_not_lower():
    patience = Patience(2)
    ended = []
    for loss in (3.0, 3.0, 2.0, math.nan, 2.0):
        patience.add(loss)
        ended.append(patience.is_over)
    assert ended == [False, False, False, False, True] and patience.best == 2.0
    assert not Patience(None, num_waited=99).is_over


def test_a_run_with_all_of_it_goes_on_bitwise(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [f"recipe.model.{key}={value}" for key, value in TINY.items()]
    line = [*options, "debug=fast", "engine=eager", "trainer.sample_bytes=0", "trainer.ema=0.5", "optimizer.lr=0.05"]
    line += ["trainer.freeze=[position_embedding]", "optimizer.layer_decay=0.5", "optimizer.lr_factors=[blocks.*:0.5]"]
    line += ["lr_schedule.total_steps=6"]
    line += ["trainer.eval_every=2", "recipe.model.label_smoothing=0.1"]
    assert main([*line, "trainer.steps=6", "hydra.run.dir=whole"]) == 0
    assert main([*line, "trainer.steps=3", "hydra.run.dir=part"]) == 0
    assert main(["resume=part", "trainer.steps=6", "hydra.run.dir=rest"]) == 0
    whole, rest = (load(tmp_path / name / "checkpoints" / "step_00000006.pt").state for name in ("whole", "rest"))
    for part in ("model", "averages"):
        values, others = (state[part].get("values", state[part]) for state in (whole, rest))
        assert values.keys() == others.keys() and all(torch.equal(values[key], others[key]) for key in values)
    assert whole["patience"] == rest["patience"] and whole["averages"]["num_updates"] == 6
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    losses = {}
    for weights in ("auto", "last"):
        assert main(["task=eval", "eval.run=whole", f"eval.weights={weights}", f"hydra.run.dir={weights}"]) == 0
        losses[weights] = json.loads((tmp_path / weights / "eval.json").read_text())["loss"]
    assert losses["auto"] == summary["val_loss"] != losses["last"]
    capsys.readouterr()
    line = [*line, "optimizer.lr=1e-30", "trainer.ema=null", "trainer.patience=2", "trainer.steps=9", "hydra.run.dir=x"]
    assert main(line) == 0
    assert "ends after step 6: 2 evaluations in turn without a held-out loss below" in capsys.readouterr().out
    assert main(["task=eval", "eval.run=x", "eval.weights=averaged", "hydra.run.dir=y"]) == 2
    assert "eval.weights=averaged: that run kept no mean" in capsys.readouterr().err
    assert main([*line[:-1], "trainer.eval_every=0"]) == 2
    assert "trainer.patience=2: needs trainer.eval_every" in capsys.readouterr().err
