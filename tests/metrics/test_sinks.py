"""metrics.csv, summary.json and wandb: same names, readable at any time, and a wandb that fails harms nothing."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aottrain.config.run import LoggerConfig
from aottrain.errors import OutputError
from aottrain.metrics.sinks import COLUMNS, CsvSink, write_summary
from aottrain.metrics.wandb_sink import WandbSink

ROWS = [
    {"step": 1, "train/loss": 5.5, "train/lr": 0.1},
    {"step": 2, "train/loss": 4.5, "train/lr": 0.2, "val/loss": 4.75, "memory/peak_bytes": None},
]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_on_the_disk_as_soon_as_written(tmp_path):
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write(ROWS)
    rows = read(tmp_path / "metrics.csv")
    assert tuple(rows[0]) == COLUMNS
    assert [row["train/loss"] for row in rows] == ["5.5", "4.5"]
    assert [row["val/loss"] for row in rows] == ["", "4.75"] and rows[1]["memory/peak_bytes"] == ""
    sink.close({}, 0)


def test_a_resumed_run_keeps_the_rows_before_and_drops_those_it_repeats(tmp_path):
    path = tmp_path / "metrics.csv"
    CsvSink(path).write([{"step": step, "train/loss": step} for step in range(1, 6)])
    with path.open("a") as file:
        file.write("6,6.")  # a crash in the middle of a line
    sink = CsvSink(path, kept_steps=3)
    sink.write([{"step": 4, "train/loss": 40}])
    assert [(row["step"], row["train/loss"]) for row in read(path)] == [("1", "1"), ("2", "2"), ("3", "3"), ("4", "40")]
    CsvSink(path)
    assert read(path) == []


@pytest.mark.parametrize(("how", "told"), [("removed", "its rows are lost"), ("moved", "its rows are where it is now")])
def test_rows_that_somebody_took_away_are_told_of_at_once_and_at_the_end(tmp_path, how, told):
    said, folder = [], tmp_path / "run"
    folder.mkdir()
    sink = CsvSink(folder / "metrics.csv", say=said.append)
    shutil.rmtree(folder) if how == "removed" else folder.rename(tmp_path / "other")
    sink.write(ROWS)
    sink.write(ROWS)
    text = f"{folder / 'metrics.csv'}: was {how} while the run wrote it: {told}"
    assert said == [f"warning: {text}; going on, checkpoints and all else go to that folder anew"]
    with pytest.raises(OutputError, match=f"^{re.escape(text)}$"):
        sink.close({}, 0)
    if how == "moved":
        assert len(read(tmp_path / "other" / "metrics.csv")) == 2 * len(ROWS)


def test_the_summary_is_strict_json(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"a": math.nan, "b": [1, math.inf, (2.5, None)], "c": {"d": Path("x")}, "e": True})
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content == {"a": None, "b": [1, None, [2.5, None]], "c": {"d": "x"}, "e": True}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def wandb_sink(directory, said, run_id=None, **logger):
    return WandbSink(
        LoggerConfig(**logger),
        directory=directory,
        config={"engine": {"name": "eager"}},
        name="a run",
        group="a group",
        tags=["eager"],
        run_id=run_id,
        say=said.append,
    )


def fail(*_, **__):
    raise ConnectionError("the server\nis away")


@pytest.mark.parametrize("point", ["init", "define_metric", "log", "finish", "import"])
def test_a_wandb_that_fails_is_said_once_and_left_alone(tmp_path, monkeypatch, point):
    class Run:
        id, dir, summary = "abc", str(tmp_path / "run" / "files"), {}

        def define_metric(self, *_, **__): ...

        def log(self, *_, **__): ...

        def finish(self, **__): ...

    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    said, run = [], Run()
    monkeypatch.setattr(wandb, "init", fail if point == "init" else lambda **_: run)
    if point in ("define_metric", "log", "finish"):
        monkeypatch.setattr(run, point, fail, raising=False)
    if point == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    sink = wandb_sink(tmp_path, said)
    for _ in range(3):
        sink.write(ROWS)
    sink.close({"last_loss": 4.5}, 0)
    assert len(said) == 1 and said[0].startswith("wandb: ") and "\n" not in said[0]
    assert sink.run_id is None and sink.directory is None


def test_a_setting_of_the_environment_that_wandb_refuses_is_named(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    said = []
    sink = wandb_sink(tmp_path, said)
    assert re.match("wandb: ValidationError: .*mode .*online.*'sometimes'.*; going on without it", said[0])
    assert len(said) == 1 and sink.run_id is None


def test_a_wandb_that_never_answers_is_waited_for_once(tmp_path, monkeypatch):
    """Its service was stopped, and a run that wrote to it stood still for ever."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    ends, said, ended = threading.Event(), [], []
    run = SimpleNamespace(
        id="abc", dir=str(tmp_path), summary={}, define_metric=lambda *_, **__: None, log=lambda *_, **__: ends.wait(5)
    )
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    monkeypatch.setattr(wandb, "teardown", lambda **_: ended.append(True))
    monkeypatch.setattr(WandbSink, "longest_s", 1.0)
    sink = wandb_sink(tmp_path, said)
    for _ in range(3):
        sink.write(ROWS)
    sink.close({"last_loss": 4.5}, 0)
    ends.set()
    assert said == ["wandb: TimeoutError: no answer for 1 s; going on without it (metrics.csv has every figure)"]
    assert ended and sink.run_id is None


