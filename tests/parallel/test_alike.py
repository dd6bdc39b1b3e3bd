"""Processes that were given something else than the others, or find other data, say so before they do anything."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from aottrain.config.run import RunConfig
from aottrain.errors import ConfigError, ParallelError
from aottrain.trainer.parallel.alike import check_settings, shapes_of
from aottrain.trainer.parallel.world import World
from tests.parallel.groups import ended, run_together, started
from tests.parallel.test_runs import SMALL
from tests.sampling import WHOLE

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

TOLD_APART = str(Path(__file__).with_name("told_apart.py"))
SOON = timedelta(seconds=20)
OWN = RunConfig()


def changed(**sections):
    """The configuration with other values, by section."""
    return dataclasses.replace(
        OWN, **{name: dataclasses.replace(getattr(OWN, name), **values) for name, values in sections.items()}
    )


def told(*configs: RunConfig) -> list[list[str]]:
    """What each of so many processes finds wrong."""
    store = dist.HashStore()

    def one(rank: int) -> list[str]:
        try:
            check_settings(World(rank, len(configs), "ddp", SOON, store), configs[rank])
        except ConfigError as error:
            return error.mistakes
        return []

    with ThreadPoolExecutor(len(configs)) as pool:
        return list(pool.map(one, range(len(configs))))


def test_what_is_given_alike_is_passed_over_wherever_folders_lie():
    here = dataclasses.replace(changed(data={"path": "/here/books"}), output_dir="/here/out", resume="/here/run")
    there = dataclasses.replace(changed(data={"path": "/there/books"}), output_dir="", resume="/there/run")
    assert told(here, there, here) == [[]] * 3
    check_settings(World(), here)  # one alone asks nobody


def test_every_process_names_each_setting_once_with_both_sides():
    other = changed(optimizer={"lr": 0.5}, trainer={"steps": 7})
    assert told(OWN, OWN, other, other) == [[
        f"optimizer.lr: process 0 was given {OWN.optimizer.lr}, process 2 0.5; all must be given the same",
        f"trainer.steps: process 0 was given {OWN.trainer.steps}, process 2 7; all must be given the same",
    ]] * 4  # fmt: skip


def test_where_one_goes_on_and_the_other_begins_that_is_said():
    there = dataclasses.replace(OWN, resume="/there/run")
    assert told(there, OWN)[0] == ["resume: process 0 was given a path, process 1 None; all must be given the same"]


def test_of_another_recipe_the_name_is_enough():
    """Its options are others, too."""
    options = {"gcn": {"width": 64, "num_nodes": 8}, "dlrm": {"width": 64, "num_rows": 5}}
    recipes = [changed(recipe={"name": name, "model": values}) for name, values in options.items()]
    assert told(*recipes)[1] == ["recipe.name: process 0 was given 'gcn', process 1 'dlrm'; all must be given the same"]
    less = [changed(recipe={"name": "gcn", "model": values}) for values in ({"width": 64}, {})]
    (line,) = told(*less)[0]
    assert line == "recipe.model.width: process 0 was given 64, process 1 nothing; all must be given the same"


def test_the_first_process_stays_until_the_others_have_read():
    """With it the store may end."""
    store, configs = dist.HashStore(), (OWN, changed(optimizer={"lr": 0.5}))
    first, second = (World(rank, 2, "ddp", SOON, store) for rank in range(2))
    has_ended = threading.Event()

    def begin() -> None:
        with pytest.raises(ConfigError):
            check_settings(first, configs[0])
        has_ended.set()

    thread = threading.Thread(target=begin)
    thread.start()
    store.set("settings/1", '{"optimizer.lr": "0.5"}')
    assert not has_ended.wait(0.3)
    with pytest.raises(ConfigError):
        check_settings(second, configs[1])
    thread.join(SOON.total_seconds())
    assert has_ended.is_set()


def test_weights_of_other_shapes_or_types_are_named():
    one, other = nn.Linear(2, 3), nn.Linear(2, 4).to(torch.bfloat16)
    store = dist.HashStore()
    store.set("aottrain/1/1", f"the weights of the model\n{shapes_of(other)}")
    line = r"process 0 has `weight: torch.float32 \[3, 2\]`, process 1 has `weight: torch.bfloat16 \[4, 2\]`"
    with pytest.raises(ParallelError, match=line):
        World(0, 2, "ddp", SOON, store).agree("the weights of the model", shapes_of(one))
    World(0, 2, "ddp").agree("the weights of the model", shapes_of(one))  # where the others are imagined


@pytest.mark.parametrize(("given", "line"), [
    pytest.param("optimizer.lr=0.1", "optimizer.lr: process 0 was given 0.002, process 1 0.1;", marks=WHOLE),
    ("trainer.accumulate=2", "trainer.accumulate: process 0 was given 1, process 1 2;"),  # who would wait for who
    pytest.param("engine=eager", "engine.name: process 0 was given 'aot', process 1 'eager';", marks=WHOLE),
])  # fmt: skip
def test_a_run_that_was_told_different_things_does_not_begin(given, line, tmp_path):
    with started([TOLD_APART, *SMALL[2:], "parallel=ddp", f"1::{given}"], tmp_path) as processes:
        first, second = ended(processes, tmp_path, timeout_s=60, asks=True)
    assert first.code == 2 and f"1 mistake in the configuration\n  {line}" in first.err
    assert second.code != 0 and line not in second.err and "Traceback" not in first.err + second.err


def test_other_data_in_a_folder_of_the_same_name_is_seen(tmp_path):
    paths = [tmp_path / name for name in ("here.txt", "there.txt")]
    for path, words in zip(paths, ("a few words ", "other ones "), strict=True):
        path.write_text(words * 1000)
    given = [f"{rank}::data.path={path}" for rank, path in enumerate(paths)]
    first, second = run_together([TOLD_APART, *SMALL[2:], "parallel=ddp", *given], tmp_path, timeout_s=60)
    assert (first.code, second.code) == (1, 1)
    assert "the processes differ in the data: process 0 has `" in first.err and "Traceback" not in first.err
