"""Whole runs of two processes, as torchrun starts them."""

from __future__ import annotations

import csv
import json
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from aottrain.trainer.checkpoint import load
from tests.parallel.groups import ended, run_together, started
from tests.sampling import WHOLE

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

SMALL = ["-m", "aottrain", "debug=fast", "kernel=aten", "decisions=default", "trainer.num_threads=1",
         "measure.memory=false", "lr_schedule.total_steps=8", "data.batch_size=6", "trainer.sample_bytes=0",
         "trainer.steps=4", "recipe.model.num_layers=1", "recipe.model.width=16", "recipe.model.num_heads=2",
         "recipe.model.context=16"]  # fmt: skip
STILL = "recipe.model.dropout=0.0"


def losses(folder) -> list[float]:
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


def summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Eight steps of one process."""
    folder = tmp_path_factory.mktemp("one")
    (alone,) = run_together([*SMALL, STILL, "trainer.steps=8", "hydra.run.dir=out"], folder, size=1)
    assert alone.code == 0, alone.err
    return folder / "out"


@pytest.fixture(scope="module", params=["ddp", "shard"])
def two(request, tmp_path_factory):
    """Four steps of two processes."""
    folder = tmp_path_factory.mktemp("two")
    first, second = run_together([*SMALL, STILL, f"parallel={request.param}", "hydra.run.dir=out"], folder)
    assert (first.code, second.code) == (0, 0), second.err
    assert "finished after step 4" in first.out and second.out == ""
    return folder / "out"


def test_two_processes_train_as_one_does(one, two):
    assert losses(two) == pytest.approx(losses(one)[:4], rel=1e-5)
    left = summary(two)
    assert left["status"] == "finished" and left["verify_max_error"] < 1e-5
    assert left["verify_joined_error"] is not None and left["verify_joined_error"] < 1e-5
    assert left["val_loss"] is not None
    state = load(two / "checkpoints" / "step_00000004.pt").state
    assert len(state["random_of_others"]) == 1
    assert not torch.equal(state["random"]["torch"], state["random_of_others"][0]["torch"])


@pytest.mark.parametrize("size", [pytest.param(1, marks=WHOLE), pytest.param(2, marks=WHOLE), 3])
def test_a_run_goes_on_with_as_many_processes_or_others(one, two, size, tmp_path):
    line = ["-m", "aottrain", f"resume={two}", "trainer.steps=8", "hydra.run.dir=out"]
    ended = run_together(line, tmp_path, size)
    assert [each.code for each in ended] == [0] * size, ended[-1].err
    assert losses(tmp_path / "out") == pytest.approx(losses(one)[4:], rel=1e-4)


@WHOLE  # the test above has each of the three, and test_gradients what several micro-batches sum
@pytest.mark.parametrize("mode", ["ddp", "shard"])
def test_two_then_three_then_one_process_train_as_one_does(mode, tmp_path):
    """By compiled programs, of two micro-batches in which documents of several lengths leave places empty."""
    words = ["a", "few", "words", "of", "any", "length", "that", "follow", "each", "other"]
    texts = [" ".join(words[place % 7 : place % 7 + 1 + place % 3]) for place in range(600)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    own = ["trainer.accumulate=2", f"data.path={tmp_path}/texts.jsonl", "data.packing=true", "partition.budget=0.4"]
    first = [*SMALL, STILL, *own]

    def losses_of(name: str, line: list[str], size: int, steps: int) -> list[float]:
        (tmp_path / name).mkdir()
        ended = run_together([*line, f"trainer.steps={steps}", "hydra.run.dir=out"], tmp_path / name, size)
        assert [each.code for each in ended] == [0] * size, ended[-1].err
        return losses(tmp_path / name / "out")

    found = losses_of("two", [*first, f"parallel={mode}"], 2, 3)
    for name, before, size, steps in (("three", "two", 3, 6), ("again", "three", 1, 8)):
        found += losses_of(name, ["-m", "aottrain", f"resume={tmp_path}/{before}/out"], size, steps)
    assert found == pytest.approx(losses_of("one", first, 1, 8), rel=1e-5)


def end_of(folder, step: int) -> dict:
    return load(folder / "checkpoints" / f"step_{step:08d}.pt").state


@pytest.mark.parametrize("adapter", [
    pytest.param([], marks=WHOLE, id="whole"),
    pytest.param(["adapter=lora", "adapter.rank=2", "optimizer.lr=0.02"], id="adapters"),
])  # fmt: skip
def test_weights_in_bfloat16_train_as_by_one_process_and_go_on_bitwise(adapter, tmp_path):
    """Their parts are gathered, and gradients summed, in bfloat16; float32 copies are each process's own parts."""
    line = [*SMALL, STILL, *adapter, "trainer.precision=bf16_weights", "hydra.run.dir=out"]

    def left_by(name: str, given: list[str], size: int) -> Path:
        (tmp_path / name).mkdir()
        ended = run_together(given, tmp_path / name, size)
        assert [each.code for each in ended] == [0] * size, ended[-1].err
        return tmp_path / name / "out"

    alone = losses(left_by("one", line, 1))
    for mode in ("ddp", "shard"):
        whole = left_by(mode, [*line, f"parallel={mode}"], 2)
        assert losses(whole)[0] == pytest.approx(alone[0], rel=1e-6)
        assert losses(whole) == pytest.approx(alone, rel=2**-8)
        assert summary(whole)["verify_joined_error"] < 2**-5
        part = left_by(f"{mode}_part", [*line, f"parallel={mode}", "trainer.steps=2"], 2)
        again = ["-m", "aottrain", f"resume={part}", "trainer.steps=4", "hydra.run.dir=out"]
        states = end_of(whole, 4), end_of(left_by(f"{mode}_rest", again, 2), 4)
        assert torch.bfloat16 in {value.dtype for value in states[0]["model"].values()}
        for kind in ("model", "optimizer"):
            values, others = ([v for v in tree_leaves(state[kind]) if torch.is_tensor(v)] for state in states)
            assert values and all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


