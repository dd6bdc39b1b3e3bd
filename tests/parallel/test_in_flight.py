"""Many collectives under way at once give what one at a time gives, and leave memory whole."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.parallel.groups import run_together

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")


def test_many_at_once_arrive(tmp_path):
    """torch 2.13's gather into memory of its own damages the heap here, and a process crashes."""
    for one in run_together([str(Path(__file__).with_name("in_flight.py"))], tmp_path):
        assert (one.code, one.out.strip()) == (0, "all arrived"), one.err
