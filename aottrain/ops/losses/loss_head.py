"""A linear layer followed by cross-entropy as one op, computed in chunks of rows: the logits are never whole in memory.

For a chunk of n rows it computes the logits (n, classes), turns them into the loss of each row and, in the same memory,
into the gradient of the logits, and multiplies that into the gradients of the layer. So the gradients are known when
the loss is. They are those of an upstream gradient of 1: a backward multiplies them by its own.

Roundings are those of the ops that this stands for: a product rounds to its operands' type, the log-softmax and its
gradient to `softmax_dtype`, the losses to `loss_dtype`, the logits' gradient to the logits' type.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake
from aottrain.ir.kernels.tiles import loss_head_scratch_bytes
from aottrain.ir.settings.decisions import ATEN, ONEDNN, OWN
from aottrain.ops.native.shared import FLOATS, INTEGERS
from aottrain.ops.products.onednn import product
from aottrain.ops.products.pieces import own_product
from aottrain.toolchain.native import Source, load

aten = torch.ops.aten

MEAN, SUM = 1, 2  # ATen's numbers for reductions

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int reduction, int ignore_index, "
    'ScalarType softmax_dtype, ScalarType loss_dtype, int chunk, bool[] output_mask, str library="ATen") -> '
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    softmax_dtype: torch.dtype,
    loss_dtype: torch.dtype,
    chunk: int,
    output_mask: Sequence[bool],
    library: str = ATEN,
) -> tuple[Tensor, ...]:
    """hidden (rows, width), weight (classes, width), bias (classes) or None, target (rows) of class numbers.

    reduction: MEAN over the rows whose target is not ignore_index, or SUM. chunk: rows at a time. output_mask: which
    gradients to compute, of hidden, weight and bias. library: which multiplies; float32 on a CPU has more than ATEN.
    Returns the loss and the number of rows that count, both 0-dim of loss_dtype, and the three gradients, those of
    weight and bias in float32 at least; one that is not computed has no elements. Raises IndexError for a target that
    is no class.
    """
    rows = len(hidden)
    counted = (target != ignore_index).sum().to(loss_dtype)
    losses = torch.empty(rows, dtype=loss_dtype, device=hidden.device)
    shape = min(chunk, rows), len(weight)
    scratch = None
    if library == OWN:  # what its products compute in, one after the other
        sizes = shape[0], hidden.shape[1], shape[1], torch.get_num_threads(), hidden.dtype
        scratch = torch.empty(loss_head_scratch_bytes(*sizes), dtype=torch.uint8)
    sums = _Gradients(hidden, weight, output_mask, library, scratch)
    rule = _native_rule(hidden, target, softmax_dtype, loss_dtype) or _triton_rule(hidden, target, loss_dtype)
    rule = rule or _aten_rule
    memory = None if library == ONEDNN else torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
    with torch.no_grad():
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            row_arguments = _Rows(target[part], reduction, ignore_index, counted, softmax_dtype, any(output_mask))
            # By no name: oneDNN's logits of one chunk are gone before those of the next.
            sums.add(part, rule(_logits(hidden[part], weight, bias, memory, scratch), losses[part], row_arguments))
        total = losses.sum(dtype=torch.float64)
        loss = (total / counted if reduction == MEAN else total).to(loss_dtype)
    return loss, counted, *sums.results()


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor | None, scratch: Tensor | None
) -> Tensor:
    """Of some rows: in `memory`, or where oneDNN does it, which takes no memory, in its own. scratch: of a product of
    our own."""
    if memory is None:
        return product(hidden, weight.t(), bias)
    if scratch is not None:
        return own_product(hidden, weight.t(), bias, out=memory[: len(hidden)], scratch=scratch)
    if bias is None:
        return torch.mm(hidden, weight.t(), out=memory[: len(hidden)])
    return torch.addmm(bias, hidden, weight.t(), out=memory[: len(hidden)])


@cache
def adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of such halves are added in place to what is in float32, by one call: on a GPU, by a torch that
    has it. It is tried there once; of a GPU that is absent it is taken to be so."""
    if device.type != "cuda":
        return False
    if not torch.cuda.is_available():
        return True
    left, total = torch.zeros(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        aten.mm.dtype_out(left, left, torch.float32, out=total)
        aten.addmm.dtype_out(total, left, left, torch.float32, out=total)
    except (RuntimeError, AttributeError):  # this torch takes no such operands, or has no such operator
        return False
    return True


class _Gradients:
    """The three gradients while they grow. What is summed over chunks is summed in float32 at least."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, output_mask: Sequence[bool], library: str, scratch: Tensor | None
    ):
        self._inputs = hidden, weight
        self._library, self._scratch = library, scratch
        self._output_mask = output_mask
        self._sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
        shape = hidden.shape if output_mask[0] else (0,)
        self.hidden = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        # The first rows write it; of none it is zeros.
        made = self._empty if len(hidden) else self._zeros
        self.weight = made(*weight.shape) if output_mask[1] else self._zeros(0)
        self.bias = self._zeros(len(weight) if output_mask[2] else 0)
        self._transposed = self._zeros(0)
        narrow = output_mask[1] and self._sum_dtype != hidden.dtype
        self._wide = narrow and adds_wide(hidden.device, hidden.dtype)
        takes = narrow and not self._wide and library == ATEN
        self._product = torch.empty(weight.shape, dtype=hidden.dtype, device=hidden.device) if takes else None

    def add(self, part: slice, gradient: Tensor | None) -> None:
        """gradient: of the logits of these rows."""
        if gradient is None:
            return
        hidden, weight = self._inputs
        if self._library != ATEN:
            (self._add_by_onednn if self._library == ONEDNN else self._add_by_own)(part, gradient)
            return
        if self._output_mask[0]:
            torch.mm(gradient, weight, out=self.hidden[part])
        if self._wide:
            wide = gradient.t(), hidden[part], torch.float32
            if part.start == 0:
                aten.mm.dtype_out(*wide, out=self.weight)
            else:
                aten.addmm.dtype_out(self.weight, *wide, out=self.weight)
        elif self._product is not None:
            product = torch.mm(gradient.t(), hidden[part], out=self._product)
            self.weight.copy_(product) if part.start == 0 else self.weight.add_(product)
        elif self._output_mask[1] and part.start == 0:
            torch.mm(gradient.t(), hidden[part], out=self.weight)
        elif self._output_mask[1]:
            self.weight.addmm_(gradient.t(), hidden[part])
        if self._output_mask[2]:
            self.bias.add_(gradient.sum(0, dtype=self._sum_dtype))

    def _add_by_onednn(self, part: slice, gradient: Tensor) -> None:
        """As above. The weight's gradient is the transpose of what is multiplied, hidden^T @ gradient."""
        hidden, weight = self._inputs
        if self._output_mask[0]:
            self.hidden[part] = product(gradient, weight)
        if self._output_mask[1]:
            new = product(hidden[part].t(), gradient)
            self._transposed = new if part.start == 0 else self._transposed.add_(new)
            if part.stop == len(hidden):
                self.weight.copy_(self._transposed.t())
        if self._output_mask[2]:
            self.bias.add_(gradient.sum(0))

    def _add_by_own(self, part: slice, gradient: Tensor) -> None:
        hidden, weight = self._inputs
        if self._output_mask[0]:
            own_product(gradient, weight, out=self.hidden[part], scratch=self._scratch)
        if self._output_mask[1]:
            adds = part.start > 0
            own_product(gradient.t(), hidden[part], out=self.weight, adds=adds, scratch=self._scratch)
        if self._output_mask[2]:
            self.bias.add_(gradient.sum(0, dtype=self._sum_dtype))

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._sum_dtype, device=self._inputs[0].device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._sum_dtype, device=self._inputs[0].device)


