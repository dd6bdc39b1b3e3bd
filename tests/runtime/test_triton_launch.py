"""Launching a compiled kernel again: what goes through Triton, and what is started directly. No device is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from aottrain.runtime.triton_launch import _Prepared


class Kernel:
    """Stands for a Triton function: counts its launches, and gives what Triton gives back."""

    def __init__(self):
        self.through_triton, self.direct = [], []
        run = lambda *given: self.direct.append(given)  # noqa: E731
        self.compiled = SimpleNamespace(run=run, function="function", packed_metadata="packed")

    def __getitem__(self, grid):
        def launch(*tensors, **options):
            self.through_triton.append((grid, tensors, options))
            return self.compiled

        return launch


@pytest.fixture
def prepared():
    kernel = Kernel()
    made = _Prepared(kernel, 7, {"num_warps": 4})
    made.settings = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=SimpleNamespace(calls=[]))
    made.driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: f"stream of {index}"))
    return kernel, made


def tensors(offset=0):
    return torch.zeros(64 + offset)[offset:], torch.zeros(8)


def test_after_the_first_launch_the_kernel_is_started_directly_on_the_current_stream(prepared):
    kernel, launch = prepared
    given = tensors()
    launch(*given)
    assert kernel.through_triton == [((7, 1, 1), given, {"num_warps": 4})] and not kernel.direct
    launch(*given)
    launch(*tensors())
    assert len(kernel.through_triton) == 1
    addresses = [tensor.data_ptr() for tensor in given]
    assert kernel.direct[0] == (7, 1, 1, "stream of None", "function", "packed", None, None, None, *addresses)
    assert len(kernel.direct) == 2


def test_memory_that_is_not_aligned_goes_through_triton_always(prepared):
    """It compiles another kernel for it, and must not be given that of aligned memory, nor the other way round."""
    kernel, launch = prepared
    for offset in (1, 0, 1, 0):
        launch(*tensors(offset))
    assert [given[0].data_ptr() % 16 for _, given, _ in kernel.through_triton] == [4, 0, 4]
    assert len(kernel.direct) == 1


def test_a_profiler_of_launches_hears_of_all(prepared):
    kernel, launch = prepared
    launch(*tensors())
    launch.settings.launch_enter_hook = SimpleNamespace(calls=[print])
    launch(*tensors())
    assert len(kernel.through_triton) == 2 and not kernel.direct


def test_what_triton_does_not_say_is_never_guessed(prepared):
    kernel, launch = prepared
    kernel.compiled = None
    for _ in range(3):
        launch(*tensors())
    assert len(kernel.through_triton) == 3
