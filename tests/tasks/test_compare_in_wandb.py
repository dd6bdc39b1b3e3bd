"""A comparison as wandb has it: one group, a run for each engine, the same keys in all, read back from the files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aottrain.metrics.guest import BENCH
from aottrain.metrics.sinks import COLUMNS
from aottrain.tasks import compare
from tests.metrics.test_sinks import finished_records
from tests.tasks.test_compare_runs import run_here, small

pytest.importorskip("wandb", reason="wandb is not installed")


def keys(items) -> set[str]:
    return {"/".join(item.nested_key) or item.key for item in items}


def test_runs_of_a_comparison_share_a_group_and_log_the_same_keys(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(compare, "run_apart", run_here)
    sections = {"compare": {"engines": ["eager", "aot"], "steps": 2, "loss_steps": 1}}
    assert compare.run(small(tmp_path / "a", task="compare", logger={"name": "wandb"}, **sections)) == 0
    found = {}
    for engine in ("eager", "aot"):
        (folder,) = (tmp_path / "a" / engine / "timed" / "wandb").glob("offline-run-*")
        records = finished_records(Path(folder))
        (run,) = [record.run for record in records if record.HasField("run")][:1]
        assert (run.run_group, run.display_name) == ("compare-a", engine)
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["engine"]["name"] == engine
        logged = set().union(*(keys(record.history.item) for record in records if record.HasField("history")))
        last = set().union(*(keys(record.summary.update) for record in records if record.HasField("summary")))
        curves = {name for name in logged if name in COLUMNS or name == "trainer/step"}
        found[engine] = (curves, {name for name in last if name.startswith("bench/")})
    assert found["eager"] == found["aot"]
    rounds = small(tmp_path / "b", task="compare", compare={"rounds": 2})
    names = {compare.timed_config(rounds, engine, i).logger.run_name for engine in ("eager", "aot") for i in (0, 1)}
    assert len(names) == 4 and "aot, round 2" in names  # or a chart has two bars of one name
    curves, bench = found["aot"]
    assert bench == {f"bench/{name}" for name in BENCH}
    assert curves >= {"trainer/step", "train/loss", "train/grad_norm", "perf/step_ms", "memory/peak_bytes"}
