"""A full disk, no compiler, no cache, too little memory, bytes that are no text: one line each, a true summary."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from aottrain.compiler.link import backends
from aottrain.config.extensions.recipes import load_recipe
from aottrain.config.run import RecipeConfig
from aottrain.data.tokens.text import load_text
from aottrain.errors import CapacityError, OutOfMemoryError, OutputError, is_out_of_memory
from aottrain.ir.settings import files
from aottrain.metrics.sinks import CsvSink, write_summary
from aottrain.tasks import train
from aottrain.tasks.building import build
from aottrain.tasks.measuring import capacity

FULL = OSError(28, "No space left on device")


def test_rows_that_find_no_room_are_kept_and_written_later(tmp_path):
    said: list[str] = []
    target = tmp_path / "metrics.csv"
    target.symlink_to("/dev/full")
    sink = CsvSink(target, say=said.append)
    sink.write([{"step": 1, "train/loss": 2.0}])
    sink._file.close()
    sink._file = (tmp_path / "room").open("wb", buffering=0)
    sink.write([{"step": 2, "train/loss": 1.0}])
    sink.close({}, 0)
    with (tmp_path / "room").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2"]
    assert said == [f"warning: {target}: cannot be written (No space left on device); keeping its rows, trying again"]


def test_a_run_whose_figures_find_no_room_trains_and_then_says_so(tiny, left_by, capsys):
    config = tiny()
    left = left_by(config)
    left.directory.mkdir()
    (left.directory / "metrics.csv").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="metrics.csv: lacks its last rows: No space left on device"):
        train.run(config)
    assert left.summary["status"] == "failed" and "No space left" in left.summary["error"]
    assert left.summary["steps"] == 4 and list((left.directory / "checkpoints").glob("*.pt"))
    assert capsys.readouterr().out.count("cannot be written") == 1


def test_on_a_full_disk_the_summary_takes_the_place_of_the_older_one(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_summary(path, {"status": "running", "steps": 100, "more": "x" * 50})

    def full(*_, **__):
        raise FULL

    monkeypatch.setattr(Path, "write_text", full)
    write_summary(path, {"status": "failed", "steps": 3})
    assert json.loads(path.read_text()) == {"status": "failed", "steps": 3}
    assert os.listdir(tmp_path) == ["summary.json"]
    with pytest.raises(OutputError, match="No space left"):
        write_summary(tmp_path / "new.json", {})


@pytest.mark.parametrize("recipe", ["transformer", "resnet"])
def test_a_batch_that_does_not_fit_is_refused_before_it_is_read(tiny, recipe):
    """It took a minute, and then an allocator said so."""
    config = tiny(data={"batch_size": 200_000_000}, trainer={"accumulate": 1000})
    if recipe != "transformer":  # which makes its own
        config = dataclasses.replace(config, recipe=RecipeConfig(name=recipe, model=load_recipe(recipe).Options()))
    start = time.monotonic()
    told = "the 200,000,000,000 examples of a step take .*, this machine has .*: a smaller data.batch_size"
    with pytest.raises(CapacityError, match=told):
        build.build_job(config)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("full", ["checkpoint", "report"])
def test_a_disk_that_fills_up_at_the_end_leaves_a_true_summary(tiny, left_by, monkeypatch, full):
    write = files.write_whole

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    def fails_for_reports(path, *rest):
        fails() if path.name == "compile_report.html" else write(path, *rest)

    target = (torch, "save", fails) if full == "checkpoint" else (files, "write_whole", fails_for_reports)
    monkeypatch.setattr(*target)
    config = tiny("aot" if full == "report" else "eager")
    with pytest.raises(Exception, match="No space left on device"):
        train.run(config)
    summary = left_by(config).summary
    assert summary["status"] == "failed" and "No space left" in summary["error"] and summary["steps"] == 4
    assert ("compile_report.html" if full == "report" else "step_00000004.pt") in summary["error"]
    assert "Errno" not in summary["error"]


def test_figures_that_find_no_memory_hide_neither_the_error_nor_the_summary(tiny, left_by, capsys, monkeypatch):
    """They are made where a run ends, which may be by a lack of memory."""

    def full(*_):
        raise MemoryError

    def fit(*_):
        monkeypatch.setattr(train, "report_figures", full)
        raise OutOfMemoryError("memory ran out")

    monkeypatch.setattr(train, "fit", fit)
    config = tiny()
    with pytest.raises(OutOfMemoryError, match="memory ran out"):
        train.run(config)
    assert "a figure, page or list cannot be made: there is no memory" in capsys.readouterr().out
    assert left_by(config).summary["error"] == "OutOfMemoryError: memory ran out"


def test_without_a_compiler_the_missing_kernels_are_said(tiny, capsys, monkeypatch):
    monkeypatch.setattr(backends, "compiler_obstacle", lambda: "no C++ compiler was found on this machine")
    assert train.run(tiny("aot")) == 0
    line = "no generated kernels, PyTorch's operators run one by one: no C++ compiler was found on this machine"
    assert capsys.readouterr().out.count(line) == 1


def test_a_cache_that_cannot_be_written_is_said_once(tiny, capsys, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", "/dev/null/cache")
    assert train.run(tiny()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "nothing is cached" in line]
    assert len(lines) == 1 and "/dev/null/cache cannot be used" in lines[0]


@pytest.mark.parametrize("available", [300_000, 900_000])
def test_a_predicted_peak_above_the_machine_s_memory_is_refused_before_any_step(tiny, left_by, monkeypatch, available):
    """10,928 weights with gradients and moments take 175 KB, and are let through."""
    monkeypatch.setattr(capacity, "total_bytes", lambda device: available)
    config = tiny("aot", model={"width": 16}, data={"batch_size": 16})
    ran = []
    monkeypatch.setattr(build.ModuleStep, "__call__", lambda *_: ran.append(1))
    with pytest.raises(CapacityError, match="a step's predicted peak is .* this machine has"):
        train.run(config)
    summary = left_by(config).summary
    assert summary["status"] == "failed" and summary["steps"] == 0 and not ran
    assert summary["predicted_peak_bytes"] > available


def test_a_peak_far_above_the_memory_is_refused_before_calls_of_its_size_are_measured(tiny, left_by, monkeypatch):
    monkeypatch.setattr(build, "total_bytes", lambda device: 300_000)
    for name in ("aottrain.measure.workspaces._measure", "aottrain.measure.timings.timed"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("something was measured"))
    config = tiny("aot", model={"width": 16}, data={"batch_size": 16})
    with pytest.raises(CapacityError, match="predicted peak is .*, the memory that it may have is 293 KiB: a smaller"):
        train.run(config)
    assert left_by(config).summary["status"] == "failed"


def test_weights_beyond_the_machine_s_memory_are_refused_before_they_are_made(tiny, left_by):
    config = tiny(model={"width": 1 << 16, "num_layers": 40})  # 20 TB
    with pytest.raises(CapacityError, match="weights, gradients and optimizer state take .* TiB"):
        train.run(config)
    assert left_by(config).summary["status"] == "failed"


@pytest.mark.parametrize("shape", [(16, 3, 4 * 10**9, 4 * 10**9), (2**62, 2**62)])
def test_more_than_any_machine_has_is_a_lack_of_memory(shape):
    with pytest.raises(RuntimeError) as caught:
        torch.randn(shape)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:117]\nDefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_an_allocator_says_becomes_a_sentence(tiny, left_by, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(train, "prepare", fails)
    with pytest.raises(OutOfMemoryError, match="memory ran out while compiling"):
        train.run(tiny("aot"))
    assert "OutOfMemoryError" in left_by(tiny("aot")).summary["error"]
    monkeypatch.setattr(train, "prepare", lambda *_: (_ for _ in ()).throw(RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        train.run(tiny("aot"))


CONTENTS = {
    "picture.txt": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"ab" * 300, "is no text: it has 3 zero bytes"),
    "wide.txt": (("Größe " * 99).encode("utf-16"), "is UTF-16, not UTF-8"),
    "wide_le.txt": (("size " * 99).encode("utf-16-le"), "is no text: it has 495 zero bytes"),
    "latin.txt": (("Gr\xf6\xdfe " * 99).encode("latin-1"), "is not UTF-8: byte 2 is 0xf6"),
    "right.txt": (("Größe " * 99).encode(), ""),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_bytes_that_are_no_text_are_warned_of(tmp_path, name):
    content, reason = CONTENTS[name]
    (tmp_path / name).write_bytes(content)
    first, *warnings = load_text(str(tmp_path / name), held_out=0.1, context=16, vocab_size=256).notes
    assert first == f"text: {tmp_path / name}, 1 file, {len(content):,} bytes"
    assert [reason in warning for warning in warnings] == ([True] if reason else [])
    assert all(warning.startswith(f"warning: {tmp_path / name} ") for warning in warnings)


def test_of_many_such_files_the_first_are_named_and_the_rest_counted(tiny, tmp_path, capsys):
    for number in range(9):
        (tmp_path / f"{number}.txt").write_bytes(b"\0" * 100)
    (tmp_path / "a.txt").write_text("text " * 100)
    assert train.run(tiny(data={"path": str(tmp_path)}, output_dir=str(tmp_path / "run"))) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("text:", "warning:"))]
    assert lines[0] == f"text: {tmp_path}, 10 files, 1,400 bytes" and len(lines) == 5
    assert lines[-1] == "warning: and 6 more files that are no text"


def test_the_built_in_text_needs_no_line():
    assert load_text(None, held_out=0.1, context=16, vocab_size=256).notes == ()


@pytest.mark.parametrize("available", [19_900_000, 20_100_000])
def test_averages_of_weights_in_half_precision_count_in_float32(tiny, monkeypatch, available):
    """Of a weight: 2 bytes, its gradient 2, the average 4, the optimizer's copy 4 and its moments 8."""
    monkeypatch.setattr(capacity, "total_bytes", lambda device: available)
    config = tiny(trainer={"precision": "bf16_weights", "ema": 0.9})
    refused = pytest.raises(CapacityError, match="take 19.1 MiB") if available < 20_000_000 else nullcontext()
    with refused:
        capacity.check_weights(
            lambda: torch.nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16), config, torch.device("cpu")
        )


@pytest.mark.parametrize(
    ("steps", "schedule", "says"),
    [
        (3, {"warmup_steps": 4}, "the learning rate rises in all 3 steps, to 7.50e-04 of optimizer.lr=0.001"),
        (4, {"warmup_steps": 4}, ""),
        (3, {"warmup_steps": 4, "total_steps": 8}, ""),  # which goes on later
    ],
)
def test_a_rate_that_never_reaches_its_peak_is_said(tiny, capsys, steps, schedule, says):
    config = tiny(trainer={"steps": steps}, lr_schedule=schedule, optimizer={"lr": 1e-3})
    assert train.run(config) == 0
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "rises" in line]
    assert said == ([says] if says else [])
