"""Memory figures against allocations whose sizes are known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import aottrain
from aottrain.ir.tensor import tensor_spec
from aottrain.metrics import memory
from aottrain.metrics.memory import alive_tensors, distinct_bytes, eager_saved_bytes, peak_rss_bytes, watch_cpu_peak
from aottrain.metrics.preserve import preserved, preserved_rng
from aottrain.runtime import arena
from aottrain.runtime.arena import ArenaLayout

MIB = 1 << 20


def block(num_mib: int) -> torch.Tensor:
    return torch.empty(num_mib * MIB, dtype=torch.uint8)


def test_the_peak_is_the_largest_sum_alive():
    before = block(5)
    with watch_cpu_peak([before]) as peak:
        a, b = block(2), block(3)
        del a
        c = block(1)
        del b, c
        assert peak.num_bytes is None
    assert peak.num_bytes == (5 + 2 + 3) * MIB


def test_what_is_freed_within_makes_room():
    with watch_cpu_peak() as peak:
        for _ in range(4):
            held = block(2)
            del held
    assert peak.num_bytes == 2 * MIB


def test_nothing_allocated_is_the_start():
    with watch_cpu_peak([block(1)]) as peak:
        pass
    assert peak.num_bytes == MIB


def test_the_backward_counts():
    x = torch.empty(MIB // 4, requires_grad=True)  # 1 MiB
    with watch_cpu_peak([x]) as peak:
        x.exp().sum().backward()  # exp saves its output, then its gradient is made from an expanded scalar
    assert 3 * MIB <= peak.num_bytes < 3.01 * MIB


def test_what_a_program_keeps_counts_until_another_program_runs():
    """Of several programs in one step only one keeps memory at a time: their arenas and blocks do not add up."""
    first, second = holders = object(), object()
    size = tensor_spec(torch.empty(MIB // 4))
    arenas = [ArenaLayout(2 * MIB, (), torch.device("cpu"), holder) for holder in holders]
    aottrain.empty_cache()
    start = arena.held_bytes()

    def run(holder: object) -> None:
        arena.begin(holder)
        arenas[holders.index(holder)].give(arenas[holders.index(holder)].take())
        arena.residual(holder, size)

    run(first)
    for others, expected in (((), 3), ((first,), 3), ((second,), 3), ((first, second), 3)):
        with watch_cpu_peak() as peak:
            for holder in others:
                run(holder)
        assert peak.num_bytes == start + expected * MIB, others
    held = arena.residual(second, size)
    with watch_cpu_peak() as peak:
        run(first)
    assert peak.num_bytes == start + 4 * MIB, "a block that something refers to stays"
    del held


def test_an_exception_passes_through():
    with pytest.raises(RuntimeError, match="within"), watch_cpu_peak():
        raise RuntimeError("within")
    with watch_cpu_peak() as peak:
        pass
    assert peak.num_bytes == 0


def test_storages_count_once():
    x = torch.zeros(10)
    assert distinct_bytes([x, x[2:], x.view(2, 5), None, torch.zeros(3)]) == 40 + 12
    assert distinct_bytes([torch.zeros(0), torch.zeros(0)]) == 0


def test_what_a_step_finds():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    batch = (torch.zeros(5, 3),)
    parameters, buffers = (6 + 2 + 2 + 2) * 4, (2 + 2) * 4 + 8
    assert distinct_bytes(alive_tensors(model, None, [batch])) == parameters + buffers + 60
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(*batch).sum().backward()
    assert distinct_bytes(alive_tensors(model, optimizer, [batch])) == 2 * parameters + buffers + 60
    optimizer.step()
    assert distinct_bytes(alive_tensors(model, optimizer, [batch])) == 4 * parameters + 4 * 4 + buffers + 60


class Saving(nn.Module):
    """Saves x (the batch), weight (a parameter), the output of exp, and of dropout its mask."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(100))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = (x * self.weight).exp()
        return (y.view(-1) * y.view(-1)).sum()


def test_saved_bytes_leave_out_parameters_buffers_and_batch():
    module, batch = Saving(), (torch.ones(10, 100),)
    assert eager_saved_bytes(module, batch) == 10 * 100 * 4
    assert module.calls == 0 and module.weight.grad is None


def test_saved_bytes_change_no_random_stream():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    assert eager_saved_bytes(module, (torch.ones(2, 4),)) > 0
    assert torch.equal(before, torch.get_rng_state())


def test_preserving_puts_gradients_buffers_and_streams_back_after_an_error():
    module = nn.BatchNorm1d(3)
    module.weight.grad = grad = torch.ones(3)
    random = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), preserved(module):
        assert module.weight.grad is None
        module(torch.randn(4, 3)).sum().backward()
        raise ZeroDivisionError
    assert module.weight.grad is grad and torch.equal(module.running_mean, torch.zeros(3))
    assert module.num_batches_tracked == 0 and torch.equal(random, torch.get_rng_state())
    with preserved_rng():
        torch.rand(3)
    assert torch.equal(random, torch.get_rng_state())


def test_the_resident_set_is_at_least_the_interpreter(monkeypatch):
    assert peak_rss_bytes() > 20 * MIB
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=7))
    for platform, unit in (("linux", 1024), ("darwin", 1)):
        monkeypatch.setattr(memory.sys, "platform", platform)
        assert peak_rss_bytes() == 7 * unit
