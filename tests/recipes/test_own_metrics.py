"""Metrics of a recipe's own: they stand wherever the held-out loss does, and what is wrong is said before training."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from aottrain.cli import main
from tests.report.test_runs import text_of

README = Path(__file__).resolve().parents[2] / "recipes" / "README.md"
EXAMPLE = re.search(r"```python\n(def metrics.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
RECIPE = """from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Options:
    image_size: int = 4
    num_classes: int = 3

    def check(self) -> list[str]:
        return []


def build(options):
    return nn.Sequential(nn.Flatten(), nn.Linear(options.image_size**2, options.num_classes), nn.Dropout(0.5))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make_batch(options, batch_size, generator):
    images = torch.randn(batch_size, options.image_size**2, generator=generator)
    return images, images[:, : options.num_classes].argmax(dim=1)


"""


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """train(source of metrics, arguments) -> exit code, lines of stdout and of stderr; of a run in the folder `run`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(name: str, source: str, *arguments: str) -> tuple[int, list[str], list[str]]:
        (tmp_path / f"{name}.py").write_text(RECIPE + source)
        line = [f"recipe.target={name}", "debug=fast", "engine=eager", "measure.memory=false", "hydra.run.dir=run"]
        code = main([*line, "trainer.steps=4", "trainer.eval_every=2", "trainer.eval_batches=3", *arguments])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run


def test_the_example_of_the_documentation_is_wherever_the_held_out_loss_is(train, tmp_path, capsys):
    code, out, _ = train("of_readme", EXAMPLE)
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open(newline="")))
    accuracies = [row["val/accuracy"] for row in rows]
    assert code == 0 and [bool(value) for value in accuracies] == [bool(row["val/loss"]) for row in rows]
    last = float(accuracies[-1])
    assert 0 < last <= 1 and last * 12 == pytest.approx(round(last * 12))  # of three batches of four
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_metrics"] == {"accuracy": last}
    (line,) = [line for line in out if line.startswith("step 4/4")]
    assert f"held-out {summary['val_loss']:.4f}  accuracy {last:.4g}  " in line
    assert any(line.startswith("finished after") and f", accuracy {last:.4g}, " in line for line in out)
    assert "Held-out accuracy" in text_of((tmp_path / "run" / "run.html").read_text(encoding="utf-8"))
    assert main(["report", "run", "run"]) == 0
    page = (tmp_path / "runs.html").read_text(encoding="utf-8")
    assert "Held-out accuracy by step" in page and f'data-label="accuracy" class="number" data-v="{last!r}"' in page
    capsys.readouterr()
    assert main(["task=eval", "eval.run=run", "recipe.target=of_readme", "hydra.run.dir=eval"]) == 0
    assert json.loads((tmp_path / "eval" / "eval.json").read_text())["metrics"] == {"accuracy": last}
    assert re.search(rf"accuracy +{last:.4g}\n", capsys.readouterr().out)


def test_a_run_that_goes_on_has_them_in_one_table(train, tmp_path):
    train("going_on", EXAMPLE)
    code, _, _ = train("going_on", EXAMPLE, "resume=auto", "trainer.steps=6")
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open(newline="")))
    assert code == 0 and [row["step"] for row in rows if row["val/accuracy"]] == ["2", "4", "6"]


def test_they_change_nothing_of_the_training(train, tmp_path):
    losses = []
    for number, source in enumerate(("", EXAMPLE)):
        assert train(f"same{number}", source, f"hydra.run.dir=run{number}")[0] == 0
        rows = csv.DictReader((tmp_path / f"run{number}" / "metrics.csv").open(newline=""))
        losses.append([(row["train/loss"], row["val/loss"]) for row in rows])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("returned", "says"), [
    ("3.0", "must return a dictionary of names and numbers; it returned float"),
    ("{'a': torch.zeros(2)}", "a is a tensor of shape [2]"),
    ("{'a': 'high'}", "a is str"),
    ("{'loss': 1.0}", "'loss' is no name: letters, digits, . - and _, and not loss"),
    ("{'a b': 1.0}", "'a b' is no name"),
    ("model.nothing", "in metrics, `return model.nothing`: AttributeError"),
])  # fmt: skip
def test_what_is_wrong_is_one_line_before_training(train, tmp_path, returned, says):
    name = f"wrong_{abs(hash(returned))}"
    code, out, err = train(name, f"def metrics(model, batch):\n    return {returned}\n")
    assert code == 2 and len(err) == 1 and says in err[0] and not any(line.startswith("step") for line in out)


def test_names_do_not_change(train):
    source = "calls = []\n\n\ndef metrics(model, batch):\n    calls.append(1)\n"
    code, _, err = train("changing", source + "    return {'a' if len(calls) < 3 else 'b': 1.0}\n")
    assert code == 1 and "metrics(model, batch) gave a, then b" in err[0]


# It falls from call to call: the held-out names are asked for once, and each evaluation is of three batches.
FALLING = "calls = []\n\n\ndef metrics(model, batch):\n    calls.append(1)\n    return {'score': -len(calls)}\n"


@pytest.mark.parametrize(("end", "best", "last"), [("max", 2, 6), ("min", 8, 8)])
def test_the_best_checkpoint_and_patience_go_by_them(train, tmp_path, end, best, last):
    by = [f"trainer.judge_by=score:{end}", "trainer.steps=8"]
    code, _, _ = train(f"kept_{end}", FALLING, *by, "trainer.keep_best=true", "trainer.save_every=2")
    link = tmp_path / "run" / "checkpoints" / "best"
    assert code == 0 and link.readlink().name == f"step_0000000{best}.pt"
    code, out, _ = train(f"waits_{end}", FALLING, *by, "trainer.patience=2", "hydra.run.dir=waits")
    assert code == 0 and any(line.startswith(f"finished after step {last},") for line in out)
    told = "ends after step 6: 2 evaluations in turn without a held-out score above -"
    assert any(line.startswith(told) for line in out) == (end == "max")
    assert train(f"waits_{end}", FALLING, "resume=auto", "trainer.patience=1", "hydra.run.dir=waits")[0] == 0


@pytest.mark.parametrize(("given", "says"), [
    ("trainer.judge_by=acuracy:max", "no metric acuracy; did you mean accuracy? (its metrics: accuracy)"),
    ("trainer.judge_by=accuracy", "must be loss, or a metric of the recipe's own with its better end, as"),
    ("sweep.objectives=[recall:min]", "the recipe has no metric recall (its metrics: accuracy)"),
    ("sweep.objectives=[accuracy]", "or a metric of the recipe's own, as accuracy:max"),
    ("sweep.objectives=[]", "each must be one of val_loss"),
])  # fmt: skip
def test_a_metric_that_the_recipe_has_not_is_one_line(train, tmp_path, given, says):
    code, out, err = train("not_there", EXAMPLE, "trainer.keep_best=true", given)
    assert code == 2 and len(err) == 2 and err[1].startswith(f"  {given}: ") and says in err[1]
    assert not any(line.startswith("step") for line in out) and not (tmp_path / "run" / "checkpoints").exists()


def test_a_recipe_without_any_is_told_before_it_is_built(train):
    code, out, err = train("has_none", "", "trainer.judge_by=accuracy:max", "trainer.keep_best=true")
    assert code == 2 and "has no metric accuracy (it has no metrics(model, batch))" in err[1]
    assert "building the model, reading the data" not in out
