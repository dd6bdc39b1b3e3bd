"""A file of results is there whole or not at all, so that no reader finds half a one, whenever a run is killed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from torch import nn

import aottrain
from aottrain.config.run import RunConfig
from aottrain.errors import AottrainError
from aottrain.explain.report import CompileReport
from aottrain.ir.settings.files import write_text_whole
from aottrain.metrics.sinks import COLUMNS, CsvSink
from aottrain.tasks import compare, export, pareto
from aottrain.tasks.building.samples import write_sample
from aottrain.tasks.measuring import worker
from aottrain.trainer import evaluation
from aottrain.trainer.reliability.flight import FlightRecord

ROOT = Path(__file__).resolve().parents[2]
LAYER = nn.Linear(2, 2)
WRITERS = {
    "sample.txt": lambda folder: write_sample(folder, "text"),
    "compare.csv": lambda folder: compare._write_csv(folder / "compare.csv", [compare.Row("eager", "")]),
    "pareto.csv": lambda folder: pareto._write_csv(folder / "pareto.csv", [pareto.Point("eager", "eager")]),
    "config.json": lambda folder: worker.dump(RunConfig(output_dir=str(folder)), folder / "config.json"),
    "weights.pt": lambda folder: export.write_weights(LAYER, folder),
    "weights.safetensors": lambda folder: export.write_safetensors(LAYER, folder),
    "report.html": lambda folder: CompileReport().save(folder / "report.html"),
    "graph.svg": lambda folder: aottrain.draw_autograd(LAYER.weight.sum(), LAYER).save(folder / "graph.svg"),
    "flight.json": lambda folder: FlightRecord().write(folder, ValueError("planted"), {}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path, monkeypatch, name):
    WRITERS[name](tmp_path)
    whole = (tmp_path / name).read_bytes()
    assert whole and os.listdir(tmp_path) == [name]
    (tmp_path / name).write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    try:
        WRITERS[name](tmp_path)
    except (OSError, AottrainError) as error:
        assert "No space left" in str(error)
    assert (tmp_path / name).read_text() == "before" and os.listdir(tmp_path) == [name]


def test_results_are_written_in_no_other_way():
    """What is not listed here: whatever writes texts, by `write_text_whole`."""
    written_apart = {
        "ir/settings/files.py", "metrics/sinks.py", "trainer/checkpoint.py",  # which do what is asked for
        "runtime/cuda/triton_launch.py", "toolchain/cache.py", "toolchain/kept.py",
        "toolchain/native.py",  # caches, which rename what they have written
    }  # fmt: skip
    writes = re.compile(r"\.write_text\(|\.write_bytes\(|open\([^)]*\"w")
    found = {
        path.relative_to(ROOT / "aottrain").as_posix()
        for path in (ROOT / "aottrain").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if writes.search(line) and not re.search(r"LOG_FILE|self\.log|devnull|os\.dup|graph\.write_bytes", line)
    }
    given_to_write_whole = {"tasks/export.py", "trainer/reliability/profile.py"}
    assert found - given_to_write_whole == written_apart


def test_a_device_is_written_to_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text_whole(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text" and os.listdir(tmp_path) == ["pipe"]
    os.close(reader)


def test_rows_of_a_run_that_goes_on_are_there_all_the_time(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    CsvSink(path).write([{"step": step, "train/loss": step} for step in range(1, 6)])
    opened = Path.open

    def checked(self: Path, mode: str = "r", **options: object):
        assert "w" not in mode or self != path, "the rows are gone until they are written again"
        return opened(self, mode, **options)

    monkeypatch.setattr(Path, "open", checked)
    CsvSink(path, kept_steps=3).write([{"step": 4, "train/loss": 4.5}])
    steps = [line.split(",")[0] for line in path.read_text().splitlines()]
    assert steps == ["step", "1", "2", "3", "4"]
    monkeypatch.undo()
    path.write_text("step,train/loss\n1,2.5\n2,2.25\n3,2\n")  # of another release
    CsvSink(path, kept_steps=2)
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert [line[:5] for line in path.read_text().splitlines()[1:]] == ["1,2.5", "2,2.2"]


def test_a_sample_after_half_a_line_has_a_line_of_its_own(tmp_path):
    class Job:
        module = nn.Linear(1, 1)

        def sample(self, num_bytes: int) -> str:
            return "x" * num_bytes

        def with_averages(self):
            return evaluation.evaluating(self.module)

    (tmp_path / evaluation.SAMPLES).write_text('{"step": 2, "te')
    for step in (3, 4):
        evaluation.add_sample(Job(), step, 2, tmp_path, pytest.fail)  # type: ignore[arg-type]
    lines = (tmp_path / evaluation.SAMPLES).read_text().splitlines()
    assert lines == ['{"step": 2, "te', '{"step": 3, "text": "xx"}', '{"step": 4, "text": "xx"}']
