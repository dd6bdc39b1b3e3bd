"""The Dynamo door: TorchDynamo traces any Python into graphs and guards them; each graph goes through our pipeline.

`backend` is registered as an entry point of torch, so that `torch.compile(model, backend="aottrain",
options={"budget": 0.4})` needs no import. `compile_dynamo` is what `aottrain.compile(..., capture="dynamo")` uses.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from aottrain.compat import (
    drop_shadows,
    dynamo_settings,
    guard_modules,
    in_dual_level,
    symbolic_tracing,
    tracing_alone,
    tree_unflatten,
)
from aottrain.compiler import compile_call
from aottrain.compiler.analysis import Analysis
from aottrain.compiler.capture import CapturedStep
from aottrain.compiler.dynamic import SymbolicSizes, example_sizes
from aottrain.compiler.options import CompileOptions, options_from_dict
from aottrain.compiler.places import place_of, written_at
from aottrain.compiler.regions import checkpointed, reentrant_checkpoint
from aottrain.compiler.reporting import without_state
from aottrain.compiler.seeding import seeding_shown
from aottrain.errors import ConfigError, UnsupportedError
from aottrain.ir.report import CompileReport, GraphReport, add_fallback
from aottrain.runtime.epilogue import assemble
from aottrain.runtime.guards import FORWARD_MODE, is_disjoint
from aottrain.runtime.program import NO_SIZES, Program, keep_dynamo_out
from aottrain.runtime.state import StateGuard

Runner = Callable[..., Any]


def backend(graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, **_: Any) -> Runner:
    """The backend that `torch.compile(..., backend="aottrain")` finds; `options`: keywords of `aottrain.compile`."""
    return compile_graph(options_from_dict(options or {}), CompileReport(), graph, example_inputs)


_SETTERS = ("set_default_dtype", "_set_default_dtype", "_set_deterministic", "use_deterministic", "set_num_threads")
# Programs kept for one callable (by Dynamo: for one piece of code); past it calls run eagerly and are counted.
RECOMPILE_LIMIT = 16
LIMIT_REACHED = f"{RECOMPILE_LIMIT} programs are compiled for this target already"


def compile_dynamo(target: Callable[..., Any], options: CompileOptions, report: CompileReport) -> Callable[..., Any]:
    """`target` under TorchDynamo with our backend; unless `options.dynamic`, each shape is compiled on its own.

    Hooks on modules are guarded, which Dynamo skips by default. A call in which no program of ours ran is counted as a
    fallback: past the recompile limit Dynamo runs code eagerly and says so only once.
    """
    ran = threading.local()
    compiled = torch.compile(target, backend=partial(compile_graph, options, report, ran=ran), dynamic=options.dynamic)
    settings = _settings()

    def call(*args: Any, **kwargs: Any) -> Any:
        ran.any = False
        try:
            with settings, seeding_shown(options.rng):
                out = compiled(*args, **kwargs)
        except Exception as error:
            # Dynamo wraps what its backend raises; what a person has to correct is said in one line.
            wrapped = getattr(error, "inner_exception", None)
            if isinstance(wrapped, ConfigError):
                raise wrapped from None
            raise
        if not ran.any and len(report.graphs) >= RECOMPILE_LIMIT:
            if add_fallback(report, LIMIT_REACHED):
                warnings.warn(f"aottrain runs this call eagerly: {LIMIT_REACHED}", stacklevel=4)
        elif not ran.any:
            add_fallback(report, "TorchDynamo gave no graph to compile for this call")
        return out

    return call


@cache
def _settings() -> Any:
    """One for the process: where all threads see the same options, who leaves last puts them back."""
    return dynamo_settings(
        skip_nnmodule_hook_guards=False,
        recompile_limit=RECOMPILE_LIMIT,
        error_on_nested_fx_trace=False,
        reorderable_logging_functions={warnings.warn},  # after the graph instead of breaking it
    )


def compile_graph(
    options: CompileOptions,
    report: CompileReport,
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    ran: threading.local | None = None,
) -> Runner:
    """One Dynamo graph as a callable on the graph's inputs. What is not proven runs as Dynamo's graph, op by op, and is
    counted in the report."""
    ran = ran or threading.local()
    guard_modules()
    keep_dynamo_out()
    drop_shadows(graph)
    function = _Inliner(graph).run
    sizes = None
    try:
        examples = _examples(graph, example_inputs)
        if _counts_from_start(graph) and any(isinstance(v, Tensor) and v.storage_offset() for v in example_inputs):
            raise UnsupportedError(_STARTS)
        sizes = example_sizes(examples)
        with tracing_alone():
            entry, sizes = _compile(function, graph, examples, options, sizes)
    except UnsupportedError as error:
        if options.on_unsupported == "error":
            raise
        reason = str(error).partition("\n")[0]  # fx appends where it was in the graph
        return _eager(graph, report, reason, ran)
    program, step, analysis, graph_report = entry
    report.graphs.append(without_state(graph_report, graph, example_inputs))
    _note_break(graph, options, report)
    places = [i for i, value in enumerate(examples) if isinstance(value, Tensor)]
    state = step.primals[: step.num_state]
    num_batch = len(step.primals) - step.num_state
    forward_mode = _eager(graph, report, FORWARD_MODE, ran)
    fallback = _eager(graph, report, "inputs overlap in memory, and the program writes one", ran)
    moved = _eager(graph, report, _STARTS, ran)
    counts_from_start = _counts_from_start(graph)

    def run(*args: Any) -> Any:
        if counts_from_start and any(args[i].storage_offset() for i in places):
            return moved(*args)
        if in_dual_level():
            return forward_mode(*args)
        batch = {id(args[i]): args[i] for i in places}
        primals = [*state, *batch.values()]
        # Dynamo guards duplicates, not overlap: one compiled graph serves disjoint and overlapping calls.
        if len(batch) != num_batch or (analysis.mutated and not is_disjoint(primals, analysis.mutated)):
            return fallback(*args)
        ran.any = True
        values = NO_SIZES if sizes is None else sizes.read(args)
        computed = program(primals, values)
        leaves = assemble(analysis.outputs, analysis.leaves, analysis.is_tensor, computed, primals, values)
        return tree_unflatten(leaves, analysis.out_tree)

    return run


def _note_break(graph: fx.GraphModule, options: CompileOptions, report: CompileReport) -> None:
    """Other graphs of the same step follow this one: no budget of one of them bounds the step."""
    why = getattr(graph, "compile_subgraph_reason", None)
    if why is None or not why.graph_break:
        return
    frame = why.user_stack[-1] if why.user_stack else None
    place = f" at {os.path.basename(frame.filename)}:{frame.lineno}" if frame is not None else ""
    text = f"TorchDynamo breaks the code{place} ({why.reason.strip().partition(chr(10))[0]})"
    if text not in report.breaks:
        report.breaks.append(text)
        if len(report.breaks) == 1 and options.partition == "budget":
            warnings.warn(f"aottrain: {report.breaks_text}", stacklevel=2)


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
                return compile_call(function, None, examples, {}, options, StateGuard(graph), sizes), sizes
        except UnsupportedError:
            examples = [int(value) if isinstance(value, torch.SymInt) else value for value in examples]
    return compile_call(function, None, examples, {}, options, StateGuard(graph)), None


def _eager(graph: fx.GraphModule, report: CompileReport, reason: str, ran: threading.local) -> Runner:
    def run(*args: Any) -> Any:
        ran.any = True
        add_fallback(report, reason)
        if not restored:
            _restore_checkpoints(graph)
            restored.append(True)
        return graph(*args)

    restored: list[bool] = []
    return run


def _restore_checkpoints(graph: fx.GraphModule) -> None:
    """Make Dynamo's graph run torch's own checkpoint, as it was called: Dynamo's stand-in keeps no random state."""
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                    node.args = (_is_state(node), *node.args)
                    node.target = _checkpoint
            part.recompile()


