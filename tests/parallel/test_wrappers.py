"""DistributedDataParallel and fully_shard around and inside compiled models; what runs eagerly is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.parallel.groups import run_together

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

SCRIPT = str(Path(__file__).with_name("wrappers.py"))
# With how many calls that run eagerly: of the direct trace, which does not trace what DDP does to its own state, and of
# sharded models that are given themselves.
CASES = {
    "DDP around, dynamo": 0,
    "DDP around, trace": 0,
    "DDP inside, dynamo": 0,
    "DDP inside, trace": 1,
    "FSDP2 by block, compiled first, trace": 0,
    "FSDP2 by block, compiled last, dynamo": 0,
    "FSDP2 by block, compiled first, dynamo": 0,
    "FSDP2 by block, compiled last, trace": 0,
    "DDP around blocks, dynamo": 0,
    "DDP around blocks, trace": 0,
    "FSDP2 whole, compiled first, dynamo": 0,
    "FSDP2 whole, compiled first, trace": 0,
    "FSDP2 whole, compiled last, dynamo": 0,
    "FSDP2 whole, compiled last, trace": 0,
    "FSDP2 inside, dynamo": 1,
    "FSDP2 inside, trace": 1,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    ended = run_together([SCRIPT, *CASES], tmp_path_factory.mktemp("group"), timeout_s=300)
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    return [{case: rest for case, *rest in map(json.loads, each.out.splitlines())} for each in ended]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_whole_batch(results, case):
    for of_process in results:
        error, num_fallbacks, reasons = of_process[case]
        assert error < 2e-6 and num_fallbacks == len(reasons) == CASES[case]


def test_parts_that_are_traced_say_what_to_write_instead(results):
    for of_process in results:
        _, _, (reason,) = of_process["FSDP2 inside, trace"]
        assert reason == (
            "first.weight is a tensor subclass, DTensor, of which this process has a part: give it whole, as what "
            "fully_shard gathers is: module.forward = aottrain.compile(module.forward)"
        )
