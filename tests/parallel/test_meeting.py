"""Processes that are started again meet each other, and not what those before them have left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from aottrain.trainer.parallel.meeting import fresh

SOON = timedelta(seconds=20)


def met(store, size, ranks=None, timeout=SOON):
    """What each process of one start finds; each leaves its address there."""
    with ThreadPoolExecutor(size) as pool:
        own = [pool.submit(fresh, store, rank, size, timeout) for rank in ranks or range(size)]
        stores = [each.result() for each in own]
    return stores


def test_each_start_has_keys_of_its_own():
    store = dist.HashStore()
    for start in range(3):
        stores = met(store, 3)
        assert not any(each.check(["address/0"]) for each in stores)
        stores[0].set("address/0", str(start))
        assert [each.get("address/0").decode() for each in stores] == [str(start)] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_that_ended_early_has_asked_or_answered_holds_nobody_up(rank):
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="has not come in time"):
        met(store, 2, [rank], timedelta(seconds=0.1))  # the other one was killed while it started
    first, second = met(store, 2)
    first.set("address", "here")
    assert second.get("address") == b"here"
