"""How vectors are made of an innermost loop in C++: its pragma, and the pointers by which it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aottrain.compiler.codegen.cpp import reductions as cpp_reductions
from aottrain.compiler.codegen.cpp.text import STORED
from aottrain.compiler.codegen.cpp.work import Work
from aottrain.ir.kernels.kernel import Column, Compute, Instruction, KernelIR, Load, Store
from aottrain.ir.sizes.polynomials import is_open

# In elements. Of what lies nearer, all that is between is read in a few vectors.
_FAR = 16


def simd(computed: Sequence[Instruction], work: Work, wholes: Mapping[int, Column]) -> list[str]:
    """The line before the loop; none where it may not be made of vectors. wholes: sums over everything."""
    checks = any(isinstance(i, Compute) and i.op == "checked" for i in computed)
    addresses = [access.address for access in (*computed, *work.stores) if isinstance(access, (Load, Store))]
    looks_up = checks and any(address.indirect for address in addresses)
    if looks_up or any(column.op not in ("sum", "prod") for column in wholes.values()):
        return []
    clauses = ["reduction(|:failed)"] * checks
    clauses += cpp_reductions.clauses(work)
    clauses += [f"reduction({'+' if column.op == 'sum' else '*'}:w{k})" for k, column in wholes.items()]
    return [" ".join(["#pragma omp simd", *clauses])]


def pointers_of(kernel: KernelIR) -> dict[int, str]:
    """By its position in the body, through which pointer a load reads.

    Where a loop reads two elements that are neighbours, and its next iteration two that are far away, as the parts of
    complex numbers of a transposed matrix, g++ reads all that is between as well, and picks what is asked for: 500
    times as long where they are 2,048 apart. It does so for what it knows to be of one pointer.
    """
    last = len(kernel.ranges) - 1
    found: dict[int, str] = {}
    constants: dict[object, list[int]] = {}
    for value, load in enumerate(kernel.body):
        if not isinstance(load, Load):
            continue
        found[value] = f"p{load.buffer}"
        offset = load.address.offset
        step = offset.coefficient(last)
        if is_open(step) or abs(step) <= _FAR or load.address.indirect or kernel.parameters[load.buffer].written:
            continue
        near = constants.setdefault((load.buffer, offset.terms), [])
        if offset.constant not in near:
            near.append(offset.constant)
        if number := near.index(offset.constant):
            found[value] = f"p{load.buffer}_{number}"
    return found


def parameters(kernel: KernelIR, pointers: Mapping[int, str]) -> list[str]:
    """The lines that name them, and the others of `pointers_of`."""
    lines = []
    for i, parameter in enumerate(kernel.parameters):
        kind = ("" if parameter.written else "const ") + STORED[parameter.dtype]
        lines.append(f"{kind}* __restrict const p{i} = ({kind}*)p[{i}];")
        others = dict.fromkeys(name for name in pointers.values() if name.startswith(f"p{i}_"))
        lines += [f"{kind}* const {name} = apart_(p{i});" for name in others]
    return lines
