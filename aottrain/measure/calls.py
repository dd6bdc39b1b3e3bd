"""One call of one op as a value: its arguments by layout instead of by content, and made-up inputs to run it on."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from aottrain.compat import disable_autocast, disable_modes, profiling
from aottrain.ir.ops import OpKind, op_info, packet_name
from aottrain.ir.tensor import TensorSpec
from aottrain.ir.values import PLAIN_TYPES
from aottrain.toolchain.cache import processor

# Ops of other libraries may have effects that their schemas do not tell.
_NAMESPACES = ("aten", "aottrain", "prims")
_PIVOTED = frozenset({"linalg_ldl_solve", "linalg_lu_solve", "lu_unpack"})
# The position of the argument that says where bags begin, behind that of the indices.
_OFFSETS = {"_embedding_bag": 2, "_embedding_bag_forward_only": 2, "_embedding_bag_backward": 2,
            "_embedding_bag_per_sample_weights_backward": 3}  # fmt: skip
_BLOCK = 1 << 16
_CGROUP = Path("/sys/fs/cgroup")
_alone = threading.Lock()


@dataclass(frozen=True)
class OpCall:
    """target(*args, **kwargs) with a TensorSpec in the place of each tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    result_bytes: int = 0
    """Of what it returns."""

    @cached_property
    def text(self) -> str | None:
        """The call in words, the same for calls that run alike; None where an argument cannot be described.
        An op of our own has with it what says whether it is still the same code: figures by this text outlive it."""
        text = self.plain_text
        own = text is not None and getattr(self.target, "namespace", "") == "aottrain"
        return f"{text} {own_code()}" if own else text

    @cached_property
    def plain_text(self) -> str | None:
        """The same whatever the code of our own op is: what a record of decisions calls it."""
        try:
            named = [f"{name}={_text(value)}" for name, value in self.kwargs.items()]
            return f"{self.target}({', '.join([*map(_text, self.args), *named])})"
        except TypeError:
            return None

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(_specs([*self.args, *self.kwargs.values()]))

    @cached_property
    def device(self) -> torch.device:
        """Where it runs; numbers on the CPU may accompany tensors elsewhere."""
        named = self.kwargs.get("device")
        places = [spec.device for spec in self.tensors] + ([torch.device(named)] if named is not None else [])
        return next((place for place in places if place.type != "cpu"), torch.device("cpu"))

    @property
    def may_run(self) -> bool:
        """Whether it may run on made-up inputs: it has no effect, and takes at most half of the free memory."""
        if getattr(self.target, "namespace", None) not in _NAMESPACES or self.text is None:
            return False
        info = op_info(self.target)
        if info.writes or info.kind in (OpKind.EFFECT, OpKind.STRUCTURE, OpKind.SIZE):
            return False
        if any(spec.device.type not in ("cpu", "cuda") for spec in self.tensors):
            return False
        needed = self.result_bytes + sum(spec.span_bytes for spec in self.tensors)
        return 2 * needed <= free_bytes(self.device)

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Made-up inputs: numbers between 0 and 1; for integers zeros, which are valid wherever one is an index, but
        ones where LAPACK counts rows from 1, and ATen refuses another number. Where bags of indices begin they are
        spread over the indices: ATen does not check that the last bag is one of the result's."""
        name = packet_name(self.target)
        args = [_materialized(value, int(name in _PIVOTED)) for value in self.args]
        if (position := _OFFSETS.get(name, len(args))) < len(args):
            indices, offsets = args[position - 1], args[position]
            step = torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
            args[position] = step * len(indices) // max(len(offsets) - 1, 1)
        return args, {key: _materialized(value, int(name in _PIVOTED)) for key, value in self.kwargs.items()}


@cache
def own_code() -> str:
    """Changes with the code of our own ops, and of what times them."""
    package = Path(__file__).resolve().parents[1]
    files = sorted(
        path for folder in ("ops", "measure", "runtime", "toolchain") for path in (package / folder).rglob("*.py")
    )
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:8]


def environment(device: torch.device) -> str:
    """What decides, beside the call itself, how a library runs it."""
    parts: list[Any] = [torch.__version__, torch.are_deterministic_algorithms_enabled()]
    if device.type == "cuda":
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        parts += [torch.cuda.get_device_name(device), cudnn.enabled, cudnn.benchmark, cudnn.deterministic]
        parts += [cudnn.version(), torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction]
        parts.append(convolutions_round())
    else:
        parts += [processor(), torch.get_num_threads(), torch.backends.mkldnn.enabled]
        parts.append(torch.get_float32_matmul_precision())
    return "\0".join(map(str, parts))


def convolutions_round() -> bool:
    """Whether cuDNN may round float32 to TF32. The older `torch.backends.cudnn.allow_tf32` says so, too, but cannot be
    read where this setting was made."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def free_bytes(device: torch.device) -> int:
    """Memory that is free now, on the machine and in the container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, StopIteration):
        limit, used = (int((_CGROUP / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        lines = (_CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file"))
        free = min(free, limit - used + cached)
    return max(free, 0)


@contextmanager
def quiet() -> Iterator[bool]:
    """Around the running of made-up calls, one thread at a time: no autograd, no modes, no garbage collection. False
    where a profiler of the caller's records: then nothing should run that it could see."""
    with _alone, torch.no_grad(), disable_modes(), disable_autocast():
        collects = gc.isenabled()
        gc.disable()
        try:
            yield not profiling()
        finally:
            if collects:
                gc.enable()


def distinct(calls: Sequence[OpCall]) -> list[OpCall]:
    """One call for each text."""
    return list({call.text: call for call in calls if call.text is not None}.values())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return f"{value} {list(value.stride)} {value.device}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    raise TypeError(type(value).__name__)


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _specs(item)


def _materialized(value: Any, integer: int) -> Any:
    if isinstance(value, (list, tuple)):
        return [_materialized(item, integer) for item in value]
    return _made_tensor(value, integer) if isinstance(value, TensorSpec) else value


def _made_tensor(spec: TensorSpec, integer: int) -> torch.Tensor:
    count = spec.span
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        memory = torch.full((count,), integer, dtype=spec.dtype, device=spec.device)
    else:
        memory = torch.empty(count, dtype=spec.dtype, device=spec.device)
        # One block of random numbers, again and again: drawing gigabytes would take longer than most ops.
        generator = torch.Generator(spec.device).manual_seed(0)
        block = torch.rand(min(count, _BLOCK), generator=generator, device=spec.device)
        full = count // max(len(block), 1) * len(block)
        memory[:full].view(-1, max(len(block), 1)).copy_(block)
        memory[full:].copy_(block[: count - full])
    return memory.as_strided(spec.shape, spec.stride)
