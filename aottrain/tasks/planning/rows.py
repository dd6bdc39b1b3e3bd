"""Rows of task=plan for a device: each a batch size, a budget and a number of devices, and what a step of it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from aottrain.compiler.absent.planning import PlannedStep, TracedStep, plan_step, trace_step
from aottrain.compiler.absent.step_time import StepTime
from aottrain.compiler.options import CompileOptions, check_options
from aottrain.compiler.partition.stored import stored_plan
from aottrain.config.extensions.recipes import recipe_of
from aottrain.config.run import RunConfig
from aottrain.errors import BudgetError, ConfigError
from aottrain.explain.report import GraphReport
from aottrain.ir.settings.budget import Budget, budget_text, parse_budget
from aottrain.ir.settings.devices import Target
from aottrain.metrics.memory import distinct_bytes
from aottrain.ops.optimizers.masters import wide_bytes
from aottrain.tasks.building.build import build_batches, flops_per_sample, load_kernel, load_partition
from aottrain.tasks.building.model import build_model, model_options
from aottrain.tasks.planning.sharing import State, dtype_name, state_of, whole_step
from aottrain.trainer.engines import LossModule
from aottrain.trainer.optim import optimizer_state_bytes
from aottrain.trainer.preparing import start_streams

# Of what a plan counts, allocators hold more: the ratio of reserved to allocated bytes was 1.01 to 1.06 in the runs
# that say both (scripts/README.md).
RESERVED = 1.05
# Of a predicted time, either way.
UNCERTAINTY = 0.15
FITS, TIGHT, NO = "fits", "tight", "no"


@dataclass(frozen=True)
class Row:
    """One plan of a step."""

    batch_size: int
    """Of each device, for each micro-batch."""
    world: int
    asked: str
    """The budget or the strategy."""
    met: bool
    """Whether the budget could be met; else the plan is the lowest one."""
    verdict: str
    peak_bytes: int
    memory: dict[str, int]
    """At the peak, by category."""
    step_s: float
    compute_s: float
    """Of the step, without exchanges that nothing runs beside."""
    exchange_s: float
    tokens_per_s: float | None
    """Of all devices together."""
    samples_per_s: float
    mfu: float | None
    limit: str
    saved_bytes: int
    recompute_flops: int
    time: StepTime
    report: GraphReport
    partition: dict[str, Any]
    """Which values are saved, as `partition=plan` takes it."""

    @property
    def cost(self) -> float:
        """Device-seconds of an example."""
        return self.world / self.samples_per_s

    @property
    def rank(self) -> tuple[int, float]:
        """The cheapest of those that fit first."""
        return (FITS, TIGHT, NO).index(self.verdict) + (0 if self.met else 2), self.cost


@dataclass(frozen=True)
class Subject:
    """What is planned: a model and one of its batches, traced for the device."""

    traced: TracedStep
    state: State
    batch_size: int
    tokens: int
    flops: int | None
    """Of a micro-batch as the recipe counts them."""
    options: CompileOptions
    num_parameters: int
    num_trained: int


def subject(config: RunConfig, target: Target, batch_size: int) -> Subject:
    """The configured run with this batch size. Errors as of `build_job`; weights take no memory."""
    data = dataclasses.replace(config.data, batch_size=batch_size)
    config = dataclasses.replace(config, data=data)
    recipe, model_opts = recipe_of(config.recipe), model_options(config)
    if mistakes := model_opts.check():
        raise ConfigError([f"recipe.model.{mistake}" for mistake in mistakes])
    start_streams(config.seed, None)
    batches = build_batches(config, recipe, model_opts, torch.device("cpu"))
    model = _without_memory(partial(build_model, recipe, model_opts, config))
    module = LossModule(model, recipe.loss, config.trainer.precision, getattr(recipe, "weight", None)).train()
    state = _state(config, module, batches.at(1))
    options = _options(config)
    counts = [parameter.numel() for parameter in module.parameters()]
    trained = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    is_whole = len(trained) == len(counts)
    flops = flops_per_sample(recipe, model_opts, batches) if is_whole and _counts(recipe, model_opts) else None
    traced = trace_step(module, batches.at(1)[0], options, target)
    return Subject(
        traced,
        state,
        batch_size,
        batches.tokens_per_batch,
        flops and flops * batch_size,
        options,
        sum(counts),
        sum(trained),
    )


def _counts(recipe: ModuleType, options: Any) -> bool:
    """Whether the recipe counts FLOPs on paper: recipe hf runs the model for it."""
    return recipe.__name__.rpartition(".")[2] != "hf"


def _without_memory(build: Any) -> nn.Module:
    """Built on the meta device; a model that needs real numbers to be built has them for a moment."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, TypeError):  # an operator that meta has no kernel for raises a RuntimeError, too
        return build()