@pytest.mark.parametrize(("given", "line"), [
    ([], "parallel=none: torchrun has started 2 processes, each of which would train alone; write parallel=ddp"),
    (["parallel=ddp", "data.batch_size=3"], "data.batch_size=3: must be a multiple of the 2 processes"),
    (["parallel=shard", "parallel.replicas=2"], "parallel.replicas=2: leaves no two of the 2 processes to share"),
    (["parallel=shard", "parallel.replicas=3"], "parallel.replicas=3: must divide the 2 processes"),
    (["parallel=shard", "task=compare", "engine=torch_compile"], "engine=torch_compile: parallel=shard takes aot or"),
    (["parallel=fsdp"], "1 mistake in the configuration\n  parallel=fsdp: unknown option; did you mean"),
])  # fmt: skip
def test_what_several_processes_cannot_do_is_said_once(given, line, tmp_path):
    with started([*SMALL, *given], tmp_path) as processes:
        first, second = ended(processes, tmp_path, asks=True)
    assert first.code == 2 and line in first.err
    assert second.code != 0 and line not in second.err


def test_a_folder_of_another_run_is_refused_once(two, tmp_path):
    with started(["-m", "aottrain", f"resume={two}", "recipe=gcn", "hydra.run.dir=out"], tmp_path) as processes:
        first, second = ended(processes, tmp_path, asks=True)
    assert first.code == 2 and "ResumeError: " in first.err and "Traceback" not in first.err
    assert "recipe.name: 'transformer' in the checkpoint, 'gcn' in this run" in first.err
    assert "recipe.model" not in first.err and second.code != 0 and not second.err


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four steps of two replicas of two parts."""
    folder = tmp_path_factory.mktemp("four")
    line = [*SMALL, STILL, "data.batch_size=12", "parallel=shard", "parallel.replicas=2", "parallel.compare_every=1"]
    ended = run_together([*line, "hydra.run.dir=out"], folder, 4)
    assert [each.code for each in ended] == [0] * 4, ended[-1].err
    assert "4 processes (2 replicas of 2 parts), planned for" in ended[0].out
    assert ended[0].out.count("between") == 2 and "finished after step 4" in ended[0].out
    return folder / "out"


def test_replicas_of_parts_train_as_one_process_does_and_go_on_in_another_mesh(four, tmp_path):
    """The checkpoint is whole, so one process, two parts, or four other replicas go on with it."""
    line = [*SMALL, STILL, "data.batch_size=12", "trainer.steps=8", "hydra.run.dir=out"]
    (alone,) = run_together(line, tmp_path, size=1)
    assert alone.code == 0, alone.err
    wanted = losses(tmp_path / "out")
    assert losses(four) == pytest.approx(wanted[:4], rel=1e-5)
    left = summary(four)
    assert left["verify_max_error"] < 1e-5 and left["verify_joined_error"] < 1e-5
    for size, more in ((4, ()), (2, ["parallel.replicas=1"]), (1, ["parallel=none"])):
        (tmp_path / str(size)).mkdir()
        again = ["-m", "aottrain", f"resume={four}", "trainer.steps=8", "hydra.run.dir=out", *more]
        ended = run_together(again, tmp_path / str(size), size)
        assert [each.code for each in ended] == [0] * size, ended[-1].err
        assert losses(tmp_path / str(size) / "out") == pytest.approx(wanted[4:], rel=1e-4)


def begun(folder, processes) -> None:
    """Some steps have been taken."""
    until = time.monotonic() + 90
    while "step " not in (folder / "0.out").read_text():
        assert time.monotonic() < until and all(each.poll() is None for each in processes)
        time.sleep(0.02)


LONG = [*SMALL, "parallel=ddp", "engine=eager", "trainer.steps=1000000", "trainer.eval_every=0", "hydra.run.dir=out"]


def test_a_signal_that_one_process_hears_ends_all_after_the_same_step(tmp_path):
    with started(LONG, tmp_path) as processes:
        begun(tmp_path, processes)
        processes[1].send_signal(signal.SIGTERM)
        first, second = ended(processes, tmp_path)
    assert (first.code, second.code) == (143, 143), second.err
    left = summary(tmp_path / "out")
    assert left["status"] == "interrupted" and left["checkpoint"].endswith(f"step_{left['steps']:08d}.pt")


def test_where_one_process_is_killed_the_other_ends_with_a_line(tmp_path):
    with started(LONG, tmp_path) as processes:
        begun(tmp_path, processes)
        processes[1].kill()
        first, _ = ended(processes, tmp_path)
    assert first.code == 1 and "ParallelError: process 0 has lost another one" in first.err, first.err
    left = summary(tmp_path / "out")
    assert left["status"] == "failed" and left["error"].startswith("ParallelError: process 0 has lost another one")
    assert "no checkpoint was written" in first.out
