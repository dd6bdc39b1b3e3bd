"""All processes have one program, and make their collectives in one order, whatever differs between their machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from aottrain.toolchain.native import find_compiler
from tests.children import ROOT
from tests.skips import NO_COMPILER

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch is without gloo"),
    pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER),
]
MUCH, LITTLE = 4_000_000_000, 200_000  # bytes that are free; in so few a step does not fit


def told(folder: Path, name: str, free_bytes: int, **environment: str) -> dict[str, list[str]]:
    """By case what one process says of its program; it has a cache of its own."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AOTTRAIN_RATES": ""}
    own |= {"AOTTRAIN_CACHE_DIR": str(folder / name)} | environment
    command = [sys.executable, str(Path(__file__).with_name("imagined.py")), str(folder / "record.json")]
    ended = subprocess.run([*command, str(free_bytes)], env=own, capture_output=True, text=True, timeout=500)
    assert not ended.returncode, ended.stderr
    return {case: rest for case, *rest in map(json.loads, ended.stdout.splitlines())}


def test_programs_are_alike_where_machines_are_not(tmp_path):
    first = told(tmp_path, "first", MUCH, PYTHONHASHSEED="1")
    same = told(tmp_path, "other", LITTLE, PYTHONHASHSEED="7", AOTTRAIN_RATES="default")
    assert same == first  # other hashes, another cache, no rates of its own, less memory
    # No compiler: its calls run by operators, and talk in the same order.
    without = told(tmp_path, "without", MUCH, PYTHONHASHSEED="99", CXX="", PATH=str(tmp_path))
    assert {case: (order, "aten") for case, (_, _, order, _) in first.items()} == {
        case: (order, kernel) for case, (_, _, order, kernel) in without.items()
    }
