"""The TorchDynamo front end: it traces any Python into graphs and guards them; each graph goes through our pipeline.

`backend` is registered as an entry point of torch, so that `torch.compile(model, backend="aottrain",
options={"budget": 0.4})` needs no import. `compile_dynamo` is what `aottrain.compile(..., capture="dynamo")` uses.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from aottrain.compat import dynamo_settings, guard_modules, tracing_alone, tree_unflatten
from aottrain.compat_checkpoint import follow_checkpoints
from aottrain.compat_dispatch import symbolic_tracing, told_of_nodes
from aottrain.compat_dynamo import (
    Frame,
    GraphBreak,
    compiled_code,
    compiled_name,
    handed_on,
    left_to_python,
    num_resets,
    optimized,
)
from aottrain.compat_dynamo_inputs import drawn_by_python, number_numpy, promotes_otherwise, sizes_not_of_strides
from aottrain.compiler.capture.capture import CapturedStep
from aottrain.compiler.capture.dynamic import SymbolicSizes, example_sizes
from aottrain.compiler.frontends.asserts import naming_other_memory, raise_as_python
from aottrain.compiler.frontends.dynamo_before_2_13 import drop_shadows
from aottrain.compiler.frontends.dynamo_checkpoints import check_reentrant, restore_checkpoints, run_in_line
from aottrain.compiler.frontends.memory_guards import (
    OVERLAP,
    UnlikeFakes,
    keep_apart,
    keep_for_eager,
    starts_unread,
    tensors_at,
)
from aottrain.compiler.frontends.reentry import host_of_graph
from aottrain.compiler.frontends.refusals import count_fallback, new_report, refusals_unlogged, shared_report
from aottrain.compiler.frontends.seeding import seeding_shown
from aottrain.compiler.graphs.source_locations import first_line, line_at, line_of, location_of, raised_at, written_at
from aottrain.compiler.joint.analysis import Analysis
from aottrain.compiler.options import AUTO, CompileOptions, options_from_dict
from aottrain.compiler.pipeline import UserCall, compile_call
from aottrain.compiler.reporting import without_state
from aottrain.errors import AottrainError, ConfigError, PythonOnlyError, UnsupportedError, is_out_of_memory
from aottrain.explain.report import CompileReport, GraphReport, add_graph_break
from aottrain.guards.guards import FORWARD_MODE, NODE_HOOKS, is_disjoint, unfit_now
from aottrain.guards.state import StateGuard
from aottrain.runtime.epilogue import assemble
from aottrain.runtime.failures import ForwardRaised
from aottrain.runtime.program import NO_SIZES, Program, keep_dynamo_out
from aottrain.toolchain.cache import say_once
from aottrain.toolchain.ending import deferred

Runner = Callable[..., Any]


def backend(graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, **_: Any) -> Runner:
    """The backend that `torch.compile(..., backend="aottrain")` finds; `options`: keywords of `aottrain.compile`.

    What was compiled and what runs eagerly is in `aottrain.reports()`.
    """
    try:
        chosen = options_from_dict(options or {})
    except ConfigError as error:
        raise handed_on(error) from None
    code = compiled_code()
    name, line = compiled_name(), first_line(graph.graph)
    target = f"{name} ({line})" if name and line else name or line
    report = shared_report(None if code is None else (code, chosen), target)
    return compile_graph(chosen, report, graph, example_inputs)


def refuse(options: Any, graph_break: GraphBreak) -> Callable[[], None]:
    """For a call of code that `backend` is not asked about, because an op in it refuses its arguments."""
    error = UnsupportedError(graph_break.reason, line_at(graph_break.file, graph_break.line))
    return partial(_EagerCounter(options_from_dict(options or {}), new_report(error.source), _Calls()).note, error)


_SETTERS = ("set_default_dtype", "_set_default_dtype", "_set_deterministic", "use_deterministic", "set_num_threads")
RECOMPILE_LIMIT = 16  # programs of one callable (by Dynamo: of one piece of code); past it calls are eager, and counted
LIMIT_REACHED = f"{RECOMPILE_LIMIT} programs are compiled for this target already"
NO_GRAPH = "TorchDynamo gave no graph to compile for this call"


class _Calls(threading.local):
    """The call that this thread is in."""

    inside = False
    ran = False  # whether a graph was run

    def __init__(self) -> None:
        self.eager: list[UnsupportedError] = []  # why something ran eagerly, in order


class _FrameLog:
    """What TorchDynamo does with the frames of one target: past the recompile limit it runs code eagerly, and says so
    only once."""

    def __init__(self, options: CompileOptions, report: CompileReport, calls: _Calls):
        self._options, self._report, self._calls = options, report, calls
        self._num_compiled = self._num_skipped = 0
        self._num_resets = 0

    def begin(self) -> None:
        """Of a call. What TorchDynamo has forgotten since the last one is in the report no more."""
        if self._num_resets != num_resets():
            if self._num_resets:
                self._report.clear()
            self._num_resets, self._num_compiled, self._num_skipped = num_resets(), 0, 0

    def __call__(self, frame: Frame) -> None:
        if not frame.limited:
            self._num_compiled += not frame.skipped
            self._num_skipped += frame.skipped
            if (failed := frame.failed) is not None:
                self._eagerly(failed.reason, line_at(failed.file, failed.line))
            for graph_break in frame.breaks:
                add_graph_break(self._report, graph_break.reason, line_at(graph_break.file, graph_break.line))
            if frame.breaks and self._options.partition == "budget":
                say_once(self._report.breaks_text)  # other graphs of the same step follow
        else:
            self._eagerly(LIMIT_REACHED, line_of(frame.code))

    def _eagerly(self, reason: str, source: str) -> None:
        """Once in a call for each reason."""
        if self._options.on_unsupported == "error":
            raise UnsupportedError(reason, source)
        if not any(error.reason == reason for error in self._calls.eager):
            self._calls.eager.append(UnsupportedError(reason, source))

    def check_ran(self) -> None:
        """After a call: something of it ran compiled, or is counted, or there was nothing to compile."""
        report = self._report
        if self._calls.ran or self._calls.eager:
            return
        if self._num_compiled and not (self._num_skipped or report.graphs or report.graph_breaks):
            return
        # Under "error" not where a program exists: this call may have had nothing to compute.
        if self._options.on_unsupported == "error" and not report.graphs:
            raise UnsupportedError(NO_GRAPH)
        self._calls.eager.append(UnsupportedError(NO_GRAPH))


def compile_dynamo(target: Callable[..., Any], options: CompileOptions, report: CompileReport) -> Callable[..., Any]:
    """`target` under TorchDynamo with our backend; where options.dynamic is False, each shape is compiled on its own.
    Hooks on modules are guarded, which Dynamo skips. What runs eagerly, in part or whole, is counted as a fallback."""
    follow_checkpoints()
    calls = _Calls()
    frame_log, backend = _FrameLog(options, report, calls), partial(compile_graph, options, report, calls=calls)
    dynamic = None if options.dynamic == AUTO else bool(options.dynamic)
    compiled = optimized(target, backend, dynamic, frame_log, deferred)

    def call(*args: Any, **kwargs: Any) -> Any:
        outer, calls.inside, calls.ran, calls.eager = (calls.inside, calls.ran, calls.eager), True, False, []
        frame_log.begin()
        try:
            with _settings(), refusals_unlogged, seeding_shown(options.rng):
                out = compiled(*args, **kwargs)
            frame_log.check_ran()
        finally:
            eager = calls.eager
            calls.inside, calls.ran, calls.eager = outer
            for error in eager:
                count_fallback(report, error, 4)
        return out

    return call


@cache
def _settings() -> Any:
    """One for the process: where all threads see the same options, the last to leave puts them back."""
    return dynamo_settings(
        skip_nnmodule_hook_guards=False,
        recompile_limit=RECOMPILE_LIMIT,
        error_on_nested_fx_trace=False,
        allow_rnn=True,  # else it runs nn.RNN, GRU and LSTM eagerly
        reorderable_logging_functions={warnings.warn},  # after the graph instead of breaking it
    )


def compile_graph(
    options: CompileOptions,
    report: CompileReport,
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    calls: _Calls | None = None,
) -> Runner:
    """One Dynamo graph as a callable on its inputs. What is not proven runs as Dynamo's graph, op by op, counted."""
    guard_modules()
    keep_dynamo_out()
    drop_shadows(graph)
    raise_as_python(graph)
    number_numpy(graph)
    eager = _Eager(graph, _EagerCounter(options, report, calls or _Calls()))
    try:
        return _compile_graph(options, graph, example_inputs, eager)
    except UnsupportedError as error:
        if options.on_unsupported == "error":
            raise handed_on(error) from None
        return _uncompiled(graph, example_inputs, error, eager)
    except Exception as error:
        if isinstance(error, AottrainError) or is_out_of_memory(error):
            raise handed_on(error) from None
        raise


