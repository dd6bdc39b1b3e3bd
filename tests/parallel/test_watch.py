"""A process that meets a new kind of batch hears from the others at once whether they do, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from aottrain.errors import ParallelError
from aottrain.trainer.parallel.watch import Watch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is without gloo")


@pytest.fixture
def two():
    store = dist.HashStore()
    watches = [Watch(store, rank, 2, timedelta(seconds=5)) for rank in range(2)]
    yield watches
    for watch in watches:
        watch.close()


def together(two, kinds):
    """What each raises, or None."""
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(watch.meet, kind, True) for watch, kind in zip(two, kinds, strict=True)]
        return [each.exception() for each in met]


def test_what_all_meet_anew_holds_nobody_up(two):
    assert together(two, "aa") == [None, None]
    two[0].meet("a", False)  # one step ahead of the other
    two[1].meet("a", False)
    assert together(two, "bb") == [None, None]


def test_who_goes_on_with_what_it_knows_says_so(two):
    together(two, "aa")
    two[1].meet("a", False)  # and waits in a collective of this step
    with pytest.raises(ParallelError, match="process 0 meets a first batch of b, and process 1 goes on with a"):
        two[0].meet("b", True)


def test_who_has_not_come_so_far_is_waited_for(two):
    together(two, "aa")
    two[0].timeout = timedelta(seconds=1.2)
    with pytest.raises(ParallelError, match="first batch of b; process 1 does not answer in time"):
        two[0].meet("b", True)


def test_both_hear_of_two_kinds(two):
    first, second = together(two, "ab")
    assert "process 0 meets a first batch of a, and process 1 one of b" in str(first)
    assert "process 1 meets a first batch of b, and process 0 one of a" in str(second)
