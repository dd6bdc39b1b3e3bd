"""bisect: which stage of the compiler, and which node of its graph, first gives another value than eager.

The stages are eager -> joint -> functional -> what each of the pipeline's PASSES gives -> partitioned -> scheduled
(loop nests evaluated in plain torch) -> kernel (as they are compiled, each also compared with its loop nest). Each runs
on the same inputs, (seed, offset) and tangents. The first whose outputs, state updates or gradients differ is guilty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from aottrain.compat import disable_autocast, tree_flatten
from aottrain.compiler.bisect.reproduction import write_script
from aottrain.compiler.capture.capture import CapturedStep, enter_primals
from aottrain.compiler.capture.torch_settings import autocast_cache
from aottrain.compiler.codegen.evaluation import evaluate, memory_of
from aottrain.compiler.frontends.api import CompiledModule
from aottrain.compiler.joint.analysis import Analysis, analyse
from aottrain.compiler.joint.functional import functionalize
from aottrain.compiler.joint.joint import trace_joint
from aottrain.compiler.link.backends import KernelPlan, make_kernels, plan_kernels
from aottrain.compiler.link.linking import build_runner
from aottrain.compiler.link.programs import FusedGraph
from aottrain.compiler.options import CompileOptions, Kernel, check_options, names_checked
from aottrain.compiler.partition.policy import Policy
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.pipeline import Pass, UserCall, capture_whole, passes_for, plan_for, targets_for, with_kernel
from aottrain.compiler.stages import StageLog
from aottrain.errors import BudgetError
from aottrain.guards.state import StateGuard
from aottrain.ir.graph import InputKind, JointGraph, OutputKind, PartitionedGraph, module_of, source_of
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.settings.choices import GENERATED
from aottrain.ir.settings.decisions import MEASURED, Record
from aottrain.ir.text import node_text
from aottrain.measure.decisions import deciding
from aottrain.ops.random.mode import PhiloxMode
from aottrain.ops.random.philox import new_state
from aottrain.runtime.faults import Faults
from aottrain.runtime.launch import Launch

Results = dict[str, Any]  # "output 0", "update of running_mean", "gradient of weight" -> value
Values = dict[str, Any]  # node name -> value

# Rounding that a legal reordering of sums may cause, relative to the largest element. Elements far below _FLOOR are
# noise: a bias before a batch norm has a gradient of zero.
_FLOOR = 1e-2
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Guilty:
    """The first difference."""

    stage: str | None
    """Such as "joint" or "functional"; None where all agree with eager."""
    what: str = ""
    """The result that differs."""
    node: str = ""
    """Text of the first node whose inputs agree and whose value does not ("" where it cannot be told)."""
    module: str = ""
    source: str = ""
    error: float = 0.0
    """Largest absolute difference."""
    script: str = ""
    """A file that shows the node's values without aottrain."""

    def __str__(self) -> str:
        if self.stage is None:
            return "every stage agrees with eager"
        place = ", ".join(part for part in (self.module, self.source) if part)
        node = f"; first at `{self.node}`" + (f" ({place})" if place else "") if self.node else ""
        script = f"; see {self.script}" if self.script else ""
        return f"stage {self.stage}: {self.what} differs from the stage before by {self.error:.3g}{node}{script}"


@dataclass(frozen=True)
class _StageRun:
    """What one stage gives."""

    name: str
    results: Results
    values: Values
    nodes: dict[str, fx.Node]
    wrong_kernels: tuple[KernelIR, ...] = ()
    """Those that differ from their loop nests, in the order in which they ran."""


