"""scripts/settings.py: settings reach the tests, and what the processor has not is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts import settings

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "settings.py"
PROBE = """
import torch

def test_settings():
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    assert not torch.backends.mkldnn.enabled
"""


def test_a_setting_reaches_the_tests(tmp_path):
    """A probe beside this tree's conftest: the instruction set is ATen's, and oneDNN is off."""
    (tmp_path / "test_probe.py").write_text(PROBE)
    chosen = ["--sets", "default", "--onednn", "off"]
    command = [sys.executable, str(SCRIPT), *chosen, "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "=== default, oneDNN off" in done.stdout and "1 passed" in done.stdout
    assert "passed under every setting that this processor has" in done.stdout


def test_an_instruction_set_that_is_not_there_is_left_out(capsys):
    """ATen would take its name for it, and crash."""
    found = settings.settings(settings.SETS, ("on", "off"), {"avx2", "fma", "avx512f"})
    names = [f"{name}, oneDNN {state}" for name in ("default", "avx2") for state in ("on", "off")]
    assert [name for name, _ in found] == names
    assert "avx512: this processor has no avx512bw, avx512dq, avx512vl; left out" in capsys.readouterr().out
