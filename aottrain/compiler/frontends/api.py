"""aottrain.compile: the user's function or module, run through compiled programs, one for each set of guards."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from aottrain.compat import has_global_module_hooks, is_tracing, tracing_alone
from aottrain.compat_dispatch import symbolic_tracing, told_of_nodes
from aottrain.compiler.capture.checkpoint_regions import num_regions, open_regions
from aottrain.compiler.capture.dynamic import SymbolicSizes, differing_dims, size_guard, symbolic_sizes
from aottrain.compiler.frontends.dynamo import LIMIT_REACHED, RECOMPILE_LIMIT, compile_dynamo
from aottrain.compiler.frontends.entry import Bound, Entry, Refusal
from aottrain.compiler.frontends.refusals import count_fallback, new_report, refusals_unlogged
from aottrain.compiler.graphs.source_locations import raised_at
from aottrain.compiler.options import AUTO, CompileOptions, Kernel, check_options, names_checked
from aottrain.compiler.partition.policy import Policy
from aottrain.compiler.pipeline import UserCall, compile_call
from aottrain.compiler.stages import collection_paused
from aottrain.errors import ConfigError, UnsupportedError
from aottrain.explain.report import CompileReport, GraphReport
from aottrain.guards.assigned import Assigned, Unforeseen
from aottrain.guards.guards import NODE_HOOKS, argument_objects, call_key, describe, dynamic_dims
from aottrain.guards.lifetimes import Loss
from aottrain.guards.state import StateGuard
from aottrain.ir.settings.budget import Budget
from aottrain.ir.settings.decisions import Record
from aottrain.runtime.failures import ForwardRaised
from aottrain.toolchain.cache import say_once
from aottrain.toolchain.ending import deferred

# Under dynamic="auto" so many shapes have programs of their own: a last batch, or one of an evaluation, is no reason
# for the next one to be of any size.
_FEW_SHAPES = 3
GLOBAL_HOOKS = "hooks are registered on all modules, which no guard sees"


class CompiledCall:
    """The cache of programs of one target, and its report.

    Every attempt counts against the limit, whether it gave a program or was refused: a target that changes its own
    state at each call would otherwise be traced at each call. Past the limit a call costs a look at the guards.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module | None, options: CompileOptions):
        self.function = function
        self.module = module
        self.options = options
        self.report = new_report(function)
        self._entries: dict[Any, list[Entry]] = {}
        self._shapes: dict[Any, dict[Any, None]] = {}  # in the order in which they came
        self._refused: dict[Any, list[Refusal]] = {}
        self._num_refused = 0
        self._last_reason = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self.function(*args, **kwargs)
        try:
            if has_global_module_hooks():
                raise UnsupportedError(GLOBAL_HOOKS)
            key, tensors = call_key(args, kwargs, bool(self.options.dynamic))
            entry, primals = self._find(key, tensors) or self._compile(key, tensors, args, kwargs)
        except UnsupportedError as error:
            if self.options.on_unsupported == "error":
                raise
            self._count(error)
        else:
            return self._run(entry, tensors, primals, args, kwargs)
        return self.function(*args, **kwargs)  # here, where the error holds nothing of the trace any more

    def _run(
        self,
        entry: Entry,
        tensors: Sequence[Tensor],
        primals: list[Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return entry(tensors, primals)
        except ForwardRaised as signal:
            raised = signal
        result = raised.run_again(self.function, args, kwargs)
        if self.options.on_unsupported == "error":
            raise raised.refusal() from raised.error
        self._count(raised.refusal())
        return result

    def prepare(self, *args: Any, **kwargs: Any) -> GraphReport:
        """Compile for these inputs without running. Raises UnsupportedError, also under on_unsupported="eager"."""
        key, tensors = call_key(args, kwargs, bool(self.options.dynamic))
        entry, _ = self._find(key, tensors) or self._compile(key, tensors, args, kwargs)
        return entry.report

    def _find(self, key: Any, tensors: Sequence[Tensor]) -> Bound | None:
        lost = False
        for entry in self._entries.get(key, ()):
            primals = entry.bind(tensors)
            if primals is not None:
                return entry, primals
            lost = lost or entry.guard.lost
        if lost:
            self._forget_lost(key)
        return None

    def _forget_lost(self, key: Any) -> None:
        """Let go of programs of tensors and modules that are gone."""
        with tracing_alone():
            self._entries[key] = [entry for entry in self._entries[key] if not entry.guard.lost]

    def _check_refused(self, key: Any) -> None:
        for refusal in self._refused.get(key, ()):
            if refusal.guard.holds():
                raise refusal.error()
        if len(self.report.graphs) + self._num_refused >= RECOMPILE_LIMIT:
            last = f", or refused, the last because {self._last_reason}" if self._num_refused else ""
            raise UnsupportedError(LIMIT_REACHED + last)

    def _compile(self, key: Any, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Bound:
        self._check_refused(key)
        with tracing_alone(), refusals_unlogged, collection_paused():
            bound = self._find(key, tensors)
            if bound is not None:
                return bound
            self._check_refused(key)
            guard, entry, assigned = None, None, Assigned(open_regions, num_regions)
            try:
                while entry is None:  # again where the program assigns attributes: each time more is known of them
                    guard = StateGuard(self.function, argument_objects(args, kwargs), assigned)
                    try:
                        entry = self._trace(key, guard, tensors, args, kwargs)
                    except Unforeseen:
                        _undo(guard)
                primals = entry.settle(tensors)
            except BaseException as error:
                if guard is not None:
                    _undo(guard)
                if isinstance(error, UnsupportedError):
                    self._refuse(key, guard, error)
                raise
            self._entries.setdefault(key, []).append(entry)
            self.report.graphs.append(entry.report)
            entry.program.faults.count_in(self.report)
            return entry, primals

    def _refuse(self, key: Any, guard: StateGuard | None, error: UnsupportedError) -> None:
        """guard: None where not even what the program can reach could be looked at."""
        error.source = error.source or raised_at(error)
        self._num_refused += 1
        self._last_reason = error.reason
        refusals = [refusal for refusal in self._refused.get(key, ()) if not refusal.guard.lost]
        if guard is not None:
            guard.release(is_refused=True)
            refusals.append(Refusal(guard, error.reason, error.source))
        if refusals:
            self._refused[key] = refusals

    def _open_dims(self, key: Any, tensors: Sequence[Tensor]) -> list[frozenset[int]]:
        """Of each tensor those whose sizes are to be symbols. "auto": once calls that are alike but for their sizes
        have had a few shapes, what differs between them."""
        if self.options.dynamic != AUTO:
            return [dynamic_dims(tensor, bool(self.options.dynamic)) for tensor in tensors]
        seen = self._shapes.setdefault(key, {})
        dims = differing_dims(tensors, list(seen) if len(seen) >= _FEW_SHAPES else ())
        seen[tuple(tensor.shape for tensor in tensors)] = None
        return dims

    def _trace(
        self, key: Any, guard: StateGuard, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Entry:
        """For all sizes, where some are dynamic; if that fails, for these."""
        dims = self._open_dims(key, tensors)
        sizes = symbolic_sizes(tensors, dims)
        if sizes is not None:
            try:
                with symbolic_tracing():
                    entry = self._trace_sizes(guard, args, kwargs, sizes)
                    entry.size_guard = size_guard(sizes, tensors)
                if self.options.dynamic == AUTO:
                    _say_open(self.report.target, len(self._shapes[key]), dims)
                return entry
            except UnsupportedError:
                _undo(guard)
        entry = self._trace_sizes(guard, args, kwargs, None)
        entry.shapes = None if sizes is None and not self.options.dynamic else tuple(map(describe, tensors))
        return entry

    def _trace_sizes(
        self, guard: StateGuard, args: Sequence[Any], kwargs: dict[str, Any], sizes: SymbolicSizes | None
    ) -> Entry:
        call = UserCall(self.function, self.module, args, kwargs, guard, sizes)
        with deferred():
            program, step, analysis, report = compile_call(call, self.options)
        guard.check_unchanged()
        return Entry(program, step, analysis, guard, report)

    def _count(self, error: UnsupportedError) -> None:
        count_fallback(self.report, error, 4)


def _say_open(target: str, num_shapes: int, dims: Sequence[frozenset[int]]) -> None:
    places = [f"dimension {dim} of input {i}" for i, found in enumerate(dims) for dim in sorted(found)]
    say_once(f"aottrain: {target} was called with {num_shapes} shapes: one program serves any {', '.join(places)}")


def _undo(guard: StateGuard) -> None:
    """What tracing did to Python state never happened."""
    guard.clear_caches()
    guard.restore()


class DynamoCall:
    """A target under TorchDynamo: it keeps the guards and the programs; the report grows with each graph."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None, options: CompileOptions):
        self.module = module
        self.options = options
        self.report = new_report(function)
        self._function = function
        self._call = compile_dynamo(function, options, self.report)
        self._look_at_modules()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self._function(*args, **kwargs)
        if has_global_module_hooks() or told_of_nodes():
            return self._run_eagerly(NODE_HOOKS if told_of_nodes() else GLOBAL_HOOKS, args, kwargs)
        if self._count_attributes() != self._num_attributes and (shadowed := self._shadowed()):
            # Dynamo reads the registered submodule, Python the attribute that hides it, and no guard tells them apart.
            return self._run_eagerly(f"the attribute {shadowed} hides a parameter, buffer or submodule", args, kwargs)
        return self._call(*args, **kwargs)

    def _run_eagerly(self, reason: str, args: Any, kwargs: Any) -> Any:
        if self.options.on_unsupported == "error":
            raise UnsupportedError(reason)
        count_fallback(self.report, UnsupportedError(reason), 4)
        return self._function(*args, **kwargs)

    def _look_at_modules(self) -> None:
        children = [] if self.module is None else list(self.module.modules())
        self._tables = [vars(child) for child in children]
        self._watched = [weakref.ref(child, Loss(self)) for child in children]
        self._num_attributes = self._count_attributes()

    def lose(self) -> None:
        """A submodule is gone: the attributes are to be looked at again."""
        self._tables = []

    def _count_attributes(self) -> int:
        return sum(map(len, self._tables))

    def _shadowed(self) -> str:
        for child in () if self.module is None else self.module.modules():
            for name in (*child._parameters, *child._buffers, *child._modules):
                if name in vars(child):
                    return name
        self._look_at_modules()
        return ""

    def prepare(self, *args: Any, **kwargs: Any) -> GraphReport:
        raise ConfigError("capture='dynamo' cannot compile without running; prepare() needs capture='trace'")


_FRONTENDS = {"trace": CompiledCall, "dynamo": DynamoCall}


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
    call = _FRONTENDS[options.capture](module, module, options)
    namespace = {"compiled_call": call, "__module__": original.__module__}
    wrapper = type(f"Compiled{original.__name__}", (CompiledModule, original), namespace)
    compiled: Any = object.__new__(wrapper)
    object.__setattr__(compiled, "__dict__", module.__dict__)
    return compiled


@names_checked
def compile(
    target: Any,
    *,
    partition: str | Policy | None = None,
    budget: Budget | None = None,
    kernel: Kernel = "auto",
    capture: str = "dynamo",
    rng: str = "philox",
    dynamic: bool | str = False,
    on_unsupported: str = "eager",
    reserved_bytes: int = 0,
    cost: str = "roofline",
    modules: Sequence[str] = (),
    workspaces: bool = False,
    loss_head: str = "auto",
    cuda_graphs: bool = False,
    decisions: str | Path | Record = "measured",
    memory_bytes: int | None = None,
    reduce_over: str | None = None,
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
        distinct call is run once on made-up inputs to measure it. With a budget that is always done. Without either,
        only those that a rule knows are counted, as the chunked loss head.
    reserved_bytes: memory that is counted into that peak and that this call does not see, such as an optimizer's state.
    memory_bytes: what the device has for all of it: a larger peak raises CapacityError before calls are measured.
    reduce_over: the name of a process group of torch.distributed (`group.group_name`): gradients of parameters are
        summed over its processes inside the backward. All of them make the same calls with inputs of the same shapes.
    kernel: "auto": generated kernels where they pay, Triton on CUDA, C++ on a CPU, else PyTorch's operators. "cpp",
        "triton": always generated ones. "aten": PyTorch's operators one by one, bitwise as eager. "inductor": torch's
        kernel compiler. Or a callable (GraphModule, example_inputs) -> callable that runs both graphs.
    loss_head: "chunked": a linear layer followed by cross-entropy is computed in chunks of rows, loss and gradients
        together, without the logits ever whole in memory; "whole": op by op; "auto": chunked, but for kernel="aten" and
        a callable. `.report.graphs[i].loss_heads` says what was done, and why.
    cuda_graphs: True: on CUDA forward and backward are each recorded after a few calls and then replayed by one launch,
        where that is safe; their memory is held from step to step and is not part of the predicted peak.
        `.report.graphs[i].cuda_graphs` counts the calls, and says why one was no replay.
    decisions: who answers what is decided by measuring (rates, libraries, layouts, attention). "measured": the clock,
        or what it said before; "default": a fixed model without a clock, the same on every machine; or the path of a
        record (`decisions.json`, or the folder of a run), whose answers are taken. `.report.decisions` is the record.
    capture: "dynamo": TorchDynamo traces any Python, breaks graphs and guards them. "trace": the call is traced
        directly, guarded by our own checks before every call; faster, for static steps.
    rng: "philox": draws are functions of a seed that each call takes from torch's generator; they fuse, and may be
        recomputed. "eager": eager's own stream, bit for bit; random values are then always saved.
    dynamic: True: one program serves all sizes of the inputs, as far as the code allows; dimensions that were marked
        (torch._dynamo.mark_dynamic) are dynamic in any case. False: each shape has a program of its own. "auto": the
        first three have; from then on, of calls that are alike but for their sizes, the sizes that differed are open.
        (With capture="dynamo" TorchDynamo opens what differs from its second shape on.)
    on_unsupported: "eager": what cannot be compiled runs eagerly and is counted in `.report.fallbacks`; "error": raises
        UnsupportedError.

    Returns a module for a module (same parameters, hooks and state_dict keys), a function for a function; both have
    `.report`, and with capture="trace" `.prepare(*args)`. Raises ConfigError with every mistake in the options; calls
    raise BudgetError where no plan's peak is within the budget, and ConfigError where the program has no such blocks or
    a policy answers something else.
    """
    options = {name: value for name, value in locals().items() if name != "target"}
    return _compiled(target, check_options(**options))


def _compiled(target: Any, options: CompileOptions) -> Any:
    if isinstance(target, CompiledModule):
        target = target.compiled_call.module
    if isinstance(target, nn.Module):
        return _compile_module(target, options)
    target = getattr(target, "_torchdynamo_orig_callable", target)  # what torch.compile was given
    if isinstance(target, type) and issubclass(target, nn.Module):
        raise ConfigError(f"target is the class {target.__name__}; compile a module of it: {target.__name__}(...)")
    if not callable(target):
        raise ConfigError(f"target is a {type(target).__name__}; allowed: a torch.nn.Module or a function")
    call: Any = _FRONTENDS[options.capture](target, None, options)

    @functools.wraps(target)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    compiled.report = call.report  # type: ignore[attr-defined]
    compiled.prepare = call.prepare  # type: ignore[attr-defined]
    return compiled