@dataclass(frozen=True)
class _Rows:
    """What the loss of some rows needs beside their logits."""

    target: Tensor
    """(rows), class numbers."""
    reduction: int
    """MEAN or SUM."""
    ignore_index: int
    """The target of rows that do not count."""
    counted: Tensor
    """How many of all rows count, 0-dim."""
    softmax_dtype: torch.dtype
    with_gradient: bool
    """Whether the logits' gradient is computed, too."""


def _aten_rule(logits: Tensor, losses: Tensor, rows: _Rows) -> Tensor | None:
    """Eager's own ops on these rows: writes their losses, returns the gradient of their logits."""
    log_softmax = aten._log_softmax(logits.to(rows.softmax_dtype), 1, False)
    scores = log_softmax.to(losses.dtype)
    losses.copy_(aten.nll_loss_forward(scores, rows.target, None, 0, rows.ignore_index)[0])
    if not rows.with_gradient:
        return None
    one = torch.ones((), dtype=losses.dtype, device=losses.device)
    weights = rows.reduction, rows.ignore_index, rows.counted
    gradient = aten.nll_loss_backward(one, scores, rows.target, None, *weights).to(log_softmax.dtype)
    return aten._log_softmax_backward_data(gradient, log_softmax, 1, log_softmax.dtype).to(logits.dtype)


