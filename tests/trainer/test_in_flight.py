"""Checks in flight, the flight record, and the profile of some steps."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from aottrain.config.run import VerifyConfig
from aottrain.errors import NumericsError
from aottrain.metrics.throughput import utilisation
from aottrain.tasks import train
from aottrain.trainer.parallel.world import ALONE
from aottrain.trainer.reliability import sentinel as sentinels
from aottrain.trainer.reliability.profile import where_time_goes
from aottrain.trainer.reliability.sentinel import Sentinel
from tests.trainer.test_going_back import spoiled  # noqa: F401

ALWAYS = {"verify": {"every": 2, "share": 1.0}, "trainer": {"steps": 6}}
KERNEL = {"kernel": {"name": "cpp"}, "decisions": "default"}


def test_checks_in_flight_change_nothing_and_are_in_the_figures(tiny, left_by, tmp_path):
    runs = [tiny("aot", output_dir=str(tmp_path / "a"), trainer={"steps": 6}), tiny("aot", **ALWAYS)]
    for config in runs:
        assert train.run(config) == 0
    plain, checked = map(left_by, runs)
    assert plain.losses == checked.losses
    assert [bool(row["verify/max_error"]) for row in checked.rows] == [True, True, False, True, False, True]
    assert checked.summary["verify_checks"] == 4 and plain.summary["verify_checks"] == 1
    errors = [float(row["verify/max_error"]) for row in checked.rows if row["verify/max_error"]]
    drift = errors[-1] / errors[0] if errors[0] else None
    assert checked.summary["verify_drift"] == (drift and pytest.approx(drift, rel=1e-3))


def plant_wrong_gradients(monkeypatch):
    """A kernel of ours whose every gradient is too large, from the third call on."""
    from aottrain.tasks.building import rungs

    true, calls = rungs.ModuleStep.__call__, []

    def wrong(step, batches):
        result = true(step, batches)
        calls.append(1)
        if len(calls) > 4 and step.rungs is not None and step.rungs.changes.get("kernel") is None:
            for parameter in step.module_parameters():
                parameter.grad *= 1.01
        return result

    monkeypatch.setattr(rungs.ModuleStep, "__call__", wrong)
    monkeypatch.setattr(
        rungs.ModuleStep, "module_parameters", lambda step: list(step.rungs.module.parameters()), raising=False
    )


def test_a_breach_ends_the_run_or_falls_back_as_configured(tiny, left_by, monkeypatch, capsys):
    plant_wrong_gradients(monkeypatch)
    with pytest.raises(NumericsError, match="step 4: the compiled gradient of"):
        train.run(tiny("aot", **ALWAYS, **KERNEL))
    more = {"verify": {**ALWAYS["verify"], "on_breach": "fallback"}, "trainer": ALWAYS["trainer"]}
    plant_wrong_gradients(monkeypatch)
    assert train.run(tiny("aot", **more, **KERNEL)) == 0
    printed = capsys.readouterr().out
    assert "verify.on_breach=fallback: PyTorch's operators run in the plan's order from now on" in printed
    assert "verified step 6 against eager" in printed


def fake_clock(monkeypatch, step_s: float, check_s: float):
    now = [0.0]
    monkeypatch.setattr(sentinels.time, "perf_counter", lambda: now[0])
    said, checked = [], []

    def check(step, batches):
        now[0] += check_s
        checked.append(step)
        return SimpleNamespace(max_error=1e-6 * len(checked))

    job = SimpleNamespace(step=SimpleNamespace(engine="aot", rungs=None), module=SimpleNamespace(world=ALONE))
    watch = Sentinel(job, VerifyConfig(steps=1, every=10, share=0.05), 0, check, said.append)
    for step in range(1, 501):
        watch.look(step, [], [step_s * 1e3])
        now[0] += step_s
    return watch, checked, said


def test_its_share_of_the_time_is_bounded_and_known_beforehand(monkeypatch):
    watch, checked, said = fake_clock(monkeypatch, 1.0, 2.0)
    in_flight = len(checked) - 1
    assert 0.04 < in_flight * 2.0 / (500 + 2 * len(checked)) <= 0.051 and all(step % 10 == 0 for step in checked[1:])
    (line,) = said
    assert line.startswith("a check takes 2.00 s, every 10 steps 16.7 % of the time; verify.share=0.05 makes it ")
    assert line.endswith("about every 38 steps")
    assert watch.drift == pytest.approx(len(checked))
    _, checked, said = fake_clock(monkeypatch, 1.0, 0.1)
    assert checked[2:] == list(range(20, 501, 10)) and len(said) == 1
    assert said[0].startswith("a check takes 100") and said[0].endswith("every 10 steps 0.99 % of the time")


def test_a_run_that_dies_leaves_a_flight_record(tiny, spoiled):  # noqa: F811
    spoiled({104: math.nan})
    config = tiny(trainer={"steps": 110, "log_every": 20})
    with pytest.raises(NumericsError):
        train.run(config)
    with open(f"{config.output_dir}/flight.json", encoding="utf-8") as file:
        record = json.load(file)
    assert record["error"].startswith("NumericsError: step 104: the loss is nan")
    assert [row["step"] for row in record["steps"]] == list(range(5, 105))
    assert record["steps"][-2]["train/loss"] > 0 and record["steps"][-1]["train/loss"] is None


def test_a_profile_names_each_generated_kernel_with_its_module_and_line(tiny, left_by):
    config = tiny("aot", trainer={"steps": 7}, profile="step", **KERNEL)
    assert train.run(config) == 0
    events = json.loads((left_by(config).directory / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {"step 3", "step 4", "step 5"} <= names and "step 6" not in names
    assert any("blocks.0" in name and "transformer.py:" in name for name in names)
    told = json.loads((left_by(config).directory / "profile.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in told["rows"]}
    assert told["steps"] == 3 and len(rows) <= 20
    assert "Python, and what else has no name" in rows and any(name.startswith("aten::") for name in rows)
    kernels = [row for row in rows.values() if "bytes" in row]
    assert kernels and all(row["bytes"] > 0 and row["computes"] and row["calls"] % 1 == 0 for row in kernels)
    spans = [event["dur"] / 1e6 for event in events if event.get("name") in ("step 3", "step 4", "step 5")]
    assert told["seconds"] == pytest.approx(sum(spans) / 3, rel=0.1), "what is in a step counts once, the rest not"
    page = (left_by(config).directory / "run.html").read_text(encoding="utf-8")
    assert "Where time goes" in page and kernels[0]["name"].replace("_", "_<wbr>") in page


def event(name, start, end, own, *, device=DeviceType.CPU, annotation=False):
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), self_cpu_time_total=own,
        self_device_time_total=own, device_type=device, is_user_annotation=annotation,
    )  # fmt: skip


def test_what_runs_between_steps_is_not_where_their_time_goes():
    steps = [event("step 3", 0, 100, 10), event("step 4", 200, 300, 20)]
    work = [event("aten::mm", 5, 65, 60), event("aten::mm", 205, 245, 40), event("aten::check", 120, 190, 70)]
    table = where_time_goes([*steps, *work], None)
    assert table["steps"] == 2 and table["seconds"] == pytest.approx(65e-6)
    found = [(row["name"], row["calls"], round(row["seconds"] * 1e6)) for row in table["rows"]]
    assert found == [("aten::mm", 1.0, 50), ("Python, and what else has no name", 1.0, 15)]
    kernels = [event("triton_kernel", 400, 430, 30, device=DeviceType.CUDA)]  # a device works on after a step's end
    ranges = [event("step 3", 0, 430, 99, device=DeviceType.CUDA, annotation=True)]
    table = where_time_goes([*steps, *work, *kernels, *ranges], None)
    assert [(row["name"], round(row["seconds"] * 1e6)) for row in table["rows"]] == [("triton_kernel", 15)]


def test_the_share_of_a_device_s_peak_is_told_where_the_peak_is_known():
    assert utilisation(494.7e12, "NVIDIA H100 80GB HBM3", "bf16") == pytest.approx(0.5, rel=1e-3)
    assert utilisation(1e12, "AMD EPYC", "bf16") is None
    assert utilisation(None, "NVIDIA H100 80GB HBM3", "bf16") is None
