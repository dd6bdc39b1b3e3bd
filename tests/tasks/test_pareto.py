"""The curve of budgets: which runs are dominated, where the knee is, and one real run of a very small model."""

import csv
import json
from pathlib import Path

import pytest

from aottrain.config import RunConfig
from aottrain.tasks import pareto
from aottrain.tasks.pareto import Point, dominated, judged, knee, predicted_line
from tests.tasks.test_compare_runs import ROOT, small


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


def test_engines_dominate_but_are_no_knee():
    points = [
        Point("eager", "eager", peak_bytes=2, step_ms_median=2.0),
        Point("budget-1", "aot", 1.0, peak_bytes=10, step_ms_median=1.0),
        Point("budget-0.5", "aot", 0.5, peak_bytes=3, step_ms_median=4.0),
        Point("budget-0", "aot", 0.0, peak_bytes=1, step_ms_median=10.0),
        Point("failed", "aot", 0.1, error="no memory"),
    ]
    found = judged(points)
    assert [point.dominated for point in found] == [False, False, True, False, False]
    assert [point.knee for point in found] == [False, False, True, False, False]
    assert [point.speedup for point in found] == [1.0, 2.0, 0.5, 0.2, None]


def test_the_predicted_line_starts_at_the_roomiest_budget():
    points = [
        Point("eager", "eager", peak_bytes=300, step_ms_median=50.0),
        Point("budget-0", "aot", 0.0, predicted_peak_bytes=100, step_ms_median=90.0),
        Point("budget-1", "aot", 1.0, predicted_peak_bytes=210, step_ms_median=60.0),
    ]
    line = predicted_line(points, [(250, 0.0), (200, 0.01), (100, 0.04)])
    assert line == [(250, pytest.approx(0.05)), (200, pytest.approx(0.06)), (100, pytest.approx(0.09))]
    assert predicted_line(points[:1], [(250, 0.0)]) == [] and predicted_line(points, []) == []


def test_a_small_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    settings = {"budgets": [1.0, 0.0], "engines": ["eager"], "steps": 2}
    assert pareto.run(small(tmp_path, task="pareto", pareto=settings)) == 0
    with (tmp_path / "pareto.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["eager", "budget-1.0", "budget-0.0"]
    roomy, tight = rows["budget-1.0"], rows["budget-0.0"]
    assert int(tight["predicted_peak_bytes"]) < int(roomy["predicted_peak_bytes"])
    assert int(tight["saved_bytes"]) < int(roomy["saved_bytes"]) < int(rows["eager"]["saved_bytes"])
    assert all(float(row["step_ms_median"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows.values())
    peaks = [peak for peak, _ in json.loads((tmp_path / "plan" / "plan.json").read_text())["graph"]["curve"]]
    assert {int(roomy["predicted_peak_bytes"]), int(tight["predicted_peak_bytes"])} <= set(peaks)
    page = (tmp_path / "pareto.html").read_text()
    assert page.count("<circle") == 3 and "<polyline" in page and "budget-0.0" in page
    assert "predicted peak" in capsys.readouterr().out


def test_a_failed_run_is_shown_with_its_error(tmp_path, monkeypatch, capsys):
    def fail(config: RunConfig) -> str:
        Path(config.output_dir).mkdir(parents=True)
        return "RuntimeError: no compiler here"

    monkeypatch.setattr(pareto, "run_apart", fail)
    monkeypatch.setattr("aottrain.tasks.compare.run_apart", fail)
    assert pareto.run(small(tmp_path, task="pareto", pareto={"budgets": [0.4], "engines": []})) == 1
    printed = capsys.readouterr().out
    assert "budget-0.4 failed: RuntimeError: no compiler here" in printed and "no predicted curve" in printed
    assert "nothing to show" in (tmp_path / "pareto.html").read_text()
