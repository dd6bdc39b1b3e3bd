"""A checkpoint that is whole, but whose values are none that a run writes: a sentence, and never another error."""

from __future__ import annotations

import itertools
import math
import random
import shutil
from pathlib import Path

import pytest
import torch

from aottrain.errors import AottrainError, ResumeError
from aottrain.tasks import train
from aottrain.trainer.checkpoint import load
from aottrain.trainer.reliability.saving import check_held

NESTED: list = []
for _ in range(100):
    NESTED = [NESTED]
ODD = {
    "None": None, "-1": -1, "2**70": 2**70, "nan": math.nan, "text": "x", "list": [], "nested": NESTED,
    "tensor": torch.ones(2), "dictionary": {"x": 1}, "absent": ...,
}  # fmt: skip
TRAINER = {"ema": 0.5, "on_spike": "skip"}
BESIDE = (
    ("rung", "splits"), ("rung", "changes"), ("averages", "values"), ("averages", "num_updates"), ("patience", "best"),
    ("random", "python"), ("random", "numpy"), ("random", "torch"), ("optimizer", "state"), ("optimizer", "state", 0),
    ("optimizer", "state", 0, "exp_avg"), ("optimizer", "state", 0, "step"), ("optimizer", "param_groups"),
    ("optimizer", "param_groups", 0), ("optimizer", "param_groups", 0, "betas"),
    ("optimizer", "param_groups", 0, "params"), ("identity", "seed"), ("identity", "trainer.freeze"),
)  # fmt: skip


def with_odd(values, path, odd):
    """A copy in which this stands at the end of the path."""
    first, *rest = path
    copy = values.copy()
    if rest:
        copy[first] = with_odd(copy[first], rest, odd)
    elif odd is ...:
        del copy[first]
    else:
        copy[first] = odd
    return copy


@pytest.fixture
def saved(tiny):
    """The file of a checkpoint."""
    config = tiny(trainer={"steps": 2, **TRAINER})
    assert train.run(config) == 0
    return Path(config.output_dir, "checkpoints", "step_00000002.pt")


def test_what_a_run_has_written_is_held(saved):
    assert check_held(load(saved)).step == 2


def test_values_that_no_run_writes_are_a_sentence(tiny, saved, tmp_path, whole):
    content = torch.load(saved, weights_only=True)
    places = [*((key,) for key in content), *BESIDE]
    cases = [*itertools.product(places, ODD)]
    folder, refused, wrong = tmp_path / "odd" / "checkpoints", 0, []
    for place, name in cases if whole else random.Random(1).sample(cases, 40):
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(saved.with_suffix(".safetensors"), folder)
        torch.save(with_odd(content, place, ODD[name]), folder / saved.name)
        config = tiny(trainer={"steps": 3, **TRAINER}, resume=str(folder.parent), output_dir=str(tmp_path / "again"))
        try:
            assert train.run(config) == 0
        except Exception as error:
            refused += isinstance(error, AottrainError)
            if not isinstance(error, AottrainError):
                wrong.append(f"{place}, {name}: {type(error).__name__}: {error}"[:200])
    assert not wrong
    assert refused > len(cases) // 2 if whole else refused > 20


@pytest.mark.parametrize(
    "changes", [{"kernel": "custom"}, {"partition": "plan"}, {"budget": 2.0}, {"modules": ("x",)}, {"cost": "measured"}]
)
def test_a_rung_names_no_program_but_those_that_a_run_goes_down_to(saved, changes):
    loaded = load(saved)
    loaded.state["rung"] = {"splits": 1, "changes": {"partition": "budget", "budget": 0.5, "modules": ()}}
    check_held(loaded)
    loaded.state["rung"]["changes"].update(changes)
    with pytest.raises(ResumeError, match="is no checkpoint of aottrain: its rung is a dict"):
        check_held(loaded)
