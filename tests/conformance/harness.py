"""Programs that are hard for a compiler, each run eagerly and through both front ends, and compared in all that shows.

Generated kernels are C++; `TRITON_INTERPRET=1 python -m pytest tests/conformance -k triton` runs Triton's instead.

A case is a function of `comp`, which compiles a function or module (and for eager's turn hands it back as it is). The
case builds its own inputs and returns an observation: any nest of tensors and plain values. Tensors are compared
bitwise, and in dtype, shape, strides, requires_grad and is_leaf; where a case says `close`, within rounding. How far it
compiles is compared with the record, see `record`.

A test takes each case through the front ends that it is about; `scripts/conformance.py` takes every case through all.
"""

from __future__ import annotations

import os
import random
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.conformance import record
from tests.numerics.tolerance import RTOL_ATOL, sum_error
from tests.recorded import on_recorded_torch
from tests.sampling import WHOLE
from tests.skips import NO_COMPILER

FRONTENDS = ("dynamo", "trace")
# The front ends of a module's cases, by turns: of those about what is computed, about Python, and about what a compiler
# does to a program; and of programs that were brought from elsewhere. Of a case's front ends one is sampled, which one
# hangs on its name. Every case goes through every front end in the script.
VALUES = ("trace cpp",)
PYTHON = ("trace dynamo", "trace")
PROGRAMS = ("trace dynamo", "trace cpp")
PEERS = ("trace", "dynamo", "cpp")
# The second once more, with generated kernels however small the program: their results are compared closely.
GENERATED = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "cpp"
BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
Compile = Callable[[Any], Any]


