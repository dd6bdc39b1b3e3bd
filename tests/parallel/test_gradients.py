"""Gradients and losses of several processes are those of one on the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.parallel.groups import run_together

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

SCRIPT = str(Path(__file__).with_name("sums.py"))
# scripts/parallel_matrix.py tries all combinations.
CASES = ["ddp/cpp/min_cut/plain", "ddp/aten/budget/tied", "ddp/aten/min_cut/accumulated", "ddp/aten/save_all/unused",
         "ddp/aten/min_cut/empty", "ddp/-/-/eager", "shard/cpp/budget/plain", "shard/aten/save_all/tied",
         "shard/aten/min_cut/odd", "shard/aten/budget/weighted", "shard/-/-/eager"]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By case what each process found; one group of processes does all of them."""
    ended = run_together([SCRIPT, *CASES], tmp_path_factory.mktemp("group"))
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    lines = [[json.loads(line) for line in each.out.splitlines()] for each in ended]
    return {case: [(error, eager) for name, error, eager in (row for own in lines for row in own) if name == case]
            for case in CASES}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_the_whole_batch(results, case):
    assert len(results[case]) == 2
    assert all(error < 2e-6 for error, _ in results[case])
    # Where one process has nothing to learn from, the others run eagerly, too.
    assert [eager for _, eager in results[case]] == ([0, 1] if case.endswith("/empty") else [0, 0])
