"""task=plan with strategies that are named on the command line."""

import json
import re

import pytest

from aottrain import __version__
from aottrain.cli import main
from aottrain.tasks import plan
from aottrain.tasks.building import build

TINY = ["task=plan", *(f"recipe.model.{key}" for key in ("width=32", "num_heads=2", "context=16")), "data.batch_size=2"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*overrides):
        code = main([*TINY, "recipe.model.num_layers=3", f"hydra.run.dir={tmp_path}/out", *overrides])
        return code, *capsys.readouterr()

    return call


def test_checkpoint_says_what_enters_each_block_and_draws_the_step(run, tmp_path):
    code, out, _ = run("partition=checkpoint")
    assert code == 0
    for part in ("enters model.blocks.1", "Memory over the step", "Alive at the top", "peak then", "optimizer"):
        assert part in out
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    graph = plan["graph"]
    assert graph["partition"] == "checkpoint" and graph["counts_workspaces"] and "live" not in graph["timeline"]
    assert any(value["peak_change"] is not None for value in graph["saved"])
    assert sum(graph["memory"].values()) == graph["predicted_peak_bytes"]
    assert '<path class="layer' in (tmp_path / "out" / "compile_report.html").read_text()


@pytest.mark.parametrize(("budget", "asked"), [("2GiB", "the budget is 2GiB, "), ("0.5", ""), ("auto", "")])
def test_it_says_that_a_step_fits(run, budget, asked):
    code, out, _ = run(f"partition.budget={budget}")
    line = next(line for line in out.splitlines() if line.startswith("memory "))
    assert code == 0
    assert re.fullmatch(rf"memory +fits: predicted peak [\d.]+ \w+; {asked}this machine has [\d.]+ GiB", line), line


def test_it_says_that_a_step_does_not_fit(run, monkeypatch):
    """Such as one that the optimizer's state alone brings above what there is."""
    monkeypatch.setattr(plan, "total_bytes", lambda device: 1 << 16)
    code, out, _ = run()
    assert code == 0 and re.search(r"^memory +does not fit: .*; this machine has 64.0 KiB$", out, re.MULTILINE)