def _checkpoint(is_state: Sequence[bool], body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    context = body.meta.get("_checkpoint_context_fn")
    function, direct = _close_over(body, args, is_state)
    return checkpoint(function, *direct, **kwargs, **({} if context is None else {"context_fn": context}))


def _is_state(node: fx.Node) -> tuple[bool, ...]:
    """Which inputs of a checkpoint's body are parameters or buffers: Dynamo names them after where they are found."""
    names = [getattr(value, "name", "") for value in node.args[1:]]
    return tuple("_parameters_" in name or "_buffers_" in name for name in names)


def _close_over(function: Runner, inputs: Sequence[Any], closed: Sequence[bool]) -> tuple[Runner, list[Any]]:
    """A function of the other inputs: checkpoint keeps those that it is given, and lets its function find the rest."""

    def partially(*direct: Any) -> Any:
        rest = iter(direct)
        return function(*(value if flag else next(rest) for value, flag in zip(inputs, closed, strict=True)))

    return partially, [value for value, flag in zip(inputs, closed, strict=True) if not flag]


_STARTS = "as_strided with an offset counts from the start of the memory, and an input starts elsewhere"


def _counts_from_start(graph: fx.GraphModule) -> bool:
    """Whether it calls as_strided with an offset: Dynamo does not guard where in its memory an input starts."""
    return any(
        getattr(node.target, "__name__", node.target) == "as_strided"
        and (len(node.args) > 3 or node.kwargs.get("storage_offset") is not None)
        for part in graph.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def _examples(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Dynamo's fakes of the inputs, and symbolic numbers."""
    found = []
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name.startswith(_SETTERS):
            # Dynamo has called it once already: the trace sees no change.
            raise UnsupportedError(f"the program calls {name}, which sets what holds for all code")
    for node, example in zip(nodes, example_inputs, strict=True):
        value = node.meta.get("example_value", example)
        if isinstance(value, Tensor) and value.is_nested:
            raise UnsupportedError("an input is a nested tensor")
        if isinstance(value, torch.SymInt) and value.node.is_nested_int():
            raise UnsupportedError("an input is the size of a nested tensor")
        found.append(value)
    return found


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
            with written_at(place_of(n)):
                return super().run_node(n)
        (body, *inputs), kwargs = self.fetch_args_kwargs_from_env(n)
        preserves_rng = kwargs.get("preserve_rng_state", True)
        if kwargs.get("use_reentrant"):
            function, direct = _close_over(_Inliner(body).run, inputs, _is_state(n))
            return reentrant_checkpoint(function, preserves_rng, *direct)
        with checkpointed(body.meta.get("_checkpoint_context_fn"), preserves_rng):
            return _Inliner(body).run(*inputs)
