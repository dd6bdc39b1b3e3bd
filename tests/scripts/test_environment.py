"""scripts/environment.sh: a torch that is not taken is refused before anything is fetched, one that is stays."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from aottrain.versions import warn_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
@pytest.mark.parametrize(("asked", "is_taken"), [
    ("torch==2.13.0", True), ("torch==2.13.0+cpu", True), ("torch==2.11.0", True), ("torch", True),
    ("/some/folder/torch-2.12.0-cp311.whl", True), ("torch==2.14.1", True), ("torch==2.15.0", True),
    ("torch==2.16.0", False), ("torch==2.10.0", False),
])  # fmt: skip
def test_a_torch_that_is_not_taken_is_one_line(asked, is_taken):
    program = f'source scripts/environment.sh; python="{sys.executable}"; check_torch; echo goes on'
    environment = {**os.environ, "AOTTRAIN_TORCH": asked}
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    if is_taken:
        assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
    else:
        says = f"aottrain: AOTTRAIN_TORCH={asked}: aottrain takes torch>=2.11,<2.16 (aottrain/versions.py)\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", says)


# Stands for pip and for python: says which calls of pip there are, and knows of one torch.
FAKE = """#!/usr/bin/env bash
case "$*" in
    *"-r "*) echo "pip ${*:3:2} -r"; cat "${@: -1}" ;;
    "-m pip"*) shift 2; echo "pip $*" ;;
    *) PYTHONPATH="$FAKED" exec "$REAL" "$@" ;;
esac
"""


def _install(folder: Path, installed: str, *extra: str) -> subprocess.CompletedProcess[str]:
    info = folder / f"torch-{installed}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n", encoding="utf-8")
    python = folder / "python"
    python.write_text(FAKE, encoding="utf-8")
    python.chmod(0o755)
    program = f'source scripts/environment.sh; python="{python}"; install_tree {" ".join(extra)}'
    environment = {**os.environ, "AOTTRAIN_TORCH": "/a/wheel.whl", "FAKED": str(folder), "REAL": sys.executable}
    return subprocess.run(["bash", "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_pip_installs_the_tree_with_all_that_it_needs_where_torch_is_within_its_bounds(tmp_path):
    lines = _install(tmp_path, "2.13.0+cpu", "test").stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["/a/wheel.whl", f"{ROOT}[test]"]


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_a_newer_torch_that_is_taken_is_not_replaced(tmp_path):
    lines = _install(tmp_path, "2.14.1", "test").stdout.splitlines()
    assert lines[1] == "pip install -qq -r" and lines[-1].endswith(f"--no-deps -e {ROOT}")
    names = {line.partition("<")[0].partition(">")[0] for line in lines[2:-1]}
    assert {"hydra-core", "numpy", "pyarrow", "pytest", "wandb-workspaces"} <= names and "torch" not in names


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")
def test_a_wheel_of_a_torch_that_is_not_taken_is_one_line(tmp_path):
    done = _install(tmp_path, "2.16.0")
    says = "aottrain: torch 2.16.0 is installed: aottrain takes torch>=2.11,<2.16 (aottrain/versions.py)\n"
    assert (done.returncode, done.stderr) == (1, says)


def test_a_torch_that_was_not_tried_is_said_to_be_so():
    with pytest.warns(UserWarning, match="takes torch>=2.11,<2.16, and was not tried with 2.16.0"):
        warn_of("2.16.0+cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of("2.15.0+cu130")
        warn_of("2.11.0a0+git")
