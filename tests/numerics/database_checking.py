"""Compares an entry of torch's own databases of operators and modules, compiled, with eager: see `check_operator`.

Under rng="eager", so that random entries are compared bit for bit with eager's own stream.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_map

import aottrain
from aottrain.errors import UnsupportedError
from tests.numerics.rounding_noise import RandomRounding, within_noise
from tests.numerics.tolerance import RTOL_ATOL

# From good to bad: what an entry is, is the worst of its samples.
NOTHING, EQUAL, EAGER, REFUSED, WRONG = "nothing to compare", "equal", "ran eagerly", "refused", "WRONG"
NOISY = "as far off as rounding noise"  # where kernels may round otherwise: no farther than eager's own values may be
KINDS = (NOTHING, EQUAL, NOISY, EAGER, REFUSED, WRONG)
_NUM_NOISY_RUNS = 6

# Uninitialised memory: not even eager gives the same values twice.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# The test suite runs one entry of so many, chosen by its name, and these beside them: what was wrong once or has an
# effect, what runs eagerly in part, and what a compiler's own formula stands for.
SHARE = 18
ALWAYS = {
    "bernoulli", "corrcoef", "cov", "gather", "linalg.cholesky", "linalg.inv", "linalg.ldl_factor", "linalg.lstsq",
    "linalg.lu_factor", "linalg.solve", "masked_select", "multinomial", "narrow", "nn.functional.binary_cross_entropy",
    "nn.functional.ctc_loss", "nn.functional.dropout", "nn.functional.embedding",
    "nn.functional.fractional_max_pool2d", "nn.functional.scaled_dot_product_attention", "nonzero",
    "normal", "repeat_interleave", "sparse.sampled_addmm", "stft", "tensor_split", "unique",
}  # fmt: skip
ALWAYS_MODULES = {
    "nn.BatchNorm2d", "nn.CTCLoss", "nn.Embedding", "nn.FractionalMaxPool2d", "nn.LSTM", "nn.MultiheadAttention",
    "nn.TransformerEncoderLayer",
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """differentiable: whether gradients were compared, too. num_kernels: how many generated kernels it took."""

    kind: str
    why: str = ""
    differentiable: bool = False
    num_kernels: int = 0


# Those of custom Functions, of operators written in Python, and of operators that take functions, as torch.cond.
SMALL_DATABASES = ("autograd_function_db", "custom_op_db", "hop_db")


def operators(dtype: torch.dtype, device: str = "cpu", database: str = "op_db") -> list[Any]:
    """The entries whose results are defined and that take this type on the device."""
    entries = op_db
    if database in SMALL_DATABASES:
        entries = getattr(importlib.import_module(f"torch.testing._internal.{database}"), database)
    return [op for op in entries if dtype in op.supported_dtypes(device) and op.name not in UNDEFINED]


def modules(dtype: torch.dtype) -> list[Any]:
    return [entry for entry in module_db if dtype in entry.dtypes]


def sample(entries: list[Any], always: set[str]) -> list[Any]:
    """The share of them that the test suite runs: it depends on nothing but the names."""
    found = [entry for entry in entries if _is_sampled(entry) or entry.name in always]
    assert always <= {entry.name for entry in found}, always - {entry.name for entry in found}
    return found


def _is_sampled(entry: Any) -> bool:
    name = getattr(entry, "formatted_name", entry.name)
    return zlib.crc32(name.encode()) % SHARE == 0


def clones(tree: Any) -> Any:
    def clone(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided or 0 in value.stride():
            return value.detach().clone().requires_grad_(value.requires_grad)
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return out.copy_(value.detach()).requires_grad_(value.requires_grad)

    return tree_map(clone, tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(tree)[0] if isinstance(value, torch.Tensor)]


def difference(want: Any, got: Any, layout: bool = True) -> str | None:
    """The first difference, in words; None where two results agree."""
    (wanted, _), (found, _) = tree_flatten(want), tree_flatten(got)
    if len(wanted) != len(found):
        return f"{len(wanted)} values became {len(found)}"
    pairs = zip(wanted, found, strict=True)
    return next((text for a, b in pairs if (text := _difference_of_leaves(a, b, layout)) is not None), None)


def _difference_of_leaves(a: Any, b: Any, layout: bool) -> str | None:
    if not isinstance(a, torch.Tensor):
        return f"{a} became {b}" if type(a) is not type(b) or (a == a and a != b) else None
    if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{list(a.shape)} became another type or shape"
    if a.requires_grad != b.requires_grad:
        return "requires_grad changed"
    if a.layout != torch.strided or a.dtype == torch.complex32:
        return None
    if layout and b._is_view() and not a._is_view() and not b.requires_grad:
        return "a view of another tensor, which eager's is not"
    if layout and a.numel() > 1 and a.stride() != b.stride():
        return f"strides {a.stride()} became {b.stride()}"
    rtol, atol = RTOL_ATOL.get(a.dtype.to_real() if a.is_complex() else a.dtype, (0.0, 0.0))
    if torch.allclose(a, b, rtol, atol, equal_nan=True) if rtol else torch.equal(a, b):
        return None
    return f"values differ in {a.dtype}{list(a.shape)}: {a.flatten()[:4].tolist()} became {b.flatten()[:4].tolist()}"


def _worst(verdicts: Iterator[Verdict]) -> Verdict:
    found = list(verdicts)
    worst = max(found, key=lambda verdict: KINDS.index(verdict.kind), default=Verdict(NOTHING))
    num_kernels = sum(verdict.num_kernels for verdict in found)
    return Verdict(worst.kind, worst.why, any(verdict.differentiable for verdict in found), num_kernels)


def _run_sample(function: Callable[..., Any], sample: Any) -> tuple[Any, ...]:
    """(output, gradients, inputs afterwards, generator) of one call; gradients is None where there are none."""
    inputs = clones((sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    out = function(inputs[0], *inputs[1], **inputs[2])
    outputs = [value for value in tensors_of(out) if value.requires_grad]
    wanted = [value for value in tensors_of(inputs) if value.requires_grad]
    gradients = None
    if outputs and wanted:
        generator = torch.Generator().manual_seed(1)
        tangents = [torch.randn(v.shape, generator=generator).to(v) for v in outputs]
        gradients = torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
    return out, gradients, tensors_of(inputs), _generators()


def _generators() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def check_operator(
    op: Any,
    dtype: torch.dtype,
    frontend: str,
    num_samples: int,
    device: str = "cpu",
    kernel: str = "auto",
    dynamic: bool = False,
) -> Verdict:
    """Forward, gradients where the type has them, inputs afterwards and the generators, for the first samples.

    Samples that eager itself refuses are left out. dynamic: their sizes are symbols.
    """
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes(device)

    def verdicts() -> Iterator[Verdict]:
        for sample in itertools.islice(op.sample_inputs(device, dtype, requires_grad=differentiable), num_samples):

            def function(*args: Any, **kwargs: Any) -> Any:
                return op.op(*args, **kwargs)

            try:
                want = _run_sample(function, sample)
            except Exception:
                continue  # a sparse tangent, a missing kernel
            compiled = aottrain.compile(function, capture=frontend, rng="eager", kernel=kernel, dynamic=dynamic)
            runs = [lambda call=call, sample=sample: _run_sample(call, sample) for call in (compiled, function)]
            yield _judged(compiled, *runs, want, want[1] is not None, kernel != "aten")

    return _checked(verdicts, frontend)


def _judged(
    compiled: Any,
    run: Callable[[], Any],
    run_eager: Callable[[], Any],
    want: tuple[Any, ...],
    differentiable: bool,
    may_round: bool,
) -> Verdict:
    try:
        got = run()
    except UnsupportedError as error:
        return Verdict(REFUSED, str(error), differentiable)
    except Exception as error:
        return Verdict(WRONG, f"raises {type(error).__name__}: {str(error)[:200]}", differentiable)
    # The strides of a gradient are autograd's own affair (a leaf's .grad takes the leaf's): values alone.
    found = difference(want[:1] + want[2:], got[:1] + got[2:]) or difference(want[1], got[1], layout=False)
    if found:
        noisy = may_round and "values differ" in found and _is_noise(want[:2], got[:2], run_eager)
        return Verdict(NOISY if noisy else WRONG, found, differentiable)
    report = compiled.report
    return Verdict(EAGER if report.num_fallbacks else EQUAL, _reasons(report), differentiable, _num_kernels(report))


def _num_kernels(report: Any) -> int:
    return sum(len(graph.kernels) for graph in report.graphs)


def _is_noise(want: Any, got: Any, run_eager: Callable[[], Any]) -> bool:
    """Whether results and gradients are no farther off than eager's are where each of its ops rounds at random."""
    runs = []
    for seed in range(_NUM_NOISY_RUNS):
        with RandomRounding(seed):
            runs.append(tensors_of(run_eager()[:2]))
    wanted, found = tensors_of(want), tensors_of(got)
    return len(wanted) == len(found) and all(
        a.dtype == b.dtype and a.shape == b.shape and within_noise(a, b, noisy)
        for a, b, *noisy in zip(wanted, found, *runs, strict=True)
    )