@dataclass
class Case:
    """A program that is run eagerly and through a front end, and what is expected of it."""

    program: Callable[[Compile], Any]
    raises: str = ""
    """The type of the error that ends it both ways."""
    close: str = ""
    """Why the values may differ by rounding."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why, per front end, an error is due where eager gives none."""
    dynamo_blind: str = ""
    """What TorchDynamo itself does not guard, also with its own eager backend: that front end is not tried."""
    dynamo_was_blind: str = ""
    """The same before torch 2.13."""
    eager_was_wrong: str = ""
    """What eager itself did wrong before torch 2.13: there no front end is tried."""
    kernels_differ: str = ""
    """Why generated kernels give something else, within what they promise: they are not tried."""
    additions: int = 0
    """How many numbers, about standard normal ones, a sum of it adds: kernels may do so in another order."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.program.__name__


@dataclass
class Outcome:
    """What one run of a case gave: a frozen observation, or the error that ended it and its type ("" for none); and
    what the compiler did."""

    observation: Any
    error: str | None
    raised: str = ""
    num_graphs: int = 0
    fallbacks: tuple[str, ...] = ()


_cases: dict[str, list[Case]] = {}


def case(program: Any = None, **expectations: Any) -> Any:
    """Register a program as a case of its module."""
    if program is None:
        return lambda decorated: case(decorated, **expectations)
    _cases.setdefault(program.__module__, []).append(Case(program, **expectations))
    return program


def cases(module: str) -> list[Case]:
    return _cases.get(module, [])


def takes(case: Case, frontend: str) -> bool:
    """Whether a front end is tried: not where TorchDynamo sees too little, or kernels promise something else."""
    unfit = {"dynamo": case.dynamo_blind, GENERATED: case.kernels_differ}.get(frontend)
    return not (unfit or (BEFORE_2_13 and _was_wrong(case, frontend)))


def cases_of(module: str, turns: Sequence[str]) -> list[Any]:
    """Every case of a module with the front ends of one of the turns, by its name; as parameters (case, frontend)."""
    parameters = []
    for case in cases(module):
        frontends = turns[zlib.crc32(case.name.encode()) % len(turns)].split()
        frontends = [frontend for frontend in frontends if _is_worth(case, frontend)] or ["trace"]
        sampled = frontends[zlib.crc32(case.name[::-1].encode()) % len(frontends)]
        if GENERATED == "triton":
            frontends += [GENERATED] * (not case.kernels_differ)
        for frontend in frontends:
            marks = _skips(case, frontend) + [WHOLE] * (frontend not in (sampled, "triton"))
            parameters.append(pytest.param(case, frontend, id=f"{case.name}-{frontend}", marks=marks))
    return parameters


def _is_worth(case: Case, frontend: str) -> bool:
    """Not what TorchDynamo does not see, and no kernels where they promise something else, or where there are none."""
    if frontend == "cpp":
        no_kernels = (
            on_recorded_torch() and record.recorded(case.program.__module__, case.name, frontend)[:5] == "eager"
        )
        return not (case.kernels_differ or no_kernels)
    return frontend == "trace" or not case.dynamo_blind


def _skips(case: Case, frontend: str) -> list[Any]:
    why = _was_wrong(case, frontend)
    marks = [pytest.mark.skipif(BEFORE_2_13, reason=f"torch {torch.__version__}: {why}")] if why else []
    return marks + [pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)] * (frontend == "cpp")


def _was_wrong(case: Case, frontend: str) -> str:
    return case.eager_was_wrong or (case.dynamo_was_blind if frontend == "dynamo" else "")


def check(case: Case, frontend: str) -> None:
    eager, got = run(case), run(case, frontend)
    problem = disagreement(case, frontend, eager, got)
    assert problem is None, problem
    if on_recorded_torch() and frontend != "triton":
        problem = record.change(case.program.__module__, case.name, frontend, standing(eager, got))
        assert problem is None, problem


def disagreement(case: Case, frontend: str, eager: Outcome, got: Outcome) -> str | None:
    """In words, what eager's run and the compiled one differ in, or what the case does not say of eager's; or None."""
    if eager.raised != case.raises:
        return f"eager: {eager.error or 'no error'}; the case says: {case.raises or 'no error'}"
    if eager.raised != got.raised:
        refused = _capture(frontend) in case.refused and got.raised and not eager.raised
        return None if refused else f"eager: {eager.error or 'no error'}; compiled: {got.error or 'no error'}"
    if eager.error:
        return None
    close, added = bool(case.close) or frontend == GENERATED, sum_error(case.additions, torch.float32)
    return difference(eager.observation, got.observation, close, added=added)


def standing(eager: Outcome, got: Outcome) -> record.Standing:
    return record.standing(got.num_graphs, got.fallbacks, None if eager.error else got.error)


def _capture(frontend: str) -> str:
    return "trace" if frontend == GENERATED else frontend


def run(case: Case, frontend: str | None = None) -> Outcome:
    """One run from a clean slate; eager's where no front end is named."""
    reports: list[Any] = []  # and not the compiled: some cases watch what is let go

    def comp(target: Any) -> Any:
        if frontend is None:
            return target
        kernel = {"kernel": GENERATED} if frontend == GENERATED else {}
        compiled = aottrain.compile(target, capture=_capture(frontend), **{**kernel, **case.options})
        reports.append(compiled.report)
        return compiled

    torch._dynamo.reset()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    # TorchDynamo turns these checks off for good when it is first used; its front end finds them so from the start.
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(frontend != "dynamo")
    result = Outcome(None, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result.observation = freeze(case.program(comp))
    except Exception as error:
        result.error, result.raised = f"{type(error).__name__}: {error}", _type_of(error)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.distributions.Distribution.set_default_validate_args(checks)
    result.num_graphs = sum(len(report.graphs) for report in reports)
    result.fallbacks = tuple(value.reason for report in reports for value in report.fallbacks)
    return result


def freeze(value: Any) -> Any:
    """An observation that nothing can change any more, in tuples."""
    if isinstance(value, Tensor):
        shown = value.detach().clone() if value.layout == torch.strided else value.detach().to_dense()
        flags = type(value).__name__, value.dtype, tuple(value.shape), _strides(value), value.requires_grad
        return ("tensor", (*flags, value.is_leaf), shown)
    if is_dataclass(value) and not isinstance(value, type):
        names = [attribute.name for attribute in fields(value)]
        return (type(value).__name__, *((name, freeze(getattr(value, name))) for name in names))
    if isinstance(value, dict):
        return (type(value).__name__, *((repr(key), freeze(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(freeze(item) for item in value))
    return ("value", repr(value))


def _strides(value: Tensor) -> Any:
    if value.layout != torch.strided or value.numel() == 0:
        return value.layout
    return tuple(stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)


def difference(eager: Any, got: Any, close: bool, path: str = "result", added: float = 0.0) -> str | None:
    """The first difference of two frozen observations, in words; None where there is none. added: what sums in another
    order may differ by, beside the usual."""
    if not (isinstance(eager, tuple) and isinstance(got, tuple)):
        return None if eager == got else f"{path}: {eager!r} became {got!r}"
    if eager[0] == "tensor" == got[0]:
        if eager[1] != got[1]:
            return f"{path}: {eager[1]} became {got[1]}"
        if not (_close(eager[2], got[2], added) if close else _bitwise(eager[2], got[2])):
            return f"{path}: {eager[2].flatten()[:8].tolist()} became {got[2].flatten()[:8].tolist()}"
        return None
    if len(eager) != len(got):
        return f"{path}: {len(eager)} items became {len(got)}"
    for i, (one, other) in enumerate(zip(eager, got, strict=True)):
        problem = difference(one, other, close, f"{path}.{i}", added)
        if problem:
            return problem
    return None


def _bitwise(eager: Tensor, got: Tensor) -> bool:
    if eager.is_complex():
        return _bitwise(torch.view_as_real(eager.resolve_conj()), torch.view_as_real(got.resolve_conj()))
    if not eager.is_floating_point():
        return torch.equal(eager, got)
    # NaN equals NaN; 0 does not equal -0.
    nan = eager.isnan()
    return torch.equal(nan, got.isnan()) and bool((((eager == got) & (eager.signbit() == got.signbit())) | nan).all())


def _close(eager: Tensor, got: Tensor, added: float) -> bool:
    if eager.is_complex():
        return _close(torch.view_as_real(eager.resolve_conj()), torch.view_as_real(got.resolve_conj()), added)
    if eager.dtype not in RTOL_ATOL:
        return _bitwise(eager, got)
    rtol, atol = RTOL_ATOL[eager.dtype]
    return torch.allclose(eager, got, rtol=rtol, atol=atol + added, equal_nan=True)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or ((),)), generator=generator, dtype=torch.float64).to(dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same, requiring a gradient."""
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def grads(*tensors: Tensor) -> list[Tensor | None]:
    return [tensor.grad for tensor in tensors]


def fill(module: Any, seed: int = 7) -> Any:
    """A module with parameters that depend on nothing but the seed."""
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(normal(*parameter.shape, seed=seed + i, dtype=parameter.dtype) * 0.3)
    return module


def raises(action: Callable[[], Any]) -> str:
    """The type of the error that ends an action, "" where there is none."""
    try:
        action()
    except Exception as error:
        return _type_of(error)
    return ""


def _type_of(error: Exception) -> str:
    """Its name; of TorchDynamo's own, which it raises where arguments are wrong, that of what it is besides."""
    bases = (cls for cls in type(error).__mro__ if not cls.__module__.startswith("torch._dynamo"))
    return next(bases).__name__


def shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors live in the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
