"""Torch's Muon for hidden matrices beside torch's AdamW, as `optimizer.target=aottrain:Muon` gives it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import aottrain
from aottrain.config.run import OptimizerConfig
from aottrain.metrics.memory import distinct_bytes
from aottrain.tasks import train
from aottrain.trainer.optim import build_optimizer, optimizer_state_bytes, set_learning_rate

CONFIG = OptimizerConfig(name="custom", target="aottrain:Muon", lr=0.01, weight_decay=0.1)


def made(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Embedding(10, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Conv1d(10, 10, 1), nn.Linear(16, 10)
    return nn.Sequential(*layers).to(dtype)


def stepped(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 3) -> list[Tensor]:
    for _ in range(steps):
        model(torch.arange(10)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_matrices_within_the_model_are_updated_by_muon_and_all_others_by_adamw():
    ours, torch_s = made(), made()
    hidden = torch_s[1].weight
    others = [parameter for parameter in torch_s.parameters() if parameter is not hidden]
    plain = [
        torch.optim.Muon([hidden], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [parameter for parameter in others if parameter.ndim > 1], "weight_decay": 0.1},
                {"params": [parameter for parameter in others if parameter.ndim == 1], "weight_decay": 0.0},
            ],
            lr=0.01, betas=(0.9, 0.95), fused=True,
        ),
    ]  # fmt: skip
    optimizer = build_optimizer(ours, CONFIG)
    set_learning_rate(optimizer, 0.01)
    assert type(optimizer) is aottrain.Muon
    for found, wanted in zip(stepped(ours, [optimizer]), stepped(torch_s, plain), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("precision", ["fp32", "bf16_weights"])
def test_what_it_will_hold_is_known_before_its_first_step(precision):
    model = made(torch.bfloat16 if precision == "bf16_weights" else torch.float32)
    known = optimizer_state_bytes(model, CONFIG, precision)
    optimizer = build_optimizer(model, CONFIG, precision)
    stepped(model, [optimizer], 1)
    assert known == distinct_bytes([value for state in optimizer.state.values() for value in state.values()])


@pytest.mark.parametrize("way", ["state", "copy"])
def test_it_goes_on_from_its_state(way):
    model = made()
    optimizer = build_optimizer(model, CONFIG)
    stepped(model, [optimizer], 2)
    if way == "copy":
        twin, again = copy.deepcopy((model, optimizer))
    else:
        twin = copy.deepcopy(model)
        again = build_optimizer(twin, CONFIG)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for found, wanted in zip(stepped(twin, [again]), stepped(model, [optimizer]), strict=True):
        assert torch.equal(found, wanted)


def test_without_a_model_its_matrices_are_those_of_two_dimensions():
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2, 2))]
    groups = aottrain.Muon(parameters).param_groups
    assert [(group["by_muon"], len(group["params"])) for group in groups] == [(False, 2), (True, 1)]
    with pytest.raises(ValueError, match="momentum"):
        aottrain.Muon(parameters, momentum=-1.0)


def test_a_run_with_it_resumes_bitwise(tiny, left_by, tmp_path):
    optimizer = {"name": "custom", "target": "aottrain:Muon", "weight_decay": 0.1, "lr": 1e-3}
    given = {"optimizer": optimizer, "lr_schedule": {"total_steps": 6}}
    straight = tiny(trainer={"steps": 6, "accumulate": 2}, **given, output_dir=str(tmp_path / "straight"))
    assert train.run(straight) == 0
    for steps in (3, 6):
        config = tiny(trainer={"steps": steps, "accumulate": 2}, resume="auto", **given)
        assert train.run(config) == 0
    assert left_by(config).losses == left_by(straight).losses
    summary = left_by(straight).summary
    assert summary["optimizer"] == "aottrain:Muon" and summary["optimizer_bytes"] > 0