@names_checked
def bisect(
    target: Callable[..., Any],
    inputs: Tensor | Sequence[Any],
    *,
    partition: str | Policy | None = None,
    budget: Any = None,
    modules: Sequence[str] = (),
    kernel: Kernel = "aten",
    loss_head: str = "auto",
    reserved_bytes: int = 0,
    cost: str = "roofline",
    workspaces: bool = False,
    decisions: str | Path | Record = MEASURED,
    folder: str | Path | None = None,
) -> Guilty:
    """Which stage first gives another value than eager for `target(*inputs)`; options as of `aottrain.compile`. One
    input may be given as it is.

    `target` is a function or a module. With `folder`, a script that shows the guilty node's values without aottrain is
    written there. The caller's tensors, buffers and gradients stay as they are. Raises UnsupportedError where the
    program cannot be compiled at all.
    """
    options = check_options(
        partition=partition,
        budget=budget,
        modules=modules,
        kernel=kernel,
        loss_head=loss_head,
        reserved_bytes=reserved_bytes,
        cost=cost,
        workspaces=workspaces,
        decisions=decisions,
        capture="trace",
        on_unsupported="error",
    )
    if isinstance(target, CompiledModule):
        target = target.compiled_call.module or target
    module = target if isinstance(target, nn.Module) else None
    arguments = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    step, _ = capture_whole(UserCall(target, module, arguments, {}, StateGuard(target)), options.rng, StageLog())
    return bisect_step(step, options, folder)


def bisect_step(step: CapturedStep, options: CompileOptions, folder: str | Path | None = None) -> Guilty:
    """The same for one captured call. `folder`: where the reproducing script goes; None writes none."""
    analysis = analyse(step)
    state = new_state(step.device)
    tangents = _make_tangents(step, analysis)
    previous = _StageRun("eager", _run_eager(step, analysis, state, tangents), {}, {})
    with deciding(options.decisions):
        for build in _stage_runs(step, analysis, options, state, tangents):
            run = build()
            guilty = _compare(previous, run, folder)
            if guilty is not None:
                return guilty
            previous = run
    return Guilty(None)


def _make_tangents(step: CapturedStep, analysis: Analysis) -> list[Tensor]:
    specs = [output.spec for output in analysis.computed if output.requires_grad]
    specs += [step.inputs[i].spec for i in analysis.replaced]
    generator = torch.Generator().manual_seed(0)
    tangents = []
    for spec in specs if analysis.needs_gradient else []:
        tangent = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        tangents.append(
            torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(tangent)
        )
    return tangents


def _copies(step: CapturedStep) -> list[Tensor]:
    """Leaves with the primals' values and strides: what a run mutates is not the caller's."""
    copies = []
    for value in step.primals:
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        copies.append(copy.copy_(value.detach()).requires_grad_(value.requires_grad))
    return copies


def _run_eager(step: CapturedStep, analysis: Analysis, state: Tensor, tangents: Sequence[Tensor]) -> Results:
    leaves = _copies(step)
    with autocast_cache(torch.is_autocast_cache_enabled()), PhiloxMode(state):
        primals = enter_primals(step, leaves, analysis.replaced)
        flat, _ = tree_flatten(step.call(primals))
    outputs = [*analysis.computed_outputs(flat), *(primals[i] for i in analysis.replaced)]
    results: Results = {f"output {i}": value.detach() for i, value in enumerate(outputs[: len(analysis.computed)])}
    results |= {f"update of {step.inputs[i].name}": primals[i].detach() for i in analysis.mutated}
    if analysis.needs_gradient:
        targets = [i for i, spec in enumerate(step.inputs) if spec.requires_grad]
        chosen = [value for value, flag in zip(outputs, _differentiable(analysis), strict=True) if flag]
        with disable_autocast():
            gradients = torch.autograd.grad(chosen, [leaves[i] for i in targets], list(tangents), allow_unused=True)
        results |= {f"gradient of {step.inputs[i].name}": g for i, g in zip(targets, gradients, strict=True)}
    return results


def _differentiable(analysis: Analysis) -> list[bool]:
    return [output.requires_grad for output in analysis.computed] + [True] * len(analysis.replaced)


