"""Launching a compiled kernel again: what goes through Triton, and what is started directly. No device is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from aottrain.compiler.optimizers.formulas import SGD, Segment, optimizer_step
from aottrain.ir.kernels.multi_tensor import BLOCK
from aottrain.runtime.cuda import triton_launch
from aottrain.runtime.cuda.triton_launch import _Prepared
from aottrain.runtime.multi_tensor import TensorTables


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


@pytest.mark.parametrize("checked", [False, True])
def test_how_a_module_of_kernels_is_launched(monkeypatch, checked):
    """Partial results lie in tensors that a launch makes; assertions are compiled where an index is checked alone."""
    kernel = Kernel()
    module = SimpleNamespace(SCRATCH=[("int1", 3), ("float32", 5)], LAUNCHES=[(kernel, 7, 2, ("s1", "p0", "s0"))])
    monkeypatch.setattr(triton_launch, "load_module", lambda source: module)
    given = torch.zeros(4)
    triton_launch.triton_launch("fn.check_index(row)" if checked else "row")([given])
    ((grid, (floats, argument, flags), options),) = kernel.through_triton
    assert grid == (7, 1, 1) and argument is given
    assert (floats.dtype, floats.numel(), flags.dtype, flags.numel()) == (torch.float32, 5, torch.bool, 3)
    assert options == {"enable_fp_fusion": False, "debug": checked, "sanitize_overflow": False, "num_warps": 2}


def test_stages_over_blocks_have_a_program_for_each_and_the_others_one(monkeypatch):
    """Where an address is no multiple of 16 Triton may not take them for such."""
    kernels = [Kernel(), Kernel(), Kernel()]
    stages = [
        (kernels[0], "blocks", 0, 4, ("parameter", "total")),
        (kernels[1], "all tensors", 0, 1, ("total",)),
        (kernels[2], "all blocks", 0, 2, ("total",)),
    ]
    monkeypatch.setattr(triton_launch, "check_device", lambda device: None)
    monkeypatch.setattr(triton_launch, "load_module", lambda source: SimpleNamespace(STAGES=stages))
    program = optimizer_step(SGD, (Segment(torch.float32, ()),))
    tables = TensorTables(program, [[BLOCK + 1, 5]], torch.device("cpu"))
    run = triton_launch.multi_tensor_run("", tables)
    options = {"enable_fp_fusion": False, "sanitize_overflow": False}
    for address, alignment in ((32, 16), (36, 1)):
        tables.pointers[:] = address
        run([], 0, 3)
        (first, second, third) = (kernel.through_triton.pop() for kernel in kernels)
        assert first[0] == (3, 1, 1) and first[1][3] == 0 and first[1][5] is tables.tables["total"]
        assert first[2] == {**options, "num_warps": 4, "ALIGNMENT": alignment}
        assert second == ((1, 1, 1), (2, tables.tables["total"]), {**options, "num_warps": 1})
        assert third == ((1, 1, 1), (3, tables.tables["total"]), {**options, "num_warps": 2})
