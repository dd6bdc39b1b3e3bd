"""scripts/settings.py: settings reach the tests, and what the processor has not is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from scripts import settings

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "settings.py"


def test_the_settings_are_those_asked_for():
    """Whatever runs this; the next test runs it under others."""
    wanted = os.environ.get("ATEN_CPU_CAPABILITY", "")
    assert torch.backends.cpu.get_cpu_capability().lower() == wanted or not wanted
    assert torch.backends.mkldnn.enabled == (os.environ.get("AOTTRAIN_TEST_ONEDNN") != "off")


def test_a_setting_reaches_the_tests():
    """With a sample of the tests whose bounds are about rounding: one that failed without vector instructions."""
    tests = [
        "tests/scripts/test_settings.py::test_the_settings_are_those_asked_for",
        "tests/ops/test_attention.py::test_a_scale_that_is_not_positive",
    ]
    command = [sys.executable, str(SCRIPT), "--sets", "default", "--onednn", "off", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "=== default, oneDNN off" in done.stdout and "\n...  " in done.stdout
    assert "passed under every setting that this processor has" in done.stdout


def test_an_instruction_set_that_is_not_there_is_left_out(capsys):
    """ATen would take its name for it, and crash."""
    found = settings.settings(settings.SETS, ("on", "off"), {"avx2", "fma", "avx512f"})
    names = [f"{name}, oneDNN {state}" for name in ("default", "avx2") for state in ("on", "off")]
    assert [name for name, _ in found] == names
    assert "avx512: this processor has no avx512bw, avx512dq, avx512vl; left out" in capsys.readouterr().out


def test_the_tests_that_it_names_are_there():
    assert all((settings.ROOT / name).exists() for name in settings.TESTS)
