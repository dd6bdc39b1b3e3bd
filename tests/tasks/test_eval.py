"""task=eval: what is measured of a run's newest checkpoint, and that compiled and eager agree."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aottrain.cli import main
from aottrain.errors import RecipeError
from aottrain.trainer.evaluation import Tally, perplexity
from tests.numerics.tolerance import RTOL_ATOL
from tests.sampling import WHOLE
from tests.tasks.trained import IMAGES, TEXT, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on text and one on images."""
    folder = tmp_path_factory.mktemp("runs")
    return {"text": train(folder, "transformer", TEXT), "images": train(folder, "resnet", IMAGES)}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Evaluates a run; the exit code, and what eval.json says where that is 0."""
    monkeypatch.chdir(tmp_path)

    def call(run, *overrides):
        code = main(["task=eval", f"eval.run={run}", "hydra.run.dir=out", *overrides])
        return code, json.loads(Path("out/eval.json").read_text()) if code == 0 else None

    return call


def test_the_loss_is_the_one_that_training_measured_last(runs, measured, capsys):
    code, found = measured(runs["text"])
    summary = json.loads((runs["text"] / "summary.json").read_text())
    assert code == 0 and found["run_by"] == "eager" and found["step"] == 3
    assert found["loss"] == summary["val_loss"] and found["bits_per_byte"] == summary["val_bits_per_byte"]
    assert found["perplexity"] == math.exp(found["loss"])
    assert found["accuracy"] is None and found["num_examples"] == 4 and found["seconds"] > 0
    lines = capsys.readouterr().out.splitlines()
    table = dict(re.split(r"  +", line.strip()) for line in lines[-7:-1])
    assert table["loss"] == f"{found['loss']:.4f}" and table["perplexity"] == f"{found['perplexity']:.4g}"
    assert table["examples"] == "4" and "accuracy" not in table


@pytest.mark.parametrize(
    ("kind", "precision"), [("text", "fp32"), pytest.param("images", "fp32", marks=WHOLE), ("images", "bf16")]
)
def test_compiled_and_eager_measure_the_same(runs, measured, kind, precision):
    more = ["eval.batches=3", f"trainer.precision={precision}"]
    _, eager = measured(runs[kind], *more)
    code, compiled = measured(runs[kind], *more, "engine=aot", "engine.on_unsupported=error", "kernel=auto")
    assert code == 0 and (compiled["run_by"], eager["run_by"]) == ("aot", "eager")
    rtol, atol = RTOL_ATOL[torch.float32 if precision == "fp32" else torch.bfloat16]
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=rtol, abs=atol)
    assert compiled["num_batches"] == 3 and compiled["num_examples"] == eager["num_examples"] == 12
    if kind == "images":
        assert compiled["perplexity"] is compiled["bits_per_byte"] is None
        assert 0 <= compiled["accuracy"] <= compiled["top_accuracy"] <= 1
        if precision == "fp32":
            assert (compiled["accuracy"], compiled["top_accuracy"]) == (eager["accuracy"], eager["top_accuracy"])


def test_what_is_given_beside_the_run_stands_and_is_shown(runs, measured, capsys):
    Path("other.txt").write_text("quite another text, " * 60)
    code, found = measured(runs["text"], "data.path=other.txt", "data.batch_size=2")
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if " in that run, " in line]
    assert code == 0 and found["num_examples"] == 2 and "data.batch_size: 4 in that run, 2 here" in shown


def test_a_run_without_a_checkpoint_or_of_another_model_is_one_line(runs, measured, capsys):
    Path("empty").mkdir()
    assert measured("empty")[0] == 2
    assert "eval.run=" in (line := capsys.readouterr().err) and "the folder has no checkpoint" in line
    assert measured("nowhere")[0] == 2 and "no such folder" in capsys.readouterr().err
    assert measured(runs["text"], "recipe.model.width=32")[0] == 2
    assert "is not of this model" in capsys.readouterr().err
    assert main(["task=eval"]) == 2 and "task=eval needs the output directory of a run" in capsys.readouterr().err
    assert measured(runs["text"], "eval.batches=0")[0] == 2 and "eval.batches=0: " in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(runs, measured, tmp_path, capsys):
    folder = shutil.copytree(runs["text"], tmp_path / "copy")
    (newest,) = (folder / "checkpoints").glob("*.pt")
    index = json.loads((folder / "checkpoints" / "latest.json").read_text())
    older = newest.with_name("step_00000002.pt")
    torch.save({**torch.load(newest, weights_only=True), "step": 2}, older)
    digest = hashlib.sha256(older.read_bytes()).hexdigest()
    index["checkpoints"].append({**index["checkpoints"][0], "file": older.name, "step": 2, "sha256": digest})
    (folder / "checkpoints" / "latest.json").write_text(json.dumps(index))
    newest.write_bytes(newest.read_bytes()[:500])
    code, found = measured(folder)
    assert code == 0 and found["checkpoint"].endswith(older.name)
    assert "passing over a damaged checkpoint" in capsys.readouterr().out


def test_right_answers_are_counted():
    tally = Tally()
    scores = torch.eye(7)[:4] * 2 + torch.linspace(1, 0, 7)  # the last ones are lowest but where they are raised
    tally.add((scores, torch.tensor([0, 6, 2, -100])))
    assert (tally.num_labels, tally.num_right, tally.num_near) == (3, 2, 2)
    assert tally.accuracy == tally.top_accuracy == 2 / 3
    few = Tally()
    few.add((torch.eye(5), torch.arange(5)))
    assert few.accuracy == 1 and few.top_accuracy is None and Tally().accuracy is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(2, 3), "it returned Tensor"),
        ((torch.ones(2, 3), torch.ones(2)), r"shape \[2, 3\] and \[2\], torch.float32"),
        ((torch.ones(2), torch.ones(2, dtype=torch.int64)), "it returned tensors of shape"),
    ],
)
def test_a_predict_that_gives_something_else(value, says):
    with pytest.raises(RecipeError, match=rf"predict\(model, batch\) must return .*{says}"):
        Tally().add(value)


def test_a_perplexity_beyond_all_numbers_is_no_error():
    tokens = SimpleNamespace(tokens_per_batch=1)
    assert perplexity(1e4, tokens) == math.inf and perplexity(1.0, SimpleNamespace(tokens_per_batch=0)) is None