def test_no_wandb_is_imported_unless_asked_for():
    code = "import sys, aottrain.tasks.train; print('wandb' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"


def records(path: Path):
    """The records of an offline run: LevelDB's log format, 32 KiB blocks, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def finished_records(directory: Path) -> list:
    """Those of the run in `directory`, once the last is there: wandb's own process may write after `finish`."""
    for _ in range(200):
        found = [record for path in directory.glob("run-*.wandb") for record in records(path)]
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{directory} has no run that has ended")


def test_an_offline_run_can_be_read_back(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_NAME", "WANDB_TAGS", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_RUN_GROUP", "from the environment")
    said = []
    sink = wandb_sink(tmp_path, said, tags=("mine",))
    sink.write(ROWS)
    run_id, directory = sink.run_id, Path(sink.directory)
    sink.close({"last_loss": 4.5, "status": "finished", "budget": None}, 3)
    assert not said and run_id and directory.parent == tmp_path / "wandb"

    found = finished_records(directory)
    (run,) = [record.run for record in found if record.HasField("run")][:1]
    assert (run.run_id, run.display_name, run.run_group, run.job_type, run.project) == (
        run_id, "a run", "from the environment", "train", "aottrain",
    )  # fmt: skip
    assert set(run.tags) == {"eager", "mine"}
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["engine"] == {"name": "eager"} and config["env"]["torch"] == torch.__version__
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    assert [(row["trainer/step"], row["train/loss"]) for row in history] == [(1, 5.5), (2, 4.5)]
    assert "val/loss" not in history[0] and history[1]["val/loss"] == 4.75
    written = [item for record in found if record.HasField("summary") for item in record.summary.update]
    summary = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in written}
    assert summary["last_loss"] == 4.5 and summary["status"] == "finished" and "budget" not in summary
    axes = {record.metric.glob_name: record.metric.step_metric for record in found if record.HasField("metric")}
    assert axes.items() >= {"train/*": "trainer/step", "val/*": "trainer/step", "perf/*": "trainer/step"}.items()
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [3]
    _check_with_wandbs_own_reader(directory, run_id)


def _check_with_wandbs_own_reader(directory: Path, run_id: str) -> None:
    """`wandb leet inspect`, where this wandb has it."""
    command = shutil.which("wandb", path=str(Path(sys.executable).parent)) or shutil.which("wandb")
    if command is None:
        return
    inspect = [command, "leet", "inspect", "--summary", "--json", str(directory)]
    done = subprocess.run(inspect, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode == 0:
        summary = json.loads(done.stdout)
        assert run_id in json.dumps(summary) and summary["summary"]["last_loss"] == 4.5


@pytest.mark.parametrize(
    "bad", ["\u00b2,1.0", "9" * 5000, '1,"' + "x" * 200_000, "\0,1", "nan", "-1,2", ",,,,,,,,,,,,,,,,"]
)
def test_rows_that_are_none_are_left_out(tmp_path, bad):
    path = tmp_path / "metrics.csv"
    path.write_text(f"{','.join(COLUMNS)}\r\n1,2.5\r\n{bad}\r\n", encoding="utf-8")
    sink = CsvSink(path, kept_steps=3)
    sink.write([{"step": 4, "train/loss": 1.5}])
    sink.close({}, 0)
    with path.open(newline="") as file:
        assert [(row["step"], row["train/loss"]) for row in csv.DictReader(file)] == [("1", "2.5"), ("4", "1.5")]
