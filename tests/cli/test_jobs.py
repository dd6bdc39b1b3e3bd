"""What a sweep makes of its jobs, without running any."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest

from aottrain.cli import main, sweeps
from aottrain.cli.jobs import Outcome, Supply, SweepJob, _describe, run_sweep


@pytest.fixture
def jobs_of(tmp_path, monkeypatch):
    """The jobs of a command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*line: str) -> list[SweepJob]:
        planned = []
        monkeypatch.setattr(sweeps, "run_sweep", lambda jobs, *_: planned.extend(jobs) or 0)
        assert main(["-m", "hydra.sweep.dir=all", *line]) == 0
        return planned

    return call


@pytest.mark.parametrize(("line", "variable", "grouped"), [
    (["seed=1,2"], None, True),
    (["seed=1,2"], "mine", False),  # wandb's own variable names the group
    (["seed=1,2", "logger.group=mine"], None, False),
    (["seed=1,2", "logger.mode=disabled"], None, False),  # a group of nothing
    (["seed=1,2", "logger=csv"], None, False),
])  # fmt: skip
def test_jobs_that_are_logged_share_a_group(jobs_of, monkeypatch, line, variable, grouped):
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_RUN_GROUP", variable)
    assert [('logger.group="sweep-all"' in job.arguments) for job in jobs_of(*line)] == [grouped] * 2


def test_a_job_knows_what_it_judges_by(jobs_of, tmp_path):
    (tmp_path / "judged.py").write_text(
        "from recipes.vit import *\nfrom recipes.vit import Options, build, loss, make_batch\n"
        "def metrics(model, batch):\n    return {'accuracy': 1.0}\n"
    )
    line = ["recipe.target=judged", "trainer.keep_best=true", "trainer.judge_by=accuracy:max", "logger=csv"]
    assert [job.judge_by for job in jobs_of(*line, "seed=1,2")] == ["accuracy:max"] * 2
    assert [job.judge_by for job in jobs_of("seed=1,2")] == ["loss"] * 2


def test_a_job_is_called_by_what_the_jobs_differ_in(jobs_of):
    line = ["logger=csv", "trainer.steps=3"]
    assert [job.title for job in jobs_of(*line, "seed=1,2")] == ["seed=1", "seed=2"]
    assert [job.title for job in jobs_of(*line, "seed=1")] == ["logger=csv trainer.steps=3 seed=1"]


def test_a_job_is_described_by_its_summary(tmp_path):
    outcome = Outcome(SweepJob(0, {}, tmp_path, []), exit_code=0)
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "last_loss": 1.5, "peak_bytes": None}))
    _describe(outcome, interrupted=False)
    assert (outcome.status, outcome.figures) == ("finished", {"last_loss": 1.5})


FLOPS = {"forward": 200, "backward": 400, "recompute": 50}
HERE = {"compile_s": 1.5, "flops_per_step": FLOPS, "graph": {"predicted_peak_bytes": 4096, "saved_bytes": 2048}}
ROW = {"allocated_peak_bytes": 4096, "saved_bytes": 2048, "flops_per_step": FLOPS, "step_s": 0.25, "verdict": "fits"}


@pytest.mark.parametrize(("plan", "line"), [
    (HERE, "finished  1.50 s     2.00 KiB  4.00 KiB        25.0 %"),
    (
        {"rows": [ROW, {"verdict": "too large"}]},
        "finished  2.00 KiB  4.00 KiB        25.0 %                    250 ms          fits",
    ),
])  # fmt: skip
def test_a_plan_is_a_line_of_the_table_and_pages_go_to_its_log(tmp_path, capsys, plan, line):
    """Three plans printed 501 lines."""
    quiet = []

    def start(job, running, is_quiet):
        (job.directory / "plan.json").write_text(json.dumps(plan))
        quiet.append(is_quiet)
        ended = subprocess.Popen([sys.executable, "-c", ""])
        running.processes.append(ended)
        return ended

    jobs = [SweepJob(i, {"seed": str(i)}, tmp_path / str(i), [], prints_pages=True) for i in range(2)]
    assert run_sweep(jobs, tmp_path, start=start) == 0
    printed = capsys.readouterr().out.splitlines()
    assert quiet == [True, True] and [text for text in printed if text.endswith(line)] == printed[-4:-2]
    assert printed[-1].startswith("each job's whole plan: aottrain.log")
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [(row["planned_peak_bytes"], row["recompute_percent"]) for row in rows] == [("4096", "25.0")] * 2


def test_plans_alone_print_pages(jobs_of):
    assert [job.prints_pages for job in jobs_of("task=plan,train")] == [True, False]


def test_the_folder_of_a_sweep_is_made_with_those_above_it_and_may_be_there(tmp_path):
    assert run_sweep([], tmp_path / "a" / "b") == 0
    assert run_sweep([], tmp_path / "a" / "b") == 0
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(("losses", "told"), [
    ((2.5, 2.0, 3.0), "lowest held-out loss: 2.0000, job 1 (seed=1)\n"),
    ((2.5, 2.00001, 2.0), "lowest held-out loss: 2.0000, job 1 (seed=1), job 2 (seed=2) tie\n"),
    ((2.0, 2.0, 2.0), "held-out loss: all 3 jobs that have one tie, at 2.0000\n"),
    ((2.0,), ""),
])  # fmt: skip
def test_of_several_jobs_with_the_lowest_loss_none_is_named_alone(tmp_path, losses, told):
    supply = Supply([SweepJob(number, {"seed": str(number)}, tmp_path, []) for number in range(len(losses))])
    for outcome, loss in zip(supply.outcomes, losses, strict=True):
        outcome.figures["best_val_loss"] = loss
    assert supply.verdict() == told


@pytest.mark.parametrize(("judges", "told"), [
    (["accuracy:max"] * 3, "highest held-out accuracy: 0.75, job 0 (seed=0)\n"),
    (["accuracy:min"] * 3, "lowest held-out accuracy: 0.5, job 1 (seed=1), job 2 (seed=2) tie\n"),
    (["accuracy:max", "loss", "accuracy:max"], "lowest held-out loss: 1.0000, job 2 (seed=2)\n"),
    (["error:min"] * 3, ""),
])  # fmt: skip
def test_the_best_job_is_the_best_by_what_all_judge_by(tmp_path, judges, told):
    jobs = [SweepJob(i, {"seed": str(i)}, tmp_path, [], judge_by=judge) for i, judge in enumerate(judges)]
    supply = Supply(jobs)
    for outcome, loss, accuracy in zip(supply.outcomes, (3.0, 2.0, 1.0), (0.75, 0.5, 0.500001), strict=True):
        outcome.figures |= {"best_val_loss": loss, "val/accuracy": accuracy, "val/error": None}
    assert supply.verdict() == told
