"""Which optimizer a run gets, what is said of it, and that runs of either go on with the other."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import aottrain
from aottrain.errors import ConfigError
from aottrain.ops.optimizers.lion import Lion
from aottrain.tasks import train
from aottrain.tasks.building.build import build_job
from aottrain.toolchain import native
from aottrain.trainer import optim
from tests.trainer.conftest import left_by, one_thread, tiny

__all__ = ["left_by", "one_thread", "tiny"]
needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler on this machine")
OURS = {"adamw": aottrain.AdamW, "sgd": aottrain.SGD, "lion": aottrain.Lion}
TORCH = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": Lion}


@needs_compiler
@pytest.mark.parametrize("name", OURS)
def test_generated_kernels_where_the_graphs_have_them(tiny, name):
    job = build_job(tiny("aot", optimizer={"name": name}))
    assert type(job.optimizer) is OURS[name] and job.optimizer_kernel == "cpp"
    assert job.optimizer.clip_norm == 1.0 and job.optimizer.skip_nonfinite
    assert {group["weight_decay"] for group in job.optimizer.param_groups} == {0.0, 0.1}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(
    ("engine", "changes", "reason"),
    [
        ("eager", {}, "engine=eager"),
        ("aot", {"kernel": {"name": "aten"}}, "kernel=aten"),
        ("aot", {"optimizer": {"kernel": "torch"}}, "optimizer.kernel=torch"),
    ],
)
def test_torchs_own_elsewhere(tiny, name, engine, changes, reason):
    changes = {**changes, "optimizer": {**changes.get("optimizer", {}), "name": name}}
    job = build_job(tiny(engine, **changes))
    assert type(job.optimizer) is TORCH[name] and job.optimizer_kernel == f"torch ({reason})"


def test_without_a_compiler(tiny, monkeypatch):
    monkeypatch.setattr(native, "compiler_obstacle", lambda: "no C++ compiler was found on this machine")
    assert "no C++ compiler was found" in build_job(tiny("aot")).optimizer_kernel
    with pytest.raises(ConfigError, match="optimizer.kernel=generated: no C.. compiler .*; use optimizer.kernel=torch"):
        build_job(tiny("aot", optimizer={"kernel": "generated"}))


@needs_compiler
@pytest.mark.parametrize("name", OURS)
def test_either_goes_on_where_the_other_stopped(tiny, left_by, tmp_path, name):
    """The same losses, as far as they are printed, whichever of the two takes which half of the steps."""
    losses = []
    for number, kernels in enumerate((("torch", "torch"), ("torch", "generated"), ("generated", "torch"))):
        for steps, kernel in zip((3, 6), kernels, strict=True):
            config = tiny(
                "eager", trainer={"steps": steps}, lr_schedule={"total_steps": 6}, resume="auto",
                optimizer={"name": name, "kernel": kernel, "lr": 1e-3}, output_dir=str(tmp_path / str(number)),
            )  # fmt: skip
            assert train.run(config) == 0
        losses.append([float(loss) for loss in left_by(config).losses])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@needs_compiler
def test_summary_report_and_banner_say_so(tiny, left_by, capsys):
    config = tiny("aot", kernel={"name": "cpp"})
    assert train.run(config) == 0
    found = left_by(config)
    assert (found.summary["optimizer"], found.summary["optimizer_kernel"]) == ("adamw", "cpp")
    assert "optimizer adamw, kernels cpp" in (found.directory / "compile_report.html").read_text()
    assert found.summary["optimizer_bytes"] == optim.optimizer_state_bytes(build_job(config).module, config.optimizer)
    assert train.run(dataclasses.replace(config, kernel=dataclasses.replace(config.kernel, name="aten"))) == 0
    assert "optimizer adamw runs as torch (kernel=aten)" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_numbers_that_are_not_finite_leave_the_parameters_as_they_were(tiny, what):
    job = build_job(tiny("aot"))
    before = [parameter.detach().clone() for parameter in job.module.parameters()]
    for parameter in job.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    if what == "gradient norm":
        parameter.grad[0] = torch.inf
    loss = torch.tensor(torch.nan if what == "loss" else 1.0)
    norm = optim.clip_and_update(job.optimizer, job.module.parameters(), 1.0, loss)
    assert torch.isfinite(norm) == (what == "loss")
    assert all(torch.equal(a, b) for a, b in zip(before, job.module.parameters(), strict=True))


def test_what_is_compared_updates_with_torchs_own(tiny):
    """Engines are compared by forward and backward: the optimizers of the others are torch's unless asked."""
    kernels = {engine: build_job(tiny(engine)).optimizer_kernel for engine in ("eager", "torch_compile")}
    assert kernels == {"eager": "torch (engine=eager)", "torch_compile": "torch (engine=torch_compile)"}
