"""Runs on two machines that decide otherwise: stopped on one and gone on with on the other, as if it had been one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from aottrain.compiler.schedule import products as product_choice
from aottrain.errors import CheckpointError
from aottrain.explain.report import CompileReport
from aottrain.ir.settings.decisions import ATEN, Decision, Record, Timing, read_record
from aottrain.measure import stopwatch, timings
from aottrain.ops.products.libraries import choose_library
from aottrain.tasks import train
from aottrain.tasks.building.build import build_job
from aottrain.tasks.notes import unmeasured
from aottrain.toolchain.cache import Table
from aottrain.toolchain.native import find_compiler
from aottrain.trainer.checkpoint import load
from tests.explain.example import train_graph
from tests.trainer.test_run import same

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine"),
    pytest.mark.skipif(choose_library() is None, reason="this build of torch has no oneDNN"),
]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(name): from now on another one, with a cache of its own. On `first` each last candidate is the fastest,
    on `second` each first."""
    monkeypatch.delenv("AOTTRAIN_RATES")
    for name, least in (("_SMALLEST_FLOPS", 0), ("_LEAST_SIDE", 0.1), ("_FEWEST_TERMS", 0)):
        monkeypatch.setattr(product_choice, name, least)  # products of a tiny model are decided about, too
    monkeypatch.setattr(stopwatch, "is_busy", lambda: False)
    monkeypatch.setattr(stopwatch, "contradicts", lambda *_: False)

    def turn_to(name: str) -> None:
        def in_turns(runs, device):
            ranked = list(runs) if name == "second" else list(runs)[::-1]
            return {run: Timing(1e-9 * 4**place) for place, run in enumerate(ranked)}, False

        tables: dict[str, Table] = {}
        monkeypatch.setattr(stopwatch, "in_turns", in_turns)
        monkeypatch.setattr(timings, "_checked", set())
        monkeypatch.setattr(timings, "_busy", {})
        folder = tmp_path / f"cache of {name}"
        monkeypatch.setattr(
            timings, "_table", lambda kind, device: tables.setdefault(kind, Table(folder / f"{kind}.json"))
        )

    return turn_to


def choices(config, decisions=None):
    """What a compile here decides, and what runs then."""
    job = build_job(config, decisions)
    job.step.compile_for(job.batches.at(1)[0])
    return job.step.report.decisions, job.step.report.graphs[0].library_calls


@pytest.fixture
def config(tiny):
    changes = {"trainer": {"steps": 4, "save_every": 2}, "lr_schedule": {"total_steps": 4}, "verify": {"steps": 0}}
    made = tiny("aot", model={"num_layers": 1}, **changes)
    return dataclasses.replace(made, kernel=dataclasses.replace(made.kernel, name="cpp"))


def test_a_run_goes_on_bitwise_on_a_machine_that_decides_otherwise(config, machine, left_by, tmp_path):
    machine("first")
    assert train.run(config) == 0
    first, path = read_record(config.output_dir), Path(config.output_dir) / "checkpoints"
    assert first.by_question["products", "float32"].choice != ATEN
    assert {d.source for d in first.decisions if d.kind != "workspace bytes"} == {"measured"}

    machine("second")
    other, calls = choices(dataclasses.replace(config, output_dir=str(tmp_path / "other")))
    assert other.by_question["products", "float32"].choice == ATEN and other.fingerprint != first.fingerprint
    replayed, replayed_calls = choices(dataclasses.replace(config, decisions=config.output_dir))
    assert replayed == first and {d.source for d in replayed.decisions} == {"record"} and replayed_calls != calls

    second = dataclasses.replace(config, resume=str(path / "step_00000002.pt"), output_dir=str(tmp_path / "rest"))
    assert train.run(second) == 0
    assert read_record(second.output_dir) == first
    assert left_by(second).losses == left_by(config).losses[2:]
    whole, rest = (load(Path(run.output_dir) / "checkpoints" / "step_00000004.pt").state for run in (config, second))
    for part in ("model", "optimizer", "random"):
        assert same(whole[part], rest[part]), part
    assert rest["decisions"]["fingerprint"] == first.fingerprint in left_by(second).summary["decisions"]


def test_what_is_given_goes_before_the_checkpoint(config, tmp_path):
    loaded = load_like(tmp_path, {"decisions": {"format": 1, "decisions": []}})
    assert train.decisions_of(config, None) == "measured"
    assert train.decisions_of(config, loaded).decisions == ()
    assert train.decisions_of(dataclasses.replace(config, decisions="default"), loaded) == "default"
    assert train.decisions_of(config, load_like(tmp_path, {})) == "measured"  # one from before there were any
    with pytest.raises(CheckpointError, match="no record of decisions"):
        train.decisions_of(config, load_like(tmp_path, {"decisions": {"format": 7}}))


def load_like(folder, state):
    torch.save({"format": 1, "step": 1, **state}, folder / "step_00000001.pt")
    return load(folder / "step_00000001.pt")


def test_without_the_clock_two_machines_decide_alike(config, machine, tmp_path):
    deterministic = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, deterministic=True))
    found = []
    for name in ("first", "second"):
        machine(name)
        found.append(choices(deterministic))
    assert found[0] == found[1] and not (tmp_path / "cache of second").exists()
    assert {d.source for d in found[0][0].decisions if d.kind != "workspace bytes"} == {"model"}
    assert json.dumps(found[0][0].to_dict())


@pytest.mark.parametrize(("source", "is_told"), [("busy", True), ("model", False), ("shared", False)])
def test_where_the_machine_was_busy_a_line_says_what_to_do(source, is_told):
    report = CompileReport(
        [dataclasses.replace(train_graph(), decisions=Record((Decision("products", "a", ATEN, source),)))]
    )
    (line,) = unmeasured(report)
    again = (
        "(decisions.json); start it again while the machine is quiet, or give decisions=<a run that has measured them>"
    )
    assert line.endswith(again if is_told else "(decisions.json)")
