"""The curve of budgets: which runs are dominated, where the knee is, and one real run of a very small model."""

import csv
import json
from pathlib import Path

import pytest

from aottrain.errors import BudgetError
from aottrain.measure.machine import describe_machine
from aottrain.report.charts import WIDTHS
from aottrain.tasks import pareto
from aottrain.tasks.measuring.pareto_points import (
    Point,
    Ratio,
    beaten,
    dominated,
    equal_peak_verdicts,
    judged,
    knee,
    planned_peak,
    predicted_line,
)
from aottrain.tasks.measuring.runs_in_turns import RunError, timed_training
from aottrain.tasks.pareto import matching, peers, point_config
from tests.tasks.test_compare_runs import ROOT, run_here, small


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(1, 3), (2, 2), (3, 1)], [False, False, False]),
        ([(1, 3), (2, 3), (1, 4), (2, 2)], [False, True, True, False]),
        ([(1, 1), (1, 1)], [False, False]),
        ([(1, 1), None, (2, 2)], [False, False, True]),
        ([None], [False]),
        ([], []),
    ],
)
def test_dominated(places, expected):
    assert dominated(places) == expected


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(0, 10), (1, 4), (5, 2), (10, 0)], 1),
        ([(10, 0), (5, 2), (1, 4), (0, 10)], 2),
        ([(0, 1000), (1, 400), (5, 200), (10, 0)], 1),  # units do not matter
        ([(0, 10), (1, 11), None, (3, 2), (10, 0)], 3),  # neither dominated nor missing
        ([(0, 10), (5, 5), (10, 0)], None),  # on the line
        ([(0, 10), (5, 9), (10, 0)], None),  # above it
        ([(0, 10), (10, 0)], None),
        ([(1, 1), (1, 1), (1, 1)], None),
        ([], None),
    ],
)
def test_knee(places, expected):
    assert knee(places) == expected


def at(name: str, engine: str, peak: int, *round_ms: float, backend: str = "", budget: float | None = None) -> Point:
    return Point(name, engine, budget, backend=backend, peak_bytes=peak).timed(round_ms)


def test_engines_dominate_but_are_no_knee():
    points = [
        at("eager", "eager", 2, 2.0, 4.0),
        at("budget-1", "aot", 10, 1.0, 1.0),
        at("budget-0.5", "aot", 3, 4.0, 4.0),
        at("budget-0", "aot", 1, 10.0, 10.0),
        Point("failed", "aot", 0.1, error="no memory"),
    ]
    found = judged(points)
    assert [point.dominated for point in found] == [False, False, True, False, False]
    assert [point.knee for point in found] == [False, False, True, False, False]
    # Ratios within each round, not of the medians.
    assert [point.speedup for point in found] == [1.0, 3.0, 0.75, pytest.approx(0.3), None]
    assert (found[1].speedup_min, found[1].speedup_max) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.5, 0.9, "faster"), (0.9, 1.0, "level"), (0.9, 1.1, "level"), (1.0, 1.1, "level"), (1.1, 1.2, "slower")],
)
def test_a_difference_within_the_spread_of_the_rounds_is_none(low, high, verdict):
    assert Ratio(low, low, high).verdict == verdict


def test_a_difference_within_the_spread_beats_nothing():
    points = [
        at("eager", "eager", 1000, 10.0, 10.0, 10.0),
        at("faster once", "aot", 1000, 9.0, 11.0, 9.0),
        at("always faster", "aot", 995, 9.0, 9.5, 9.8),
        at("level in less", "aot", 500, 8.9, 10.5, 9.9),
        at("slower in less", "aot", 400, 9.5, 11.5, 12.0),
    ]
    found = [[beaten([point, other])[0] for other in points if other is not point] for point in points]
    assert found[0] == [False, True, True, False]  # eager, beaten in every round, and in less memory by the median
    assert found[1] == [False, False, True, False]
    assert found[2] == [False, False, False, False]  # level in half the memory, but slower by the median
    assert found[3] == found[4] == [False] * 4
    speeds = {point.name: pareto._speed(point) for point in judged(points)}
    assert speeds["eager"] == "1.00x" and speeds["faster once"] == "1.11x [0.91, 1.11] level"
    assert speeds["always faster"] == "1.05x [1.02, 1.11]"


def test_one_round_says_so():
    lines = equal_peak_verdicts([at("eager", "eager", 1000, 10.0), at("ours", "aot", 1000, 9.0)])
    assert lines[0].endswith("takes 0.90x of its time: faster, in one round")


