"""TensorBoard and MLflow: what is logged reads back, a run goes on in its record, and a failure harms nothing."""

from __future__ import annotations

import json
import math
import os
import sys
import time

import pytest
import torch

from aottrain.config.run import LoggerConfig
from aottrain.metrics.guest import BENCH
from aottrain.metrics.mlflow_sink import MlflowSink, store_of
from aottrain.metrics.tensorboard_sink import TensorBoardSink
from tests.explain import example

ROWS = [
    {"step": 1, "train/loss": 5.5, "train/lr": 0.1, "val/loss": None},
    {"step": 2, "train/loss": 4.5, "train/lr": 0.2, "val/loss": 4.75},
]
CONFIG = {"engine": {"name": "aot"}, "partition": {"budget": 0.4, "modules": ()}, "resume": "", "seed": 3}
SUMMARY = {"status": "finished", "step_ms_median": 12.5, "peak_bytes": 4096, "val_loss": None, "last_loss": 4.5}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What a sink sets lasts for one test, and nobody's settings lead to a server."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")})


def board(directory, **changes):
    said = []
    return TensorBoardSink(directory=directory, config=CONFIG, say=said.append, **changes), said


def flow(directory, run_id=None, **logger):
    said = []
    settings = LoggerConfig(name="mlflow", **{"uri": str(directory / "mlruns"), **logger})
    given = {"config": CONFIG, "name": "aot-s3", "group": "g", "tags": ["aot"]}
    return MlflowSink(settings, **given, run_id=run_id, say=said.append), said


@pytest.fixture
def tensorboard():
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install -e '.[test]')")


@pytest.fixture
def mlflow():
    return pytest.importorskip("mlflow", reason="mlflow is not installed (pip install -e '.[test]')")


