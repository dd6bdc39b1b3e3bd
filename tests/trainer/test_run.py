"""Whole runs: what they leave behind, that they can be stopped and go on, and that nothing bad passes unseen."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import aottrain
from aottrain.config.extensions.recipes import load_recipe
from aottrain.config.run import RecipeConfig
from aottrain.errors import CheckpointError, ConfigError, NumericsError, UnsupportedError
from aottrain.explain.report import CompileReport, Fallback
from aottrain.ir.units import format_bytes
from aottrain.step import StepResult
from aottrain.tasks import train
from aottrain.tasks.building import build
from aottrain.trainer import loop, preparing
from aottrain.trainer.checkpoint import load
from aottrain.trainer.engines import LossModule
from tests.sampling import crossed

PROMISED = {
    "engine", "kernel", "partition", "budget", "steps", "first_loss", "last_loss", "val_loss", "step_ms_median",
    "step_ms_p90", "save_ms", "tokens_per_s", "compile_s", "peak_bytes", "predicted_peak_bytes", "saved_bytes",
    "saved_by_module", "eager_saved_bytes", "fallbacks", "verify_max_error", "num_parameters", "seed", "torch",
    "status",
}  # fmt: skip


def same(left, right) -> bool:
    """Bitwise equality of nested containers of tensors and plain values."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def checkpoint_of(config, step: int) -> dict:
    return load(Path(config.output_dir) / "checkpoints" / f"step_{step:08d}.pt").state


def test_samples_on_the_way_change_nothing_of_a_run(tiny, left_by, tmp_path, capsys):
    asked = {"steps": 4, "eval_every": 2, "sample_bytes": 20}
    plain = tiny(trainer=asked, output_dir=str(tmp_path / "plain"))
    sampled = tiny(trainer={**asked, "sample_at_evals": True}, output_dir=str(tmp_path / "sampled"))
    assert train.run(plain) == train.run(sampled) == 0
    assert left_by(plain).losses == left_by(sampled).losses and same(checkpoint_of(plain, 4), checkpoint_of(sampled, 4))
    assert not (left_by(plain).directory / "samples.jsonl").exists()
    path = left_by(sampled).directory / "samples.jsonl"
    told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [each["step"] for each in told] == [2, 4] and all(each["text"].startswith("The ") for each in told)
    assert "What it wrote at each evaluation" in (path.parent / "run.html").read_text(encoding="utf-8")
    blocked = tiny(trainer={**asked, "sample_at_evals": True}, output_dir=str(tmp_path / "blocked"))
    (Path(blocked.output_dir) / "samples.jsonl").mkdir(parents=True)
    assert train.run(blocked) == 0 and "samples.jsonl: cannot be written: Is a directory" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["eager", "aot"])
def test_a_run_leaves_every_promised_figure(tiny, left_by, engine, capsys):
    config = tiny(engine, trainer={"steps": 6, "eval_every": 3, "sample_bytes": 20})
    assert train.run(config) == 0
    left = left_by(config)
    assert left.summary.keys() >= PROMISED
    assert left.summary["status"] == "finished" and left.summary["steps"] == 6
    assert [row["step"] for row in left.rows] == ["1", "2", "3", "4", "5", "6"]
    assert all(math.isfinite(float(row[key])) for row in left.rows for key in ("train/loss", "train/grad_norm"))
    assert [bool(row["val/loss"]) for row in left.rows] == [False, False, True, False, False, True]
    assert left.summary["last_loss"] == float(left.losses[-1])
    assert left.summary["tokens_per_s"] > 0 and left.summary["peak_bytes"] > left.summary["saved_bytes"] > 0
    printed = capsys.readouterr().out
    assert "step 6/6" in printed and "held-out" in printed and "The " in printed
    page = left.directory / "compile_report.html"
    assert page.exists() == (engine == "aot")
    assert bool(left.summary["saved_by_module"]) == (engine == "aot")
    curves = (left.directory / "run.html").read_text(encoding="utf-8")
    assert "Finished after step 6" in curves and 'href="metrics.csv"' in curves
    assert ('href="compile_report.html"' in curves) == (engine == "aot")
    if engine == "aot":  # the same prediction in both places: the optimizer's state is counted once
        assert f">{format_bytes(left.summary['predicted_peak_bytes'])}<" in page.read_text()


def test_a_verified_step_is_in_the_summary_and_the_log(tiny, left_by, capsys):
    config = tiny("aot", verify={"steps": 2})
    assert train.run(config) == 0
    summary, printed = left_by(config).summary, capsys.readouterr().out
    assert 0 <= summary["verify_max_error"] < 1e-3 and 0 < summary["verify_update_error"] < 1e-6
    assert printed.count("verified step") == 2 and printed.count("verified its update") == 2