def _triton_rule(hidden: Tensor, target: Tensor, loss_dtype: torch.dtype) -> Any:
    """The same as `_aten_rule` on CUDA, in one kernel and in place; None where it does not apply."""
    types = (target.dtype, loss_dtype) == (torch.int64, torch.float32)
    types = types and hidden.dtype in (torch.float32, torch.bfloat16)
    return _triton_rows if hidden.device.type == "cuda" and types and has_triton() else None


def _triton_rows(logits: Tensor, losses: Tensor, rows: _Rows) -> Tensor | None:
    from aottrain.ops.triton.loss_rows import loss_rows  # Triton takes a second to import

    if logits.is_cuda and logits.device.index != torch.cuda.current_device():
        with torch.cuda.device(logits.device):  # Triton launches on the current one
            return _triton_rows(logits, losses, rows)
    mean, low = rows.reduction == MEAN, rows.softmax_dtype == torch.bfloat16
    loss_rows(logits, rows.target.contiguous(), losses, rows.counted, rows.ignore_index, mean, low, rows.with_gradient)
    return logits if rows.with_gradient else None


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# Rows of logits to losses and, in place, to gradients. A row is read while it is in the cache: its maximum, the sum of
# its exponentials, its result. Sums go over lanes and blocks of 1024, as pairwise sums do. NaN and infinities come
# out as from the ops that this stands for; a row that does not count has the gradient 0 * softmax.
_NATIVE = """\
#include <cstdint>
extern "C" int omp_get_thread_num(void);
// exp of x <= 0: x = n log 2 + r; scaled by 2^n in two factors, so that the smallest results come out right.
INLINE float exp_(float x) {
  const float c = x < -104.0f ? -104.0f : x;
  float n;
  const float part = reduced_exp_(c, n);
  const i32 k = (i32)n, h = k >> 1;
  return x != x ? x : part * bits_<float>((h + 127) << 23) * bits_<float>((k - h + 127) << 23);
}
constexpr int BLOCK = 1024;
template <class T> INLINE float largest(const T* x, int64_t count) {
  float m = -__builtin_inff();
  #pragma omp simd reduction(max : m)
  for (int64_t i = 0; i < count; i++) { const float v = widen(x[i]); m = v > m ? v : m; }
  return m;
}
template <class T> INLINE double sum_exp(const T* x, int64_t count, float m, float* e) {
  double total = 0;
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t end = start + BLOCK < count ? start + BLOCK : count;
    float part = 0;
    #pragma omp simd reduction(+ : part)
    for (int64_t i = start; i < end; i++) part += e[i] = exp_(widen(x[i]) - m);
    total += part;
  }
  return total;
}
// Returns 0, or one more than a row whose target is no class.
template <class T> INLINE int64_t run(T* logits, float* scratch, const int64_t* target, float* losses, int64_t rows,
                                      int64_t classes, int64_t ignored, float scale, int with_gradient, int threads) {
  int64_t wrong = 0;
  #pragma omp parallel for schedule(static) num_threads(threads) reduction(max : wrong)
  for (int64_t row = 0; row < rows; row++) {
    T* x = logits + row * classes;
    float* e = sizeof(T) == sizeof(float) ? (float*)x : scratch + omp_get_thread_num() * classes;
    const int64_t t = target[row];
    const bool counts = t != ignored;
    if (counts && (t < 0 || t >= classes)) { wrong = row + 1; continue; }
    const float m = largest(x, classes);
    const float own = counts ? widen(x[t]) - m : 0.0f;
    const double sum = sum_exp(x, classes, m, e);
    losses[row] = counts ? (float)__builtin_log(sum) - own : 0.0f;
    if (!with_gradient) continue;
    const float factor = counts ? (float)(scale / sum) : (float)(0.0 * sum);
    const float first = counts ? (float)((e[t] - sum) * (scale / sum)) : 0.0f;
    #pragma omp simd
    for (int64_t i = 0; i < classes; i++) store(x + i, e[i] * factor);
    if (counts) store(x + t, first);
  }
  return wrong;
}
#define ENTRY(name, T) \\
  extern "C" int64_t name(T* x, float* s, const int64_t* t, float* l, int64_t rows, int64_t classes, \\
                          int64_t ignored, float scale, int with_gradient, int threads) { \\
    return run(x, s, t, l, rows, classes, ignored, scale, with_gradient, threads); }
ENTRY(loss_rows_float32, float)
ENTRY(loss_rows_bfloat16, bf16)
"""
_FLAGS = ("-fopenmp", "-fno-trapping-math", "-std=c++17")


