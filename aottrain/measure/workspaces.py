"""Bytes that library calls allocate inside themselves, which no graph shows: measured once for each distinct call.

A call runs on made-up inputs under one of torch's profilers, which report every allocation and release of its
allocators. The figures are kept on disk. No clock is read, but they hang on libraries and threads: so they are
decisions, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from aottrain.compat import free_cublas_workspaces, profiling
from aottrain.compat_dispatch import cpu_allocations
from aottrain.counted import counted
from aottrain.errors import is_out_of_memory
from aottrain.ir.kernels.tiles import loss_head_scratch_bytes
from aottrain.ir.ops import op_info
from aottrain.ir.settings.decisions import ATEN, ONEDNN, OWN
from aottrain.ir.tensor import TensorSpec
from aottrain.measure.calls import OpCall, distinct, environment, quiet, synchronize
from aottrain.measure.decisions import note, planned_for, recorded
from aottrain.toolchain.cache import Table, table
from aottrain.toolchain.threads import Pool

_KIND = "workspace bytes"
_MARK = "aottrain workspace "
Peaks = list[tuple[OpCall, "int | Exception"]]  # bytes, or why there are none
_failed: set[tuple[str, str]] = set()
_counted: ContextVar[bool] = ContextVar("workspaces are counted", default=True)


@dataclass(frozen=True)
class Workspaces:
    """What calls allocate inside themselves."""

    num_bytes: tuple[int, ...]
    """For each call."""
    unknown: tuple[OpCall, ...]
    """Those that could not be measured and count what their rule says, or 0."""
    num_run: int = 0
    """Calls run for it."""


def workspace_bytes(calls: Sequence[OpCall]) -> Workspaces:
    """For each call the most bytes alive at once while it runs, beyond its inputs and its results.

    Where the size depends on the values of the inputs (a sort of indices on a GPU), it is that of the made-up ones.
    """
    if planned_for() is not None:
        return Workspaces(tuple(map(workspace_by_rule, calls)), ())
    answers: dict[int, int | None] = {}
    num_run = 0
    by_device: dict[torch.device, list[int]] = {}
    for i, call in enumerate(calls):
        if needs_none(call):
            answers[i] = 0
        elif call.plain_text is not None and (decision := recorded(_KIND, call.plain_text)) is not None:
            answers[i] = None if decision.choice is None else int(decision.choice)  # type: ignore[arg-type]
            note(_KIND, decision.key, decision.choice, decision.source)
        else:
            by_device.setdefault(call.device, []).append(i)
    for device, indices in by_device.items():
        store = _table(device)
        new = [call for call in distinct([calls[i] for i in indices]) if not _is_known(call, store)]
        runs = [call for call in new if call.may_run and _counted.get()]
        if runs:
            num_run += _measure(runs, device, store)
        measured = {call.text for call in runs}
        for i in indices:
            text = calls[i].text
            num_bytes = None if text is None else store.get(text)
            answers[i] = num_bytes
            if (name := calls[i].plain_text) is not None:
                note(_KIND, name, answers[i], "measured" if text in measured else "cache")
    unknown = tuple(call for i, call in enumerate(calls) if answers[i] is None)
    known = (workspace_by_rule(call) if (own := answers[i]) is None else own for i, call in enumerate(calls))
    return Workspaces(tuple(known), unknown, num_run)


@contextmanager
def without_workspaces() -> Iterator[None]:
    """Inside, in this thread, no call is run to see what it needs: what is not known counts by its rule, or 0."""
    before = _counted.set(False)
    try:
        yield
    finally:
        _counted.reset(before)


def product_workspace_bytes(device: torch.device) -> int:
    """What cuBLAS allocates at a thread's first matrix product on a stream, and keeps; 0 where it does not say."""
    target = planned_for()
    return _measured_product_workspace(device) if target is None else target.product_workspace_bytes


@cache
def _measured_product_workspace(device: torch.device) -> int:
    with quiet():
        ones = torch.ones(64, 64, device=device)
        free_cublas_workspaces()
        before = torch.cuda.memory_allocated(device)
        product = ones @ ones
        kept = torch.cuda.memory_allocated(device) - before - product.untyped_storage().nbytes()
    return max(kept, 0)


