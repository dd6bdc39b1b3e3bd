"""Files of plain values that somebody else wrote: whatever is in them, they are read, or refused in a sentence."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch

from aottrain.compiler.partition.stored import read_plan
from aottrain.config.devices import find_target
from aottrain.config.folders import INDEX
from aottrain.errors import ConfigError, ResumeError
from aottrain.ir.settings.decisions import Decision, Record, Timing, read_record
from aottrain.ir.settings.devices import DEVICES
from aottrain.report.runs.drawing.pages import write_page
from aottrain.toolchain.cache import Table
from aottrain.trainer.checkpoint import CheckpointFolder

TEXTS = ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, "1" * 5000, "", "\0", "null", "[]", "{}", '"x"', "Infinity"]
ODD = [None, -1, 10**400, math.inf, math.nan, "<script>x</script>", [], {}, ["x"], {"x": []}, True, [[]], ...]


def places(value, before=()):
    if before:
        yield before
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(pairs)[:12]:
        yield from places(item, (*before, key))


def with_odd(value, place, odd):
    first, *rest = place
    changed = copy.copy(value)
    if rest:
        changed[first] = with_odd(changed[first], rest, odd)
    elif odd is ...:
        del changed[first]
    else:
        changed[first] = odd
    return changed


def read_decisions(path):
    record = read_record(path)
    assert str(record) and json.dumps(record.to_dict()) and record.fingerprint
    assert len(record.rows()) + len(list(map(str, record.decisions))) >= 0


def read_table(path):
    table = Table(path)
    table.add({"new": 1.0})
    assert table.get("new") == 1.0


def read_list(path):
    """Of two checkpoints, whatever is said of them."""
    folder = CheckpointFolder(path.parent)
    for step in (4, 6):
        if not (folder.directory / f"step_{step:08d}.pt").exists():
            folder.save(step, {"model": {"weight": torch.ones(3)}})
    path.rename(folder.directory / INDEX)
    assert folder.newest(lambda line: None).step in (4, 6)


def show(path):
    path.rename(path.with_name("summary.json"))
    write_page([path.parent])
    assert "<script>x" not in (path.parent / "run.html").read_text(encoding="utf-8")


RATES = {"torch.float32": 1e9, "bytes_per_s": 1e9, "op_overhead_s": 1e-6}
RECORD = Record(
    (
        Decision("products", "aten.mm(x)", "ATen", "measured", {"ATen": Timing(1e-3, 0.1)}),
        Decision("rates", "", RATES, "measured", {"op_overhead_s": Timing(1e-6)}),
        Decision("workspace bytes", "aten.mm.default(x)", 5.0, "record"),
        Decision("link", "", {"latency_s": 1e-4, "link_bytes_per_s": 1e9}, "cache"),
    ),
    {"processor": "x"},
)
PLAN = {
    "saved": ["a", "b"], "recomputed": ["c"], "schedule": ["a", "b", "c"], "limit": 100, "saved_bytes": 5,
    "values": {"a": "x", "b": "y"}, "kernel": "cpp", "fingerprint": "abc",
}  # fmt: skip
# As 2e-06 YAML takes numbers for text.
DEVICE = {**dataclasses.asdict(DEVICES["h100-sxm"]), "gap_s": 0.002, "launch_s": 0.06}
ENTRY = {"file": "step_00000006.pt", "step": 6, "sha256": "0" * 64, "held_out_loss": None}
SUMMARY = {"status": "finished", "steps": 4, "last_loss": 2.0, "recipe": "transformer", "replans": [], "mfu": None}
FILES = {
    "decisions.json": (RECORD.to_dict(), read_decisions, ValueError),
    "plan.json": ({"partition_plan": PLAN}, lambda path: read_plan(str(path)), ConfigError),
    "device.yaml": (DEVICE, lambda path: find_target(str(path)), ConfigError),
    "table.json": ({"a": 1.5, "b": {"c": 2}}, read_table, ()),
    "list.json": ({"checkpoints": [ENTRY]}, read_list, ResumeError),
    "page.json": (SUMMARY, show, ()),
}


@pytest.mark.parametrize("name", FILES)
def test_whatever_is_in_a_file_it_is_read_or_refused(tmp_path, name):
    values, read, refusal = FILES[name]
    texts = {text[:10]: text for text in TEXTS}
    texts |= {
        f"{place}: {odd}"[:80]: json.dumps(with_odd(values, place, odd)) for place in places(values) for odd in ODD
    }
    wrong = []
    for what, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        try:
            read(tmp_path / name)
        except refusal:
            continue
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}"[:200])
    assert not wrong
    read_at_all = json.dumps(values)
    (tmp_path / name).write_text(read_at_all, encoding="utf-8")
    if name != "list.json":  # whose checksum is another's
        read(tmp_path / name)