def test_verdicts_at_equal_peaks():
    points = [
        at("eager", "eager", 1000, 10.0, 10.0, 10.0),
        at("blocks", "eager_checkpoint", 500, 13.0, 14.0, 15.0),
        at("torch-1.0", "torch_compile", 600, 12.0, 12.0, 12.0, backend="aot_eager"),
        at("torch-0.5", "torch_compile", 200, 20.0, 20.0, 20.0, backend="aot_eager"),
        at("torch-0.0", "torch_compile", 700, 21.0, 21.0, 21.0, backend="aot_eager"),  # its own sweep beats it
        at("fused", "torch_compile", 700, 5.0, 5.0, 5.0, backend="inductor"),
        at("roomy", "aot", 1005, 9.0, 10.0, 11.0),  # within the tolerance of eager's
        at("tight", "aot", 500, 12.0, 12.0, 12.0),
        Point("failed", "aot", error="no memory"),
    ]
    lines = equal_peak_verdicts(points)
    starts = ["eager", "blocks", "torch-1.0", "torch-0.5", "fused"]
    assert [line.split(" (")[0] for line in lines] == [f"at the peak of {name}" for name in starts]
    assert lines[0].endswith("roomy (0.98 KiB) takes 1.00x [0.90, 1.10] of its time: level")
    assert lines[1].endswith("tight (500 B) takes 0.86x [0.80, 0.92] of its time: faster")
    assert lines[3].endswith("no run of ours is as low")
    assert lines[4].endswith("takes 2.40x of its time: slower")


CURVE = [(1000, 0.0), (800, 0.1), (700, 0.05), (400, 0.3)]


def test_the_plan_that_a_peak_chooses():
    assert [planned_peak(CURVE, size) for size in (2000, 999, 699, 399)] == [1000, 700, 400, None]


def test_peaks_of_others_are_matched_once():
    points = [
        at("eager", "eager", 1005, 1.0),
        at("a", "torch_compile", 650, 1.0, backend="inductor"),
        at("b", "torch_compile", 600, 1.0, backend="inductor"),  # the same plan of ours
        at("c", "torch_compile", 300, 1.0, backend="inductor"),  # no plan of ours
        Point("budget-1.0", "aot", 1.0, predicted_peak_bytes=1000, peak_bytes=1000),  # eager's is this one
    ]
    assert [(point.name, point.budget) for point in matching(points, CURVE)] == [("budget-650B", "650B")]


def test_every_peer_is_configured_as_named(tmp_path):
    settings = {"torch_backends": ["aot_eager"], "torch_budgets": [1.0, 0.2]}
    config = small(tmp_path, task="pareto", pareto=settings)
    points = peers(config)
    assert [point.name for point in points] == ["eager", "eager_checkpoint", "aot_eager-1.0", "aot_eager-0.2"]
    engines = [point_config(config, point).engine for point in points]
    assert [engine.name for engine in engines] == ["eager", "eager_checkpoint", "torch_compile", "torch_compile"]
    assert (engines[3].backend, engines[3].activation_memory_budget) == ("aot_eager", 0.2)
    assert point_config(config, Point("x", "aot", "300MiB")).partition.budget == "300MiB"


def test_the_predicted_line_starts_at_the_roomiest_budget():
    points = [
        Point("eager", "eager", peak_bytes=300, step_ms_median=50.0),
        Point("budget-0", "aot", 0.0, predicted_peak_bytes=100, step_ms_median=90.0),
        Point("budget-1", "aot", 1.0, predicted_peak_bytes=210, step_ms_median=60.0),
    ]
    line = predicted_line(points, [(250, 0.0), (200, 0.01), (100, 0.04)])
    assert line == [(250, pytest.approx(0.05)), (200, pytest.approx(0.06)), (100, pytest.approx(0.09))]
    assert predicted_line(points[:1], [(250, 0.0)]) == [] and predicted_line(points, []) == []


