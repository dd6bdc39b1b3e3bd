"""The comparison's arithmetic and verdicts, with engines that only write what a run would write."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest

from aottrain.config.reading import read_model
from aottrain.config.run import RunConfig
from aottrain.tasks import compare
from aottrain.tasks.measuring.worker import dump, load


@pytest.fixture
def config(tmp_path) -> RunConfig:
    plain = RunConfig(task="compare", seed=7, output_dir=str(tmp_path))
    plain = dataclasses.replace(plain, compare=dataclasses.replace(plain.compare, rounds=2))
    return read_model(plain)[0]


class FakeEngines:
    """Stands in for `run_apart`: writes summary.json and metrics.csv, and records which runs were asked for."""

    def __init__(self, step_ms, losses, failing=()):
        self.step_ms, self.losses, self.failing = step_ms, losses, failing
        self.runs: list[RunConfig] = []

    def __call__(self, config: RunConfig) -> str:
        self.runs.append(config)
        engine, directory = config.engine.name, Path(config.output_dir)
        if engine in self.failing:
            return "RuntimeError: no compiler here"
        directory.mkdir(parents=True)
        (directory / "summary.json").write_text(
            json.dumps(
                {
                    "step_ms_median": self.step_ms[engine],
                    "tokens_per_s": 1000,
                    "compile_s": 1.5,
                    "peak_bytes": 1024**2,
                    "saved_bytes": 2048,
                    "fallbacks": 0,
                    "machine": "a processor, 2 threads",
                }
            )
        )
        with (directory / "metrics.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["step", "train/loss"], *enumerate(self.losses[engine], 1)])
        return ""


STEP_MS = {"eager": 30.0, "torch_compile": 20.0, "aot": 15.0}
LOSSES = {"eager": [5.0, 4.0], "torch_compile": [5.0, 4.0001], "aot": [5.0, 4.0]}


def compared(monkeypatch, config, **changes) -> tuple[int, dict[str, dict[str, str]], FakeEngines]:
    engines = FakeEngines(**{"step_ms": STEP_MS, "losses": LOSSES, **changes})
    monkeypatch.setattr(compare, "run_apart", engines)
    code = compare.run(config)
    with (Path(config.output_dir) / "compare.csv").open(newline="") as file:
        return code, {row["engine"]: row for row in csv.DictReader(file)}, engines


def test_equal_engines_pass_and_are_measured_against_eager(monkeypatch, config, capsys):
    code, rows, _ = compared(monkeypatch, config)
    assert code == 0
    assert [row["verdict"] for row in rows.values()] == ["reference", "equal", "equal"]
    assert float(rows["aot"]["speedup"]) == 2.0
    printed = capsys.readouterr().out
    assert "2.00x" in printed and "1.00 MiB" in printed and "dropout off" in printed
    page = Path(config.output_dir, "comparison.html")
    assert f"page: {page}" in printed
    assert "aot was fastest: 2.00x the speed of eager" in page.read_text(encoding="utf-8")
    assert "Measured on a processor, 2 threads." in printed and rows["aot"]["machine"] == "a processor, 2 threads"
    assert "Level: faster in one round, slower in another" in printed
    once = dataclasses.replace(config, compare=dataclasses.replace(config.compare, rounds=1))
    assert "One round has no spread" in compare.render([], "eager", once)


def test_a_difference_within_the_spread_is_called_level(monkeypatch, config):
    rounds = [{"eager": {"step_ms_median": 30.0}, "aot": {"step_ms_median": ms}} for ms in (29.0, 31.0, 28.0)]
    row = compare._row("aot", "eager", rounds, {}, {}, 0.01)
    assert compare._speed(row) == "1.03x [0.97, 1.07] level"
    row = compare._row("aot", "eager", rounds[::2], {}, {}, 0.01)
    assert compare._speed(row) == "1.05x [1.03, 1.07]"


def test_a_deviating_loss_fails(monkeypatch, config, capsys):
    code, rows, _ = compared(monkeypatch, config, losses={**LOSSES, "aot": [5.0, 4.1]})
    assert code == 1
    assert rows["aot"]["verdict"] == "deviates"
    assert "compare.loss_tolerance" in capsys.readouterr().out


def test_a_failing_engine_is_shown_with_its_error_and_not_run_again(monkeypatch, config, capsys):
    code, rows, engines = compared(monkeypatch, config, failing=["torch_compile"])
    assert code == 1
    assert (rows["torch_compile"]["verdict"], rows["aot"]["verdict"]) == ("failed", "equal")
    assert "no compiler here" in capsys.readouterr().out
    assert sum(run.engine.name == "torch_compile" for run in engines.runs) == 1


def test_without_the_reference_nothing_is_called_equal(monkeypatch, config):
    code, rows, _ = compared(monkeypatch, config, failing=["eager"])
    assert code == 1
    assert rows["aot"]["verdict"] == "not compared"


def test_a_reference_that_is_not_a_number_fails(monkeypatch, config):
    code, rows, _ = compared(monkeypatch, config, losses=dict.fromkeys(STEP_MS, [math.nan]))
    assert code == 1
    assert {row["verdict"] for row in rows.values()} == {"failed", "deviates"}


def test_runs_share_everything_but_the_engine(monkeypatch, config):
    _, _, engines = compared(monkeypatch, config)
    timed, losses = engines.runs[:6], engines.runs[6:]
    assert [run.engine.name for run in timed] == ["eager", "torch_compile", "aot", "torch_compile", "aot", "eager"]
    assert {run.seed for run in engines.runs} == {7}
    assert {run.verify.steps for run in engines.runs} == {0}
    assert {run.recipe.model.dropout for run in losses} == {0.0}
    assert {run.recipe.model for run in timed} == {config.recipe.model}
    assert {run.lr_schedule.total_steps for run in engines.runs} == {config.trainer.steps}
    assert len({run.output_dir for run in engines.runs}) == len(engines.runs)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 2.0], 0.0),
        ([1.0, 2.2], 0.1),
        ([1.0], math.inf),
        ([], math.inf),
        ([1.0, math.nan], math.inf),
        ([1.0, math.inf], math.inf),
    ],
)
def test_loss_error(losses, expected):
    assert compare.loss_error(losses, [1.0, 2.0]) == pytest.approx(expected)


def test_a_configuration_travels_unchanged(config, tmp_path):
    model = dataclasses.replace(config.recipe.model, num_layers=2, dropout=0.3)
    config = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, model=model), seed=2**40)
    dump(config, tmp_path / "config.json")
    assert load(tmp_path / "config.json") == config