def events(folder):
    """What TensorBoard itself reads from a folder, which drops what a later file says no longer counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def scalars(folder, name):
    return [(event.step, round(event.value, 4)) for event in events(folder).Scalars(name)]


def test_tensorboard_reads_back_what_was_logged(tmp_path, tensorboard):
    (sink, said), folder = board(tmp_path), tmp_path / "tensorboard"
    sink.write(ROWS)
    assert scalars(folder, "train/loss") == [(1, 5.5), (2, 4.5)], "on the disk as soon as written"
    assert scalars(folder, "val/loss") == [(2, 4.75)]
    assert str(folder) in sink.hint and sink.run_id is None
    sink.publish(tmp_path, example.report_with_timeline())
    sink.close(SUMMARY, 0)
    found = events(folder)
    bench = {name for name in found.Tags()["scalars"] if name.startswith("bench/")}
    assert bench == {"bench/step_ms_median", "bench/peak_bytes", "bench/last_loss"} < {f"bench/{n}" for n in BENCH}
    assert scalars(folder, "bench/step_ms_median") == [(2, 12.5)]
    texts = {name: found.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    assert json.loads(texts["config/text_summary"])["env"]["torch"] == torch.__version__
    assert json.loads(texts["summary/text_summary"]).items() >= {"status": "finished", "exit_code": 0}.items()
    assert texts["compile/values/text_summary"].startswith("| value | is | op |\n".replace(" |\n", ""))
    assert not said


def test_tensorboard_forgets_steps_that_are_repeated(tmp_path, tensorboard):
    """After going back within a run, and in a run that goes on from a checkpoint."""
    folder, rows = tmp_path / "tensorboard", [{"step": step, "train/loss": float(step)} for step in range(1, 6)]
    sink, said = board(tmp_path)
    sink.write(rows)
    sink.rewind(3)
    sink.write([{"step": 4, "train/loss": 40.0}])
    assert scalars(folder, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    sink.close(SUMMARY, 0)
    time.sleep(1.1)  # TensorBoard reads files by the second of their names
    later, more = board(tmp_path, first_step=2)
    later.write([{"step": 2, "train/loss": 20.0}])
    assert scalars(folder, "train/loss") == [(1, 1.0), (2, 20.0)]
    later.close(SUMMARY, 0)
    assert not said + more


def test_mlflow_reads_back_what_was_logged(tmp_path, mlflow):
    (tmp_path / "run.html").write_text("<p>page</p>", encoding="utf-8")
    (tmp_path / "decisions.json").write_text("{}", encoding="utf-8")
    sink, said = flow(tmp_path, tags=("mine",))
    sink.write([*ROWS, {"step": 3, "train/loss": math.nan}])
    sink.publish(tmp_path, example.report_with_timeline())
    sink.close({**SUMMARY, "error": None}, 0)
    assert not said
    client = mlflow.MlflowClient(tracking_uri=store_of(str(tmp_path / "mlruns")))
    experiment = client.get_experiment_by_name("aottrain")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (sink.run_id, "aot-s3", "FINISHED")
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in losses) == [(1, 5.5), (2, 4.5)]
    assert {name for name in run.data.metrics if "/" in name} == {
        "train/loss", "train/lr", "val/loss", "bench/step_ms_median", "bench/peak_bytes", "bench/last_loss",
    }  # fmt: skip
    assert run.data.params["partition.budget"] == "0.4" and run.data.params["env.torch"] == torch.__version__
    assert run.data.tags.items() >= {"group": "g", "tags": "aot,mine", "status": "finished"}.items()
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"run.html", "decisions.json", "compile"}
    (table,) = (tmp_path / "mlruns").rglob("artifacts/compile/values.json")
    assert json.loads(table.read_text())["columns"][:2] == ["value", "is"]
    assert "mlflow ui --backend-store-uri file:///" in sink.hint


def test_mlflow_goes_on_in_its_run_and_begins_another_where_the_store_has_none(tmp_path, mlflow):
    sink, said = flow(tmp_path)
    sink.write(ROWS)
    sink.close({"status": "interrupted"}, 130)
    client = mlflow.MlflowClient(tracking_uri=sink.uri)
    assert client.get_run(sink.run_id).info.status == "KILLED"
    again, more = flow(tmp_path, run_id=sink.run_id)
    again.write([{"step": 3, "train/loss": 3.5}])
    again.close({"status": "failed", "error": "NumericsError: x"}, 1)
    assert again.run_id == sink.run_id
    found = client.get_run(sink.run_id)
    assert found.info.status == "FAILED" and found.data.metrics["train/loss"] == 3.5
    assert found.data.tags["error"] == "NumericsError: x"
    other, last = flow(tmp_path, run_id="0" * 32)
    assert other.run_id not in (None, sink.run_id) and not said + more + last


@pytest.mark.parametrize(("place", "is_folder"), [("~x/runs", True), ("sqlite:///a.db", False), ("databricks", False)])
def test_a_plain_name_is_a_folder_and_an_address_stays(place, is_folder):
    assert store_of(place).startswith("file:///") == is_folder and (is_folder or store_of(place) == place)


def test_an_mlflow_server_that_is_away_costs_one_line(tmp_path, mlflow):
    sink, said = flow(tmp_path, uri="http://127.0.0.1:9")
    for _ in range(3):
        sink.write(ROWS)
    sink.publish(tmp_path, None)
    sink.close(SUMMARY, 0)
    assert len(said) == 1 and said[0].startswith("mlflow: ") and "\n" not in said[0]
    assert (sink.run_id, sink.hint) == (None, None)


@pytest.mark.parametrize("point", ["import", "write", "close"])
@pytest.mark.parametrize("make", [board, flow], ids=["tensorboard", "mlflow"])
def test_a_logger_that_fails_is_said_once_and_left_alone(tmp_path, monkeypatch, make, point):
    def fail(*_, **__):
        raise OSError("No space\nleft on device")

    name, inner = ("tensorboard", "_writer") if make is board else ("mlflow", "_client")
    if point == "import":
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        monkeypatch.setitem(sys.modules, name, None)
    else:
        pytest.importorskip(name, reason=f"{name} is not installed (pip install -e '.[test]')")
    sink, said = make(tmp_path)
    if point != "import":
        methods = {"write": ("add_scalar", "log_batch"), "close": ("close", "set_terminated")}[point]
        monkeypatch.setattr(getattr(sink, inner), methods[make is flow], fail)
    for _ in range(2):
        sink.write(ROWS)
        sink.rewind(1)
    sink.publish(tmp_path, None)
    sink.close(SUMMARY, 0)
    assert len(said) == 1 and said[0].startswith(f"{name}: ") and "\n" not in said[0]
