"""aottrain.compile: the user's function or module, run through compiled programs, one for each set of guards."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from aottrain.compat import has_global_module_hooks, symbolic_tracing, tracing_alone, tree_unflatten
from aottrain.compiler import compile_call
from aottrain.compiler.analysis import Analysis
from aottrain.compiler.capture import CapturedStep
from aottrain.compiler.dynamic import SizeGuard, SymbolicSizes, size_guard, symbolic_sizes
from aottrain.compiler.dynamo import LIMIT_REACHED, RECOMPILE_LIMIT, compile_dynamo
from aottrain.compiler.options import CompileOptions, Kernel, check_options
from aottrain.compiler.partition.policy import Policy
from aottrain.compiler.stages import collection_paused
from aottrain.errors import ConfigError, UnsupportedError
from aottrain.ir.budget import Budget
from aottrain.ir.report import CompileReport, GraphReport, add_fallback
from aottrain.runtime.epilogue import assemble
from aottrain.runtime.guards import argument_objects, call_key, describe, is_disjoint
from aottrain.runtime.program import NO_SIZES, Program
from aottrain.runtime.state import StateGuard

GLOBAL_HOOKS = "hooks are registered on all modules, which no guard sees"


class Entry:
    """One compiled program with what it needs to be called."""

    def __init__(
        self, program: Program, step: CapturedStep, analysis: Analysis, guard: StateGuard, report: GraphReport
    ):
        self.program = program
        self.analysis = analysis
        self.report = report
        self.guard = guard
        self.state = step.primals[: step.num_state]
        # Where each distinct tensor argument stands among the primals; arguments that are state need no place.
        self.num_batch = len(step.primals) - step.num_state
        self.places: tuple[int, ...] = ()
        # Where the key leaves sizes open: the guard of a program with symbolic sizes, or the only sizes that it is for.
        self.size_guard: SizeGuard | None = None
        self.shapes: tuple[Any, ...] | None = None

    def state_places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Which state each argument is, or -1: a parameter that is passed to its own module is one input, not two."""
        known = {id(tensor): i for i, tensor in enumerate(self.state)}
        return tuple(known.get(id(tensor), -1) for tensor in tensors)

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        return (
            self._accepts_sizes(tensors)
            and self.guard.holds()
            and self.state_places(tensors) == self.places
            and (not self.analysis.mutated or is_disjoint(self.primals(tensors), self.analysis.mutated))
        )

    def _accepts_sizes(self, tensors: Sequence[Tensor]) -> bool:
        if self.size_guard is not None:
            return self.size_guard.holds(tensors)
        return self.shapes is None or self.shapes == tuple(map(describe, tensors))

    def primals(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        known = {id(tensor) for tensor in self.state}
        batch = {id(tensor): tensor for tensor in tensors if id(tensor) not in known}
        return [*self.state, *batch.values()]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        primals = self.primals(tensors)
        sizes = NO_SIZES if self.size_guard is None else self.size_guard.sizes.read(tensors)
        computed = self.program(primals, sizes)
        known = self.analysis
        leaves = assemble(known.outputs, known.leaves, known.is_tensor, computed, primals, sizes)
        return tree_unflatten(leaves, known.out_tree)


def target_name(function: Callable[..., Any]) -> str:
    """What a person calls it: the class of a module, the name of a function."""
    return getattr(function, "__qualname__", type(function).__name__)


class CompiledCall:
    """The cache of programs of one target, and its report."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None, options: CompileOptions):
        self.function = function
        self.module = module
        self.options = options
        self.report = CompileReport(target=target_name(function))
        self._entries: dict[Any, list[Entry]] = {}
        self._refused: dict[Any, list[tuple[StateGuard, str]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if has_global_module_hooks():
                raise UnsupportedError(GLOBAL_HOOKS)
            key, tensors = call_key(args, kwargs, self.options.dynamic)
            entry = self._find(key, tensors) or self._compile(key, tensors, args, kwargs)
        except UnsupportedError as error:
            if self.options.on_unsupported == "error":
                raise
            self._count(str(error))
            return self.function(*args, **kwargs)
        return entry(tensors)

    def prepare(self, *args: Any, **kwargs: Any) -> GraphReport:
        """Compile for these inputs without running. Raises UnsupportedError, also under on_unsupported="eager"."""
        key, tensors = call_key(args, kwargs, self.options.dynamic)
        return (self._find(key, tensors) or self._compile(key, tensors, args, kwargs)).report

    def _find(self, key: Any, tensors: Sequence[Tensor]) -> Entry | None:
        for entry in self._entries.get(key, ()):
            if entry.accepts(tensors):
                return entry
        return None

    def _compile(self, key: Any, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Entry:
        with tracing_alone(), collection_paused():
            found = self._find(key, tensors)
            if found is not None:
                return found
            for guard, reason in self._refused.get(key, ()):
                if guard.holds():
                    raise UnsupportedError(reason)
            if len(self.report.graphs) >= RECOMPILE_LIMIT:
                raise UnsupportedError(LIMIT_REACHED)
            guard = StateGuard(self.function, argument_objects(args, kwargs))
            try:
                entry = self._trace(guard, tensors, args, kwargs)
            except UnsupportedError as error:
                _undo(guard)
                self._refused.setdefault(key, []).append((guard, str(error)))
                raise
            entry.places = entry.state_places(tensors)
            self._entries.setdefault(key, []).append(entry)
            self.report.graphs.append(entry.report)
            return entry

    def _trace(
        self, guard: StateGuard, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Entry:
        """For all sizes, where some are dynamic; if that fails, for these."""
        sizes = symbolic_sizes(tensors, self.options.dynamic)
        if sizes is not None:
            try:
                with symbolic_tracing():
                    entry = self._trace_sizes(guard, args, kwargs, sizes)
                entry.size_guard = size_guard(sizes, tensors)
                return entry
            except UnsupportedError:
                _undo(guard)
        entry = self._trace_sizes(guard, args, kwargs, None)
        entry.shapes = None if sizes is None else tuple(map(describe, tensors))
        return entry

    def _trace_sizes(
        self, guard: StateGuard, args: Sequence[Any], kwargs: dict[str, Any], sizes: SymbolicSizes | None
    ) -> Entry:
        compiled = compile_call(self.function, self.module, args, kwargs, self.options, guard, sizes)
        program, step, analysis, report = compiled
        if not guard.holds():
            raise UnsupportedError(
                "the program changes Python state: an attribute, a list, a dictionary, a hook or a cache"
            )
        return Entry(program, step, analysis, guard, report)

    def _count(self, reason: str) -> None:
        if add_fallback(self.report, reason):
            warnings.warn(f"aottrain runs this call eagerly: {reason}", stacklevel=4)


def _undo(guard: StateGuard) -> None:
    """What tracing did to Python state never happened."""
    guard.clear_caches()
    guard.restore()


class DynamoCall:
    """A target under TorchDynamo: it keeps the guards and the programs; the report grows with each graph."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None, options: CompileOptions):
        self.module = module
        self.options = options
        self.report = CompileReport(target=target_name(function))
        self._function = function
        self._call = compile_dynamo(function, options, self.report)
        self._tables = [] if module is None else [(vars(child), child) for child in module.modules()]
        self._num_attributes = self._count_attributes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if has_global_module_hooks():
            add_fallback(self.report, GLOBAL_HOOKS)
            return self._function(*args, **kwargs)
        if self._count_attributes() != self._num_attributes and (shadowed := self._shadowed()):
            # Dynamo reads the registered submodule, Python the attribute that hides it, and no guard tells them apart.
            add_fallback(self.report, f"the attribute {shadowed} hides a parameter, buffer or submodule")
            return self._function(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _count_attributes(self) -> int:
        return sum(len(table) for table, _ in self._tables)

    def _shadowed(self) -> str:
        for table, child in self._tables:
            for name in (*child._parameters, *child._buffers, *child._modules):
                if name in table:
                    return name
        self._num_attributes = self._count_attributes()
        return ""

    def prepare(self, *args: Any, **kwargs: Any) -> GraphReport:
        raise ConfigError("capture='dynamo' cannot compile without running; prepare() needs capture='trace'")


_DOORS = {"trace": CompiledCall, "dynamo": DynamoCall}


class CompiledModule:
    """Mixed into the class of a compiled module. It shares its whole `__dict__` with the original, so that parameters,
    buffers, hooks, the training flag and state_dict keys are the same object's; only the call is another."""

    compiled_call: CompiledCall | DynamoCall

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled_call(*args, **kwargs)

    @property
    def report(self) -> CompileReport:
        return self.compiled_call.report

    def prepare(self, *args: Any, **kwargs: Any) -> GraphReport:
        """Compile for these inputs without running; gives the report of their program."""
        return self.compiled_call.prepare(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = copy.deepcopy(self.compiled_call.module, memo)
        return _compile_module(copied, self.compiled_call.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _compile_module, (self.compiled_call.module, self.compiled_call.options)


def _compile_module(module: nn.Module, options: CompileOptions) -> nn.Module:
    original = type(module)
    call = _DOORS[options.capture](module, module, options)
    namespace = {"compiled_call": call, "__module__": original.__module__}
    wrapper = type(f"Compiled{original.__name__}", (CompiledModule, original), namespace)
    compiled: Any = object.__new__(wrapper)
    object.__setattr__(compiled, "__dict__", module.__dict__)
    return compiled


def compile(
    target: Any,
    *,
    partition: str | Policy | None = None,
    budget: Budget | None = None,
    kernel: Kernel = "auto",
    capture: str = "dynamo",
    rng: str = "philox",
    dynamic: bool = False,
    on_unsupported: str = "eager",
    reserved_bytes: int = 0,
    cost: str = "roofline",
    modules: Sequence[str] = (),
    workspaces: bool = False,
    loss_head: str = "auto",
    cuda_graphs: bool = False,
) -> Any:
    """Compile the training step that starts at a call of `target`, a module or a function of tensors.

    Each call gives what eager gives; forward and backward run as one planned pair of graphs behind autograd.

    partition: save_all | min_cut | budget | checkpoint | recompute_all. Default min_cut, or budget where `budget` is
        given. Or a policy: a function that gets each aottrain.ForwardValue and answers "save", "recompute" or "free".
    modules: paths of the blocks of partition="checkpoint", as patterns such as "blocks.*", by their last names.
        Default: the repeated modules of the program.
    budget: what the peak memory of a call and its backward may be (budget strategy only). Bytes ("6GiB", "800MB"):
        parameters, buffers, inputs, gradients, saved values and temporaries together; a fraction 0..1 lies between the
        lowest peak of any plan and that of min_cut; "auto": the fastest plan that fits into the free memory.
    cost: how a budget's plans price recompute: "roofline" (FLOPs and bytes at this machine's rates, measured once), or
        "measured" (each distinct operator call is timed once; both are kept on disk).
    workspaces: count what library calls allocate inside themselves into the predicted peak under every strategy; each
        distinct call is run once on made-up inputs to measure it. With a budget that is always done.
    reserved_bytes: memory that is counted into that peak and that this call does not see, such as an optimizer's state.
    kernel: "auto": generated kernels where they pay, Triton on CUDA, C++ on a CPU, else PyTorch's operators. "cpp",
        "triton": always generated ones. "aten": PyTorch's operators one by one, bitwise as eager. "inductor": torch's
        kernel compiler. Or a callable (GraphModule, example_inputs) -> callable that runs both graphs.
    loss_head: "chunked": a linear layer followed by cross-entropy is computed in chunks of rows, loss and gradients
        together, without the logits ever whole in memory; "whole": op by op; "auto": chunked, but for kernel="aten" and
        a callable. `.report.graphs[i].loss_heads` says what was done, and why.
    cuda_graphs: True: on CUDA forward and backward are each recorded after a few calls and then replayed by one launch,
        where that is safe; their memory is held from step to step and is not part of the predicted peak.
        `.report.graphs[i].cuda_graphs` counts the calls, and says why one was no replay.
    capture: "dynamo": TorchDynamo traces any Python, breaks graphs and guards them. "trace": the call is traced
        directly, guarded by our own checks before every call; faster, for static steps.
    rng: "philox": draws are functions of a seed that each call takes from torch's generator; they fuse, and may be
        recomputed. "eager": eager's own stream, bit for bit; random values are then always saved.
    dynamic: True: one program serves all sizes of the inputs, as far as the code allows; dimensions that were marked
        (torch._dynamo.mark_dynamic) are dynamic in any case. False: each shape has a program of its own.
    on_unsupported: "eager": what cannot be compiled runs eagerly and is counted in `.report.fallbacks`; "error": raises
        UnsupportedError.

    Returns a module for a module (same parameters, hooks and state_dict keys), a function for a function; both have
    `.report`, and with capture="trace" `.prepare(*args)`. Raises ConfigError with every mistake in the options; calls
    raise BudgetError where no plan's peak is within the budget, and ConfigError where the program has no such blocks or
    a policy answers something else.
    """
    known = partition, budget, kernel, capture, rng, dynamic, on_unsupported, reserved_bytes, cost
    options = check_options(*known, modules, workspaces, loss_head, cuda_graphs)
    if isinstance(target, CompiledModule):
        target = target.compiled_call.module
    if isinstance(target, nn.Module):
        return _compile_module(target, options)
    if not callable(target):
        raise ConfigError(f"target is a {type(target).__name__}; allowed: a torch.nn.Module or a function")
    call: Any = _DOORS[options.capture](target, None, options)

    @functools.wraps(target)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    compiled.report = call.report  # type: ignore[attr-defined]
    compiled.prepare = call.prepare  # type: ignore[attr-defined]
    return compiled