def test_a_small_run(tmp_path, monkeypatch, capsys, quick_children):
    """What is timed in processes of its own, as always; the plan in this."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pareto, "run_apart", run_here)
    settings = {"budgets": [0.0], "engines": ["eager"], "rounds": 2, "steps": 2}
    assert pareto.run(small(tmp_path, task="pareto", pareto=settings)) == 0
    with (tmp_path / "pareto.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    matched = next(name for name in rows if name not in ("eager", "budget-0.0"))
    assert list(rows) == ["eager", matched, "budget-0.0"]
    eager, roomy, tight = rows.values()
    assert int(tight["predicted_peak_bytes"]) < int(roomy["predicted_peak_bytes"])
    assert int(tight["saved_bytes"]) < int(roomy["saved_bytes"]) <= int(eager["saved_bytes"])
    # Eight bytes of an op that returns a number are not predicted.
    assert int(tight["peak_bytes"]) < int(roomy["peak_bytes"]) <= int(eager["peak_bytes"]) + 64
    assert all(len(row["round_ms"].split()) == 2 for row in rows.values())
    peaks = [peak for peak, _ in json.loads((tmp_path / "plan" / "plan.json").read_text())["graph"]["curve"]]
    assert {int(row["predicted_peak_bytes"]) for row in (roomy, tight)} <= set(peaks)
    page = (tmp_path / "pareto.html").read_text()
    assert page.count('<path class="point') == 3 * len(WIDTHS) and "<polyline" in page and "budget-0.0" in page
    assert "whisker" in page and "an axis need not begin at zero" in page
    top = page.partition('class="verdict"')[2].partition("</section>")[0]
    assert "budget-0.0 needed least memory" in top and ("was fastest" in top or "level" in top)
    printed = capsys.readouterr().out
    machine = describe_machine().partition(", 20")[0]
    assert f"Measured on {machine}" in printed and f"Measured on {machine}" in page and "0.00 %" not in printed + page
    assert machine in eager["machine"] and machine in (tmp_path / "plan" / "plan.json").read_text()
    assert "predicted peak" in printed and "at the peak of eager" in printed


def test_a_budget_that_no_plan_meets_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(pareto, "_predicted_curve", lambda config: ([(4096, 0.0), (2048, 1.0)], ""))
    planned = []

    def run_apart(config):
        planned.append(config.partition.budget)
        Path(config.output_dir).mkdir()
        (Path(config.output_dir) / "plan.json").write_text('{"lowest_peak_bytes": 1536}')
        return ""

    monkeypatch.setattr(pareto, "run_apart", run_apart)
    config = small(tmp_path, task="pareto", pareto={"budgets": [1.0, "2KiB", "1.4KiB", "1KiB"]})
    with pytest.raises(BudgetError, match=r"pareto.budgets: 1.4KiB, 1KiB: .* lowest peak of any plan is 1.50 KiB"):
        pareto.run(config)
    assert planned == ["1KiB"] and [each.name for each in tmp_path.iterdir()] == ["plan_lowest"]


class FakeRun:
    """A run that is told to fail where its engine says so."""

    log: list[str] = []

    def __init__(self, config):
        self.config, self.name = config, Path(config.output_dir).name

    def start(self):
        if self.config.engine.name == "eager":
            raise RunError("RuntimeError: no compiler here")
        figures = {"compile_s": 1.0, "saved_bytes": 1, "fallbacks": 0, "predicted_peak_bytes": 10, "peak_bytes": 10}
        self.log.append(f"start {self.name}")
        return figures

    def time(self, steps):
        self.log.append(self.name)
        if self.name == "budget-0.2":
            raise RunError("ended by signal SIGKILL")
        return [1.0, 2.0, 60.0]

    def close(self):
        self.log.append(f"close {self.name}")


@pytest.mark.parametrize("take_turns", [True, False])
def test_runs_that_fail_are_shown_and_leave_the_others_alone(tmp_path, monkeypatch, capsys, take_turns):
    monkeypatch.setattr(pareto, "run_apart", lambda config: "RuntimeError: no plan")
    monkeypatch.setattr(pareto, "timed_training", FakeRun)
    monkeypatch.setattr(FakeRun, "log", [])
    settings = {"budgets": [0.4, 0.2], "engines": ["eager"], "rounds": 3, "take_turns": take_turns}
    assert pareto.run(small(tmp_path, task="pareto", pareto=settings)) == 1
    printed = capsys.readouterr().out
    assert "eager failed: RuntimeError: no compiler here" in printed and "no predicted curve: RuntimeError" in printed
    assert "budget-0.2 failed: ended by signal SIGKILL" in printed
    a, b = "budget-0.4", "budget-0.2"
    alone = [f"start {a}", a, a, a, f"close {a}", f"start {b}", b, f"close {b}"]
    turns = [f"start {a}", f"start {b}", a, b, f"close {b}", a, a, f"close {a}"]
    assert FakeRun.log == ["close eager", *(turns if take_turns else alone)]
    with (tmp_path / "pareto.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert rows["budget-0.4"]["round_ms"] == "2.000 2.000 2.000" and rows["budget-0.2"]["step_ms_median"] == ""


def test_a_process_that_ends_says_why(tmp_path, monkeypatch, quick_children):
    monkeypatch.chdir(ROOT)
    config = small(tmp_path, kernel={"name": "custom", "target": "tests.tasks.wrong_kernel:absent"})
    run = timed_training(config)
    with pytest.raises(RunError, match="ConfigError: kernel.target=tests.tasks.wrong_kernel:absent"):
        run.start()
    with pytest.raises(RunError, match="has ended"):
        run.time(1)
    run.close()
