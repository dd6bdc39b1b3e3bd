"""Held-out figures of several processes: those of one, and left by all after the same batch."""

from __future__ import annotations

import csv
import json
import signal
import time

import pytest
import torch.distributed as dist

from tests.parallel.groups import ended, run_together, started
from tests.sampling import WHOLE

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

# Of a batch of six, cut in two, some parts have no label above 0, and so no share in the mean.
RECIPE = """from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Options:
    width: int = 8

    def check(self) -> list[str]:
        return []


def build(options):
    return nn.Linear(options.width, 3)


def loss(model, batch):
    inputs, labels = batch
    counts = labels > 0
    return F.cross_entropy(model(inputs)[counts], labels[counts])


def weight(batch):
    return (batch[1] > 0).sum()


def metrics(model, batch):
    inputs, labels = batch
    right = model(inputs).argmax(dim=1) == labels
    return {"accuracy": right[labels > 0].float().mean(), "weights": model.weight.norm()}


def make_batch(options, batch_size, generator):
    inputs = torch.randn(batch_size, options.width, generator=generator)
    return inputs, torch.where(inputs[:, 0] > 0.2, 1 + (inputs[:, 1] > 0), 0)
"""
LINE = ["-m", "aottrain", "recipe.target=mine", "debug=fast", "trainer.num_threads=1", "measure.memory=false",
        "decisions=default", "data.batch_size=6", "trainer.sample_bytes=0", "hydra.run.dir=out"]  # fmt: skip


@pytest.mark.parametrize("given", [
    ["parallel=ddp"],
    ["parallel=ddp", "engine=eager", "trainer.accumulate=2"],
    pytest.param(["parallel=shard", "data.batch_size=64", "engine=eager"], marks=WHOLE),
])  # fmt: skip
def test_figures_of_two_processes_are_those_of_one(given, tmp_path):
    """Where a part of the first batch has no share, its process has run nothing eagerly, and checks what others do."""
    found = []
    for size, mode in ((1, "parallel=none"), (2, given[0])):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "mine.py").write_text(RECIPE)
        line = [*LINE, "trainer.steps=4", "trainer.eval_every=2", "trainer.eval_batches=5", mode, *given[1:]]
        processes = run_together(line, folder, size, timeout_s=60)
        assert [each.code for each in processes] == [0] * size, processes[-1].err
        rows = csv.DictReader((folder / "out" / "metrics.csv").open(newline=""))
        names = ("val/loss", "val/accuracy", "val/weights")
        found.append([float(row[name]) for row in rows for name in names if row["val/loss"]])
    assert len(found[0]) == 6 and found[1] == pytest.approx(found[0], rel=1e-5)


def test_metrics_of_other_names_in_another_process_are_refused(tmp_path):
    """Before training, in one line: the sums would be of different figures."""
    text = RECIPE.replace('"accuracy"', '"accuracy" if torch.distributed.get_rank() else "precision"')
    (tmp_path / "mine.py").write_text(text)
    for each in run_together([*LINE, "parallel=ddp", "engine=eager"], tmp_path, 2, timeout_s=60):
        assert each.code == 2, each.err
        assert "gave precision, weights in one process, accuracy, weights in another" in each.err


def test_a_signal_that_one_process_hears_amid_an_evaluation_ends_all(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    line = [*LINE, "parallel=ddp", "engine=eager", "trainer.eval_every=1", "trainer.eval_batches=40000",
            "data.batch_size=64"]  # fmt: skip
    with started(line, tmp_path) as processes:
        until = time.monotonic() + 60
        while "engine eager" not in (tmp_path / "0.out").read_text():
            assert time.monotonic() < until and all(each.poll() is None for each in processes)
            time.sleep(0.02)
        time.sleep(1.0)  # one step takes some milliseconds
        processes[1].send_signal(signal.SIGTERM)
        first, second = ended(processes, tmp_path, timeout_s=30)
    assert (first.code, second.code) == (143, 143), second.err
    left = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (left["status"], left["val_loss"]) == ("interrupted", None) and 1 <= left["steps"] < 5
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("*.pt")]
