"""bisect: which stage of the compiler, and which node of its graph, first gives another value than eager.

The ladder is eager -> joint -> functional -> what each of the pipeline's PASSES gives -> partitioned -> scheduled
(loop nests evaluated in plain torch) -> kernel (as they are compiled, each also held against its loop nest). Each rung
runs on the same inputs, (seed, offset) and tangents; the first whose outputs, state updates or gradients differ is
guilty.
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
from aottrain.compiler.options import CompileOptions, Kernel, check_options
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
    """The first difference. stage: "joint", "functional", ...; None where all agree with eager. what: the result that
    differs; node: text of the first node whose inputs agree and whose value does not ("" where it cannot be told);
    error: largest absolute difference; script: a file that shows the node's values without aottrain."""

    stage: str | None
    what: str = ""
    node: str = ""
    module: str = ""
    source: str = ""
    error: float = 0.0
    script: str = ""

    def __str__(self) -> str:
        if self.stage is None:
            return "every stage agrees with eager"
        place = ", ".join(part for part in (self.module, self.source) if part)
        node = f"; first at `{self.node}`" + (f" ({place})" if place else "") if self.node else ""
        script = f"; see {self.script}" if self.script else ""
        return f"stage {self.stage}: {self.what} differs from the stage before by {self.error:.3g}{node}{script}"


@dataclass(frozen=True)
class _Rung:
    name: str
    results: Results
    values: Values
    nodes: dict[str, fx.Node]
    wrong_kernels: tuple[KernelIR, ...] = ()  # in the order in which they ran


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
    given = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    step, _ = capture_whole(UserCall(target, module, given, {}, StateGuard(target)), options.rng, StageLog())
    return bisect_step(step, options, folder)


def bisect_step(step: CapturedStep, options: CompileOptions, folder: str | Path | None = None) -> Guilty:
    """Climb the ladder for one captured call. `folder`: where the reproducing script goes; None writes none."""
    analysis = analyse(step)
    state = new_state(step.device)
    tangents = _make_tangents(step, analysis)
    last = _Rung("eager", _run_eager(step, analysis, state, tangents), {}, {})
    with deciding(options.decisions):
        for build in _ladder(step, analysis, options, state, tangents):
            rung = build()
            found = _compare(last, rung, folder)
            if found is not None:
                return found
            last = rung
    return Guilty(None)


def _make_tangents(step: CapturedStep, analysis: Analysis) -> list[Tensor]:
    specs = [known.spec for known in analysis.computed if known.requires_grad]
    specs += [step.inputs[i].spec for i in analysis.replaced]
    generator = torch.Generator().manual_seed(0)
    made = []
    for spec in specs if analysis.needs_gradient else []:
        tangent = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        made.append(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(tangent))
    return made


def _copies(step: CapturedStep) -> list[Tensor]:
    """Leaves with the primals' values and strides: what a run mutates is not the caller's."""
    found = []
    for value in step.primals:
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        found.append(copy.copy_(value.detach()).requires_grad_(value.requires_grad))
    return found


def _run_eager(step: CapturedStep, analysis: Analysis, state: Tensor, tangents: Sequence[Tensor]) -> Results:
    leaves = _copies(step)
    with autocast_cache(torch.is_autocast_cache_enabled()), PhiloxMode(state):
        primals = enter_primals(step, leaves, analysis.replaced)
        flat, _ = tree_flatten(step.call(primals))
    outputs = [*analysis.computed_outputs(flat), *(primals[i] for i in analysis.replaced)]
    results: Results = {f"output {i}": value.detach() for i, value in enumerate(outputs[: len(analysis.computed)])}
    results |= {f"update of {step.inputs[i].name}": primals[i].detach() for i in analysis.mutated}
    if analysis.needs_gradient:
        wanted = [i for i, spec in enumerate(step.inputs) if spec.requires_grad]
        chosen = [value for value, known in zip(outputs, _differentiable(analysis), strict=True) if known]
        with disable_autocast():
            gradients = torch.autograd.grad(chosen, [leaves[i] for i in wanted], list(tangents), allow_unused=True)
        results |= {f"gradient of {step.inputs[i].name}": g for i, g in zip(wanted, gradients, strict=True)}
    return results


def _differentiable(analysis: Analysis) -> list[bool]:
    return [known.requires_grad for known in analysis.computed] + [True] * len(analysis.replaced)


