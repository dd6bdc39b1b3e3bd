"""Memory that runs out in a step: the plan of next lower peak, then smaller micro-batches, and the same loss curve."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aottrain.errors import LibraryError, OutOfMemoryError, is_likely_out_of_memory, is_out_of_memory, lack_text
from aottrain.runtime import executor
from aottrain.tasks import train
from aottrain.tasks.measuring.capacity import allocator_errors
from aottrain.trainer import engines, loop
from aottrain.trainer.checkpoint import load
from aottrain.trainer.engines import split_batch
from aottrain.trainer.reliability.streams import random_state
from aottrain.trainer.reliability.undo import Undo
from tests.sampling import thinned
from tests.trainer.test_run import same

FULL = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
DETERMINISTIC = {"kernel": {"name": "aten"}, "decisions": "default", "verify": {"steps": 0}}


@pytest.fixture
def full_at(monkeypatch):
    """full_at({(step, place)}): there the allocator has no more, once each; place is forward, backward or optimizer."""
    take_step, backward, update = loop.take_step, torch.Tensor.backward, loop.clip_and_update
    call = engines.ModuleStep.__call__

    def plant(places: set[tuple[int, str]], times: int = 1, text: str = FULL) -> dict:
        left, now = dict.fromkeys(places, times), SimpleNamespace(step=0)

        def fail(place: str) -> None:
            if left.get((now.step, place), 0):
                left[now.step, place] -= 1
                raise RuntimeError(text)

        def taking(job, step, *given):
            now.step = step
            return take_step(job, step, *given)

        def going_back(*given, **more):
            if now.step:
                backward(*given, **more)  # gradients are there, buffers are changed
                fail("backward")
            else:
                backward(*given, **more)

        def calling(step, batches):
            step.doing = "forward"
            fail("forward")
            return call(step, batches)

        def updating(optimizer, *given):
            if left.get((now.step, "optimizer"), 0):
                torch.rand(2)
                parameter = optimizer.param_groups[0]["params"][0]
                if parameter not in optimizer.state:  # a state that is half made
                    optimizer.state[parameter]["exp_avg"] = torch.ones(3)
            fail("optimizer")
            return update(optimizer, *given)

        monkeypatch.setattr(loop, "take_step", taking)
        monkeypatch.setattr(torch.Tensor, "backward", going_back)
        monkeypatch.setattr(engines.ModuleStep, "__call__", calling)
        monkeypatch.setattr(loop, "clip_and_update", updating)
        return left

    return plant


def state_of(config) -> dict:
    return load(sorted(Path(config.output_dir, "checkpoints").glob("step_*.pt"))[-1]).state


PLACES = [(step, place) for step in (1, 2, 4) for place in ("forward", "backward", "optimizer")]


def test_the_next_plan_is_taken_and_the_loss_curve_is_the_same_bit_for_bit(tiny, left_by, full_at, tmp_path, capsys):
    """By PyTorch's operators every plan gives the same bits."""
    straight = tiny("aot", model={"dropout": 0.3}, output_dir=str(tmp_path / "straight"), **DETERMINISTIC)
    assert train.run(straight) == 0
    for number, places in enumerate(({(1, "forward"), (4, "optimizer")}, {(2, "backward")})):
        left = full_at(places)
        config = tiny("aot", model={"dropout": 0.3}, output_dir=str(tmp_path / str(number)), **DETERMINISTIC)
        assert train.run(config) == 0
        assert not any(left.values())
        assert left_by(config).losses == left_by(straight).losses
        assert all(same(state_of(config)[part], state_of(straight)[part]) for part in ("model", "optimizer", "random"))
        said = left_by(config).summary["replans"]
        assert [entry["step"] for entry in said] == sorted(step for step, _ in places)
        assert "partition.budget=0.75 instead of 1.0, predicted peak" in said[0]["what"]
        assert f"memory ran out in the {'backward' if number else 'forward'}" in said[0]["what"]
        assert state_of(config)["rung"]["changes"]["budget"] < 1
        assert "the step is taken again" in capsys.readouterr().out


