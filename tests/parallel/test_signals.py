"""A signal is for the step after which all processes have heard of it, whenever it comes to one of them."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from aottrain.config.parallel import ParallelConfig
from aottrain.errors import Interrupted
from aottrain.trainer.parallel.together import agree
from aottrain.trainer.parallel.world import World
from aottrain.trainer.reliability.signals import graceful_stop

JOB = SimpleNamespace(world=World(0, 2, "shard"))


@pytest.fixture
def others(monkeypatch):
    """What is done while this process waits for the others, which have heard nothing."""
    waits = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value, op: [wait() for wait in waits])
    return waits


def after_step(stop):
    agree(JOB, ParallelConfig(), 1, stop)
    return stop.signum, stop.takes_save()


@pytest.mark.parametrize(("signum", "found"), [(signal.SIGTERM, (15, False)), (signal.SIGUSR1, (None, True))])
def test_what_comes_while_they_agree_is_of_the_next_step(others, signum, found, capfd):
    with graceful_stop(is_agreed=True) as stop:
        others.append(lambda: signal.raise_signal(signum))
        assert after_step(stop) == (None, False)
        others.clear()
        assert after_step(stop) == found
        assert after_step(stop) == (found[0], False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_what_comes_after_they_agreed_is_of_the_next_step(others, signum, capfd):
    is_end = signum == signal.SIGTERM
    with pytest.raises(Interrupted) if is_end else nullcontext(), graceful_stop(is_agreed=True) as stop:
        assert after_step(stop) == (None, False)
        signal.raise_signal(signum)
        assert (stop.signum, stop.takes_save()) == (None, False)
        assert after_step(stop) != (None, False)
        if is_end:
            signal.raise_signal(signum)
            pytest.fail("a second one ends it")


def test_one_process_alone_asks_nobody(capfd):
    with graceful_stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.signum == 15
