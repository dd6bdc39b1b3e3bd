"""What a sweep makes of its jobs, without running any."""

from __future__ import annotations

import json
import sys

import pytest

from aottrain.cli import main, sweeps
from aottrain.cli.jobs import Outcome, SweepJob, _describe, run_sweep


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


def test_a_job_is_described_by_its_summary(tmp_path):
    outcome = Outcome(SweepJob(0, {}, tmp_path, []), exit_code=0)
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", "last_loss": 1.5, "peak_bytes": None}))
    _describe(outcome, interrupted=False)
    assert (outcome.status, outcome.figures) == ("finished", {"last_loss": 1.5})


def test_the_folder_of_a_sweep_is_made_with_those_above_it_and_may_be_there(tmp_path):
    assert run_sweep([], tmp_path / "a" / "b") == 0
    assert run_sweep([], tmp_path / "a" / "b") == 0
    assert (tmp_path / "a" / "b").is_dir()