def _reasons(report: Any) -> str:
    return "; ".join(dict.fromkeys(fallback.reason for fallback in report.fallbacks))


def _checked(verdicts: Callable[[], Iterator[Verdict]], frontend: str) -> Verdict:
    if frontend == "dynamo":
        torch.compiler.reset()  # programs are kept for a piece of code, which here is the same for every entry
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _worst(verdicts())
        except RuntimeError as error:
            return Verdict(NOTHING, f"its samples cannot be made: {str(error)[:100]}")


def _run_module(call: Any, module: Any, sample: Any) -> tuple[Any, ...]:
    args, kwargs = clones((sample.args, sample.kwargs))
    torch.manual_seed(1)
    out = call(*args, **kwargs)
    outputs = tensors_of(out)
    differentiable = [value for value in outputs if value.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(value) for value in differentiable])
    inputs = tensors_of((args, kwargs))
    gradients = [value.grad for value in [*inputs, *module.parameters()]]
    return (
        [value.detach() for value in outputs],
        gradients,
        [value.detach().clone() for value in [*module.buffers(), *inputs]],
        _generators(),
    )


def check_module(
    entry: Any,
    dtype: torch.dtype,
    frontend: str,
    num_samples: int,
    device: str = "cpu",
    kernel: str = "auto",
    dynamic: bool = False,
    *,
    training: bool,
) -> Verdict:
    """Outputs, gradients of inputs and parameters, buffers and inputs afterwards, for the first samples."""

    def verdicts() -> Iterator[Verdict]:
        samples = entry.module_inputs_func(
            entry, device=device, dtype=dtype, requires_grad=dtype.is_floating_point, training=training
        )
        for sample in samples[:num_samples]:
            if sample.forward_input is None:
                continue
            torch.manual_seed(0)
            made = entry.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            made = made.to(device=device, dtype=dtype).train(training)
            eager, copied = copy.deepcopy(made), copy.deepcopy(made)
            try:
                want = _run_module(eager, eager, sample.forward_input)
            except RuntimeError:
                continue
            compiled = aottrain.compile(copied, capture=frontend, rng="eager", kernel=kernel, dynamic=dynamic)
            noisy, given = copy.deepcopy(made), sample.forward_input
            pairs = (compiled, copied), (noisy, noisy)
            runs = [lambda call=call, of=of, given=given: _run_module(call, of, given) for call, of in pairs]
            yield _judged(compiled, *runs, want, any(g is not None for g in want[1]), kernel != "aten")

    return _checked(verdicts, frontend)