def test_of_a_step_that_a_run_is_refused_for_the_plan_is_shown(run, tmp_path, monkeypatch):
    """As of a device that is not here."""
    code, out, _ = run("partition.budget=1000B")
    line = next(line for line in out.splitlines() if line.startswith("memory "))
    told = (
        r"the budget is 1000B, this machine has .*; a budget of 1000B cannot be met: the lowest peak that can be"
        r" reached is .* \((\d+)B\), and this is its plan"
    )
    match = re.search(f"fits: predicted peak .*; {told}", line)
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert code == 0 and match is not None and written["lowest_peak_bytes"] == int(match[1])
    assert written["graph"]["predicted_peak_bytes"] <= int(match[1])
    assert "Memory over the step" in out and (tmp_path / "out" / "plan.json").is_file()
    for name in ("aottrain.measure.workspaces._measure", "aottrain.measure.timings.timed"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(build, "total_bytes", lambda device: 1 << 17)
    monkeypatch.setattr(plan, "total_bytes", lambda device: 1 << 17)
    code, out, _ = run("data.batch_size=64", "hydra.run.dir=other")
    line = next(line for line in out.splitlines() if line.startswith("memory "))
    assert code == 0 and re.search("does not fit: predicted peak .*; this machine has 128 KiB; nothing was measu", line)
    assert "Memory over the step" in out and (tmp_path / "other" / "plan.json").is_file()


def test_a_policy_is_loaded_by_its_name(run):
    code, out, _ = run("partition=policy", "partition.target=tests.tasks.policies:save_products")
    assert code == 0 and "policy save_products" in out and "saved by save_products" in out
    assert "recomputed by save_products" in out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [  # those that only torch or the model's modules can tell come after the line that announces the import of torch
        (["partition=policy"], r"partition.target=null: .*ForwardValue -> save \| recompute \| free"),
        (["partition=policy", "partition.target=no.such:thing"], "target=no.such:thing: there is no module no "),
        (["partition=policy", "partition.target=json:dumps"], "the partition policy dumps, asked about .*raised"),
        (["partition=checkpoint", "partition.modules=[blcks.*]"], r"partition.modules=\[blcks.\*\]: no module"),
        (["partition=checkpoint", "recipe.model.num_layers=1"], "no repeated block"),
        (["partition=checkpoint", "partition.modules=blocks"], "partition.modules=blocks: must be a list"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(run, overrides, line):
    code, out, err = run(*overrides)
    first = f"aottrain {__version__}: plan transformer, engine aot, in out; loading torch\n"
    assert code == 2 and out in ("", first)
    mistakes = [text for text in err.splitlines() if re.search(line, text)]
    assert len(mistakes) == 1 and "Traceback" not in err


@pytest.mark.parametrize(("mode", "share"), [("ddp", 1), ("shard", 4)])
def test_processes_are_planned_for_of_which_none_is_started(run, tmp_path, mode, share):
    more = ["recipe.model.num_layers=1", "data.batch_size=8", "parallel.world=4", "parallel.latency=1e-3"]
    code, out, _ = run(f"parallel={mode}", "kernel=aten", *more)
    assert code == 0 and "planned for     the first of 4 processes, 1.00 ms and 954 MiB/s between them" in out
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    calls = plan["graph"]["collectives"]["calls"]
    assert "Collectives, by the cost model" in out and all(call["link_s"] >= 1e-3 for call in calls)
    held = plan["graph"]["memory"]["parameters"]
    assert plan["parameter_bytes"] <= share * held <= plan["parameter_bytes"] + 4 * 1024
    received = sum(call["num_bytes"] for call in calls if call["is_sum"])
    # Each takes in 3 of 4 parts of a sum that is cut, and of a whole sum twice as many.
    assert received == pytest.approx(plan["parameter_bytes"] * 3 / 4 * (2 if mode == "ddp" else 1), rel=0.01)


def test_replicas_of_parts_are_planned_for_each_with_a_link_of_its_own(run, tmp_path):
    more = ["recipe.model.num_layers=1", "data.batch_size=8", "parallel.world=8", "parallel.replicas=4"]
    code, out, _ = run("parallel=shard", "kernel=aten", *more, "parallel.latency=1e-3", "parallel.replica_latency=1e-2")
    assert code == 0 and "the first of 8 processes (4 replicas of 2 parts), 1.00 ms and 954 MiB/s between them" in out
    assert "10.0 ms and 954 MiB/s between replicas" in out
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    calls = plan["graph"]["collectives"]["calls"]
    between = [call for call in calls if call["call"].endswith(", copies)")]
    within = [call for call in calls if call["call"].endswith(", parts)")]
    assert len(between) + len(within) == len(calls) and all(call["link_s"] >= 1e-2 for call in between)
    assert all(1e-3 <= call["link_s"] < 1e-2 for call in within)
    size = plan["parameter_bytes"]
    assert size <= 2 * plan["graph"]["memory"]["parameters"] <= size + 2 * 1024
    cut = sum(call["num_bytes"] for call in within if call["is_sum"])
    assert cut == pytest.approx(size / 2, rel=0.01)
    # Of its half each takes in three quarters twice.
    assert sum(call["num_bytes"] for call in between) == pytest.approx(size / 2 * 3 / 4 * 2, rel=0.01)


@pytest.mark.parametrize(("more", "line"), [
    (["parallel=shard", "parallel.world=6", "parallel.replicas=4", "data.batch_size=6"], "must divide the 6 processes"),
    (["parallel=shard", "parallel.world=3"], "data.batch_size=2: must be a multiple of the 3 processes"),
    (["parallel=shard", "parallel.world=2", "device=h100-sxm"], "parallel.world=2: plans for processes of"),
    (["parallel=ddp", "parallel.world=1"], "parallel.world=1: must be a whole number >= 2"),
])  # fmt: skip
def test_processes_that_cannot_be_planned_for_are_refused(run, more, line):
    code, _, err = run(*more)
    assert code == 2 and line in err