def _uncompiled(graph: fx.GraphModule, example_inputs: Sequence[Any], error: UnsupportedError, eager: _Eager) -> Runner:
    """What runs a graph that is not compiled, if Python need not run the code, as where its inputs overlap."""
    try:
        if isinstance(error, PythonOnlyError):
            raise error
        keep_for_eager(graph, tensors_at(example_inputs), error)
        return eager.because(error)
    except PythonOnlyError as error:
        # Dynamo has followed the code past the place where eager raises, and left its `except` out.
        note = partial(eager.counted.note_once, UnsupportedError(error.reason, error.source or raised_at(error)))
        note()
        raise left_to_python(error.reason, note) from None


def _compile_graph(options: CompileOptions, graph: fx.GraphModule, inputs: Sequence[Any], eager: _Eager) -> Runner:
    examples = _examples(graph, inputs)
    unlike = UnlikeFakes(graph, inputs)
    with tracing_alone(), refusals_unlogged:
        entry, sizes = _compile(_Inliner(graph).run, graph, examples, options, example_sizes(examples))
    program, step, analysis, graph_report = entry
    report, calls = eager.counted.report, eager.counted.calls
    tensor_indices, state = tensors_at(examples), step.primals[: step.num_state]
    keep_apart(graph, tensor_indices, state, analysis.mutated)
    report.graphs.append(without_state(graph_report, graph, inputs))
    program.faults.count_in(report)
    num_batch = len(step.primals) - step.num_state
    reasons = FORWARD_MODE, NODE_HOOKS, OVERLAP, *UnlikeFakes.REASONS
    eagerly = {reason: eager.because(UnsupportedError(reason)) for reason in reasons}

    def run(*args: Any) -> Any:
        if (reason := unlike.reason(args) or unfit_now()) is not None:
            return eagerly[reason](*args)
        batch = {id(args[i]): args[i] for i in tensor_indices}
        primals = [*state, *batch.values()]
        # Guarded is that they lie apart: parts of one memory may, of which a program knows nothing.
        if len(batch) != num_batch or (analysis.mutated and not is_disjoint(primals, analysis.mutated)):
            return eagerly[OVERLAP](*args)
        calls.ran = True
        values = NO_SIZES if sizes is None else sizes.read(args)
        try:
            computed = program(primals, values)
        except ForwardRaised as signal:
            raised = signal
        else:
            return finish(computed, primals, values)
        return eager.host.leave(partial(again, raised), partial(eager.by_operators, *args))

    def again(raised: ForwardRaised, function: Runner) -> Any:
        result = raised.run_again(function, (), {})
        if options.on_unsupported == "error":
            raise raised.refusal() from raised.error
        eager.counted.count(raised.refusal())
        return result

    def finish(computed: Sequence[Tensor], primals: list[Tensor], values: Any) -> Any:
        leaves = assemble(analysis.outputs, analysis.leaves, analysis.is_tensor, computed, primals, values)
        return tree_unflatten(leaves, analysis.out_tree)

    return run


