"""A C++ compiler that is there and does not work: what is said, how often it is waited for, and what runs instead."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler.link import backends
from aottrain.compiler.link.multi_tensor import link_multi_tensor
from aottrain.errors import CompilerError, Interrupted, UnsupportedError
from aottrain.tasks import plan, train
from aottrain.tasks.building.build import build_job
from aottrain.toolchain import cache, native
from aottrain.toolchain.native import Source, compiler_obstacle, find_compiler, load_all, require_all
from aottrain.trainer.preparing import prepare
from tests.toolchain.conftest import isolated
from tests.trainer.conftest import left_by, one_thread, tiny
from tests.zoo import ResidualTrunk

__all__ = ["isolated", "left_by", "one_thread", "tiny"]
GOOD = find_compiler()
pytestmark = pytest.mark.skipif(GOOD is None, reason="there is no C++ compiler on this machine")
SOURCES = [Source(f'extern "C" int answer() {{ return {i}; }}') for i in range(5)]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """compiler(script) -> the file in which it notes each time that it is started. The script finds the real one as
    $GOOD; nothing has been compiled yet."""
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_hanging", {})
    monkeypatch.setattr(cache, "_warned", set())

    def make(script: str) -> Path:
        file, started = tmp_path / "g++", tmp_path / "started"
        started.touch()
        file.write_text(f'#!/bin/sh\nGOOD="{GOOD}"\necho "$1" >>"{started}"\n{script}\n')
        file.chmod(0o755)
        monkeypatch.setenv("CXX", str(file))
        return started

    return make


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(native, "_FIRST_TIMEOUT_S", 1)


def steps(capture="trace", **options):
    """A step of a model as large as "auto" generates kernels for; the report, and the gradients beside eager's."""
    torch.manual_seed(0)
    model = ResidualTrunk(lambda: [nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)])
    x = torch.randn(2048, 64)
    step = aottrain.compile(model, capture=capture, budget=0.3, on_unsupported="error", **options)
    step(x).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    return step.report, found, [p.grad for p in model.parameters()]


FAILS = 'echo "cc1plus: out of order" >&2; exit 3'
BREAKS = f'[ "$1" = --version ] && exec "$GOOD" "$@"\n{FAILS}'


@pytest.mark.parametrize("script", [FAILS, BREAKS, "kill -9 $$"], ids=["at once", "when it compiles", "killed"])
def test_its_own_words_are_shown_once(compiler, script):
    compiler(script)
    words = "failed .signal 9.: it said nothing" if "kill" in script else "failed .exit code 3.: cc1plus: out of order"
    with pytest.warns(UserWarning, match=f"g.. {words}.*; programs run op by op"):
        assert find_compiler() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_compiler() is None
        assert load_all(SOURCES) == [None] * 5
    with pytest.raises(CompilerError, match=words):
        require_all(SOURCES)


def test_its_licence_is_no_part_of_its_words_and_they_stand_in_a_run_once(compiler, tiny, capsys):
    compiler('"$GOOD" --version; echo "cc1plus: out of order" >&2; exit 3')
    config = tiny("aot")
    with pytest.warns(UserWarning, match="out of order") as warned:
        train.run(config)
    (told,) = (str(warning.message) for warning in warned if "out of order" in str(warning.message))
    assert "Copyright" not in told and "warranty" not in told and " 3): " in told
    out = capsys.readouterr().out
    assert "optimizer adamw runs as torch\n" in out and "out of order" not in out


FULL = "cc1plus: out of memory allocating 65536 bytes after a total of 9134080 bytes"