def test_verification_changes_nothing_of_the_run(tiny, left_by, tmp_path):
    losses = []
    for steps in (0, 3):
        config = tiny("aot", verify={"steps": steps}, output_dir=str(tmp_path / str(steps)))
        assert train.run(config) == 0
        losses.append(left_by(config).losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("engine", ["eager", "aot"])
def test_stopping_and_going_on_is_bitwise_the_same_as_not_stopping(tiny, left_by, tmp_path, engine):
    schedule = {"total_steps": 8}
    straight = tiny(engine, trainer={"steps": 8}, lr_schedule=schedule, output_dir=str(tmp_path / "straight"))
    first = tiny(engine, trainer={"steps": 4}, lr_schedule=schedule)
    second = tiny(engine, trainer={"steps": 8}, lr_schedule=schedule, resume="auto")
    for config in (straight, first, second):
        assert train.run(config) == 0
    assert left_by(second).losses == left_by(straight).losses
    assert len(set(left_by(straight).losses)) == 8
    uninterrupted, resumed = checkpoint_of(straight, 8), checkpoint_of(second, 8)
    for part in ("model", "optimizer", "random"):
        assert same(uninterrupted[part], resumed[part]), part


def test_a_signal_ends_the_run_after_its_step_and_it_goes_on_from_there(tiny, left_by, tmp_path, monkeypatch):
    def interrupting(step, *arguments):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return learning_rate(step, *arguments)

    straight = tiny(trainer={"steps": 6}, output_dir=str(tmp_path / "straight"))
    config = tiny(trainer={"steps": 6})
    handler, learning_rate = signal.getsignal(signal.SIGTERM), loop.learning_rate
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate", interrupting)
        assert train.run(config) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    assert left_by(config).summary["status"] == "interrupted" and left_by(config).summary["steps"] == 3
    assert train.run(tiny(trainer={"steps": 6}, resume="auto")) == 0
    assert train.run(straight) == 0
    assert left_by(config).losses == left_by(straight).losses


@pytest.fixture
def interrupted_at_batch(monkeypatch):
    """interrupted_at_batch(n): the n-th held-out batch of this process comes with Ctrl-C. Gives a list, of their number
    so far."""

    def arrange(number: int) -> list[int]:
        counted, forward = [0], LossModule.forward

        def counting(module, *batch):
            if not module.training:
                counted[0] += 1
                if counted[0] == number:
                    signal.raise_signal(signal.SIGINT)
            return forward(module, *batch)

        monkeypatch.setattr(LossModule, "forward", counting)
        return counted

    return arrange


@pytest.mark.parametrize("batch", [1, 6], ids=["due and first", "of the last step"])
def test_a_signal_amid_an_evaluation_leaves_it_and_a_run_that_goes_on_makes_it(
    tiny, left_by, tmp_path, batch, interrupted_at_batch
):
    trainer = {"steps": 4, "eval_every": 2, "eval_batches": 4, "keep_best": True, "patience": 2}
    trainer |= {"sample_at_evals": True, "sample_bytes": 4}
    straight = tiny(trainer=trainer, output_dir=str(tmp_path / "straight"))
    assert train.run(straight) == 0
    config, step = tiny(trainer=trainer), 2 if batch < 4 else 4
    counted = interrupted_at_batch(batch)
    assert train.run(config) == 128 + signal.SIGINT
    left = left_by(config)
    assert counted == [batch] and (left.summary["status"], left.summary["steps"]) == ("interrupted", step)
    evaluated = [float(row["val/loss"]) for row in left.rows if row["val/loss"]]
    assert len(evaluated) == batch // 4 and left.summary["val_loss"] == (evaluated or [None])[-1]
    assert checkpoint_of(config, step)["patience"]["best"] == (evaluated or [math.inf])[-1]
    assert train.run(dataclasses.replace(config, resume="auto")) == 0
    names = ("step", "train/loss", "val/loss")
    rows = [[[row[name] for name in names] for row in left_by(run).rows] for run in (straight, config)]
    assert rows[0] == rows[1] and [bool(row[2]) for row in rows[0]] == [False, True, False, True]
    wanted, got = (checkpoint_of(run, 4) for run in (straight, config))
    assert all(same(wanted[part], got[part]) for part in ("model", "optimizer", "random", "patience", "best_val_loss"))
    folders = [Path(run.output_dir) for run in (straight, config)]
    assert len({load(folder / "checkpoints" / "best").step for folder in folders}) == 1
    assert len({(folder / "samples.jsonl").read_text() for folder in folders}) == 1
    assert left_by(straight).summary["val_loss"] == left_by(config).summary["val_loss"]


def test_a_second_signal_amid_what_was_left_keeps_it_left(tiny, left_by, interrupted_at_batch, capsys):
    config = tiny(trainer={"steps": 3, "eval_every": 3, "eval_batches": 4})
    counted = interrupted_at_batch(2)
    assert train.run(config) == 128 + signal.SIGINT
    counted[0] = 0
    assert train.run(dataclasses.replace(config, resume="auto")) == 128 + signal.SIGINT
    assert left_by(config).summary["val_loss"] is None and "resume=" in capsys.readouterr().out
    assert train.run(dataclasses.replace(config, resume="auto")) == 0
    assert [bool(row["val/loss"]) for row in left_by(config).rows] == [False, False, True]


def test_a_run_that_was_killed_after_its_last_checkpoint_has_its_figures_when_it_goes_on(tiny, left_by):
    """By which sweeps compare it, and a search goes on."""
    config = tiny(trainer={"steps": 3, "keep_best": True})
    assert train.run(config) == 0
    figures = ("status", "steps", "last_loss", "val_loss", "best_val_loss", "val_bits_per_byte")
    wanted = {name: left_by(config).summary[name] for name in figures}
    (left_by(config).directory / "summary.json").write_text(json.dumps({"status": "running", "steps": 2}))
    assert train.run(dataclasses.replace(config, resume="auto")) == 0
    assert {name: left_by(config).summary[name] for name in figures} == wanted
    assert [row["step"] for row in left_by(config).rows] == ["1", "2", "3"]


def test_without_a_total_the_schedule_of_the_first_run_goes_on(tiny, left_by):
    assert train.run(tiny(trainer={"steps": 4})) == 0
    config = tiny(trainer={"steps": 6}, resume="auto")
    assert train.run(config) == 0
    rates = [float(row["train/lr"]) for row in left_by(config).rows]
    assert rates[3] == rates[4] == rates[5] == pytest.approx(config.optimizer.lr * config.lr_schedule.min_lr_ratio)


def test_resuming_another_run_lists_every_difference(tiny):
    config = tiny()
    assert train.run(config) == 0
    other = tiny(resume="auto", optimizer={"lr": 1e-3}, data={"batch_size": 2}, seed=7)
    with pytest.raises(CheckpointError) as caught:
        train.run(other)
    for difference in ("optimizer.lr: 0.002 in the checkpoint, 0.001", "data.batch_size: 4", "seed: 1234"):
        assert difference in str(caught.value)


def test_where_the_text_lies_does_not_matter_for_resuming_but_its_content_does(tiny, tmp_path):
    texts = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    for path, text in zip(texts, ("one two three " * 40, "one two three " * 40, "four five six " * 40), strict=True):
        path.write_text(text)
    assert train.run(tiny(data={"path": str(texts[0])})) == 0
    assert train.run(tiny(data={"path": str(texts[1])}, resume="auto", trainer={"steps": 5})) == 0
    with pytest.raises(CheckpointError, match="data.fingerprint"):
        train.run(tiny(data={"path": str(texts[2])}, resume="auto", trainer={"steps": 6}))


def test_resuming_automatically_with_nothing_there_starts_anew(tiny, left_by, capsys):
    config = tiny(resume="auto")
    assert train.run(config) == 0
    assert "starts at step 1" in capsys.readouterr().out and left_by(config).summary["steps"] == 4


@pytest.mark.parametrize("kind", ["loss", "gradient norm"])
def test_a_number_that_is_not_finite_stops_before_the_update(tiny, fit_job, left_by, kind):
    config = tiny(trainer={"steps": 8, "log_every": 4})
    seen = {}

    def break_step_three(job):
        good, calls = job.step, iter(range(1, 9))

        def step(micro_batches) -> StepResult:
            result = good(micro_batches)
            if next(calls) < 3:
                return result
            seen["job"] = job
            seen["before"] = [parameter.detach().clone() for parameter in job.module.parameters()]
            if kind == "loss":
                return StepResult(result.loss * math.nan, result.num_samples, result.num_tokens)
            job.module.model.final_norm.weight.grad[0] = math.inf
            return result

        step.engine, step.report = "eager", None
        job.step = step

    with pytest.raises(NumericsError, match=f"step 3: the {kind} is"):
        fit_job(config, break_step_three)
    assert same(seen["before"], [parameter.detach() for parameter in seen["job"].module.parameters()])
    assert [row["step"] for row in left_by(config).rows] == ["1", "2", "3"]


def test_a_failed_run_says_so_in_its_summary(tiny, left_by):
    config = tiny(optimizer={"lr": 1e30, "clip_norm": None}, trainer={"steps": 50})
    with pytest.raises(NumericsError):
        train.run(config)
    left = left_by(config)
    assert left.summary["status"] == "failed" and "NumericsError: step" in left.summary["error"]
    assert len(left.rows) >= 2 and left.summary["first_loss"] > 0


def test_micro_batches_are_one_batch_in_parts(tiny, fit_job):
    parameters = []
    for accumulate, batch_size in ((1, 8), (4, 2)):
        config = tiny(
            model={"dropout": 0.0}, trainer={"accumulate": accumulate, "steps": 3}, data={"batch_size": batch_size}
        )
        job, summary = fit_job(config)
        parameters.append(torch.cat([parameter.detach().flatten() for parameter in job.module.parameters()]))
        assert summary["samples_per_s"] > 0
    torch.testing.assert_close(parameters[0], parameters[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_predicted_peak_is_the_measured_one(tiny, left_by, accumulate):
    config = tiny("aot", trainer={"accumulate": accumulate}, model={"width": 32}, data={"batch_size": 8})
    assert train.run(config) == 0
    summary = left_by(config).summary
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_bytes"], rel=0.01)


SMALL_MODELS = {
    "transformer": {"num_layers": 2, "width": 64, "num_heads": 2, "context": 64},
    "llama": {"num_layers": 2, "width": 64, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 128, "context": 64},
    "resnet": {"num_blocks": 1},
}


@pytest.mark.parametrize(("recipe", "strategy"), crossed(SMALL_MODELS, ["min_cut", "save_all"], one_in=2))
def test_with_memory_that_is_used_again_the_predicted_peak_is_the_measured_one(tiny, left_by, recipe, strategy):
    """Generated kernels run in an arena and in blocks of residuals, which stay from step to step."""
    aottrain.empty_cache()  # of other tests
    model = load_recipe(recipe).Options(**SMALL_MODELS[recipe])
    partition = {"strategy": strategy, "budget": None}
    sections = {"kernel": {"name": "cpp"}, "partition": partition, "data": {"batch_size": 8}}
    config = tiny("aot", **sections, recipe=RecipeConfig(name=recipe, model=model))
    assert train.run(config) == 0
    summary = left_by(config).summary
    assert summary["kernel"] == "cpp"
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_bytes"], rel=0.01)


def test_mixed_precision_trains_and_keeps_parameters_in_float32(tiny, fit_job):
    job, summary = fit_job(tiny(trainer={"precision": "bf16"}))
    assert {parameter.dtype for parameter in job.module.parameters()} == {torch.float32}
    assert math.isfinite(summary["last_loss"])


def test_evaluation_does_not_change_the_run(tiny, left_by, tmp_path):
    losses = []
    for every in (0, 1):
        config = tiny(trainer={"eval_every": every}, output_dir=str(tmp_path / str(every)))
        assert train.run(config) == 0
        losses.append(left_by(config).losses)
    assert losses[0] == losses[1]


def test_mistakes_in_the_recipes_options_are_listed(tiny):
    with pytest.raises(ConfigError) as caught:
        train.run(tiny(model={"width": 17, "dropout": 2}))
    assert [mistake.split("=")[0] for mistake in caught.value.mistakes] == [
        "recipe.model.num_heads", "recipe.model.dropout",
    ]  # fmt: skip


def test_the_bar_is_off_where_nobody_watches(tiny, capfd):
    assert train.run(tiny()) == 0
    captured = capfd.readouterr()
    assert "step/s" not in captured.err and "it/s" not in captured.err
    assert captured.out.count("step 4/4") == 1


def test_a_full_disk_on_the_way_is_said_and_at_the_end_is_an_error(tiny, left_by, capsys, monkeypatch):
    config = tiny(trainer={"save_every": 1})
    save, calls = torch.save, []

    def failing(content, path):
        calls.append(path)
        if len(calls) in failures:
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(torch, "save", failing)
    failures = {2}
    assert train.run(config) == 0
    assert capsys.readouterr().out.count("going on without a checkpoint") == 1
    calls.clear()
    failures = {4}
    with pytest.raises(CheckpointError, match="No space left"):
        train.run(config)
    assert left_by(config).summary["status"] == "failed" and left_by(config).summary["steps"] == 4


@pytest.fixture
def made_recipe(monkeypatch):
    """A recipe with batches of its own, no tokens, and buffers that the forward changes."""

    def make_batch(options, batch_size, generator):
        x = torch.randn(batch_size, 8, generator=generator)
        return x, x.sum(dim=1, keepdim=True)

    recipe = SimpleNamespace(
        build=lambda options: nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
        ),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        make_batch=make_batch,
    )
    monkeypatch.setattr(build, "recipe_of", lambda config: recipe)


@pytest.mark.parametrize("engine", ["eager", "aot"])
def test_a_recipe_with_batches_of_its_own_resumes_bitwise_too(tiny, left_by, tmp_path, made_recipe, engine):
    data = {"batch_size": 16}
    straight = tiny(engine, trainer={"steps": 6}, data=data, output_dir=str(tmp_path / "straight"))
    assert train.run(straight) == 0
    assert train.run(tiny(engine, trainer={"steps": 3}, lr_schedule={"total_steps": 6}, data=data)) == 0
    resumed = tiny(engine, trainer={"steps": 6}, data=data, resume="auto")
    assert train.run(resumed) == 0
    assert left_by(resumed).losses == left_by(straight).losses
    assert same(checkpoint_of(straight, 6)["model"], checkpoint_of(resumed, 6)["model"])
    summary = left_by(straight).summary
    assert summary["tokens_per_s"] is None and summary["samples_per_s"] > 0 and summary["val_loss"] > 0


def test_a_step_that_runs_eagerly_is_counted_and_said(tiny, left_by, capsys, monkeypatch):
    class Fallen(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.report = module, CompileReport()

        def prepare(self, *batch):
            raise UnsupportedError("an operator")

        def forward(self, *batch):
            self.report.fallbacks[:] = [Fallback("an operator", count=self.report.num_fallbacks + 1)]
            return self.module(*batch)

    monkeypatch.setattr("aottrain.compile", lambda module, **_: Fallen(module))
    config = tiny("aot")
    assert train.run(config) == 0
    summary = left_by(config).summary
    assert summary["fallbacks"] == 6 and summary["verify_max_error"] is None and "eagerly" in summary["verify_note"]
    assert "runs eagerly: an operator" in capsys.readouterr().out


class HalfEager(nn.Module):
    """Every second call runs eagerly; one that does not is wrong by a factor."""

    def __init__(self, module, factor):
        super().__init__()
        self.module, self.factor, self.report = module, factor, CompileReport()
        self.report.fallbacks.append(Fallback("a fault", is_fault=True))
        self.num_calls = 0

    def prepare(self, *batch):
        pass

    def forward(self, *batch):
        self.num_calls += 1
        if self.num_calls % 2:
            with aottrain.philox_eager():
                return self.module(*batch) * self.factor
        self.report.fallbacks[:] = [Fallback("other shapes", count=self.report.num_fallbacks + 1)]
        return self.module(*batch)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_what_is_compiled_is_verified_where_something_else_runs_eagerly(tiny, left_by, capsys, monkeypatch, factor):
    """With dropout, whose numbers are drawn in another way where a call runs eagerly."""
    made = []

    def compiled(module, **_):
        made.append(HalfEager(module, factor))
        return made[-1]

    monkeypatch.setattr("aottrain.compile", compiled)
    config = tiny("aot", model={"dropout": 0.1}, trainer={"accumulate": 3, "steps": 1}, verify={"steps": 1})
    monkeypatch.setattr(preparing, "prepare_optimizer", lambda job: setattr(made[-1], "num_calls", 0))
    if factor == 1.0:
        assert train.run(config) == 0
        assert left_by(config).summary["verify_max_error"] < 1e-6
        assert "1 of 3 micro-batches run eagerly" in capsys.readouterr().out
        assert "1 of 3 micro-batches run eagerly" in left_by(config).summary["verify_note"]
    else:
        with pytest.raises(NumericsError, match="micro-batch 1 of 3 alone"):
            train.run(config)


def test_an_engine_that_is_eager_s_own_verifies_nothing(tiny, left_by):
    config = tiny("eager")
    assert train.run(config) == 0
    assert left_by(config).summary["verify_max_error"] is None and left_by(config).summary["verify_note"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_run_has_every_figure_and_resumes(tiny, left_by):
    config = tiny(device="cuda", trainer={"steps": 6}, lr_schedule={"total_steps": 8})
    assert train.run(config) == 0
    summary = left_by(config).summary
    assert summary["peak_bytes"] > 0 and summary["tokens_per_s"] > 0
    assert train.run(tiny(device="cuda", trainer={"steps": 8}, resume="auto", lr_schedule={"total_steps": 8})) == 0
