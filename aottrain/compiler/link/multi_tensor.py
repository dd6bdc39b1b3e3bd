"""What runs a MultiTensorIR: compiled C++, Triton kernels, or `evaluate` block by block, which says what it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from aottrain.compiler.codegen.cpp.multi_tensor import render_multi_tensor
from aottrain.compiler.codegen.evaluation import evaluate, memory_of
from aottrain.compiler.codegen.triton.multi_tensor import render_triton_multi_tensor
from aottrain.compiler.link.programs import FLAGS
from aottrain.ir.kernels.kernel import Parameter
from aottrain.ir.kernels.multi_tensor import BLOCK, Base, MultiTensorIR, Over, Stage, at_count
from aottrain.runtime.cuda.triton_launch import multi_tensor_run
from aottrain.runtime.multi_tensor import Run, TensorTables, cpp_run
from aottrain.toolchain.native import Source, require_all

Lists = Sequence[Sequence[Tensor | None]]


@cache
def link_multi_tensor(program: MultiTensorIR, backend: str) -> Callable[[TensorTables], Run]:
    """backend: "cpp", "triton" or "evaluate". CompilerError: no compiler works; ConfigError: nor a device."""
    if backend == "evaluate":
        return partial(evaluated_run, program)
    if backend == "triton":
        return partial(multi_tensor_run, render_triton_multi_tensor(program))
    (library,) = require_all([Source(render_multi_tensor(program), FLAGS)])
    return partial(cpp_run, library.functions.run)


def evaluated_run(program: MultiTensorIR, tables: TensorTables) -> Run:
    """Each stage in plain torch: the oracle."""

    def run(lists: Lists, first: int, last: int) -> None:
        for stage in program.stages[first:last]:
            if stage.over is Over.BLOCKS:
                for block in range(*tables.segment_blocks[stage.segment : stage.segment + 2]):
                    _evaluate_block(program, stage, tables, lists, block)
            else:
                count = tables.num_tensors if stage.over is Over.ALL_TENSORS else tables.num_blocks
                names = [parameter.name for parameter in stage.kernel.parameters]
                evaluate(at_count(stage.kernel, count), [tables.tables[name] for name in names])

    return run


def _evaluate_block(program: MultiTensorIR, stage: Stage, tables: TensorTables, lists: Lists, block: int) -> None:
    tensor, start = int(tables.owner[block]), int(tables.start[block])
    count = int(tables.counts[block])

    def memory(parameter: Parameter, base: Base) -> Tensor:
        if base is Base.LIST:
            whole = lists[program.lists.index(parameter.name)][tensor]
            if whole is None:
                return torch.empty(0, dtype=parameter.dtype, device=tables.device)
            return memory_of(whole, whole.numel())[start : start + count]
        position = block if base is Base.BLOCK else tensor * parameter.span if base is Base.ROW else 0
        return tables.tables[parameter.name][position : position + parameter.span]

    buffers = [memory(p, base) for p, base in zip(stage.kernel.parameters, stage.bases, strict=True)]
    assert count <= BLOCK
    evaluate(at_count(stage.kernel, count), buffers)
