"""The recommendation model: pairs of rows, categories beyond a table, and the clicks that are made."""

from __future__ import annotations

import itertools

import pytest
import torch

from aottrain.cli import main
from tests.recipes.training import small

dlrm, OPTIONS, (X, Y) = small("dlrm", batch_size=2000)


def test_the_top_reads_the_numbers_and_all_pairs():
    torch.manual_seed(0)
    model = dlrm.build(OPTIONS)
    read = []
    model.top.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    model(X[:3])
    bottom = model.bottom(X[:3, :4])
    rows = [model.tables.weight[(X[:3, 4 + field].long() + 10 * field)] for field in range(6)]
    pairs = [(one * other).sum(dim=1) for other, one in itertools.combinations([bottom, *rows], 2)]
    assert read[0].shape == (3, 8 + 21)
    torch.testing.assert_close(read[0][:, :8], bottom)
    torch.testing.assert_close(read[0][:, 8:].sort(dim=1).values, torch.stack(pairs, dim=1).sort(dim=1).values)


def test_a_category_beyond_its_table_takes_a_row_of_it():
    model = dlrm.build(OPTIONS)
    beyond = X.clone()
    beyond[:, 4:] += 10 * 7
    assert torch.equal(model(beyond), model(X))


def test_no_column_alone_tells_a_click_but_the_first_number():
    assert 0.45 < Y.mean() < 0.55
    below, above = Y[X[:, 0] < -1].mean(), Y[X[:, 0] > 1].mean()
    assert above - below > 0.25
    assert abs(Y[X[:, 1] < -1].mean() - Y[X[:, 1] > 1].mean()) < 0.12


def test_it_reads_rows_of_a_file(tmp_path, monkeypatch, capsys):
    lines = [",".join(str(value) for value in (*row, int(y))) for row, y in zip(X[:60].tolist(), Y, strict=False)]
    header = ",".join([*(f"x{index}" for index in range(10)), "clicked"])
    (tmp_path / "rows.csv").write_text("\n".join([header, *lines]) + "\n")
    monkeypatch.chdir(tmp_path)
    line = ["recipe=dlrm", "data=arrays", "data.path=rows.csv", "data.y=clicked", "recipe.model.num_rows=10"]
    assert main([*line, "engine=eager", "debug=fast", "measure.memory=false", "hydra.run.dir=run"]) == 0
    assert "10 features" in capsys.readouterr().out


def test_scores_are_of_no_click_and_of_one():
    model = dlrm.build(OPTIONS)
    scores, labels = dlrm.predict(model, (X, Y))
    entropy = torch.nn.functional.cross_entropy(scores, labels)
    assert entropy.item() == pytest.approx(dlrm.loss(model, (X, Y)).item(), rel=1e-5)