def workspace_by_rule(call: OpCall) -> int:
    """What a call allocates within itself where it is not measured, as on a device that cannot be asked: by the sources
    of the kernels that hold much there, 0 for all others."""
    rule = _RULES.get(op_info(call.target).name)
    return 0 if rule is None else rule(call)


def _of_flash_gradient(call: OpCall) -> int:
    """The backward of flash attention (Dao, 2023; ATen's flash_api.cpp) sums the gradient of queries in float32, with a
    number for each row, rows rounded up to 128 and widths to 32; where several heads of queries share one of keys, it
    writes the gradients of keys and values for each of them, and then adds these up."""
    query, key = call.tensors[1:3]
    (batch, heads, time, width), (_, key_heads, key_time, _) = query.shape, key.shape
    rows = -(-time // 128) * 128
    sums = 4 * batch * heads * rows * (-(-width // 32) * 32 + 1)
    return sums + (2 * batch * heads * key_time * width * key.dtype.itemsize if key_heads != heads else 0)


def _of_loss_head(call: OpCall) -> int:
    """Of `ops.losses.loss_head`: the losses of all rows, a chunk of logits, and the largest that is beside them: what
    ATen's operators hold, or products and sums of the weight's gradient."""
    hidden, weight, *rest = call.tensors
    softmax, losses, chunk, mask, library = (*call.args, ATEN)[6:11]
    rows, (classes, width) = min(chunk, hidden.shape[0]), weight.shape
    size, gradient_size = rows * classes, classes * width
    logits, product = size * hidden.dtype.itemsize, 0
    on_cpu = hidden.device.type == "cpu"
    by_rows = losses == torch.float32 and hidden.dtype in (torch.float32, torch.bfloat16)  # a kernel of ours
    by_rows = by_rows and rest[-1].dtype == torch.int64 and (softmax == torch.float32 or not on_cpu)
    within = 0 if by_rows else _of_loss_operators(size, hidden, softmax, losses, mask)
    if library == ONEDNN:  # each product is new; the left operand of the weight's gradient is a copy
        sums = 1 + (hidden.shape[0] > rows)
        within = 4 * max(rows * width * mask[0], (sums * gradient_size + rows * width) * mask[1])
    elif library == OWN:
        product = loss_head_scratch_bytes(rows, width, classes, torch.get_num_threads(), hidden.dtype)
    elif on_cpu and hidden.dtype.itemsize < 4 and mask[1]:
        product = gradient_size * hidden.dtype.itemsize  # added to the gradient; a GPU's library adds it
        within = max(within, logits, 4 * size * mask[2])  # a product copies its left operand; a bias's sum is of floats
    return losses.itemsize * hidden.shape[0] + logits + product + within


def _of_loss_operators(
    size: int, hidden: TensorSpec, softmax: torch.dtype, losses: torch.dtype, mask: Sequence[bool]
) -> int:
    """The log-probabilities, again in the type of losses, and the gradients of both, in bytes; size: of the logits."""
    scores = losses.itemsize * (softmax != losses)
    gradient = losses.itemsize + softmax.itemsize if any(mask) else 0
    return size * (softmax.itemsize + scores + gradient)


_RULES = {
    "aten._scaled_dot_product_flash_attention_backward.default": _of_flash_gradient,
    "aottrain.linear_cross_entropy.default": _of_loss_head,
}


def has_rule(target: Any) -> bool:
    """Whether `workspace_by_rule` knows of the operator."""
    return op_info(target).name in _RULES


def needs_none(call: OpCall) -> bool:
    """Views; and pointwise ops whose tensors have one floating dtype: operands of others are converted in a copy."""
    if op_info(call.target).is_free:
        return True
    dtypes = {spec.dtype for spec in call.tensors}
    plain = len(dtypes) == 1 and all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    return plain and torch.Tag.pointwise in getattr(call.target, "tags", ())


def _table(device: torch.device) -> Table:
    return table(f"workspaces-{hashlib.sha256(environment(device).encode()).hexdigest()[:16]}", _is_size)


def _is_size(value: object) -> bool:
    """A number of bytes that some machine could have."""
    return type(value) is int and 0 <= value < 1 << 60


def _is_known(call: OpCall, store: Table) -> bool:
    text = call.text or ""
    return store.get(text) is not None or (text, store.path.name) in _failed


def _measure(calls: list[OpCall], device: torch.device, store: Table) -> int:
    """Add to the store what these calls need; how many were run."""
    found = _on_gpu(calls, device) if device.type == "cuda" else _on_cpu(calls)
    # Where it was memory that lacked, the next time may be another.
    failed = [call for call, peak in found if isinstance(peak, Exception) and not is_out_of_memory(peak)]
    _failed.update((call.text or "", store.path.name) for call in failed)
    store.add({call.text or "": peak for call, peak in found if isinstance(peak, int)})
    return len(found)


def _on_cpu(calls: list[OpCall]) -> Peaks:
    """While torch's profiler records for the caller, a thread of its own does it, of which that sees nothing."""
    if not profiling():
        return _alone_on_cpu(calls)
    pool = Pool(_alone_on_cpu, [calls])
    pool.start(1)
    while not pool.wait():
        pass
    return pool.futures[0].result()


def _alone_on_cpu(calls: list[OpCall]) -> Peaks:
    with quiet():
        return [(call, _peak_of(call)) for call in counted("calls measured", calls)]


def _peak_of(call: OpCall) -> int | Exception:
    """The largest sum of the allocator's events while it runs, less the sum at its end: what the results hold."""
    try:
        args, kwargs = call.arguments()
        changes = cpu_allocations(lambda: call.target(*args, **kwargs))
    except Exception as error:  # whatever it is: these inputs were none that a program would give
        return error.with_traceback(None)  # which would keep them
    sums = list(accumulate(changes, initial=0))
    return max(sums) - max(sums[-1], 0)


def _on_gpu(calls: list[OpCall], device: torch.device) -> Peaks:
    with quiet() as allowed:
        if not allowed:
            return []
        # What a library allocates once, and keeps, is no workspace of a single call.
        calls = [call for call in calls if _error_of(call) is None]
        with _silent_profiler() as record:
            errors = [_error_of(call, f"{_MARK}{i}") for i, call in enumerate(counted("calls measured", calls))]
        peaks = _peaks(record)
        return [
            (call, error or peaks[i])
            for i, (call, error) in enumerate(zip(calls, errors, strict=True))
            if error or i in peaks
        ]


def _error_of(call: OpCall, mark: str = _MARK) -> Exception | None:
    """Run it; what it raised. Its results live until the mark ends, its inputs longer."""
    try:
        args, kwargs = call.arguments()
        with record_function(mark):
            result = call.target(*args, **kwargs)
        synchronize(call.device)
        del result
    except Exception as error:  # as in `_peak_of`
        return error.with_traceback(None)
    return None


@contextmanager
def _silent_profiler() -> Iterator[profile]:
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"  # or the profiler writes lines of its own to stderr
    try:
        with profile(profile_memory=True, use_kineto=True) as record:
            yield record
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _peaks(record: profile) -> dict[int, int]:
    """For each mark the largest sum of the GPU allocator's events in it, less the sum at its end: what the results
    hold."""
    events: list[Any] = [] if record.kineto_results is None else list(record.kineto_results.events())
    kind = torch.autograd.DeviceType.CUDA
    marks = sorted(
        (e.start_ns(), e.end_ns(), int(e.name()[len(_MARK) :])) for e in events if e.name().startswith(_MARK)
    )
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.device_type() == kind]
    changes.sort(key=lambda change: change[0])  # stable: equal times keep their order
    peaks: dict[int, int] = {}
    at = 0
    for start, end, i in marks:
        while at < len(changes) and changes[at][0] < start:
            at += 1
        now = largest = 0
        while at < len(changes) and changes[at][0] <= end:
            now += changes[at][1]
            largest = max(largest, now)
            at += 1
        peaks[i] = largest - max(now, 0)
    return peaks