def _ladder(
    step: CapturedStep, analysis: Analysis, options: CompileOptions, state: Tensor, tangents: Sequence[Tensor]
) -> Iterator[Callable[[], _Rung]]:
    """Each rung is to be climbed before the next is asked for: it starts from what the last one made."""
    stages: dict[str, Any] = {}

    def last() -> JointGraph:
        return list(stages.values())[-1]

    def rewritten(each: Pass) -> JointGraph:
        return each(last()).joint

    def inputs(joint: JointGraph) -> list[Tensor]:
        return [*(value.detach() for value in _copies(step)), *joint.constants, state, *tangents]

    def whole(name: str, make: Callable[[], JointGraph]) -> Callable[[], _Rung]:
        def climb() -> _Rung:
            joint = stages[name] = make()
            given = inputs(joint)
            values, outputs = _record(joint.graph, given)
            results = _named(joint, outputs)
            for i in analysis.mutated:  # before functionalization an update is a write to the input
                results.setdefault(f"update of {step.inputs[i].name}", given[i])
            return _Rung(name, results, values, {node.name: node for node in joint.graph.nodes})

        return climb

    @cache
    def planned() -> tuple[JointGraph, PartitionedGraph, KernelPlan]:
        """The plan that runs: as rewritten for kernels, or, where a budget has no room for them, of what was before."""
        ready = last()
        with suppress(BudgetError):
            found = plan_of(ready)
            if found[2].kernel == options.kernel or ready is base:
                return found
        return plan_of(base)

    def plan_of(joint: JointGraph) -> tuple[JointGraph, PartitionedGraph, KernelPlan]:
        plan = plan_for(joint, options)
        parts = apply_partition(joint, plan)
        return joint, parts, plan_kernels(joint, plan, parts, options)

    def halves(name: str, kernel: Kernel) -> Callable[[], _Rung]:
        def climb() -> _Rung:
            joint, parts, kernels = planned()
            return _run_halves(name, joint, parts, kernels, kernel, inputs(joint))

        return climb

    yield whole("joint", lambda: trace_joint(step, analysis))
    yield whole("functional", lambda: functionalize(stages["joint"]))
    for each in passes_for(options):
        yield whole(each.result, partial(rewritten, each))
    base = last()
    options, _ = with_kernel(options, base, Faults())
    target, *_ = targets_for(options.kernel)
    for each in target.passes:
        yield whole(each.result, partial(rewritten, each))
    yield halves("partitioned", "aten")
    kernel = planned()[2].kernel
    if kernel in GENERATED:
        yield halves("scheduled", "evaluate")
    if kernel != "aten":
        yield halves("kernel", kernel)


def _run_halves(
    name: str, joint: JointGraph, parts: PartitionedGraph, kernels: KernelPlan, kernel: Kernel, given: list[Tensor]
) -> _Rung:
    tangents = len(joint.inputs_of(InputKind.TANGENT))
    primals, late = given[: len(given) - tangents], given[len(given) - tangents :]
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
            more, gradients = _record(parts.backward, [*residuals.values(), *late])
            values |= more
        else:
            runner = fused[1].runner() if fused else build_runner(parts.backward, kernel)
            gradients = runner([*residuals.values(), *late])
        flat += list(gradients)
    results = _named(joint, flat) | {f"residual {key}": value for key, value in residuals.items() if kernel != "aten"}
    return _Rung(name, results, values | residuals, nodes, tuple(wrong))


def _kernels(plan: KernelPlan, evaluated: bool, wrong: list[KernelIR]) -> list[FusedGraph]:
    """Both graphs, run by kernels. wrong: gets each kernel that does not give what its evaluation gives."""
    known = {call.kernel.name: call.kernel for _, _, schedule in plan.planned for call in schedule.kernels}
    if evaluated:
        launches = {name: _evaluated(kernel) for name, kernel in known.items()}
        return [FusedGraph(graph, schedule, None, launches, 0, "", "evaluate") for graph, _, schedule in plan.planned]
    made = make_kernels(plan)
    checked = {name: _checked(kernel, made[0].launches[name], wrong) for name, kernel in known.items()}
    return [replace(one, launches=checked) for one in made]


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
    found: Results = {}
    for spec, value in zip(joint.signature.outputs, outputs, strict=True):
        label = spec.target if spec.kind is OutputKind.OUTPUT else spec.name
        found[f"{words.get(spec.kind, 'update of')} {label}"] = value
    return found


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


def _compare(last: _Rung, rung: _Rung, folder: str | Path | None) -> Guilty | None:
    for what, value in rung.results.items():
        known = last.results.get(what, last.values.get(what.removeprefix("residual "), _UNKNOWN))
        error = 0.0 if known is _UNKNOWN else _difference(known, value)
        if error:
            return _blame(last, rung, what, error, folder)
    return None


_UNKNOWN = object()


def _blame(last: _Rung, rung: _Rung, what: str, error: float, folder: str | Path | None) -> Guilty:
    """The first node, in program order, whose inputs agree with the rung before and whose value does not; of kernels
    the first to run that does not give what its loop nest says."""
    if rung.wrong_kernels:
        kernel = rung.wrong_kernels[0]
        ops = ", ".join(line.split(" = ")[0] for line in kernel.sources)
        return Guilty(rung.name, what, f"{kernel.name} ({ops})", error=error)
    wrong = {
        name for name, value in rung.values.items() if name in last.values and _difference(last.values[name], value)
    }
    for name, node in rung.nodes.items():
        if name in wrong and not any(source.name in wrong for source in node.all_input_nodes):
            known = rung.name, node, last.values, rung.values[name]
            script = "" if folder is None else write_script(Path(folder), *known)
            return Guilty(rung.name, what, node_text(node), module_of(node), source_of(node), error, script)
    return Guilty(rung.name, what, error=error)


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