def _stage_runs(
    step: CapturedStep, analysis: Analysis, options: CompileOptions, state: Tensor, tangents: Sequence[Tensor]
) -> Iterator[Callable[[], _StageRun]]:
    """One function for each stage. It must run before the next is asked for, which starts from what it made."""
    stages: dict[str, Any] = {}

    def last() -> JointGraph:
        return list(stages.values())[-1]

    def rewritten(rewrite: Pass) -> JointGraph:
        return rewrite(last()).joint

    def inputs(joint: JointGraph) -> list[Tensor]:
        return [*(value.detach() for value in _copies(step)), *joint.constants, state, *tangents]

    def graph_stage(name: str, make: Callable[[], JointGraph]) -> Callable[[], _StageRun]:
        def run() -> _StageRun:
            joint = stages[name] = make()
            arguments = inputs(joint)
            values, outputs = _record(joint.graph, arguments)
            results = _named(joint, outputs)
            for i in analysis.mutated:  # before functionalization an update is a write to the input
                results.setdefault(f"update of {step.inputs[i].name}", arguments[i])
            return _StageRun(name, results, values, {node.name: node for node in joint.graph.nodes})

        return run

    @cache
    def planned() -> tuple[JointGraph, PartitionedGraph, KernelPlan]:
        """The plan that runs: as rewritten for kernels, or, where a budget has no room for them, of what was before."""
        ready = last()
        with suppress(BudgetError):
            plan = plan_of(ready)
            if plan[2].kernel == options.kernel or ready is base:
                return plan
        return plan_of(base)

    def plan_of(joint: JointGraph) -> tuple[JointGraph, PartitionedGraph, KernelPlan]:
        plan = plan_for(joint, options)
        parts = apply_partition(joint, plan)
        return joint, parts, plan_kernels(joint, plan, parts, options)

    def partitioned_stage(name: str, kernel: Kernel) -> Callable[[], _StageRun]:
        def run() -> _StageRun:
            joint, parts, kernels = planned()
            return _run_halves(name, joint, parts, kernels, kernel, inputs(joint))

        return run

    yield graph_stage("joint", lambda: trace_joint(step, analysis))
    yield graph_stage("functional", lambda: functionalize(stages["joint"]))
    for rewrite in passes_for(options):
        yield graph_stage(rewrite.result, partial(rewritten, rewrite))
    base = last()
    options, _ = with_kernel(options, base, Faults())
    target, *_ = targets_for(options.kernel)
    for rewrite in target.passes:
        yield graph_stage(rewrite.result, partial(rewritten, rewrite))
    yield partitioned_stage("partitioned", "aten")
    kernel = planned()[2].kernel
    if kernel in GENERATED:
        yield partitioned_stage("scheduled", "evaluate")
    if kernel != "aten":
        yield partitioned_stage("kernel", kernel)


def _run_halves(
    name: str, joint: JointGraph, parts: PartitionedGraph, kernels: KernelPlan, kernel: Kernel, arguments: list[Tensor]
) -> _StageRun:
    num_tangents = len(joint.inputs_of(InputKind.TANGENT))
    primals, tangents = arguments[: len(arguments) - num_tangents], arguments[len(arguments) - num_tangents :]
    nodes = {node.name: node for node in parts.forward.nodes}
    wrong: list[KernelIR] = []
    if kernel == "aten":
        values, outputs = _record(parts.forward, primals)
    else:
        fused = _kernels(kernels, kernel == "evaluate", wrong) if kernels.planned else []
        runner = fused[0].runner() if fused else build_runner(parts.forward, kernel)
        values, outputs = {}, runner(list(primals))
    count = parts.num_forward_outputs
    residuals = dict(zip((name for name, _ in parts.residuals), outputs[count:], strict=True))
    flat = list(outputs[:count])
    if parts.backward is not None:
        for node in parts.backward.nodes:
            nodes.setdefault(node.name, node)
        if kernel == "aten":
            more, gradients = _record(parts.backward, [*residuals.values(), *tangents])
            values |= more
        else:
            runner = fused[1].runner() if fused else build_runner(parts.backward, kernel)
            gradients = runner([*residuals.values(), *tangents])
        flat += list(gradients)
    results = _named(joint, flat) | {f"residual {key}": value for key, value in residuals.items() if kernel != "aten"}
    return _StageRun(name, results, values | residuals, nodes, tuple(wrong))


def _kernels(plan: KernelPlan, evaluated: bool, wrong: list[KernelIR]) -> list[FusedGraph]:
    """Both graphs, run by kernels. wrong: gets each kernel that does not give what its evaluation gives."""
    kernels = {call.kernel.name: call.kernel for _, _, schedule in plan.planned for call in schedule.kernels}
    if evaluated:
        launches = {name: _evaluated(kernel) for name, kernel in kernels.items()}
        return [FusedGraph(graph, schedule, None, launches, 0, "", "evaluate") for graph, _, schedule in plan.planned]
    graphs = make_kernels(plan)
    checked = {name: _checked(kernel, graphs[0].launches[name], wrong) for name, kernel in kernels.items()}
    return [replace(graph, launches=checked) for graph in graphs]


