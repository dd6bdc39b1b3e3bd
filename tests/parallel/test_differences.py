"""Processes that differ say so, both of them, and neither waits for what the other never does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.parallel.groups import run_together

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

SCRIPT = str(Path(__file__).with_name("differing.py"))
SUM = "backward: aottrain_parallel.sum_start.default({}float32[4, 4], float32[4], float32[4, 4], 0)"


@pytest.mark.parametrize(("what", "sides"), [
    ("program", (SUM.format(""), SUM.format("float32[4], "))),
    ("eager", ("compiled", "runs eagerly")),
    ("weights", ("after step 2 model.1.bias is another in process", "and so are 0 of 3 others")),
])  # fmt: skip
def test_both_sides_are_named(what, sides, tmp_path):
    ended = run_together([SCRIPT, what], tmp_path, timeout_s=60)
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    for each in ended:
        assert all(side in each.out for side in sides), each.out
        assert what == "weights" or "the processes differ in the program for [[2, 4]]: process " in each.out


def test_a_shape_that_one_process_meets_alone_is_said_at_once(tmp_path):
    """The other one is in its sums by then, and ends with it."""
    first, second = run_together([SCRIPT, "shape"], tmp_path, timeout_s=60)
    text = "process 1 meets a first batch of [[3, 4]], and process 0 goes on with [[2, 4]]"
    assert second.code == 0 and text in second.out
    assert first.code == 1 and "process 0 has lost another one" in first.err
