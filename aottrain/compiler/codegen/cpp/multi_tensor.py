"""Render a MultiTensorIR as one C++ function: every stage within one parallel region, so a step costs one fork.

    int run(void* const* memory, const i64* sizes, int first_stage, int last_stage, int num_threads)

memory: owner, start and count of each block (i64), the active flag is a count of 0; then the lists, each an array of
pointers; then the tables. sizes: the number of tensors, of blocks, and the first block of each segment.
"""

from __future__ import annotations

from collections.abc import Iterator

from aottrain.compiler.codegen.cpp.library import LIBRARY
from aottrain.compiler.codegen.cpp.pragmas import parameters
from aottrain.compiler.codegen.cpp.render import Renderer
from aottrain.compiler.codegen.cpp.text import STORED
from aottrain.compiler.codegen.row_passes import plan_passes
from aottrain.ir.kernels.kernel import KernelIR, Level
from aottrain.ir.kernels.multi_tensor import Base, MultiTensorIR, Over, Stage

# Of what `memory` begins with.
STRUCTURE = ("owner", "start", "count")


class _BlockRenderer(Renderer):
    """The function of one block: `void NAME(void* const* p, const i64 count)`."""

    def __init__(self, kernel: KernelIR):
        super().__init__(kernel)
        self.plan = plan_passes(kernel, can_hold=False)  # a table may be longer than a block

    def render(self) -> str:
        self._out(0, f"static void {self.kernel.name}(void* const* p, const i64 count) {{")
        self._lines(1, parameters(self.kernel, self.pointers))
        self._values(1, Level.CONSTANT, 0)
        for number in range(len(self.plan.passes)):
            self._pass(1, number, ("0", "count"), None)
            self._values(1, Level.ROW, number + 1)
        self._row_stores(1)
        self._out(0, "}")
        return "\n".join(self.lines) + "\n"


def render_multi_tensor(program: MultiTensorIR) -> str:
    """One self-contained C++ text: a function for each stage, and `run`, which runs them."""
    parts = [LIBRARY]
    for stage in program.stages:
        header = [f"// {line}" for line in str(stage.kernel).splitlines() if line.strip()]
        parts.append("\n".join(header) + "\n" + _BlockRenderer(stage.kernel).render())
    return "\n".join([*parts, *_driver(program)]) + "\n"


def _driver(program: MultiTensorIR) -> Iterator[str]:
    parameters = "void* const* memory, const i64* sizes, int first_stage, int last_stage, int num_threads"
    yield f'extern "C" int run({parameters}) {{'
    for number, name in enumerate(STRUCTURE):
        yield f"  const i64* const {name} = (const i64*)memory[{number}];"
    yield "  #pragma omp parallel num_threads(num_threads)"
    yield "  {"
    yield "    const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();"
    for number, stage in enumerate(program.stages):
        yield f"    if ({number} >= first_stage && {number} < last_stage) {{"
        yield from _over_blocks(program, stage) if stage.over is Over.BLOCKS else _once(program, stage)
        if number + 1 < len(program.stages) and not _is_followed_freely(program, number):
            yield "      #pragma omp barrier"
        yield "    }"
    yield "  }"
    yield "  return 0;"
    yield "}"


def _is_followed_freely(program: MultiTensorIR, number: int) -> bool:
    """Whether the next stage does the same for another segment's tensors: it need not wait."""
    return program.stages[number].over is Over.BLOCKS and program.stages[number + 1].over is Over.BLOCKS


def _over_blocks(program: MultiTensorIR, stage: Stage) -> Iterator[str]:
    low, high = f"sizes[{2 + stage.segment}]", f"sizes[{3 + stage.segment}]"
    yield f"      const i64 num = {high} - {low}, end = {low} + num * (thread + 1) / threads;"
    yield f"      for (i64 block = {low} + num * thread / threads; block < end; block++) {{"
    yield "        const i64 tensor = owner[block];"
    yield from _parameter_pointers(program, stage, 8)
    yield f"        {stage.kernel.name}(p, count[block]);"
    yield "      }"


def _once(program: MultiTensorIR, stage: Stage) -> Iterator[str]:
    yield "      if (thread == 0) {"
    yield from _parameter_pointers(program, stage, 8)
    yield f"        {stage.kernel.name}(p, sizes[{0 if stage.over is Over.ALL_TENSORS else 1}]);"
    yield "      }"


def _parameter_pointers(program: MultiTensorIR, stage: Stage, indent: int) -> Iterator[str]:
    """Where the memory of each parameter begins."""
    yield " " * indent + "void* const p[] = {"
    for parameter, base in zip(stage.kernel.parameters, stage.bases, strict=True):
        kind = STORED[parameter.dtype]
        address = f"memory[{memory_index(program, parameter.name)}]"
        text = {
            Base.LIST: f"({kind}*)((void* const*){address})[tensor] + start[block]",
            Base.ROW: f"({kind}*){address} + tensor * {parameter.span}",
            Base.BLOCK: f"({kind}*){address} + block",
            Base.WHOLE: address,
        }[base]
        yield " " * (indent + 2) + f"{text},  // {parameter.name}"
    yield " " * indent + "};"


def memory_index(program: MultiTensorIR, name: str) -> int:
    """The position of a list or table in `memory`."""
    return len(STRUCTURE) + (*program.lists, *program.tables).index(name)
