"""DistributedDataParallel and fully_shard around and inside compiled models; what runs eagerly is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.parallel.groups import run_together

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

SCRIPT = str(Path(__file__).with_name("wrappers.py"))
# With how many calls that run eagerly: of the direct trace, which does not trace what DDP does to its own state.
CASES = {
    "DDP around, dynamo": 0,
    "DDP around, trace": 0,
    "DDP inside, dynamo": 0,
    "DDP inside, trace": 1,
    "FSDP2 by block, compiled first, trace": 0,
    "FSDP2 by block, compiled last, dynamo": 0,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    ended = run_together([SCRIPT, *CASES], tmp_path_factory.mktemp("group"))
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    return [{case: rest for case, *rest in map(json.loads, each.out.splitlines())} for each in ended]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_whole_batch(results, case):
    for of_process in results:
        error, num_fallbacks = of_process[case]
        assert error < 2e-6 and num_fallbacks == CASES[case]
