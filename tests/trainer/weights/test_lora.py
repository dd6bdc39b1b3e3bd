"""adapter=lora: what is trained, that a model begins as what it was, and that a merged one gives the same."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from torch import nn

from aottrain.cli import main
from aottrain.config.extensions.recipes import load_recipe
from aottrain.config.run import AdapterConfig, OptimizerConfig
from aottrain.errors import ConfigError
from aottrain.trainer.checkpoint import load
from aottrain.trainer.optim import build_optimizer
from aottrain.trainer.weights.lora import Adapted, adapt, merge, unreached

LORA = AdapterConfig(name="lora", rank=2, alpha=4.0)
TINY = {
    "transformer": {"num_layers": 2, "width": 16, "num_heads": 2, "context": 16, "dropout": 0.0},
    "llama": {"num_layers": 2, "width": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24, "context": 16},
    "resnet": {"width": 4, "num_blocks": 1, "image_size": 8},
}


def model_and_batch(name: str):
    recipe = load_recipe(name)
    options = recipe.Options(**TINY[name])
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    if name == "resnet":
        return recipe, recipe.build(options), recipe.make_batch(options, 4, generator)
    return recipe, recipe.build(options), tuple(torch.randint(256, (2, 2, 16), generator=generator))


@pytest.mark.parametrize("name", TINY)
def test_it_begins_as_the_base_and_merges_into_one(name):
    recipe, model, batch = model_and_batch(name)
    model.eval()
    before, kept = recipe.loss(model, batch), copy.deepcopy(model.state_dict())
    adapt(model, LORA)
    assert torch.equal(recipe.loss(model, batch), before)
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in key for key in trained)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trained)
    for _ in range(3):
        recipe.loss(model, batch).backward()
        assert unreached(model) == []
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in kept.items())
    adapted = recipe.loss(model, batch)
    merged = merge(copy.deepcopy(model))
    assert adapted < before and torch.allclose(recipe.loss(merged, batch), adapted, rtol=1e-5)
    assert merged.state_dict().keys() == kept.keys() and not any(isinstance(m, Adapted) for m in merged.modules())


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding_mode="circular"),
                                   nn.Conv3d(4, 6, 1), nn.Linear(4, 6)])  # fmt: skip
def test_each_kind_of_layer_gives_the_same_merged(layer):
    sizes = {1: (2, 4, 9), 2: (2, 4, 9, 9), 3: (2, 4, 3, 3, 3)}
    x = torch.randn(sizes.get(layer.weight.ndim - 2, (2, 5, 4)))
    adapt(layer, LORA)
    nn.init.normal_(layer.lora_b)
    own = type(layer).own_class.forward(layer, x)
    expected = layer(x)
    assert not torch.allclose(expected, own, rtol=1e-2)
    assert torch.allclose(merge(layer)(x), expected, rtol=1e-4, atol=1e-5)


def test_patterns_choose_layers_and_a_wrong_one_is_told():
    model = load_recipe("llama").build(load_recipe("llama").Options(**TINY["llama"]))
    adapt(model, AdapterConfig(name="lora", modules=("query", "blocks.1.mlp")))
    adapted = [name for name, module in model.named_modules() if isinstance(module, Adapted)]
    assert adapted == ["blocks.0.attention.query", "blocks.1.attention.query"] + [
        f"blocks.1.mlp.{name}" for name in ("gate", "up", "down")
    ]
    model = load_recipe("llama").build(load_recipe("llama").Options(**TINY["llama"]))
    with pytest.raises(ConfigError, match=r"adapter.modules=qeury: matches no layer .*; did you mean .*query\?"):
        adapt(model, AdapterConfig(name="lora", modules=("qeury",)))


def test_a_layer_whose_weight_is_anothers_is_left_alone():
    recipe = load_recipe("llama")
    tied = recipe.Options(**TINY["llama"], tie_head=True)
    model = adapt(recipe.build(tied), LORA)
    assert not isinstance(model.head, Adapted) and isinstance(model.blocks[0].mlp.up, Adapted)
    with pytest.raises(ConfigError, match="adapter.modules=head: the weight of head is another module's, too"):
        adapt(recipe.build(tied), AdapterConfig(name="lora", modules=("head",)))
    with pytest.raises(ConfigError, match="adapter=lora: the model has no layer that can be adapted"):
        adapt(nn.Sequential(nn.LayerNorm(3)), LORA)


def test_a_layer_that_is_read_without_being_called_is_told():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.read = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.called(x) @ self.read.weight

    model = adapt(Reads(), LORA)
    model(torch.ones(2, 3)).sum().backward()
    assert unreached(model) == ["read"]


def test_a_run_goes_on_and_its_memory_is_the_one_that_is_planned(tmp_path, monkeypatch, capsys):
    """From a run's weights; compiled, verified and resumed bitwise; fewer bytes than without, as predicted."""
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")
    options = [f"recipe.model.{key}={value}" for key, value in TINY["llama"].items()]
    common = ["recipe=llama", *options, "debug=fast", "trainer.sample_bytes=0", "decisions=default", "kernel=aten"]
    assert main([*common, "trainer.steps=2", "hydra.run.dir=base"]) == 0
    lora = [*common, "adapter=lora", "adapter.base=base", "adapter.modules=[query,value]", "adapter.rank=1"]
    lora += ["lr_schedule.total_steps=4"]
    assert main([*lora, "trainer.steps=4", "hydra.run.dir=whole"]) == 0
    assert main([*lora, "trainer.steps=2", "engine=eager", "hydra.run.dir=part"]) == 0  # aten's kernels are eager's
    (tmp_path / "base").rename(tmp_path / "elsewhere")  # the checkpoint has the base
    assert main(["resume=part", "trainer.steps=4", "hydra.run.dir=rest"]) == 0
    whole, rest = (load(tmp_path / name / "checkpoints" / "step_00000004.pt").state for name in ("whole", "rest"))
    assert all(torch.equal(value, rest["model"][key]) for key, value in whole["model"].items())
    first = load(tmp_path / "elsewhere" / "checkpoints" / "step_00000002.pt").state["model"]
    assert all(torch.equal(whole["model"][key], value) for key, value in first.items())
    full, adapted = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("elsewhere", "whole"))
    assert adapted["verify_max_error"] < 1e-4 and adapted["fallbacks"] == 0
    assert adapted["num_trained"] == 2 * (16 + 16 + 16 + 8) < adapted["num_parameters"]
    assert adapted["peak_bytes"] == adapted["predicted_peak_bytes"] < full["peak_bytes"]
    assert adapted["saved_bytes"] < full["saved_bytes"] and adapted["optimizer_bytes"] < full["optimizer_bytes"]
    assert main(["task=eval", "eval.run=whole", "hydra.run.dir=eval"]) == 0
    assert json.loads((tmp_path / "eval/eval.json").read_text())["loss"] == pytest.approx(adapted["val_loss"], rel=1e-5)
    assert main([*lora, "adapter.base=absent"]) == 2
    assert "adapter.base=" in capsys.readouterr().err


def test_another_adapter_is_another_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [f"recipe.model.{key}={value}" for key, value in TINY["transformer"].items()]
    common = [*options, "debug=fast", "engine=eager", "trainer.steps=1", "trainer.sample_bytes=0"]
    assert main([*common, "adapter=lora", "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    assert main(["resume=run", "adapter.rank=4", "trainer.steps=2", "hydra.run.dir=on"]) == 2
    assert "adapter.rank: 8 in the checkpoint, 4 in this run" in capsys.readouterr().err
    assert main(["task=generate", "generate.run=run", "generate.length=4", "hydra.run.dir=text"]) == 0
