"""Bad numbers that a program makes itself, in several steps in turn, under `raise`, `skip` and `rollback`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from aottrain.config.run import RecipeConfig
from aottrain.data.batches import MadeBatches
from aottrain.errors import NumericsError
from aottrain.tasks import train
from aottrain.trainer import loop
from aottrain.trainer.checkpoint import load
from aottrain.trainer.reliability.streams import random_state
from tests.sampling import crossed
from tests.trainer.reliability import own_bad_numbers
from tests.trainer.test_run import same

FIRST, LAST = 22, 23  # spikes are told from the 20 losses before
STEPS = 25
ENGINES = {"eager": {}, "aten": {"kernel": {"name": "aten"}}, "cpp": {"kernel": {"name": "cpp"}}}
KINDS = ("forward", "backward", "spike")
EVERY = crossed(KINDS, ENGINES, ("fp32", "bf16", "bf16_weights"), (1, 3), one_in=5)


@pytest.fixture
def spoiled(monkeypatch):
    """spoiled(kind, numbers): what these batches ask for, in the last of their micro-batches. Returns what was there
    before and after each step, by the number of its batch, and the numbers of the batches in their order."""
    at, take_step, seen, order = MadeBatches.at, loop.take_step, {}, []

    def state_of(job):
        parts = {"model": job.module.state_dict(), "optimizer": job.optimizer.state_dict()["state"]}
        return {**torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, parts), "random": random_state()}

    def spoil(kind: str, numbers: range):
        def asking(batches, number):
            *good, (inputs, asked, targets) = at(batches, number)
            order.append(number)
            wanted = own_bad_numbers.ASKED[kind if number in numbers else "nothing"]
            return [*good, (inputs, torch.tensor(wanted).repeat(len(inputs), 1), targets)]

        def taking(job, *given):
            before, number = state_of(job), order[-1]
            seen[number] = before, lambda: state_of(job)
            take_step(job, *given)
            seen[number] = before, state_of(job)

        monkeypatch.setattr(MadeBatches, "at", asking)
        monkeypatch.setattr(loop, "take_step", taking)
        return seen, order

    return spoil


@pytest.fixture
def asking(tiny, tmp_path):
    """asking(engine, precision, accumulate, **trainer) -> RunConfig of the program whose batches ask."""

    def make(engine: str, precision: str, accumulate: int, name: str = "run", clip: float | None = 1.0, **trainer):
        of_recipe = RecipeConfig(name="custom", target=own_bad_numbers.__name__, model=own_bad_numbers.Options())
        of_trainer = {"steps": STEPS, "precision": precision, "accumulate": accumulate, "log_every": 1, **trainer}
        return tiny(
            "eager" if engine == "eager" else "aot",
            recipe=of_recipe,
            trainer=of_trainer,
            data={"batch_size": 4},
            optimizer={"clip_norm": clip},
            lr_schedule={"total_steps": STEPS},
            output_dir=str(tmp_path / name),
            decisions="default",
            verify={"steps": 0},
            **ENGINES[engine],
        )

    return make


def told(kind: str) -> str:
    """What is said of the first bad tensor, a pattern."""
    file, call = Path(own_bad_numbers.__file__).name, {"forward": ".log(", "backward": ".sqrt("}[kind]
    lines = Path(own_bad_numbers.__file__).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if call in text)
    if kind == "forward":
        return rf"first in the forward: nan of aten.log.default \[\d+\] \(model, {file}:{line}\)"
    return rf"first in the backward: the gradient of SqrtBackward \({file}:{line}\)"


@pytest.mark.parametrize(("kind", "engine", "precision", "accumulate"), EVERY)
def test_steps_that_are_left_out_move_nothing_and_the_tensor_is_named(
    asking, left_by, spoiled, capsys, kind, engine, precision, accumulate
):
    seen, _ = spoiled(kind, range(FIRST, LAST + 1))
    clip = None if accumulate == 1 else 1.0
    config = asking(engine, precision, accumulate, clip=clip, on_nonfinite="skip", on_spike="skip", max_skips=2)
    assert train.run(config) == 0
    for number in (FIRST, LAST):
        assert same(*seen[number]), number
    assert not same(*seen[LAST + 1])
    printed = capsys.readouterr().out
    assert len(re.findall(rf"step ({FIRST}|{LAST}) is left out: ", printed)) == 2 == printed.count("left out: ")
    if kind != "spike":
        for number in (FIRST, LAST):
            assert re.search(rf"step {number}: {told(kind)}", printed), printed
    assert left_by(config).summary["skipped_steps"] == 2 and left_by(config).summary["status"] == "finished"


@pytest.mark.parametrize(("kind", "engine", "precision", "accumulate"), EVERY)
def test_a_run_that_raises_has_moved_nothing_and_names_the_tensor(asking, spoiled, kind, engine, precision, accumulate):
    seen, _ = spoiled(kind, range(FIRST, LAST + 1))
    why = "is a spike" if kind == "spike" else told(kind)
    with pytest.raises(NumericsError, match=rf"step {FIRST}: .*{why}"):
        train.run(asking(engine, precision, accumulate, on_nonfinite="raise", on_spike="raise"))
    before, after = seen[FIRST]
    assert same(before, after())  # now, when the run has ended


@pytest.mark.parametrize(("kind", "engine", "precision", "accumulate"), EVERY)
def test_a_run_that_goes_back_is_the_one_that_never_met_these_batches(
    asking, left_by, spoiled, monkeypatch, kind, engine, precision, accumulate
):
    trainer = {"on_nonfinite": "rollback", "on_spike": "rollback", "rollback_every": FIRST - 1, "max_rollbacks": 2}
    _, order = spoiled(kind, range(FIRST, LAST + 1))
    went_back = asking(engine, precision, accumulate, "back", **trainer)
    assert train.run(went_back) == 0
    assert left_by(went_back).summary["rollbacks"] == 2
    assert order[-2 - (STEPS - FIRST + 1) :] == [*range(FIRST, STEPS + 3)]
    monkeypatch.undo()
    at = MadeBatches.at
    monkeypatch.setattr(MadeBatches, "at", lambda batches, number: at(batches, number + 2 * (number >= FIRST)))
    straight = asking(engine, precision, accumulate, "straight")
    assert train.run(straight) == 0
    states = [load(Path(run.output_dir, "checkpoints", f"step_{STEPS:08d}.pt")).state for run in (went_back, straight)]
    assert all(same(states[0][part], states[1][part]) for part in ("model", "optimizer", "random"))
    assert left_by(went_back).losses == left_by(straight).losses


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_more_than_allowed_ends_the_run(asking, left_by, spoiled, policy, kind):
    spoiled(kind, range(FIRST, STEPS + 9))
    trainer = {"on_nonfinite": policy, "on_spike": policy, "max_skips": 2, "max_rollbacks": 2}
    with pytest.raises(NumericsError, match=rf"trainer.max_{policy}s?"):
        train.run(asking("eager", "fp32", 1, rollback_every=FIRST - 1, **trainer))
    assert left_by(asking("eager", "fp32", 1)).summary["skipped_steps" if policy == "skip" else "rollbacks"] == 2
