"""The CUDA path without a device: the other files on_*.py, in a process that simulates two devices (see device.py).

They run on their own, too:  python -m pytest -p tests.simulated.plugin tests/simulated/on_devices.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.simulated.device import library

HERE = Path(__file__).parent


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which the simulated devices are compiled by")
def test_their_library_is_compiled_by_any_build():
    """Which that for CUDA does not load."""
    assert library().stat().st_size


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA: tests/runtime/test_on_a_gpu.py")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which the simulated devices are compiled by")
def test_in_a_process_of_its_own(whole):
    pytest.importorskip("triton", reason="the package triton is not installed: there is none for this platform")
    files = [str(HERE / name) for name in ("on_devices.py", "on_images.py", "on_tasks.py")]
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "tests.simulated.plugin", *files]
    command += ["--whole"] * whole
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    plain["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), *filter(None, [plain.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=HERE.parents[1], env=plain, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert " passed" in done.stdout and "skipped" not in done.stdout
