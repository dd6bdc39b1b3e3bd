"""Private names of TorchDynamo: what it does with each frame, which no public function tells."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch


class GraphBreak(NamedTuple):
    """reason: one line; file and line: of the program."""

    reason: str
    file: str
    line: int


class Frame(NamedTuple):
    """What TorchDynamo did with a frame that no compiled code fits.

    limited: there are as many programs for its code as there may be. skipped: TorchDynamo gave up on it. Both run
    eagerly; else it was compiled, or holds nothing to compile. breaks: the graph breaks that were met.
    """

    code: types.CodeType
    limited: bool = False
    skipped: bool = False
    breaks: tuple[GraphBreak, ...] = ()


def optimized(
    target: Any, backend: Callable[..., Any], dynamic: bool, watch: Callable[[Frame], None]
) -> Callable[..., Any]:
    """torch.compile(target, backend=backend, dynamic=dynamic), where `watch` is told of each frame that is compiled or
    runs eagerly, before it runs; what `watch` raises, the call raises."""
    import torch._dynamo  # here, because it takes a second that most programs need not spend

    guard_methods_of_classes()
    context = torch._dynamo.optimize(backend=backend, dynamic=dynamic)
    if hasattr(context, "callback"):  # else Dynamo is switched off in the environment
        context.callback = _Watched(context.callback, watch)
    return context(target)


@cache
def guard_methods_of_classes() -> None:
    """From now on TorchDynamo guards which method of a class written in C a value is.

    It guards functions, but takes torch.Tensor.sin for the torch.Tensor.cos that it has traced, as an argument, a
    global, an attribute or in a list. A guard more is right for every backend.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.torch import BaseTorchVariable

    original = BaseTorchVariable.create_with_source.__func__

    def create_with_source(cls: Any, value: Any, source: Any) -> Any:
        if isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        return original(cls, value, source)

    BaseTorchVariable.create_with_source = classmethod(create_with_source)


class _Watched:
    """TorchDynamo's callback, which is asked for each frame that no compiled code fits.

    Past its limit TorchDynamo asks no more, and runs the code as it is. Here it goes on asking, and is not bothered.
    """

    def __init__(self, callback: Any, watch: Callable[[Frame], None]):
        self._callback, self._watch = callback, watch
        self._limited: dict[types.CodeType, Any] = {}
        # Dynamo knows a cache of compiled code by the backend that this leads to.
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend
        self._clone_with_backend = getattr(callback, "_clone_with_backend", None)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        from torch._dynamo.types import FrameAction
        from torch._dynamo.utils import counters, graph_break_reasons

        code = frame.f_code
        if cache_entry is None:
            self._limited.pop(code, None)  # torch._dynamo.reset() was called
        known = self._limited.get(code)
        if known is not None:  # each time the same
            self._watch(Frame(code, limited=True))
            return known
        frames = counters["frames"]
        total, done, num_breaks = frames["total"], frames["ok"], len(graph_break_reasons)
        found = self._callback(frame, cache_entry, frame_state)
        if found.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY:
            found = self._limited[code] = replace(found, apply_to_code=False)
            self._watch(Frame(code, limited=True))
        elif frames["total"] > total:  # else it is torch's own, or there is nothing to compile by
            breaks = tuple(map(_graph_break, graph_break_reasons[num_breaks:]))
            self._watch(Frame(code, False, frames["ok"] == done, breaks))
        return found


def _graph_break(found: Any) -> GraphBreak:
    where = found.user_stack[-1] if found.user_stack else None
    reason = str(found.reason).strip().partition("\n")[0]
    return GraphBreak(reason, where.filename if where else "", (where.lineno or 0) if where else 0)


def handed_on(error: Exception) -> Exception:
    """To be raised by a backend, so that the caller gets `error` as it is, and not as the cause of one of Dynamo's."""
    from torch._dynamo.exc import ShortenTraceback

    class HandedOn(ShortenTraceback):
        def remove_dynamo_frames(self) -> Any:  # asked for what to raise in the end
            return error

    return HandedOn(str(error), first_useful_frame=None)


def compiled_code() -> int | None:
    """While a backend is called: a number for the piece of code that TorchDynamo compiles, the same for each of its
    shapes."""
    found = torch._guards.CompileContext.current_compile_id()
    return None if found is None else found.frame_id


def enters_dynamo(code: types.CodeType) -> bool:
    """Whether it is the wrapper that torch.compile makes: of a function of the program's, or of torch's own, such as
    what runs the branches of torch.cond."""
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py")
