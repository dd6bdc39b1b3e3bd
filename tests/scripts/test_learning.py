"""The table of every recipe by every engine: what counts as equal, and its cells."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from scripts import learning
from scripts.learning import Result, Trained


def result(*losses: float, reasons: tuple[str, ...] = (), eager: tuple[float, ...] = (2.0, 1.0)) -> Result:
    by_engine = {"eager": Trained(eager, 2048, 1024), "aot": Trained(losses, 1024, 512, reasons)}
    return Result("gcn", 4740, by_engine)


def test_what_is_equal_and_what_is_not():
    assert result(2.0, 1.0001).verdict(1e-3) == "equal"
    assert result(2.0, 1.01).verdict(1e-3) == "aottrain differs"
    assert result(2.0, float("nan")).verdict(1e-3) == "aottrain differs"
    assert result(2.0, 1.0, reasons=("a list",)).verdict(1e-3) == "ran eagerly: a list"
    assert Result("gcn", error="no memory").verdict(1e-3) == "no memory"


def test_the_cells_of_a_row():
    measured = result(2.0, 1.0)
    measured.by_engine["aot"] = replace(measured.by_engine["aot"], step_s=0.0021)
    row = learning.cells(measured)
    assert row[:3] == ("gcn", "4,740", "1: 2.000, 2: 1.000") and row[3] == "aottrain 0e+00"
    assert row[4:] == ("1.00 KiB, 512 B", "2.00 KiB, -, 1.00 KiB", "-, -, 2.10 ms") and len(row) == len(learning.HEADER)
    assert len(learning.cells(Result("gcn", error="no memory"))) == len(learning.HEADER)


def test_the_curve_has_its_ends_and_points_between():
    assert learning.curve([1.0]) == "1: 1.000"
    assert learning.curve([1.0, 0.5, 0.25]) == "1: 1.000, 2: 0.500, 3: 0.250"
    steps = [point.split(":")[0] for point in learning.curve(range(1, 101)).split(", ")]
    assert steps == ["1", "25", "50", "75", "100"]


def test_engines_take_turns_and_the_first_round_does_not_count():
    order = []

    def seconds(name, times):
        left = iter(times)
        return lambda: order.append(name) or next(left)

    runs = {"eager": seconds("eager", [9.0, 1.0, 3.0, 2.0]), "aot": seconds("aot", [9.0, 0.5, 0.5, 8.0])}
    assert learning.medians_in_turns(runs, rounds=3) == {"eager": 2.0, "aot": 0.5}
    assert order == ["eager", "aot"] * 4


def test_a_recipe_is_measured():
    found = learning.measure("dlrm", ["eager", "aot"], steps=2, tolerance=1e-3)
    assert found.verdict(1e-3) == "equal" and found.num_parameters > 20_000
    assert found.by_engine["eager"].saved_bytes > 0 and found.by_engine["aot"].peak_bytes > 0
    assert all(trained.step_s > 0 for trained in found.by_engine.values())


def test_every_loss_is_written_as_csv(monkeypatch, capsys, tmp_path):
    measured = {"gcn": result(2.0, 1.0), "vae": Result("vae", error="no memory"), "dlrm": result(2.0, 1.0)}
    monkeypatch.setattr(learning, "measure_apart", lambda name, *_: measured[name])
    monkeypatch.setattr(sys, "argv", ["learning.py", *measured, "--curves", str(tmp_path / "curves.csv")])
    assert learning.main() == 1 and "no memory" in capsys.readouterr().out
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[:3] == ["recipe,engine,step,loss", "gcn,eager,1,2.0", "gcn,eager,2,1.0"] and len(lines) == 9


def test_weights_are_changed_by_about_a_rounding():
    layer = torch.nn.Linear(64, 64)
    before = layer.weight.clone()
    learning._round(layer, torch.Generator().manual_seed(0))
    assert 0 < ((layer.weight - before) / before).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["vae", "resnet"])
def test_float64_is_asked_where_losses_differ(name, monkeypatch):
    """Of images, too, which are float32 where they come from."""
    monkeypatch.setitem(learning.BATCH_SIZES, name, 2)
    found = learning.measure(name, ["eager", "aot"], steps=1, tolerance=-1.0)
    assert len(found.exact) == 1 and found.noise < 1e-4 and "rounding" in learning.cells(found)[3]
    assert found.exact[0] == pytest.approx(found.by_engine["eager"].losses[0], rel=1e-4)


@pytest.mark.parametrize(("words", "told"), [(["resnt"], "resnt: unknown recipe"), (["--steps", "0"], "--steps 0")])
def test_wrong_words_are_a_line(words, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learning.py", *words])
    assert learning.main() == 2
    assert told in capsys.readouterr().err


def test_a_difference_that_float64_shows_of_eager_as_well_is_rounding():
    trained = {name: learning.Trained(losses, 1, 1) for name, losses in (("eager", (1.0, 2.0)), ("aot", (1.0, 2.01)))}
    result = learning.Result("some", 1, trained)
    assert result.verdict(1e-3) == "aottrain differs"
    assert replace(result, exact=(1.0, 2.006)).verdict(1e-3) == "equal"
    assert replace(result, exact=(1.0, 2.0001)).verdict(1e-3) == "aottrain differs"
    shaken = replace(result, exact=(1.0, 2.0001), noise=0.004)
    assert shaken.verdict(1e-3) == "equal" and replace(shaken, noise=0.001).verdict(1e-3) == "aottrain differs"