def _evaluated(kernel: KernelIR) -> Launch:
    def launch(buffers: Sequence[Tensor]) -> None:
        evaluate(kernel, [memory_of(value, p.span) for value, p in zip(buffers, kernel.parameters, strict=True)])

    return launch


def _checked(kernel: KernelIR, run: Launch, wrong: list[KernelIR]) -> Launch:
    def launch(buffers: Sequence[Tensor]) -> None:
        memory = [memory_of(value, p.span) for value, p in zip(buffers, kernel.parameters, strict=True)]
        expected = [value.clone() for value in memory]
        evaluate(kernel, expected)
        run(buffers)
        if any(_difference(a, b) for a, b in zip(expected, memory, strict=True)):
            wrong.append(kernel)

    return launch


def _named(joint: JointGraph, outputs: Sequence[Any]) -> Results:
    words = {OutputKind.OUTPUT: "output", OutputKind.GRADIENT: "gradient of"}
    results: Results = {}
    for spec, value in zip(joint.signature.outputs, outputs, strict=True):
        label = spec.target if spec.kind is OutputKind.OUTPUT else spec.name
        results[f"{words.get(spec.kind, 'update of')} {label}"] = value
    return results


def _record(graph: fx.Graph, inputs: Sequence[Tensor]) -> tuple[Values, list[Any]]:
    """Every node's value (copied, for a later node may write it), and the outputs."""
    values: Values = {}

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            out = super().run_node(node)
            values[node.name] = out.clone() if isinstance(out, Tensor) else out
            return out

    with torch.no_grad(), disable_autocast():
        outputs = Recorder(fx.GraphModule(nn.Module(), graph)).run(*inputs)
    return values, list(outputs)


def _compare(previous: _StageRun, run: _StageRun, folder: str | Path | None) -> Guilty | None:
    for what, value in run.results.items():
        expected = previous.results.get(what, previous.values.get(what.removeprefix("residual "), _UNKNOWN))
        error = 0.0 if expected is _UNKNOWN else _difference(expected, value)
        if error:
            return _blame(previous, run, what, error, folder)
    return None


_UNKNOWN = object()


def _blame(previous: _StageRun, run: _StageRun, what: str, error: float, folder: str | Path | None) -> Guilty:
    """The first node, in program order, whose inputs agree with the stage before and whose value does not; of kernels
    the first to run that does not give what its loop nest says."""
    if run.wrong_kernels:
        kernel = run.wrong_kernels[0]
        ops = ", ".join(line.split(" = ")[0] for line in kernel.sources)
        return Guilty(run.name, what, f"{kernel.name} ({ops})", error=error)
    wrong = {
        name
        for name, value in run.values.items()
        if name in previous.values and _difference(previous.values[name], value)
    }
    for name, node in run.nodes.items():
        if name in wrong and not any(source.name in wrong for source in node.all_input_nodes):
            values = previous.values, run.values[name]
            script = "" if folder is None else write_script(Path(folder), run.name, node, *values)
            return Guilty(run.name, what, node_text(node), module_of(node), source_of(node), error, script)
    return Guilty(run.name, what, error=error)


def _difference(a: Any, b: Any) -> float:
    """0 where two values agree within rounding; infinity where they cannot be compared."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return 0.0 if type(a) is type(b) else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b) or a.numel() == 0:
        return 0.0
    if a.dtype not in _TOLERANCE:
        return float("inf")
    wide_a, wide_b = a.double(), b.double()
    finite = wide_a.isfinite() & wide_b.isfinite()
    if not torch.equal(wide_a[~finite].nan_to_num(nan=7.0), wide_b[~finite].nan_to_num(nan=7.0)):
        return float("inf")
    error = float((wide_a - wide_b)[finite].abs().max()) if bool(finite.any()) else 0.0
    scale = float(wide_a[finite].abs().max()) if bool(finite.any()) else 0.0
    return error if error > _TOLERANCE[a.dtype] * max(scale, _FLOOR) else 0.0
