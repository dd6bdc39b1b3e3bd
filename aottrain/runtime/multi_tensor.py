"""The memory of a program over many tensors (`ir.kernels.multi_tensor`), and the call of its compiled C++ on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aottrain.ir.kernels.multi_tensor import BLOCK, Base, MultiTensorIR, Over, row_size

# Below this many elements a step runs on the calling thread: waking the others costs more.
_PARALLEL_FROM = 32768


class TensorTables:
    """Tables for tensors of known sizes: which tensor each block belongs to, pointers, numbers of the step, results.

    program: what runs on them. sizes: elements of each tensor, for each segment. The host writes `hyperparameters`,
    `settings` and `pointers` in each step, as NumPy arrays. `upload` brings them to a device; a CPU has them already.
    """

    def __init__(self, program: MultiTensorIR, sizes: Sequence[Sequence[int]], device: torch.device):
        self.program, self.device = program, device
        flat = [size for segment in sizes for size in segment]
        blocks = [-(-size // BLOCK) for size in flat]
        self.num_tensors, self.num_blocks, self.num_elements = len(flat), sum(blocks), sum(flat)
        first_tensors = np.cumsum([0, *map(len, sizes)])
        first_blocks = np.cumsum([0, *blocks])
        self.segment_blocks = tuple(int(first_blocks[i]) for i in first_tensors)
        owner = np.repeat(np.arange(len(flat)), blocks)
        start = (np.arange(self.num_blocks) - first_blocks[owner]) * BLOCK
        self._owner = owner
        self._full_counts = np.minimum(np.array(flat, dtype=np.int64)[owner] - start, BLOCK)
        self.owner, self.start = (torch.from_numpy(a.astype(np.int64)).to(device) for a in (owner, start))
        self.tables = {name: self._table(name) for name in program.tables}
        self._share(("settings", "given"))

    def _table(self, name: str) -> Tensor:
        for stage in self.program.stages:
            for number, (parameter, base) in enumerate(zip(stage.kernel.parameters, stage.bases, strict=True)):
                if parameter.name == name and stage.over is not Over.BLOCKS:
                    size = row_size(stage.kernel, number)
                    moves = size != parameter.span
                    rows = self.num_tensors if stage.over is Over.ALL_TENSORS else self.num_blocks
                    assert base is Base.WHOLE
                    return torch.zeros(size * rows if moves else size, dtype=parameter.dtype, device=self.device)
        raise KeyError(name)

    def _share(self, names: Sequence[str]) -> None:
        """One block of memory for all that the host writes in each step: one copy brings it to a device."""
        num_lists = len(self.program.lists)
        counts = [self.tables[name].numel() for name in names] + [num_lists * self.num_tensors]
        self._host = torch.zeros(sum(counts), dtype=torch.int64)
        self._device = self._host.to(self.device)  # the same where that is a CPU
        host, there = self._host.split(counts), self._device.split(counts)
        for name, part in zip(names, there, strict=False):
            self.tables[name] = part.view(torch.float64)
        self.settings = host[0].numpy().view(np.float64)
        self.hyperparameters = host[1].numpy().view(np.float64).reshape(self.num_tensors, -1)
        self.pointers = host[2].numpy().reshape(num_lists, self.num_tensors)
        self.device_pointers = there[2].view(num_lists, -1)
        self.counts = torch.zeros(self.num_blocks, dtype=torch.int64, device=self.device)

    def set_active(self, active: Sequence[bool]) -> None:
        """Blocks of other tensors are empty: nothing of them is read or written."""
        counts = np.where(np.array(active, dtype=bool)[self._owner], self._full_counts, 0)
        self.counts.copy_(torch.from_numpy(counts))

    def upload(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


# Runs the stages from the first to before the last on the tensors of each list, None where one is not active.
Run = Callable[[Sequence[Sequence[Tensor | None]], int, int], None]


def cpp_run(function: Any, tables: TensorTables) -> Run:
    """Calls `int run(void* const* memory, const i64* sizes, int first, int last, int num_threads)`."""
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int
    pieces = [tables.owner, tables.start, tables.counts, *tables.device_pointers]
    pieces += [tables.tables[name] for name in tables.program.tables]
    memory = (ctypes.c_void_p * len(pieces))(*(piece.data_ptr() for piece in pieces))
    numbers = (tables.num_tensors, tables.num_blocks, *tables.segment_blocks)
    sizes = (ctypes.c_int64 * len(numbers))(*numbers)
    threads = torch.get_num_threads

    def run(lists: Sequence[Sequence[Tensor | None]], first: int, last: int) -> None:
        count = threads() if tables.num_elements >= _PARALLEL_FROM else 1
        function(memory, sizes, first, last, count)

    return run
