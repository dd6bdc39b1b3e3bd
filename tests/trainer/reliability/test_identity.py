"""What a run may go on otherwise in: nothing that resume_override does not name; who computes is left open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aottrain.cli import main
from aottrain.errors import ResumeError
from aottrain.tasks import train
from aottrain.trainer.checkpoint import load
from aottrain.trainer.reliability.identity import check_identity
from tests.sampling import WHOLE
from tests.trainer.test_run import same
from tests.trainer.test_saving_on_request import SMALL

SAVED = {"optimizer.lr": 0.1, "optimizer.beta1": 0.9, "data.batch_size": 4, "seed": 1}


def final(config) -> dict:
    return load(Path(config.output_dir, "checkpoints", f"step_{config.trainer.steps:08d}.pt")).state


def test_what_is_named_may_differ_and_is_shown():
    now = {**SAVED, "optimizer.lr": 0.2, "optimizer.beta1": 0.8, "seed": 2}
    changes = check_identity(SAVED, now, Path("it"), ["optimizer", "seed"])
    assert changes.keys == {"optimizer.lr", "optimizer.beta1", "seed"} and changes.of_groups == {"betas"}
    assert changes.lines == (
        "resume_override: optimizer.beta1: 0.9 in the checkpoint, 0.8 in this run",
        "resume_override: optimizer.lr: 0.1 in the checkpoint, 0.2 in this run",
        "resume_override: seed: 1 in the checkpoint, 2 in this run",
    )
    assert check_identity(SAVED, dict(SAVED), Path("it"), ["seed"]).lines == ()


def test_what_is_not_named_is_refused_with_what_to_write():
    now = {**SAVED, "optimizer.lr": 0.2, "seed": 2}
    with pytest.raises(ResumeError) as caught:
        check_identity(SAVED, now, Path("it"), ["seed"])
    assert str(caught.value).splitlines() == [
        "it is of another run; to go on all the same write 'resume_override=[seed,optimizer.lr]'; it differs in",
        "  optimizer.lr: 0.1 in the checkpoint, 0.2 in this run",
    ]
    with pytest.raises(ResumeError, match="resume_override=optimizer.rl: names no setting .*did you mean optimizer.lr"):
        check_identity(SAVED, now, Path("it"), ["seed", "optimizer.rl"])


def test_of_another_recipe_the_name_says_it():
    """Its options are others, too: they are neither listed nor named one by one."""
    saved = {**SAVED, "recipe.name": "transformer", "recipe.model.width": 16, "recipe.model.context": 8}
    now = {**SAVED, "recipe.name": "gcn", "recipe.model.width": 64, "seed": 2}
    with pytest.raises(ResumeError) as caught:
        check_identity(saved, now, Path("it"))
    title, *lines = str(caught.value).splitlines()
    assert "write 'resume_override=[recipe,seed]';" in title
    assert lines == [
        "  recipe.name: 'transformer' in the checkpoint, 'gcn' in this run",
        "  seed: 1 in the checkpoint, 2 in this run",
    ]
    assert check_identity(saved, now, Path("it"), ["recipe", "seed"]).lines
    saved["recipe.name"] = "gcn"
    with pytest.raises(ResumeError, match="recipe.model.width: 16 in the checkpoint, 64 in this run"):
        check_identity(saved, now, Path("it"), ["seed"])


@pytest.mark.parametrize("engine", ["eager", pytest.param("aot", marks=WHOLE)])
def test_the_new_value_counts_and_not_the_checkpoint_s(tiny, tmp_path, engine):
    """load_state_dict alone would bring the old betas and decay back: the update is that of a run that had the new
    ones from the start of the step, from the same moments."""
    before = {"lr_schedule": {"total_steps": 9}, "decisions": "default"}
    assert train.run(tiny(engine, **before)) == 0
    source = str(tmp_path / "run" / "checkpoints" / "step_00000004.pt")
    new = {"lr": 1e-3, "beta1": 0.5, "weight_decay": 0.7}
    override = tuple(f"optimizer.{key}" for key in new)
    config = tiny(engine, trainer={"steps": 5}, optimizer=new, resume=source, resume_override=override,
                  output_dir=str(tmp_path / "again"), **before)  # fmt: skip
    assert train.run(config) == 0
    old = tiny(engine, trainer={"steps": 5}, resume=source, output_dir=str(tmp_path / "old"), **before)
    assert train.run(old) == 0
    got, other, begun = final(config), final(old), load(Path(source)).state
    first, second = got["optimizer"]["param_groups"]
    assert first["betas"] == (0.5, 0.95) and first["weight_decay"] == 0.7 and second["weight_decay"] == 0.0
    for number, moment in begun["optimizer"]["state"].items():  # m' = m + (1 - beta1) (g - m), with the same g
        was, moved, moved_before = (s["exp_avg"] for s in (moment, got["optimizer"]["state"][number],
                                                           other["optimizer"]["state"][number]))  # fmt: skip
        torch.testing.assert_close(moved - was, 5 * (moved_before - was), rtol=1e-3, atol=1e-7)
    assert got["identity"]["optimizer.beta1"] == 0.5 and same(got["random"], other["random"])


def test_another_optimizer_begins_anew_and_averages_too(tiny, left_by, tmp_path, capsys):
    assert train.run(tiny()) == 0
    config = tiny(trainer={"steps": 6, "ema": 0.5}, optimizer={"name": "lion", "lr": 1e-4}, resume="auto",
                  resume_override=("optimizer", "trainer.ema"))  # fmt: skip
    assert train.run(config) == 0
    assert "resume_override: the optimizer begins anew, without the checkpoint's state" in capsys.readouterr().out
    state = final(config)
    assert all(values.keys() == {"exp_avg"} for values in state["optimizer"]["state"].values())
    assert state["averages"]["num_updates"] == 2
    again = tiny(trainer={"steps": 7, "ema": 0.5}, optimizer={"name": "lion", "lr": 1e-4}, resume="auto")
    assert train.run(again) == 0  # which is now the run's own setting


def test_a_smaller_model_is_refused_all_the_same(tiny):
    assert train.run(tiny()) == 0
    with pytest.raises(ResumeError, match="is not of this model"):
        train.run(tiny(model={"width": 32}, resume="auto", resume_override=("recipe",)))


def test_the_command_line_refuses_with_code_2_and_goes_on_where_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["engine=eager", "debug=fast", "logger=csv", "trainer.num_threads=1", *SMALL]
    assert main([*line, "hydra.run.dir=run"]) == 0
    more = ["resume=run", "hydra.run.dir=again", "trainer.steps=6", "seed=7", "logger=csv"]
    assert main(more) == 2
    assert "'resume_override=[seed]'" in capsys.readouterr().err
    assert main([*more, "resume_override=[sed]"]) == 2
    assert "resume_override=sed: names no setting that a checkpoint is compared by; did you mean seed?" in (
        capsys.readouterr().err
    )
    assert main([*more, "resume_override=[seed]"]) == 0
    assert "resume_override: seed: 1234 in the checkpoint, 7 in this run" in capsys.readouterr().out
    assert main([*line, "resume_override=[seed]", "hydra.run.dir=other"]) == 0
    assert "resume_override=[seed] has no effect: resume is null" in capsys.readouterr().out


EXACT = {"decisions": "default", "kernel": {"name": "aten"}}
WAYS = {
    "eager": ("eager", {}),
    "aten": ("aot", EXACT),
    "budget 0": ("aot", {**EXACT, "partition": {"budget": 0.0}}),
    "recompute_all": ("aot", {**EXACT, "partition": {"strategy": "recompute_all", "budget": None}}),
    "cpp": ("aot", {"decisions": "default", "kernel": {"name": "cpp"}}),
}


@pytest.mark.parametrize(("first", "second"), [
    ("eager", "budget 0"), ("recompute_all", "eager"), ("cpp", "eager"), pytest.param("aten", "budget 0", marks=WHOLE),
    pytest.param("budget 0", "eager", marks=WHOLE), pytest.param("eager", "cpp", marks=WHOLE),
])  # fmt: skip
def test_a_checkpoint_of_one_engine_kernel_or_budget_resumes_under_another(tiny, left_by, tmp_path, first, second):
    """By PyTorch's operators to the very bits of a run that eager does alone."""

    def config(way: str, steps: int, **more):
        engine, settings = WAYS[way]
        return tiny(engine, {"dropout": 0.0}, trainer={"steps": steps}, lr_schedule={"total_steps": 6},
                    optimizer={"kernel": "torch"}, **settings, **more)  # fmt: skip

    alone = config("eager", 6, output_dir=str(tmp_path / "alone"))
    assert train.run(alone) == train.run(config(first, 3)) == 0
    assert train.run(config(second, 6, resume="auto")) == 0
    wanted, got = final(alone), final(config(second, 6))
    if "cpp" in (first, second):
        losses = [list(map(float, left_by(each).losses)) for each in (alone, config(second, 6))]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    else:
        assert all(same(wanted[part], got[part]) for part in ("model", "optimizer", "random"))
        assert left_by(config(second, 6)).losses == left_by(alone).losses