def _compile(
    function: Runner,
    graph: fx.GraphModule,
    examples: Sequence[Any],
    options: CompileOptions,
    sizes: SymbolicSizes | None,
) -> tuple[tuple[Program, CapturedStep, Analysis, GraphReport], SymbolicSizes | None]:
    """With symbolic sizes where there are some; if that fails each becomes the number that it is, guarded by Dynamo."""
    if sizes is not None:
        try:
            with symbolic_tracing():
                return compile_call(UserCall(function, None, examples, {}, StateGuard(graph), sizes), options), sizes
        except UnsupportedError:
            examples = [int(value) if isinstance(value, torch.SymInt) else value for value in examples]
    return compile_call(UserCall(function, None, examples, {}, StateGuard(graph)), options), None


class _EagerCounter:
    """Counts in the report what runs eagerly, or raises. It holds no graph: TorchDynamo's callback keeps it."""

    def __init__(self, options: CompileOptions, report: CompileReport, calls: _Calls):
        self.report, self.calls = report, calls
        self._refuses = options.on_unsupported == "error"

    def note(self, error: UnsupportedError) -> None:
        if self._refuses:
            raise error
        self.count(error)

    def note_once(self, error: UnsupportedError) -> None:
        """Not again in the same call: code that Python runs may call other code that it also runs."""
        if not any((counted.reason, counted.source) == (error.reason, error.source) for counted in self.calls.eager):
            self.note(error)

    def count(self, error: UnsupportedError) -> None:
        self.calls.ran = True
        if self.calls.inside:  # counted at the end of the call
            self.calls.eager.append(error)
        else:
            count_fallback(self.report, error, 5)


