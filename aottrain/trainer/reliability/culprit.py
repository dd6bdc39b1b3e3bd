"""Which tensor of a bad step was the first that is not finite: the step again in eager, op by op, drawing the same."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.compat import TorchDispatchMode, tree_flatten
from aottrain.errors import is_likely_out_of_memory, lack_text
from aottrain.metrics.preserve import preserved
from aottrain.step import Batch
from aottrain.trainer.engines import LossModule
from aottrain.trainer.reliability.undo import RandomNumbers

_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Ops that are told to write infinities, as masks are made of, and those whose memory holds anything yet.
_TOLD = re.compile(r"aten\.(full|fill|masked_fill|scalar_tensor|where|new_full|empty|new_empty|zeros_like|lift)")


def first_bad_tensor(
    module: LossModule,
    micro_batches: Sequence[Batch],
    draws: Callable[[], AbstractContextManager],
    random: RandomNumbers,
) -> str:
    """A sentence. random: the random numbers that the step began with. Leaves no trace."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not _is_finite(tensor):
            return f"{name} itself was not finite before the step"
    for tensor in (tensor for batch in micro_batches for tensor in batch):
        if not _is_finite(tensor):
            return f"the batch has a number that is not finite, in a tensor of shape {list(tensor.shape)}"
    try:
        with preserved(module), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that finding anomalies is slow
            random.put_back()
            for batch in micro_batches:
                if found := _replay(module, batch, draws):
                    return found
    except Exception as error:
        if not is_likely_out_of_memory(error):
            raise
        return f"where it came from is not known: {lack_text(error, 'eager')}"
    return "eager's numbers are finite in the same step, with the same random numbers"


def _replay(module: LossModule, batch: Batch, draws: Callable[[], AbstractContextManager]) -> str:
    watching = _Watching(module)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        with draws(), watching:
            loss = module(*batch)
        if watching.found:
            return f"first in the forward: {'; then '.join(watching.found)}"
        found: list[str] = []
        for node in _nodes_of(loss):
            _watch(node, found)
        loss.backward()
    return f"first in the backward: the gradient of {found[0]}" if found else ""


class _Watching(TorchDispatchMode):
    """Notes the first op that makes an infinity, and the first that makes NaN of numbers."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.found: list[str] = []
        self._names = {id(child): name for name, child in module.named_modules()}
        self._has_nan = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._has_nan or _TOLD.match(str(func)):
            return out
        tensors = [value for value in tree_flatten(out)[0] if _has_floats(value)]
        for tensor in tensors:
            is_nan = bool(tensor.isnan().any())
            if is_nan or (not self.found and bool((tensor == torch.inf).any())):
                self._has_nan = is_nan
                what = "nan" if is_nan else "inf"
                self.found.append(f"{what} of {func} {list(tensor.shape)}{self._place(sys._getframe(1))}")
                break
        return out

    def _place(self, frame: FrameType | None) -> str:
        line = path = ""
        while frame is not None and not (line and path):
            line = line or _shown(frame.f_code.co_filename, frame.f_lineno)
            path = path or self._names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        parts = [part for part in (path, line) if part]
        return f" ({', '.join(parts)})" if parts else ""


def _has_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _shown(file: str, line: int | str) -> str:
    """As "file.py:line", of a program's own file; recipes of ours are such."""
    is_own = not file.startswith(_PACKAGES) or "recipes" in Path(file).parts
    return f"{Path(file).name}:{line}" if is_own and not file.startswith("<") else ""


def _nodes_of(loss: Tensor) -> Iterable[Any]:
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


def _watch(node: Any, found: list[str]) -> None:
    def look(given: Sequence[Any], taken: Sequence[Any]) -> None:
        bad = any(_has_floats(value) and not _is_finite(value) for value in given)
        if bad and not found and all(_is_finite(value) for value in taken if _has_floats(value)):
            frames = _FRAME.findall("".join(node.metadata.get("traceback_", ())))
            lines = [text for file, line in reversed(frames) if (text := _shown(file, line))]
            found.append(node.name().removesuffix("0") + (f" ({lines[0]})" if lines else ""))

    node.register_hook(look)
