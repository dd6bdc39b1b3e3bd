"""task=plan: compile and say what a training step would save, recompute and need; no step is run."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from aottrain.config.extensions.recipes import program_errors
from aottrain.config.run import RunConfig
from aottrain.errors import BudgetError, CapacityError, UnsupportedError
from aottrain.explain.figures import with_optimizer
from aottrain.explain.report import CompileReport, GraphReport
from aottrain.ir.settings.budget import Budget, bounds_bytes, budget_text, parse_budget
from aottrain.ir.settings.decisions import DEFAULT, FILE
from aottrain.ir.settings.devices import is_specified
from aottrain.ir.units import format_bytes, format_count, format_flops
from aottrain.measure.workspaces import without_workspaces
from aottrain.metrics.memory import total_bytes
from aottrain.metrics.sinks import write_result
from aottrain.report import html
from aottrain.tasks.building.build import build_job, raise_own_error
from aottrain.tasks.measuring.determinism import as_deterministic_as_asked
from aottrain.trainer.engines import LossModule
from aottrain.trainer.job import Job
from aottrain.trainer.optim import optimizer_state_bytes
from aottrain.trainer.parallel.link import assume_link
from aottrain.trainer.parallel.world import imagined
from aottrain.trainer.reliability.signals import interruptible

# Long, and on the HTML page, or in a file of their own.
LONG = {"forward_text", "backward_text", "after", "live", "decisions"}


def run(config: RunConfig) -> int:
    """Print the plan of one training step; write plan.json, decisions.json and compile_report.html. The engine is
    always aot."""
    if is_specified(config.device):
        from aottrain.tasks.planning.elsewhere import run as run_elsewhere  # which a device at hand does without

        with interruptible(), program_errors(config):
            return run_elsewhere(config)
    with interruptible():  # a compiler that runs ends with this process
        config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, name="aot"))
        with program_errors(config), as_deterministic_as_asked(config), imagined(config.parallel) as world:
            link = assume_link(world, config.parallel)
            job = build_job(config, world=world)
            try:
                compiled, lowest, differs = _planned(job)
            except UnsupportedError:
                raise_own_error(job)
                raise
        num_bytes = optimizer_state_bytes(job.module, config.optimizer, config.trainer.precision)
        report = with_optimizer(compiled.report, num_bytes)
        plan = describe(job.module, report, config) | {"process": link, "lowest_peak_bytes": lowest}
        plan["memory"] = "; ".join(filter(None, [_fits(config, report, job.device), *differs]))
        directory = Path(config.output_dir)
        decisions = json.dumps(report.decisions.to_dict(), indent=1)
        write_result(directory / FILE, decisions + "\n")
        write_result(directory / "plan.json", json.dumps(plan, indent=2) + "\n")
        write_result(directory / "compile_report.html", html.render(report, {"recipe": config.recipe.title}))
        print(render(plan))
        print()
        print(report.explain())
        print(f"\nNo step was run. Every value, and the graphs: {directory / 'compile_report.html'}")
    return 0


def _planned(job: Job) -> tuple[Any, int | None, list[str]]:
    """The step, compiled; the lowest peak, where the budget is below it; and how the plan is another than was asked
    for. What a run is refused for is the answer here: of a budget that cannot be met the plan of the lowest peak, of
    more memory than there is one without measuring."""
    rungs: Any = job.step.rungs  # of engine aot there are some
    changes: dict[str, Any] = {}
    lowest, differs = None, list[str]()
    while True:
        compiled = rungs.compiled_with({**rungs.plan, **changes})
        try:
            with without_workspaces() if "memory_bytes" in changes else nullcontext():
                compiled.prepare(*job.batches.at(1)[0])
        except BudgetError as error:
            if "budget" in changes:
                raise
            lowest, changes["budget"] = error.lowest_bytes, f"{error.lowest_bytes}B"
            differs.append(f"{error}, and this is its plan")
        except CapacityError:
            if "memory_bytes" in changes:
                raise
            changes |= {"memory_bytes": None, "decisions": DEFAULT}
            differs.append("nothing was measured, and what library calls need within themselves is left out")
        else:
            return compiled, lowest, differs


def _fits(config: RunConfig, report: CompileReport, device: torch.device) -> str:
    """Whether a step fits, with the optimizer's state; "" where its peak is not known or not of one process."""
    if len(report.graphs) != 1 or config.parallel.name != "none":
        return ""
    budget: Budget = parse_budget(config.partition.budget) if config.partition.strategy == "budget" else 1.0
    asked = f"the budget is {budget_text(budget)}, " if budget != "auto" and bounds_bytes(budget) else ""
    peak, total = report.graphs[0].predicted_peak_bytes, total_bytes(device)
    has = f"this {'device' if device.type == 'cuda' else 'machine'} has {format_bytes(total)}"
    return f"{'fits' if peak <= total else 'does not fit'}: predicted peak {format_bytes(peak)}; {asked}{has}"


def describe(module: LossModule, report: CompileReport, config: RunConfig) -> dict[str, Any]:
    """The plan as plain data: what plan.json holds. FLOPs are those of one optimizer step, all its micro-batches."""
    graph = report.graphs[-1]
    parameters = [(module.size_of(name), p) for name, p in module.model.named_parameters()]
    num_micro_batches = config.trainer.accumulate
    shown = dataclasses.replace(graph, traffic=None, diagrams=tuple(graph.diagrams))
    return {
        "recipe": config.recipe.title,
        "machine": graph.machine,
        "batch_size": config.data.batch_size,
        "num_micro_batches": num_micro_batches,
        "num_parameters": sum(size for size, _ in parameters),
        "num_trained": sum(size for size, parameter in parameters if parameter.requires_grad),
        "parameter_bytes": sum(size * parameter.element_size() for size, parameter in parameters),
        "flops_per_step": {
            "forward": graph.forward_flops * num_micro_batches,
            "backward": graph.backward_flops * num_micro_batches,
            "recompute": graph.recompute_flops * num_micro_batches,
        },
        "compile_s": graph.compile_s,
        "graph": _without_long(dataclasses.asdict(shown)) | _traffic(graph),
        "fallbacks": [dataclasses.asdict(fallback) for fallback in report.fallbacks],
    }


def render(plan: dict[str, Any]) -> str:
    """The lines above the tables."""
    times = "" if plan["num_micro_batches"] == 1 else f", {plan['num_micro_batches']} micro-batches a step"
    flops = ", ".join(f"{name} {format_flops(count)}" for name, count in plan["flops_per_step"].items())
    num_trained = plan["num_trained"]
    trained = "" if num_trained == plan["num_parameters"] else f", {format_count(num_trained)} of them trained"
    return "\n".join(
        [
            f"Plan of {plan['recipe']}: batches of {plan['batch_size']}{times}",
            f"parameters      {format_count(plan['num_parameters'])}, {format_bytes(plan['parameter_bytes'])}{trained}",
            f"FLOPs per step  {flops}",
            f"times of        {plan['machine']}",
            *([f"planned for     {plan['process']}"] if plan["process"] else []),
            *([f"memory          {plan['memory']}"] if plan["memory"] else []),
        ]
    )


def _traffic(graph: GraphReport) -> dict[str, Any]:
    """Bytes that its kernels and library calls move, and the least."""
    traffic = graph.traffic
    return {"traffic": None if traffic is None else {"moved": traffic.moved, "least": traffic.least}}


def _without_long(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_long(item) for name, item in value.items() if name not in LONG}
    if isinstance(value, list | tuple):
        return [_without_long(item) for item in value]
    return value