class _Eager:
    """What runs where a graph is not compiled, or not for these inputs: counted, or an error."""

    def __init__(self, graph: fx.GraphModule, counted: _EagerCounter):
        self.graph, self.counted = graph, counted
        self.host = host_of_graph()
        self._restored = False

    def because(self, error: UnsupportedError) -> Runner:
        reason, source = error.reason, error.source or raised_at(error)
        return lambda *args: self._run(UnsupportedError(reason, source), args)

    def _run(self, error: UnsupportedError, args: Sequence[Any]) -> Any:
        self.counted.note(error)
        return self.host.leave(lambda function: function(), partial(self.by_operators, *args))

    def by_operators(self, *args: Any) -> Any:
        """Dynamo's graph as eager runs it."""
        if not self._restored:
            restore_checkpoints(self.graph)
            self._restored = True
        return self.graph(*args)


def _examples(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Dynamo's fakes of the inputs, and symbolic numbers."""
    check_reentrant(graph)
    examples, nodes = [], [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in (node for part in graph.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name.startswith(_SETTERS):
            # Dynamo has called it already: the trace sees no change.
            raise UnsupportedError(f"the program calls {name}, which sets what holds for all code")
        if name == "_enter_inference_mode" and not node.args[0]:  # TorchDynamo traces outside of the caller's
            raise UnsupportedError("the program leaves its caller's inference mode")
        if name.startswith("_tensor_version"):
            raise UnsupportedError("the program uses Tensor._version, which a trace cannot know")
    if told_of_nodes():
        raise PythonOnlyError(NODE_HOOKS)
    if promotes_otherwise(graph):
        raise PythonOnlyError("TorchDynamo makes tensors of numpy's scalars, which promote otherwise")
    if not sizes_not_of_strides(graph):
        raise PythonOnlyError("TorchDynamo reads a size from a stride of a gradient, which may have others")
    for node, example in zip(nodes, example_inputs, strict=True):
        value = node.meta.get("example_value", example)
        if drawn_by_python(node):
            raise UnsupportedError("TorchDynamo makes tensors of Python's random numbers")
        if isinstance(value, Tensor) and value.is_nested:
            raise UnsupportedError("an input is a nested tensor")
        if isinstance(value, torch.SymInt) and value.node.is_nested_int():
            raise UnsupportedError("an input is the size of a nested tensor")
        examples.append(value)
    return examples


class _Inliner(fx.Interpreter):
    """Runs Dynamo's torch-level graph, with the bodies of activation checkpoints in line and marked: the partitioner
    has their values computed again, and checkpoint's own recompute would draw other random numbers."""

    def __init__(self, graph: nn.Module):
        super().__init__(graph, garbage_collect_values=False)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.env.clear()
        return super().run(*args, enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_method" and n.target == "item":
            # A Python float that Dynamo made symbolic (an eps, a dropout rate): its number, which adds a guard.
            value = n.meta.get("example_value")
            if isinstance(value, torch.SymFloat) and value.node.hint is not None:
                return float(value)
        if n.target is not torch.ops.higher_order.tag_activation_checkpoint:
            with written_at(location_of(n)), starts_unread(n, self.env), naming_other_memory(n.target):
                return super().run_node(n)
        (body, *inputs), kwargs = self.fetch_args_kwargs_from_env(n)
        return run_in_line(n, body, _Inliner(body).run, inputs, kwargs)
