"""Private names of TorchDynamo: what it does with each frame, which no public function tells."""

from __future__ import annotations

import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch


class GraphBreak(NamedTuple):
    """Where TorchDynamo cut a program."""

    reason: str
    """One line."""
    file: str
    """Of the program, as `line` is."""
    line: int


class Frame(NamedTuple):
    """What TorchDynamo did with a frame that no compiled code fits: it runs eagerly, was compiled, or holds nothing to
    compile."""

    code: types.CodeType
    limited: bool = False
    """There are as many programs for its code as there may be: it runs eagerly."""
    skipped: bool = False
    """TorchDynamo gave up on it: it runs eagerly."""
    breaks: tuple[GraphBreak, ...] = ()
    """The graph breaks that were met."""
    failed: GraphBreak | None = None
    """Where an op of the frame refused its arguments while TorchDynamo traced it, or TorchDynamo itself failed: this
    call of it is left to Python."""


def most_sizes(tensor: torch.Tensor) -> dict[int, int]:
    """The greatest size of dimensions that the caller marked so: mark_dynamic(..., max=)."""
    ranges = vars(tensor).get("_dynamo_dynamic_range", ())
    return {each.dim: each.max for each in ranges if each.max is not None}


Watch = Callable[[Frame], None]
During = Callable[[], AbstractContextManager[None]]


