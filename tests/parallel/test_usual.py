"""DDP and FSDP2 with the options that training scripts give them, trained with compiled modules as by eager PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from aottrain.toolchain.native import find_compiler
from tests.parallel.groups import run_together
from tests.parallel.usual import CASES, PARTS_GIVEN, SMALL_BUCKETS
from tests.sampling import WHOLE
from tests.skips import NO_COMPILER

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

SCRIPT = str(Path(__file__).with_name("usual.py"))
QUICK = [f"{case}/trace/aten" for case in CASES] + [f"{case}/dynamo/aten" for case in list(CASES)[:2]]
OTHERS = [
    name for kernel in ("aten", "cpp") for door in ("trace", "dynamo")
    for name in (f"{case}/{door}/{kernel}" for case in CASES) if name not in QUICK
]  # fmt: skip


def run(cases, folder):
    """Of each process by case: the error, how many calls ran eagerly, and why."""
    ended = run_together([SCRIPT, *cases], folder, timeout_s=500)
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    return [{case: rest for case, *rest in map(json.loads, each.out.splitlines())} for each in ended]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(QUICK, tmp_path_factory.mktemp("group"))


@pytest.fixture(scope="module")
def other_results(tmp_path_factory):
    if find_compiler() is None:
        pytest.skip(NO_COMPILER)
    return run(OTHERS, tmp_path_factory.mktemp("group"))


def check(results, name):
    case, door, kernel = name.split("/")
    for of_process in results:
        error, num_fallbacks, reasons = of_process[name]
        assert error <= (0.0 if kernel == "aten" else 2**-7 if "bfloat16" in case else 5e-6)
        if case == PARTS_GIVEN:
            (reason,) = reasons
            assert num_fallbacks == 1 and reason.startswith("input0 is a tensor subclass, DTensor, of which this")
            assert reason.endswith("process has a part: give it whole, by full_tensor()")
        elif case == SMALL_BUCKETS and door == "dynamo":  # TorchDynamo's own cutting by buckets does not take them
            assert num_fallbacks == 3 and len(reasons) == 1 and "First bucket" in reasons[0]
        else:
            assert num_fallbacks == 0, reasons


@pytest.mark.parametrize("name", QUICK)
def test_three_steps_are_eagers(results, name):
    check(results, name)


@WHOLE
@pytest.mark.parametrize("name", OTHERS)
def test_three_steps_are_eagers_by_the_other_ways(other_results, name):
    check(other_results, name)
