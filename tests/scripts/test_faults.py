"""scripts/faults.py: what it takes for wrong; and a few of its faults, which all of it tries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aottrain.cli import main
from scripts.faults import WRONG, Printed, judged_fault, judged_input
from scripts.faults_of_machines import MACHINE

ROOT = Path(__file__).resolve().parents[2]
TITLE = "aottrain: 1 mistake in the configuration\n"


def test_it_tries_what_was_promised():
    lines = [line for line in WRONG.replace("\n", " | ").split(" | ") if line]
    assert len(lines) == len(set(lines)) >= 60 and len(MACHINE) >= 20


@pytest.mark.parametrize(("code", "text", "wrong"), [
    (2, f"{TITLE}  seed=x: must be a whole number\n", ""),
    (2, "aottrain 0.1.0: train\naottrain: ResumeError: it: there is no such checkpoint\n", ""),
    (2, "aottrain 0.1.0: train\n", "no line says what is wrong"),
    (1, f"{TITLE}  seed=x: must be a whole number\n", "exit code 1, not 2"),
    (2, "Traceback (most recent call last):\n", "traceback"),
])  # fmt: skip
def test_wrong_input_is_one_line_and_code_2(code, text, wrong):
    assert judged_input(Printed(code, text)) == wrong


@pytest.mark.parametrize(("code", "text", "wrong"), [
    (0, "warning: nothing is cached\nstep 1\n", ""),
    (0, "warning: nothing is cached\nwarning: another\n", "2 warnings"),
    (1, "aottrain: CheckpointError: disk full\n", ""),
    (1, "", "0 lines say what is wrong"),
    (139, "", "exit code 139, not 0 or 1"),
])  # fmt: skip
def test_a_fault_is_one_line(code, text, wrong):
    assert judged_fault(Printed(code, text), (0, 1)) == wrong


def test_a_current_folder_that_is_gone_is_one_line(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["seed=1"]) == 2
    assert capsys.readouterr().err == "aottrain: the current folder is not there any more; go to another one\n"


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
@pytest.mark.usefixtures("quick_children")
def test_it_runs_as_a_script(tmp_path):
    environment = {**os.environ, "AOTTRAIN_CACHE_DIR": str(tmp_path / "cache")}
    only = ["--only", "trainer.steps=1.5", "two runs in one folder"]
    command = [sys.executable, str(ROOT / "scripts" / "faults.py"), *only]
    process = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "| `trainer.steps=1.5` | 2 | `trainer.steps=1.5: must be a whole number >= 1` |" in process.stdout
    assert "1 of wrong input, 1 of a machine that fails; 0 wrong" in process.stdout
