"""The pragma that makes vectors of an innermost loop in C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aottrain.compiler.codegen.cpp import reductions as cpp_reductions
from aottrain.compiler.codegen.cpp.work import Work
from aottrain.ir.kernels.kernel import Column, Compute, Instruction, Load, Store


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