def optimized(
    target: Any, backend: Callable[..., Any], dynamic: bool | None, watch: Watch, during: During
) -> Callable[..., Any]:
    """torch.compile(target, backend=backend, dynamic=dynamic), where `watch` is told of each frame that is compiled or
    runs eagerly, before it runs; what `watch` raises, the call raises. Each is compiled inside `during()`."""
    import torch._dynamo  # here, because it takes a second that most programs need not spend

    guard_methods_of_classes()
    leave_functions_inside_transforms()
    look_again()
    context = torch._dynamo.optimize(backend=backend, dynamic=dynamic)
    if hasattr(context, "callback"):  # else Dynamo is switched off in the environment
        context.callback = _Watched(context.callback, watch, during)
    if isinstance(target, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        # Torch refuses these as a target, but not where a function of Python calls them.
        return context(lambda *args, **kwargs: target(*args, **kwargs))
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


@cache
def leave_functions_inside_transforms() -> None:
    """From now on TorchDynamo leaves code to Python that calls a custom Function inside a transform of torch.func, or
    inside forward-mode differentiation.

    By itself it follows the Function's forward there, and the transform differentiates that: the Function's own
    backward, jvp and vmap are never called, with every backend.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    variable: Any = AutogradFunctionVariable
    original = variable.call_apply

    def call_apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if transformed or torch.autograd.forward_ad._current_level >= 0:
            unimplemented(
                gb_type="custom autograd.Function inside a transform",
                context=self.fn_cls.__name__,
                explanation="TorchDynamo would not call the backward, jvp or vmap of a custom autograd.Function here.",
                hints=[],
            )
        return original(self, *args, **kwargs)

    variable.call_apply = call_apply


class _Left(threading.local):
    """Whether a backend has left the call for which this thread's TorchDynamo compiles to Python: what tells of it."""

    tell: Callable[[], None] | None = None
    ends_traces: bool = False  # whether an op that refuses its fakes is left to Python


_left = _Left()
# By TorchDynamo's callback, then by code: since which state of it, how often it was left, and what tells of it.
_often: weakref.WeakKeyDictionary[Any, dict[types.CodeType, tuple[Any, int, Callable[[], None]]]]
_often = weakref.WeakKeyDictionary()


def left_to_python(reason: str, tell: Callable[[], None]) -> Exception:
    """What a backend raises so that TorchDynamo runs this call of the code that it has traced in Python.

    tell: called where such calls have become too many to trace each, and one more is left so.
    """
    from torch._dynamo.exc import SkipFrame

    _left.tell = tell
    return SkipFrame(reason)


@cache
def look_again() -> None:
    """From now on TorchDynamo looks anew at code of which a backend has left a call to Python: for other inputs it is,
    or will be, compiled. By its own rule it would run it in Python for good, and nobody could count the calls."""
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.exc import TorchRuntimeError
    from torch._dynamo.types import ConvertFrameReturn

    original = CatchErrorsWrapper.__call__

    def call(self: Any, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        left = _often.setdefault(self, {})
        since, count, tell = left.get(frame.f_code, (frame_state, 0, None))
        count *= since is frame_state  # torch._dynamo.reset() makes another
        if tell is not None and count >= torch._dynamo.config.recompile_limit:
            tell()
            return ConvertFrameReturn(apply_to_code=False)
        _left.tell = None
        refuse, options = _refusal_of(self)
        try:
            with nullcontext() if refuse is None else _refusals_end_traces():
                converted = original(self, frame, cache_entry, frame_state)
        except TorchRuntimeError as error:
            if refuse is None:
                raise
            _left.tell, converted = refuse(options, _failure(error)), ConvertFrameReturn()
            _left.tell()
        tell, _left.tell = _left.tell, None
        if tell is None:
            return converted
        left[frame.f_code] = frame_state, count + 1, tell
        return replace(converted, apply_to_code=False)

    CatchErrorsWrapper.__call__ = call


# By backend: given torch.compile's options, and where an op refused its arguments: what tells of the call.
Refuse = Callable[[Any, GraphBreak], Callable[[], None]]
_refusals: dict[Any, Refuse] = {}


def refuse_by(backend: Any, refuse: Refuse) -> None:
    """Where an op refuses its arguments while TorchDynamo traces for torch.compile(..., backend=backend), Python is to
    run that call of the code, and raise what the op raises where it belongs."""
    _refusals[backend] = refuse


def _backend_of(callback: Any) -> Any:
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def _refusal_of(callback: Any) -> tuple[Refuse | None, Any]:
    callback = _backend_of(callback)
    return _refusals.get(getattr(callback, "compiler_fn", None)), getattr(callback, "kwargs", {}).get("options")


@contextmanager
def _refusals_end_traces() -> Iterator[None]:
    """Inside, an op that refuses its fakes ends TorchDynamo's trace, as it did before torch 2.14: since then a `try` of
    the program's catches the refusal while it is traced. Eager may not refuse it, and does so in other words."""
    _note_refusals()
    before, _left.ends_traces = _left.ends_traces, True
    try:
        yield
    finally:
        _left.ends_traces = before


@cache
def _note_refusals() -> None:
    import torch._dynamo.exc as exc

    if observed := getattr(exc, "FakeTensorObservedException", None):  # since torch 2.14

        class Refused(observed):  # type: ignore[misc,valid-type]
            def __new__(cls, message: str, real_stack: Any = None) -> Any:
                return (exc.TorchRuntimeError if _left.ends_traces else observed)(message, real_stack=real_stack)

        exc.FakeTensorObservedException = Refused  # type: ignore[attr-defined]


class _Watched:
    """TorchDynamo's callback, which is asked for each frame that no compiled code fits.

    Past its limit TorchDynamo asks no more, and runs the code as it is. Here it goes on asking, and is not bothered.
    Calls that cannot be traced count against the limit.
    """

    def __init__(self, callback: Any, watch: Watch, during: During):
        self._callback, self._watch, self._during = callback, watch, during
        self._limited: dict[types.CodeType, Any] = {}
        self._num_failed: dict[types.CodeType, tuple[Any, int]] = {}  # by code: since which state of it, how often
        # Dynamo knows a cache of compiled code by the backend that this leads to.
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend
        self._clone_with_backend = getattr(callback, "_clone_with_backend", None)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError
        from torch._dynamo.types import ConvertFrameReturn, FrameAction
        from torch._dynamo.utils import counters, graph_break_reasons

        code = frame.f_code
        if cache_entry is None:
            self._limited.pop(code, None)  # torch._dynamo.reset() was called
        limited = self._limited.get(code)
        if limited is not None:  # each time the same
            self._watch(Frame(code, limited=True))
            return limited
        since, num_failed = self._num_failed.get(code, (frame_state, 0))
        num_failed *= since is frame_state  # a reset makes another
        if num_failed >= torch._dynamo.config.recompile_limit:
            self._watch(Frame(code, limited=True))
            return ConvertFrameReturn(apply_to_code=False)
        frames = counters["frames"]
        total, done, num_breaks = frames["total"], frames["ok"], len(graph_break_reasons)
        failed = None
        try:
            with self._during(), _refusals_end_traces(), _limit_of_one(self, frame):
                converted = self._callback(frame, cache_entry, frame_state)
        except (TorchRuntimeError, InternalTorchDynamoError, AssertionError) as error:
            # Python raises it where it belongs, maybe in a `try` of the program's; or it is a fault of TorchDynamo's.
            failed, converted = _failure(error), ConvertFrameReturn(apply_to_code=False)
            self._num_failed[code] = frame_state, num_failed + 1
        if converted.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY:
            converted = self._limited[code] = replace(converted, apply_to_code=False)
            self._watch(Frame(code, limited=True))
        elif failed:
            self._watch(Frame(code, skipped=True, failed=failed))
        elif frames["total"] > total:  # else it is torch's own, or there is nothing to compile by
            breaks = tuple(map(_graph_break, graph_break_reasons[num_breaks:]))
            self._watch(Frame(code, False, frames["ok"] == done, breaks))
        return converted


def _limit_of_one(callback: Any, frame: Any) -> AbstractContextManager[Any]:
    """Inside, programs that other targets have of this code do not count against TorchDynamo's limits, which are of one
    target here: the blocks of a model, each compiled by itself, are of one code."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.cache_size import _has_same_id_matched_objs

    backend, config = _backend_of(callback), torch._dynamo.config
    entries = _debug_get_cache_entry_list(frame.f_code)
    others = [entry for entry in entries if getattr(entry, "backend", backend) is not backend]
    if not others:
        return nullcontext()
    counted = sum(_has_same_id_matched_objs(frame, entry) for entry in others)
    more = {"recompile_limit": counted, "accumulated_recompile_limit": len(others)}
    return config.patch({name: getattr(config, name) + count for name, count in more.items()})


def _graph_break(entry: Any) -> GraphBreak:
    return _graph_break_at(entry.reason, entry.user_stack)


def _failure(error: Any) -> GraphBreak:
    return _graph_break_at(
        f"TorchDynamo cannot trace it: {getattr(error, 'msg', error)}", getattr(error, "real_stack", None)
    )


def _graph_break_at(reason: Any, stack: Any) -> GraphBreak:
    where = stack[-1] if stack else None
    reason = str(reason).strip().partition("\n")[0]
    return GraphBreak(reason, where.filename if where else "", (where.lineno or 0) if where else 0)


def handed_on(error: Exception) -> Exception:
    """To be raised by a backend, so that the caller gets `error` as it is, and not as the cause of one of Dynamo's."""
    from torch._dynamo.exc import ShortenTraceback

    class HandedOn(ShortenTraceback):
        def remove_dynamo_frames(self) -> Any:  # asked for what to raise in the end
            return error

    return HandedOn(str(error), first_useful_frame=None)


def compiled_code() -> tuple[int, int] | None:
    """While a backend is called: numbers for the piece of code that TorchDynamo compiles, the same for each of its
    shapes, and others after torch._dynamo.reset()."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return None if compile_id is None or compile_id.frame_id is None else (compile_id.frame_id, num_resets())


def compiled_name() -> str:
    """While a backend is called: the class of the module whose code TorchDynamo compiles, or the function's name; empty
    where it does not say."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame = InstructionTranslator.current_tx().output.root_tx
        code, owner = frame.f_code, frame.f_locals.get("".join(frame.f_code.co_varnames[:1]))
    except AttributeError:  # who calls is not TorchDynamo
        return ""
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    rest = _RESUMED.fullmatch(code.co_name)
    return f"{rest[1]}, after a graph break" if rest else str(getattr(code, "co_qualname", code.co_name))


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")  # what follows a graph break
_resets = [0]


def num_resets() -> int:
    """How often torch._dynamo.reset() was seen to have been called: told by code that TorchDynamo forgets then."""
    from torch._dynamo.convert_frame import input_codes

    if num_resets.__code__ not in input_codes:
        input_codes.add(num_resets.__code__)
        _resets[0] += 1
    return _resets[0]


def compiling() -> tuple[Any, Any]:
    """While TorchDynamo compiles: a number for the compilation, and what stands for this attempt at it."""
    return torch._guards.CompileContext.current_compile_id(), torch._guards.TracingContext.try_get()


def on_new_code(change: Callable[[types.CodeType, types.CodeType], types.CodeType | None]) -> None:
    """Have TorchDynamo run, for the program's code and its own for that, the code that `change` gives, if it does."""
    from torch._dynamo.convert_frame import register_bytecode_hook

    register_bytecode_hook(change)


def leave_out(code: types.CodeType) -> None:
    """TorchDynamo does not look at calls of this code; at those that it makes it does."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def enters_dynamo(code: types.CodeType) -> bool:
    """Whether it is the wrapper that torch.compile makes: of a function of the program's, or of torch's own, such as
    what runs the branches of torch.cond."""
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py")
