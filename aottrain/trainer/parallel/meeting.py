"""Where the processes of one start meet.

torchrun's store outlives a restart, since its rendezvous shares it with the processes that it starts. It then has the
addresses and answers of those that have ended: whoever comes first reads them, and waits for a process that is gone.
So the processes of each start take keys of their own.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore

_LOOKS_S = 0.02


def fresh(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The store under a prefix that the first process has made up and each other one has from it. TimeoutError: one
    does not come.

    A process asks under its rank, where an ended one may have asked, with a name that is new; the first process answers
    under that name, which no ended one can have done, and goes on answering until each has confirmed its prefix.
    """
    until_s = time.monotonic() + timeout.total_seconds()
    own = uuid.uuid4().hex
    if rank:
        store.set(f"aottrain/asks/{rank}", own)
        prefix = _answer(store, f"aottrain/answers/{own}", until_s)
        store.set(f"aottrain/confirms/{prefix}/{rank}", own)
        return PrefixStore(f"aottrain/{prefix}", store)
    answered: dict[int, str] = {}
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            key = f"aottrain/asks/{other}"
            name = store.get(key).decode() if store.check([key]) else None
            if name is not None and answered.get(other) != name:
                store.set(f"aottrain/answers/{name}", own)
                answered[other] = name
            if store.check([f"aottrain/confirms/{own}/{other}"]):
                missing.remove(other)
        _pause(until_s, f"process {min(missing, default=0)} has not come")
    return PrefixStore(f"aottrain/{own}", store)


def _answer(store: Any, key: str, until_s: float) -> str:
    while not store.check([key]):
        _pause(until_s, "the first process has not come")
    return store.get(key).decode()


def _pause(until_s: float, problem: str) -> None:
    if time.monotonic() > until_s:
        raise TimeoutError(f"{problem} in time")
    time.sleep(_LOOKS_S)
