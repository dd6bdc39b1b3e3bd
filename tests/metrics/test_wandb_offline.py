"""One offline run, read back from the file that `wandb sync` sends: what a dashboard will see."""

from __future__ import annotations

import dataclasses
import json
import struct
import time
from pathlib import Path
from types import SimpleNamespace

from aottrain.explain.report import CompileReport
from aottrain.metrics.guest import BENCH
from aottrain.metrics.report_tables import tables
from aottrain.metrics.wandb_sink import WandbSink
from tests.explain import example

BLOCK, HEADER = 32768, 7


def records(path: Path) -> list:
    """All records of a `.wandb` file: LevelDB's log format, after a header of seven bytes.

    A record that is not written to its end yet is left out.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, found, parts = path.read_bytes(), HEADER, [], b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block that has no room for a record's head
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if at + HEADER + length > len(data):  # wandb's own process is writing it
            break
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def written(folder: Path, engine: str, report, summary: dict) -> SimpleNamespace:
    """What one run leaves, by kind of record."""
    (folder / "checkpoints" / "step-2").mkdir(parents=True)
    (folder / "checkpoints" / "step-2" / "state.pt").write_bytes(bytes(100))
    for name in ("run.html", "compile_report.html", "decisions.json"):
        (folder / name).write_text(f"<p>{name}</p>", encoding="utf-8")
    said: list[str] = []
    logger = SimpleNamespace(mode="offline", project="aottrain", run_name=None, group=None, tags=[])
    sink = WandbSink(
        logger, directory=folder, config={"engine": engine}, name=engine, group="g", tags=[engine], say=said.append
    )
    sink.write([{"step": step, "train/loss": 1.0 / step, "perf/step_ms": None, "val/accuracy": 0.5} for step in (1, 2)])
    where = Path(sink.directory)
    sink.publish(folder, report)
    sink.close(summary, 1 if summary["status"] == "failed" else 0)
    assert said == []
    (path,) = where.glob("*.wandb")
    until = time.monotonic() + 20
    while True:  # wandb's own process may still be writing
        rows = records(path)
        kinds = [row.WhichOneof("record_type") for row in rows]
        if "exit" in kinds or time.monotonic() > until:
            break
        time.sleep(0.05)
    of = {kind: [getattr(row, kind) for row, k in zip(rows, kinds, strict=True) if k == kind] for kind in set(kinds)}
    logged = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in of["history"]
    ]
    last = {}
    for row in of["summary"]:
        for item in row.update:
            last["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    requests = [row.log_artifact for row in of.get("request", ()) if row.WhichOneof("request_type") == "log_artifact"]
    artifacts = {each.type: each for each in (*of.get("artifact", ()), *(each.artifact for each in requests))}
    return SimpleNamespace(
        run=of["run"][0], logged=logged, summary=last, artifacts=artifacts, alerts=of.get("alert", []), folder=where
    )


def test_an_offline_run_reads_back_whole(tmp_path):
    summary = {"status": "finished", "step_ms_median": 12.5, "peak_bytes": 4096, "fallbacks": 3}
    left = written(tmp_path / "a", "aot", example.report_with_timeline(), summary)
    assert (left.run.run_group, list(left.run.tags), left.run.project) == ("g", ["aot"], "aottrain")
    losses = [row["train/loss"] for row in left.logged if "train/loss" in row]
    assert losses == [1.0, 0.5]
    assert [row["val/accuracy"] for row in left.logged if "val/accuracy" in row] == [0.5, 0.5]  # a recipe's own metric
    media = {key: value for row in left.logged for key, value in row.items()}
    assert media["page/_type"] == "html-file" and media["compile/values/_type"] == "table-file"
    (page,) = left.folder.glob("files/media/html/*.html")
    assert "run.html" in page.read_text(encoding="utf-8")
    shown = tables(example.report_with_timeline())
    for name, table in shown.items():
        (file,) = left.folder.glob(f"files/media/table/compile/{name}_*.json")
        saved = json.loads(file.read_text(encoding="utf-8"))
        assert saved["columns"] == list(table.columns) and len(saved["data"]) == len(table.rows)
    assert {"values", "memory"} <= set(shown)
    files = {kind: {entry.path for entry in each.manifest.contents} for kind, each in left.artifacts.items()}
    assert files["report"] == {"run.html", "compile_report.html"} and files["plan"] == {"decisions.json"}
    (entry,) = left.artifacts["checkpoint"].manifest.contents
    assert entry.ref == (tmp_path / "a" / "checkpoints" / "step-2" / "state.pt").resolve().as_uri()
    assert [alert.level for alert in left.alerts] == ["WARN"]
    bench = {key for key in left.summary if key.startswith("bench/")}
    assert bench == {f"bench/{name}" for name in BENCH} and left.summary["bench/step_ms_median"] == 12.5


def test_a_run_of_another_engine_has_the_same_keys_and_a_fault_alerts(tmp_path):
    summary = {"status": "failed", "error": "NumericsError: the loss is nan", "step_ms_median": 20.0}
    left = written(tmp_path / "b", "eager", None, summary)
    assert {key for key in left.summary if key.startswith("bench/")} == {f"bench/{name}" for name in BENCH}
    assert left.summary["bench/predicted_peak_bytes"] is None
    (alert,) = left.alerts
    assert alert.level == "ERROR" and "the loss is nan" in alert.text


def test_where_no_memory_is_predicted_there_is_no_table_of_it():
    (graph,) = example.report_with_timeline().graphs
    report = CompileReport([dataclasses.replace(graph, timeline=None)])
    assert tables(report).keys() == tables(example.report_with_timeline()).keys() - {"memory"}
    assert tables(None) == tables(CompileReport([])) == {}
