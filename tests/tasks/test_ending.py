"""Processes of a comparison end with it, whatever ends it; what has failed is told, whatever comes then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aottrain.config.run import RunConfig
from aottrain.errors import Interrupted, ParallelError
from aottrain.tasks import compare, train
from aottrain.tasks.measuring import worker
from aottrain.tasks.measuring.runs_in_turns import TimedRun

ROOT = Path(__file__).resolve().parent.parent.parent
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def said_in(log: Path) -> int:
    while not (log.is_file() and log.read_text().endswith("\n")):
        time.sleep(0.01)
    return int(log.read_text())


def interrupt_when(log: Path, signum: int) -> threading.Thread:
    def wait() -> None:
        said_in(log)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_comparison_ends_what_trains(tmp_path, monkeypatch, signum):
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", CHILD], **options))
    handler = signal.getsignal(signum)
    log = tmp_path / "eager" / "timed" / worker.LOG_FILE
    config = RunConfig(task="compare", output_dir=str(tmp_path))
    thread = interrupt_when(log, signum)
    with pytest.raises(Interrupted) as caught:
        compare.run(config)
    thread.join()
    assert caught.value.signum == signum and signal.getsignal(signum) is handler
    assert not running(said_in(log))


def test_a_run_that_answers_no_signal_is_ended_by_force(monkeypatch):
    monkeypatch.setattr(worker, "GRACE_S", 0.2)
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + CHILD
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    worker.end(process)
    assert process.poll() == -signal.SIGKILL
    process.stdout.close()


def test_a_timed_run_that_is_waited_for_is_ended_by_a_signal(tmp_path):
    def raised(signum, frame):
        raise Interrupted(signum)

    previous = signal.signal(signal.SIGTERM, raised)
    child = "import sys\n" + CHILD.replace("flush=True", "file=sys.stderr")
    try:
        run = TimedRun([sys.executable, "-c", child], tmp_path / "log.txt")
        thread = interrupt_when(tmp_path / "log.txt", signal.SIGTERM)
        with pytest.raises(Interrupted):
            run.start()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not running(said_in(tmp_path / "log.txt"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_worker_ends_with_a_parent_that_was_killed(tmp_path):
    child = f"from aottrain.config.launch import end_with_parent; end_with_parent()\n{CHILD}"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 30
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(pid)


def test_a_process_that_has_lost_another_says_so_though_torchrun_ends_it(tmp_path, monkeypatch, capsys):
    """A signal comes while its files are written: what has failed stays what is told."""

    def signalled(record):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_close", signalled)
    record = train.RunRecord(None, tmp_path, {})  # type: ignore[arg-type]
    train._fail(record, ParallelError("process 0 has lost another one"))
    assert record.summary == {"status": "failed", "error": "ParallelError: process 0 has lost another one"}
    assert "no checkpoint was written" in capsys.readouterr().out