NATIVE = Source(INTEGERS + FLOATS + _NATIVE, _FLAGS)  # what `linear_cross_entropy` compiles on a CPU


def _native_rule(hidden: Tensor, target: Tensor, softmax_dtype: torch.dtype, loss_dtype: torch.dtype) -> Any:
    """The same as `_aten_rule`, in one pass over each row and in place; None where it does not apply."""
    if hidden.device.type != "cpu" or target.dtype != torch.int64:
        return None
    if {softmax_dtype, loss_dtype} != {torch.float32}:
        return None
    name = {torch.float32: "loss_rows_float32", torch.bfloat16: "loss_rows_bfloat16"}.get(hidden.dtype)
    library = None if name is None else load(NATIVE)
    if library is None:
        return None
    function = getattr(library, name)
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (*[pointer] * 4, *[integer] * 3, ctypes.c_float, ctypes.c_int, ctypes.c_int)
    function.restype = integer

    def rule(logits: Tensor, losses: Tensor, rows: _Rows) -> Tensor | None:
        scale = 1.0 / (rows.counted.item() or 1.0) if rows.reduction == MEAN else 1.0
        target, threads = rows.target.contiguous(), torch.get_num_threads()
        scratch = losses.new_empty(0 if logits.dtype == torch.float32 else threads * logits.shape[1])
        addresses = logits.data_ptr(), scratch.data_ptr(), target.data_ptr(), losses.data_ptr()
        plan = scale, rows.with_gradient, threads
        wrong = function(*addresses, *logits.shape, rows.ignore_index, *plan)
        if wrong:
            raise IndexError(f"Target {int(target[wrong - 1])} is out of bounds.")
        return logits if rows.with_gradient else None

    return rule


_library.impl("linear_cross_entropy", _linear_cross_entropy, "CompositeExplicitAutograd")


@register_fake(_library, "linear_cross_entropy")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    softmax_dtype: torch.dtype,
    loss_dtype: torch.dtype,
    chunk: int,
    output_mask: Sequence[bool],
    library: str = ATEN,
) -> tuple[Tensor, ...]:
    number = hidden.new_empty((), dtype=loss_dtype)
    shapes = hidden.shape, weight.shape, (len(weight),)
    sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
    gradients = [
        hidden.new_empty(shape if flag else (0,), dtype=dtype)
        for shape, dtype, flag in zip(shapes, (hidden.dtype, sum_dtype, sum_dtype), output_mask, strict=True)
    ]
    return number, torch.empty_like(number), *gradients
