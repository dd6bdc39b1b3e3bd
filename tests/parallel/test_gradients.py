"""Gradients and losses of several processes are those of one on the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from scripts.parallel_matrix import tolerance
from tests.parallel.groups import run_together

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

SCRIPT = str(Path(__file__).with_name("sums.py"))
# scripts/parallel_matrix.py tries all combinations.
CASES = ["ddp/cpp/min_cut/plain", "ddp/aten/budget/tied", "ddp/aten/min_cut/accumulated", "ddp/aten/save_all/unused",
         "ddp/aten/min_cut/empty", "ddp/-/-/eager", "shard/cpp/budget/plain", "shard/aten/save_all/tied",
         "shard/aten/min_cut/odd", "shard/aten/budget/weighted", "shard/-/-/eager", "ddp/cpp/budget/dropout",
         "shard/aten/min_cut/dropout-bf16", "shard/cpp/min_cut/plain"]  # fmt: skip
OF_FOUR = ["replicas/cpp/budget/tied", "replicas/aten/min_cut/odd", "replicas/aten/save_all/accumulated",
           "replicas/aten/min_cut/unused", "replicas/-/-/eager", "replicas/aten/budget/weighted-bf16"]  # fmt: skip


def results_of(cases, folder, size):
    """By case what each process found; one group of processes does all of them."""
    ended = run_together([SCRIPT, *cases], folder, size)
    assert [each.code for each in ended] == [0] * size, [each.err for each in ended]
    lines = [[json.loads(line) for line in each.out.splitlines()] for each in ended]
    return {case: [(error, eager) for name, error, eager in (row for own in lines for row in own) if name == case]
            for case in cases}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of(CASES, tmp_path_factory.mktemp("two"), 2) | results_of(
        OF_FOUR, tmp_path_factory.mktemp("four"), 4
    )


@pytest.mark.parametrize("case", [*CASES, *OF_FOUR])
def test_they_are_those_of_the_whole_batch(results, case):
    size = 4 if case in OF_FOUR else 2
    assert len(results[case]) == size
    assert all(error < tolerance(case) for error, _ in results[case])
    # Where one process has nothing to learn from, the others run eagerly, too.
    assert [eager for _, eager in results[case]] == ([0, 1] if case.endswith("/empty") else [0] * size)
