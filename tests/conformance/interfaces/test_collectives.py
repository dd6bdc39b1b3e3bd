"""Collectives inside a compiled function, in two processes: compiled or refused and counted, and never dropped."""

from __future__ import annotations

import socket
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import aottrain
from tests.sampling import WHOLE

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")


def of_a_value(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def of_an_input(x):
    dist.all_reduce(x)
    return x + 1


def of_what_nothing_reads(x, other):
    dist.all_reduce(other)
    return x * 2


def functional(x):
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def functional_unread(x, other):
    from torch.distributed._functional_collectives import all_reduce

    all_reduce(other, "sum", dist.group.WORLD)
    return x * 2


PROGRAMS = of_a_value, of_an_input, of_what_nothing_reads, functional, functional_unread


def work(rank: int, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for frontend in ("trace", "dynamo"):
        for program in PROGRAMS:
            given = [torch.full((3,), rank + i + 1.0) for i in range(program.__code__.co_argcount)]
            wanted = [value.clone() for value in given]
            call = aottrain.compile(program, capture=frontend, kernel="aten")
            got, expected = call(*given), program(*wanted)
            assert all(map(torch.equal, [torch.as_tensor(got), *given], [torch.as_tensor(expected), *wanted])), program
            kept = "all_reduce" in "".join(graph.forward_text for graph in call.report.graphs)
            assert kept or call.report.num_fallbacks, f"{program.__name__} by {frontend}: no collective is left"
    dist.destroy_process_group()


@WHOLE  # tests/parallel has two processes, too
def test_collectives_are_eagers():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(port,), nprocs=2)