@pytest.mark.parametrize("at", thinned(PLACES, one_in=4), ids=str)
def test_where_no_plan_is_left_micro_batches_are_halved(tiny, left_by, full_at, tmp_path, at):
    straight = tiny(output_dir=str(tmp_path / "straight"), model={"dropout": 0.0})
    config = tiny(model={"dropout": 0.0})
    assert train.run(straight) == 0
    full_at({at})
    assert train.run(config) == 0
    losses = [[float(loss) for loss in left_by(run).losses] for run in (config, straight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][: at[0] - 1] == losses[1][: at[0] - 1]
    (said,) = left_by(config).summary["replans"]
    assert said["what"].endswith("micro-batches of 2 examples instead of 4, 2 times as many")
    assert state_of(config)["rung"] == {"splits": 2, "changes": {}}


def test_a_run_that_goes_on_has_the_plan_and_the_parts_of_before(tiny, left_by, full_at, tmp_path):
    schedule = {"total_steps": 6}
    runs = [
        tiny("aot", trainer={"steps": steps}, lr_schedule=schedule, output_dir=str(tmp_path / name), **more)
        for steps, name, more in (
            (6, "a", DETERMINISTIC),
            (3, "b", DETERMINISTIC),
            (6, "b", DETERMINISTIC | {"resume": "auto"}),
        )
    ]
    for config in runs[:2]:
        full_at({(2, "forward")}, times=4)  # three plans of lower peak at the most, then parts
        assert train.run(config) == 0
    full_at(set())
    assert train.run(runs[2]) == 0
    assert left_by(runs[2]).losses == left_by(runs[0]).losses
    assert state_of(runs[2])["rung"] == state_of(runs[0])["rung"]
    assert same(state_of(runs[2])["model"], state_of(runs[0])["model"])


def test_one_example_is_the_least_and_raise_is_what_it_says(tiny, left_by, full_at):
    full_at({(2, "forward")}, times=99)
    with pytest.raises(OutOfMemoryError, match="memory ran out while training: .*can't allocate"):
        train.run(tiny())
    summary = left_by(tiny()).summary
    assert summary["status"] == "failed" and len(summary["replans"]) == 2 and summary["steps"] == 1
    assert (left_by(tiny()).directory / "flight.json").exists()
    full_at({(2, "forward")})
    with pytest.raises(OutOfMemoryError):
        train.run(tiny(trainer={"on_oom": "raise"}))


@pytest.mark.parametrize("on_oom", ["replan", "raise"])
def test_a_call_that_a_library_has_not_is_not_told_as_a_lack_of_memory(tiny, left_by, full_at, on_oom):
    full_at({(2, "forward")}, times=99, text="could not create a primitive")
    config = tiny(trainer={"on_oom": on_oom})
    with pytest.raises(LibraryError, match="could not create a primitive; either memory ran out, .* or oneDNN has no"):
        train.run(config)
    summary = left_by(config).summary
    assert summary["status"] == "failed" and summary["error"].startswith("LibraryError: training: ")
    tried = [entry["what"] for entry in summary.get("replans", [])]
    assert len(tried) == (2 if on_oom == "replan" else 0) and all(", it seems, in the" in what for what in tried)


def test_what_such_a_call_says_has_the_line_of_the_recipe(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def loss():\n    raise RuntimeError('could not create a primitive')\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    with (
        pytest.raises(LibraryError, match=r"training: .*mine.py:2, in loss"),
        allocator_errors(["training"], lambda: [str(path)]),
    ):
        space["loss"]()


def test_an_allocator_s_error_in_a_compiled_forward_is_not_run_again_eagerly(tiny, left_by, monkeypatch):
    """Which would need more memory: it used to, on a CPU."""
    calls = []
    render = executor.aten_runner

    def failing(graph):
        run = render(graph)

        def once(inputs):
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError(FULL)
            return run(inputs)

        return once

    monkeypatch.setattr("aottrain.compiler.link.programs.aten_runner", failing, raising=False)
    monkeypatch.setattr("aottrain.compiler.link.linking.aten_runner", failing, raising=False)
    config = tiny("aot", **DETERMINISTIC)
    assert train.run(config) == 0
    assert len(calls) > 5 and left_by(config).summary["fallbacks"] == 0
    assert len(left_by(config).summary["replans"]) == 1


def module_and(optimizer_class, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return module, optimizer_class(module.parameters(), 0.1, **options)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("at", [1, 3])
def test_an_update_that_is_half_done_is_undone(options, at):
    module, optimizer = module_and(torch.optim.AdamW, **options)

    def forward() -> None:
        module(torch.randn(8, 3)).square().mean().backward()

    for _ in range(at - 1):
        forward()
        optimizer.step()
    kept = {"module": module.state_dict(), "optimizer": optimizer.state_dict()["state"], "random": random_state()}
    kept = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, kept)
    before = Undo(module, optimizer).before()
    forward()
    optimizer.step()  # as far as it can go
    if options == {"fused": True} and at > 1:
        with pytest.raises(OutOfMemoryError, match="in the middle of the optimizer's update"):
            before.put_all_back()  # which torch's fused one, given its state, does not do by halves
        return
    before.put_all_back()
    now = {"module": module.state_dict(), "optimizer": optimizer.state_dict()["state"], "random": random_state()}
    assert same(now, kept)


def test_batches_are_cut_as_equally_as_they_can_be():
    batch = (torch.arange(5), torch.arange(10).view(5, 2))
    assert [len(part[0]) for part in split_batch(batch, 2)] == [2, 3]
    assert torch.equal(torch.cat([part[1] for part in split_batch(batch, 4)]), batch[1])
    for wrong in ((torch.arange(5), torch.arange(4)), (torch.arange(1), torch.arange(1))):
        with pytest.raises(ValueError, match="cannot be cut"):
            split_batch(wrong, 2)


def test_what_allocators_raise_is_told_from_other_errors():
    errors = [RuntimeError(FULL), torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("other")]
    assert list(map(is_out_of_memory, errors)) == [True, True, True, False]
    errors.append(RuntimeError("could not create a primitive"))  # oneDNN's, which gives no reason
    assert list(map(is_likely_out_of_memory, errors)) == [True, True, True, False, True]
    assert lack_text(errors[0], "it") == "it does not fit into memory"
    assert lack_text(errors[-1], "it") == (
        "it does not fit into memory, or a library has no such call (could not create a primitive)"
    )
    assert not is_out_of_memory(errors[-1])  # a compiled forward that raises it is run again eagerly
