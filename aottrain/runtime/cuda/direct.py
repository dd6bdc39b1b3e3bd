"""Kernels that Triton has compiled, started by one call of the CUDA driver each, from a C++ function of our own.

Triton's launcher takes each argument apart in Python. The kernels of one generated module always take pointers, and
after them numbers of random draws as 64 bits, in the same places. What is known of a kernel's arguments is read from
its machine code's text: where that has others than these and the two scratch pointers of Triton, which are null for
kernels that need none, Triton starts it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from aottrain.ops.native.launches import LAUNCHES
from aottrain.toolchain.native import Source, load

_LIBRARIES = ("libcuda.so.1", "libcuda.so")
_MOST_ARGUMENTS = 256
_MOST_NULLS = 2
_PARAMETERS = re.compile(r"\.entry\s+\S+?\s*\(([^)]*)\)")
# Of Triton's metadata: what a plain launch has none of. A name that a version does not know is not used there.
_PLAIN = {
    "num_ctas": 1, "launch_pdl": False, "launch_cooperative_grid": False, "global_scratch_size": 0,
    "profile_scratch_size": 0,
}  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("programs", "threads", "shared")),
        *((name, ctypes.c_int) for name in ("count", "nulls")),
        ("places", ctypes.c_void_p),
    )


class _Steps(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("start", "steps", "parts")),
        ("count", ctypes.c_int),
        ("buffers", ctypes.c_int),
    )


Kernel = tuple[Any, int, Sequence[int]]  # what Triton compiled, its programs, the places of its arguments


class Direct:
    """The kernels of one module on one device, which is current. Called with buffers, the address of scratch memory
    and the numbers of draws it says how many kernels it has started: where not all, Triton starts the others."""

    def __init__(
        self,
        functions: tuple[Any, int],
        kernels: Sequence[Kernel],
        num_buffers: int,
        num_draws: int,
        parts: Sequence[int],
        stream: Callable[[], int],
    ):
        function, start = functions
        self._kept: list[Any] = [kernel for kernel, _, _ in kernels]  # whose code stays loaded
        steps = (_Step * len(kernels))()
        for step, (kernel, programs, places) in zip(steps, kernels, strict=True):
            numbers = (ctypes.c_int * len(places))(*places)
            self._kept.append(numbers)
            step.function, step.programs, step.shared = kernel.function, programs, kernel.metadata.shared
            step.threads = 32 * kernel.metadata.num_warps
            step.count, step.nulls = len(places), _num_arguments(kernel) - len(places)
            step.places = ctypes.addressof(numbers)
        offsets = (ctypes.c_int64 * len(parts))(*parts)
        whole = _Steps(start, ctypes.addressof(steps), ctypes.addressof(offsets), len(kernels), num_buffers)
        self._kept += [steps, offsets, whole]
        self.count = len(kernels)
        self._table, self._address, self._function = (
            ctypes.c_void_p * (num_buffers + num_draws),
            ctypes.addressof(whole),
            function,
        )
        self._stream = stream

    def __call__(self, buffers: Sequence[Tensor], scratch: int, draws: Sequence[int] = ()) -> int:
        table = self._table(*map(_pointer, buffers), *draws)
        return self._function(self._address, self._stream(), table, scratch)


_pointer = Tensor.data_ptr


def direct(
    kernels: Sequence[Kernel], num_buffers: int, num_draws: int, parts: Sequence[int], stream: Callable[[], int]
) -> Direct | None:
    """None where Triton has to start them: no driver or C++ compiler, or kernels that take more than their buffers.

    parts: where each piece of scratch memory starts within it, in bytes. stream: gives the handle of that on which the
    device's work is queued.
    """
    if not all(_is_plain(kernel, len(places)) for kernel, _, places in kernels):
        return None
    start, function = driver_function(), _function()
    return (
        None
        if not start or function is None
        else Direct((function, start), kernels, num_buffers, num_draws, parts, stream)
    )


@cache
def driver_function() -> int:
    """The address of cuLaunchKernel; 0 where there is no driver."""
    for name in _LIBRARIES:
        try:
            return ctypes.cast(ctypes.CDLL(name).cuLaunchKernel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


@cache
def _function() -> Callable[..., int] | None:
    library = load(Source(LAUNCHES.replace("MOST", str(_MOST_ARGUMENTS))))
    if library is None:
        return None
    function = library.start_all
    function.argtypes = (ctypes.c_void_p,) * 4
    function.restype = ctypes.c_int
    return function


def _is_plain(kernel: Any, count: int) -> bool:
    metadata = getattr(kernel, "metadata", None)
    if metadata is None or not isinstance(getattr(kernel, "function", None), int):
        return False
    if any(getattr(metadata, name, plain) != plain for name, plain in _PLAIN.items()) or metadata.num_ctas != 1:
        return False
    return 0 <= _num_arguments(kernel) - count <= _MOST_NULLS and _num_arguments(kernel) <= _MOST_ARGUMENTS


def _num_arguments(kernel: Any) -> int:
    """How many pointers, or other 64 bits, its machine code takes; -1 where it takes anything else, or its text does
    not say."""
    found = _PARAMETERS.findall(kernel.asm.get("ptx", "") if hasattr(kernel, "asm") else "")
    if len(found) != 1:
        return -1
    parameters = [parameter for parameter in found[0].split(",") if parameter.strip()]
    return len(parameters) if all(re.match(r"\s*\.param\s+\.u64\b", parameter) for parameter in parameters) else -1