@pytest.mark.parametrize("at", ["at once", "when it compiles"])
def test_what_lacked_memory_is_tried_again(compiler, at, tmp_path):
    begins = "" if at == "at once" else '[ "$1" = --version ] && exec "$GOOD" "$@"\n'
    compiler(f'{begins}[ -e "{tmp_path}/room" ] && exec "$GOOD" "$@"\necho "{FULL}" >&2; exit 1')
    with pytest.warns(UserWarning, match="out of memory"):
        assert find_compiler() is None
    with pytest.raises(CompilerError, match="out of memory"):
        require_all(SOURCES)
    (tmp_path / "room").touch()
    assert find_compiler() is not None
    assert all(library.functions.answer() == i for i, library in enumerate(require_all(SOURCES)))


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_the_plan_and_its_budget_stay(compiler, capture):
    working, *_ = steps(capture)
    assert working.graphs[0].kernel == "cpp"
    compiler(FAILS)
    with pytest.warns(UserWarning, match="out of order"):
        report, found, expected = steps(capture)
    (graph,) = report.graphs
    assert graph.kernel == "aten" and "out of order" in graph.kernel_reason and not report.fallbacks
    assert graph.recomputed and graph.predicted_peak_bytes < working.graphs[0].predicted_peak_bytes * 1.5
    assert all(map(torch.equal, found, expected))


def test_one_that_breaks_while_the_process_runs(compiler, tmp_path):
    """It has made one small program; then it fails for the program's own."""
    compiler(f'[ -e "{tmp_path}/broken" ] || exec "$GOOD" "$@"\n{FAILS}')
    assert find_compiler() is not None
    (tmp_path / "broken").touch()
    with pytest.warns(UserWarning, match="this program runs op by op: .*out of order"):
        report, found, expected = steps(kernel="cpp")
    (graph,) = report.graphs
    assert graph.kernel == "aten" and "out of order" in graph.kernel_reason and not report.fallbacks
    assert graph.recomputed and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("script", ["sleep 1000", '[ "$1" = --version ] && exec "$GOOD" "$@"\nsleep 1000'])
def test_one_that_hangs_is_waited_for_once(compiler, impatient, script):
    started = compiler(script)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="did not answer within 1 s"):
        assert find_compiler() is None
    calls = started.read_text()
    report, *_ = steps()
    assert load_all(SOURCES) == [None] * 5 and "did not answer" in compiler_obstacle()
    assert report.graphs[0].kernel == "aten" and not report.fallbacks
    assert started.read_text() == calls, "it is not started again"
    assert time.monotonic() - start < 60


def test_what_hangs_is_ended_with_all_that_it_has_started(compiler, impatient, tmp_path):
    compiler(f'sleep 1000 & echo $! >"{tmp_path}/child"; wait')
    with pytest.warns(UserWarning, match="did not answer"):
        assert find_compiler() is None
    child = int((tmp_path / "child").read_text())
    assert _ends(child)


def test_objects_that_hang_later_are_waited_for_once(compiler, tmp_path, monkeypatch):
    started = compiler(f'[ -e "{tmp_path}/broken" ] && sleep 1000\nexec "$GOOD" "$@"')
    assert find_compiler() is not None
    (tmp_path / "broken").touch()
    monkeypatch.setattr(native, "_TIMEOUT_S", 1)
    before = len(started.read_text().splitlines())
    assert load_all(SOURCES) == [None] * 5
    assert len(started.read_text().splitlines()) - before <= native._num_processors()
    assert find_compiler() is None