def _state(config: RunConfig, module: LossModule, micro_batches: Any) -> State:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    others = distinct_bytes(tensor for batch in micro_batches[1:] for tensor in batch)
    others += gradients if len(micro_batches) > 1 else 0
    others += wide_bytes(trained) if config.trainer.ema is not None else 0
    precision = config.trainer.precision
    return state_of(module, optimizer_state_bytes(module, config.optimizer, precision), others, precision)


def _options(config: RunConfig) -> CompileOptions:
    return check_options(
        partition=load_partition(config), budget=config.partition.budget, modules=config.partition.modules,
        kernel=load_kernel(config), loss_head=config.kernel.loss_head, capture="trace", workspaces=True,
        on_unsupported="error",
    )  # fmt: skip


def rows_of(subject: Subject, config: RunConfig, target: Target) -> Iterator[Row]:
    """A row for each of the budgets and numbers of devices that `plan` asks for."""
    budgets = [parse_budget(budget) for budget in config.plan.budgets] or [subject.options.budget]
    for world in config.plan.worlds or (config.plan.world,):
        for budget in budgets:
            yield row_of(subject, config, target, budget, world)


def row_of(subject: Subject, config: RunConfig, target: Target, budget: Budget | None, world: int) -> Row:
    if config.kernel.cuda_graphs:  # one launch replays a whole graph
        target = dataclasses.replace(target, launch_s=0.0)
    state, options = subject.state, subject.options
    held = state.held(world)
    # The compiler counts whole parameters, and whole gradients where they are not shared.
    reserved = sum(held.values()) - state.parameters
    options = dataclasses.replace(options, budget=budget, reserved_bytes=reserved)
    traced = dataclasses.replace(subject.traced, target=dataclasses.replace(target, world=world))
    met = True
    try:
        planned = plan_step(traced, options)
    except BudgetError as error:
        met, planned = False, plan_step(traced, dataclasses.replace(options, budget=error.lowest_bytes))
    asked = options.partition_name if budget is None else budget_text(budget)
    return _row(subject, config, traced.target, planned, (asked, met, held))


def _row(
    subject: Subject, config: RunConfig, target: Target, planned: PlannedStep, told: tuple[str, bool, dict[str, int]]
) -> Row:
    asked, met, held = told
    report, world, count = _with_state(planned.report, held), target.world, config.trainer.accumulate
    assert planned.time is not None  # of a target it is known
    clips = config.optimizer.clip_norm is not None
    time, exchange_s, step_s = whole_step(planned.time, subject.state, target, count, clips)
    examples = subject.batch_size * count * world
    flops = subject.flops or report.forward_flops + report.backward_flops
    peak_flops = target.flops_per_s(dtype_name(config.trainer.precision))
    peak = report.predicted_peak_bytes
    return Row(
        batch_size=subject.batch_size,
        world=world,
        asked=asked,
        met=met,
        verdict=NO if peak > target.memory_bytes else FITS if RESERVED * peak <= target.memory_bytes else TIGHT,
        peak_bytes=peak,
        memory=_at_the_peak(report.memory, held),
        step_s=step_s,
        compute_s=time.seconds,
        exchange_s=exchange_s,
        tokens_per_s=subject.tokens * count * world / step_s if subject.tokens else None,
        samples_per_s=examples / step_s,
        mfu=flops * count / step_s / peak_flops,
        limit="exchange" if exchange_s > time.seconds else time.limit,
        saved_bytes=report.saved_bytes,
        recompute_flops=report.recompute_flops * count,
        time=time,
        report=report,
        partition=stored_plan(planned.joint, planned.plan, report.kernel),
    )


def _with_state(report: GraphReport, held: dict[str, int]) -> GraphReport:
    """With what a device holds in the place of whole parameters and of what was reserved."""
    fixed = report.memory.get("reserved", 0) + report.memory.get("parameters", 0)
    named = {name: held[name] for name in ("parameters", "optimizer")}
    named["reserved"] = fixed - sum(named.values())
    timeline = report.timeline and dataclasses.replace(report.timeline, fixed={**report.timeline.fixed, **named})
    return dataclasses.replace(report, memory={**report.memory, **named}, timeline=timeline)


def _at_the_peak(memory: dict[str, int], held: dict[str, int]) -> dict[str, int]:
    """Bytes by category, with what sharing holds by name, and the rest of what is reserved: what libraries keep."""
    shared = {name: size for name, size in held.items() if name not in memory}
    rest = {name: size for name, size in memory.items() if name != "reserved"}
    return {**rest, **shared, "libraries": memory["reserved"] - sum(shared.values())}
