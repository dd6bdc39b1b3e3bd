"""Files of plain values that somebody else wrote: whatever is in them, they are read, or refused in a sentence."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math

import pytest
import torch

from aottrain.cli import main
from aottrain.compiler.partition.stored import read_plan
from aottrain.config.devices import find_target
from aottrain.config.folders import INDEX
from aottrain.errors import ConfigError, ResumeError
from aottrain.ir.settings.decisions import Decision, Record, Timing, read_record
from aottrain.ir.settings.devices import DEVICES
from aottrain.report.runs import reading
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


BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))


def read_settings(folder):
    problems = []
    assert reading.read_settings(folder, problems) == {}
    return problems[0]


def read_overrides(folder):
    (folder / ".hydra" / "overrides.yaml").write_text((folder / ".hydra" / "config.yaml").read_text())
    assert reading.command_of(folder) == ""
    return refused(["sweep.resume=" + str(folder)])


def refused(arguments):
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as said:
        patch.setattr("sys.stderr", said)
        assert main(arguments) == 2
        return said.getvalue()


@pytest.mark.parametrize("text", [BOMB, "a: &a [1, *a]", "&a {b: {c: *a}}", "- &a [*a, *a]"])
def test_aliases_stand_for_no_more_values_than_a_person_writes(tmp_path, text):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "checkpoints").mkdir()
    recorded = tmp_path / ".hydra" / "config.yaml"
    recorded.write_text(text)
    told = "has aliases that stand for too many values"
    assert told in read_settings(tmp_path)
    assert "no sweep was recorded there" in read_overrides(tmp_path)
    assert told in refused([f"resume={tmp_path}"])
    assert "cannot be read" in refused(["task=plan", f"device={recorded}"])


def test_aliases_that_a_person_writes_are_read(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("a: &a {x: 1}\nb: *a\nc: [*a, *a]")
    assert reading.read_settings(tmp_path, []) == {"a.x": 1, "b.x": 1, "c": [{"x": 1}, {"x": 1}]}


def test_names_of_others_do_not_steer_the_terminal(tmp_path):
    named = tmp_path / "new\x1b]0;title\x07\u202ename"
    for arguments in ([f"resume={named}"], ["sweep.resume=" + str(named)], ["task=plan", f"device={named}.yaml"]):
        said = refused(arguments)
        assert "\\x1b]0;title\\x07\\u202ename" in said
        assert all(character.isprintable() or character == "\n" for character in said)