def test_an_interrupt_does_not_wait_for_compilers(compiler, tmp_path):
    compiler(f'[ "$1" = --version ] && exec "$GOOD" "$@"\necho $$ >"{tmp_path}/child"; sleep 1000')
    child = tmp_path / "child"

    def interrupt() -> None:
        while not (child.exists() and child.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    native._version(str(tmp_path / "g++"))
    start = time.monotonic()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        load_all(SOURCES)
    thread.join()
    assert time.monotonic() - start < 60 and _ends(int(child.read_text()))


@pytest.mark.parametrize("owner, name", [(subprocess.Popen, "_execute_child"), (native._Child, "start")])
def test_a_compiler_ends_where_a_signal_comes_while_it_starts(compiler, tmp_path, monkeypatch, owner, name):
    compiler(f'echo $$ >"{tmp_path}/child"; sleep 1000')
    start = getattr(owner, name)

    def interrupted(process, *arguments, **options):
        start(process, *arguments, **options)
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        native._run(str(tmp_path / "g++"), [], 60)
    assert _ends(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize("task", [train, plan])
def test_a_run_that_is_ended_while_it_compiles_ends_its_compilers(compiler, tiny, tmp_path, task):
    compiler(f'[ "$1" = --version ] && exec "$GOOD" "$@"\necho $$ >"{tmp_path}/child"; sleep 1000')
    child = tmp_path / "child"

    def end() -> None:
        while not (child.exists() and child.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread, start = threading.Thread(target=end), time.monotonic()
    thread.start()
    config = tiny("aot", kernel={"name": "cpp"})
    with pytest.raises(Interrupted):
        task.run(config)
    thread.join()
    assert time.monotonic() - start < 60 and _ends(int(child.read_text()))
    if task is train:
        summary = json.loads(Path(config.output_dir, "summary.json").read_text())
        assert (summary["status"], summary["steps"], summary["error"]) == ("interrupted", 0, "Interrupted: by SIGTERM")


def _ends(process: int) -> bool:
    """Whether it is gone, or waits to be reaped by whoever is its parent now."""
    for _ in range(100):
        try:
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
            os.kill(process, 0)
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_another_version_of_the_compiler_makes_its_own_objects(compiler, tmp_path):
    compiler(f'[ "$1" = --version ] && exec cat "{tmp_path}/version"\nexec "$GOOD" "$@"')
    answers = []
    for version in ("12.1", "12.1", "12.2"):
        (tmp_path / "version").write_text(version)
        native._version.cache_clear()
        native._loaded.clear()
        answers.append(load_all(SOURCES[:1])[0].compiled)
    native._version.cache_clear()
    assert answers == [True, False, True]


def test_a_run_goes_on_with_a_compiler_that_fails(compiler, tiny, left_by, capsys):
    compiler(FAILS)
    with pytest.warns(UserWarning, match="out of order"):
        assert train.run(tiny("aot", kernel={"name": "cpp"})) == 0
    found = left_by(tiny("aot"))
    assert found.summary["status"] == "finished" and found.summary["fallbacks"] == 0
    assert "out of order" in found.summary["optimizer_kernel"] and "runs as torch\n" in capsys.readouterr().out


@pytest.mark.parametrize("on_unsupported", ["eager", "error"])
def test_an_optimizer_whose_kernels_cannot_be_made(compiler, tiny, tmp_path, on_unsupported):
    compiler(f'[ -e "{tmp_path}/broken" ] || exec "$GOOD" "$@"\n{FAILS}')
    config = tiny("aot", optimizer={"kernel": "generated"})
    engine = dataclasses.replace(config.engine, on_unsupported=on_unsupported)
    job = build_job(dataclasses.replace(config, engine=engine))
    assert isinstance(job.optimizer, aottrain.AdamW)
    (tmp_path / "broken").touch()
    link_multi_tensor.cache_clear()
    if on_unsupported == "error":
        with pytest.raises(UnsupportedError, match="out of order"):
            prepare(job)
        return
    prepare(job)
    assert type(job.optimizer) is torch.optim.AdamW and "out of order" in job.optimizer_kernel
    assert [group["weight_decay"] for group in job.optimizer.param_groups] == [0.1, 0.0]


def test_a_temporary_folder_that_takes_no_file_more(compiler, tmp_path, monkeypatch):
    """It may fill up while a run compiles: no fault of ours."""
    compiler('exec "$GOOD" "$@"')
    assert not compiler_obstacle()
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "private_folder", lambda: tmp_path / "gone")
    with pytest.raises(CompilerError, match="temporary folder cannot be written: No such file.*TMPDIR names another"):
        require_all(SOURCES[:1])
    x = torch.randn(64, 64, requires_grad=True)
    step = aottrain.compile(lambda x: (x.sin() + x.exp()).sum(), capture="trace", kernel="cpp")
    with pytest.warns(UserWarning, match="runs op by op: a file of the temporary folder cannot be written"):
        step(x).backward()
    assert torch.allclose(x.grad, x.detach().cos() + x.detach().exp())


def test_a_kernel_that_cannot_run_is_named_as_it_is_typed(monkeypatch):
    monkeypatch.setattr(backends, "_choose", lambda kernel, joint: ("aten", "no compiler was found"))
    with pytest.warns(UserWarning, match="^kernel=cpp runs as aten: no compiler was found$"):
        backends.choose_kernel("cpp", None)


def test_a_compiler_that_was_asked_for_and_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.warns(UserWarning, match="CXX=/nowhere/c\\+\\+: there is no such compiler, and .* compiles"):
        assert find_compiler() is not None
