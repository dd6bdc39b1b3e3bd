"""A private part of torch.distributed, which torch's own tests of several processes in one are made with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def imagined_processes(size: int) -> Iterator[None]:
    """Inside, this process is the first of so many, of which no other is there: what it sends goes nowhere, and what it
    would be given is whatever memory holds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this makes the backend known

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
