"""Render a MultiTensorIR as a Triton module: a kernel for each stage, one program for each block.

A program looks up its tensor's pointers in a table, as text and launch do not depend on the tensors. Whole blocks have
no masks, and where the host says that all pointers are multiples of 16 bytes, memory moves 16 bytes at a time.
"""

from __future__ import annotations

from aottrain.compiler.codegen.triton.columns import Columns
from aottrain.compiler.codegen.triton.derived import Derived
from aottrain.compiler.codegen.triton.index import COL, Indices
from aottrain.compiler.codegen.triton.render import HEADER, Renderer
from aottrain.compiler.codegen.triton.text import STORED
from aottrain.compiler.codegen.triton.tiles import Tile
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.multi_tensor import BLOCK, Base, MultiTensorIR, Over, Stage

_WIDTH = {Over.BLOCKS: 1024, Over.ALL_TENSORS: 128, Over.ALL_BLOCKS: 4096}


class _CountedIndices(Indices):
    """masked: the row has `count` elements, which a value of the kernel says; else all of a block."""

    def __init__(self, kernel: KernelIR, tile: Tile, masked: bool):
        self.masked = masked
        super().__init__(kernel, tile)

    def _is_masked(self, axis: str) -> bool:
        return axis == COL and self.masked

    def _mask_line(self, axis: str) -> list[str]:
        return [f"{axis}_mask = {axis} < count"] if self._is_masked(axis) else []


class _BlockRenderer(Renderer):
    """The lines of a kernel after those that define `count` and the parameters' pointers."""

    def __init__(self, stage: Stage, masked: bool):
        super().__init__(stage.kernel)
        width = _WIDTH[stage.over]
        self.masked = masked
        self.tile = Tile(False, 1, width, max(1, width // 256), False, Derived(stage.kernel), swept=True)
        self.index = _CountedIndices(stage.kernel, self.tile, masked)
        self.axes = self._axes()
        self.columns = Columns(stage.kernel, self.tile, self.index, self._masked, self._out)

    def _row_end(self) -> str:
        return "count" if self.masked else str(BLOCK)

    def body(self, depth: int) -> list[str]:
        early = {value for value, axes in enumerate(self.axes) if not axes}
        for value in sorted(early):
            self._define(depth, value)
        self._out(depth, "row = tl.arange(0, 1)[:, None]")
        self._sweep(depth, early)
        return self.lines


def render_triton_multi_tensor(program: MultiTensorIR) -> str:
    """A Python module: a kernel for each stage, and STAGES: each kernel, what it runs over, its segment, its warps, the
    names of its lists and tables."""
    parts = [HEADER]
    rows = []
    for stage in program.stages:
        comment = "".join(f"# {line}\n" for line in str(stage.kernel).splitlines() if line.strip())
        lines = _over_blocks(stage) if stage.over is Over.BLOCKS else _once(stage)
        parts.append(f"\n{comment}" + "\n".join(lines) + "\n")
        names = tuple(parameter.name for parameter in stage.kernel.parameters)
        warps = max(1, _WIDTH[stage.over] // 256)
        rows.append(f"    ({stage.kernel.name}, {stage.over.value!r}, {stage.segment}, {warps}, {names!r}),\n")
    return "\n".join(parts) + f"\n\nSTAGES = (\n{''.join(rows)})\n"


def _over_blocks(stage: Stage) -> list[str]:
    kernel = stage.kernel
    names = [f"m{i}" for i in range(len(kernel.parameters))]
    lines = [
        '@triton.jit(do_not_specialize=["first_block"])',
        f"def {kernel.name}(owner, origins, counts, first_block, {', '.join(names)}, ALIGNMENT: tl.constexpr):",
        "    block = first_block + tl.program_id(0).to(tl.int64)",
        "    tensor = tl.load(owner + block)",
        f"    origin = tl.multiple_of(tl.load(origins + block), {BLOCK})",
        "    count = tl.load(counts + block).to(tl.int32)",
    ]
    for number, (parameter, base) in enumerate(zip(kernel.parameters, stage.bases, strict=True)):
        kind = STORED[parameter.dtype]
        first = f"tl.load(m{number} + tensor).to(tl.pointer_type({kind}))"
        text = {
            Base.LIST: f"tl.multiple_of({first}, ALIGNMENT) + origin",
            Base.ROW: f"m{number} + tensor * {parameter.span}",
            Base.BLOCK: f"m{number} + block",
            Base.WHOLE: f"m{number}",
        }[base]
        lines.append(f"    p{number} = {text}")
    lines.append(f"    if count == {BLOCK}:")
    lines += _BlockRenderer(stage, masked=False).body(2)
    lines.append("    else:")
    return lines + _BlockRenderer(stage, masked=True).body(2)


def _once(stage: Stage) -> list[str]:
    names = [f"p{i}" for i in range(len(stage.kernel.parameters))]
    lines = [
        '@triton.jit(do_not_specialize=["count"])',
        f"def {stage.kernel.name}(count, {', '.join(names)}):",
    ]
    return lines + _BlockRenderer(stage, masked=True).body(1)
