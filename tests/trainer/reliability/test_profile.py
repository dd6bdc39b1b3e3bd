"""profile=memory: each allocation of some steps, as the allocator itself tells them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aottrain.config.run import MeasureConfig, RunConfig, TrainerConfig
from aottrain.tasks import train
from aottrain.trainer.reliability.profile import StepProfile


def test_on_a_cpu_the_trace_has_the_allocator_s_bytes(tiny, left_by, capsys):
    config = tiny(trainer={"steps": 6}, profile="memory")
    assert train.run(config) == 0
    path = left_by(config).directory / "memory.json"
    assert f"profile: {path}" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("step ") and event["ph"] == "X"]
    assert sorted(set(steps)) == ["step 3", "step 4", "step 5"]
    changes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    logits = 4 * 16 * 256 * 4  # of four examples of sixteen bytes, as float32
    assert changes.count(logits) >= 3 and changes.count(-logits) >= 3


def test_on_cuda_the_history_is_kept_and_written_and_again_where_memory_runs_out(tmp_path, monkeypatch):
    """By stand-ins for the two functions of torch: there is no device."""
    calls, said = [], []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **more: calls.append(more))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("kept"))
    config = RunConfig(profile="memory", trainer=TrainerConfig(steps=20))
    profile = StepProfile(config, 0, tmp_path, said.append, "cuda")
    for step in range(1, 21):
        with profile.watch(step):
            pass
    profile.note_out_of_memory(20)
    paths = [tmp_path / "memory.pickle", tmp_path / "memory_at_20.pickle"]
    assert calls == [{"max_entries": 100_000}] and said == [f"profile: {path}" for path in paths]
    assert [path.read_text() for path in paths] == ["kept", "kept"] and sorted(tmp_path.iterdir()) == paths


@pytest.mark.parametrize("asked", [None, "step"])
def test_nothing_is_kept_that_was_not_asked_for(asked, tmp_path, monkeypatch):
    kept, said = [], []
    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.setattr(torch.cuda.memory, name, lambda *args, **more: kept.append((args, more)))
    config = RunConfig(profile=asked, trainer=TrainerConfig(steps=6))
    profile = StepProfile(config, 0, tmp_path, said.append, "cuda")
    for step in range(1, 7):
        with profile.watch(step):
            torch.ones(2).sin()
    profile.note_out_of_memory(6)
    written = ["profile.json", "trace.json"] if asked else []
    assert kept == [] and sorted(path.name for path in tmp_path.iterdir()) == written and len(said) == len(written)


@pytest.mark.parametrize(("steps", "start", "memory", "profiled"), [
    (20, 0, True, [7, 8, 9]), (20, 10, True, [17, 18, 19]), (8, 0, True, [7, 8]), (7, 0, True, [7]),
    (6, 0, True, [3, 4, 5]), (2, 0, True, [1]), (1, 0, True, []), (1, 0, False, [1]), (3, 0, False, [1, 2, 3]),
    (6, 6, True, []),
])  # fmt: skip
def test_the_step_whose_memory_is_measured_is_not_profiled(steps, start, memory, profiled, tmp_path):
    """It is under a profiler of its own; a run of few steps ended by a fault of memory."""
    config = RunConfig(profile="step", trainer=TrainerConfig(steps=steps), measure=MeasureConfig(memory=memory))
    said = []
    assert list(StepProfile(config, start, tmp_path, said.append)._steps) == profiled
    assert len(said) == (not profiled and start < steps)


def test_a_run_of_few_steps_leaves_its_profile(tiny, left_by):
    config = tiny(trainer={"steps": 3}, profile="step", measure={"memory": True, "warmup_steps": 1})
    assert train.run(config) == 0
    table = json.loads((left_by(config).directory / "profile.json").read_text())
    assert table["steps"] == 1 and left_by(config).summary["peak_bytes"]
