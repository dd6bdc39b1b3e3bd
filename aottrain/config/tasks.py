"""The sections of a RunConfig that one task alone reads, or a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aottrain.config.choices import (
    COMPARED,
    ENGINES,
    EXECUTORS,
    EXPORT_FORMATS,
    OBJECTIVES,
    PEERS,
    SEARCHES,
    TORCH_BACKENDS,
    WEIGHTS,
)
from aottrain.config.schema import setting
from aottrain.ir.settings.budget import ALLOWED


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Used by task=compare only."""

    engines: tuple[str, ...] = setting(COMPARED, one_of=ENGINES)
    """Which to run, in this order, each in a process of its own."""
    steps: int = setting(30, low=1)
    """Measured steps of each engine."""
    rounds: int = setting(1, low=1)
    """How often all engines are timed, in rotating order; the speed-up is the median over the rounds."""
    loss_steps: int = setting(10, low=1)
    """First steps, run again without dropout, whose losses must agree with eager's (or the first engine's)."""
    loss_tolerance: float = setting(1e-3, above=0)
    """Largest relative difference of these losses."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Used by task=plan of a device that is named or described, only."""

    batches: tuple[int, ...] = setting((), low=1)
    """Batch sizes to plan, a row of the table each; [] is data.batch_size."""
    budgets: tuple[Any, ...] = setting((), form=f"budgets, each {ALLOWED}")
    """Budgets to plan, a row each; [] is what partition says."""
    world: int = setting(1, low=1)
    """Devices that share parameters, gradients and optimizer state, each with a batch of its own, by arithmetic."""
    worlds: tuple[int, ...] = setting((), low=1)
    """Numbers of such devices, a row each; [] is world."""


@dataclass(frozen=True, kw_only=True)
class ParetoConfig:
    """Used by task=pareto only."""

    budgets: tuple[Any, ...] = setting((1.0, 0.7, 0.4, 0.2, 0.0), form=f"budgets, each {ALLOWED}")
    """partition.budget of each run of engine aot."""
    match_peaks: bool = True
    """Whether ours runs also at each peak that another engine was measured at, where a plan reaches it."""
    engines: tuple[str, ...] = setting(PEERS, one_of=PEERS)
    """Engines that are measured beside ours; [] for none."""
    torch_backends: tuple[str, ...] = setting(TORCH_BACKENDS, one_of=TORCH_BACKENDS)
    """Backends of torch_compile: inductor fuses kernels, aot_eager has eager's under torch's partitioner."""
    torch_budgets: tuple[float, ...] = setting((1.0, 0.5, 0.2, 0.0), low=0, high=1)
    """Torch's activation_memory_budget of each run of torch_compile; 1 is torch.compile as it comes."""
    rounds: int = setting(6, low=1)
    """How often every run is timed, in rotating order; ratios are taken within a round."""
    steps: int = setting(5, low=1)
    """Measured steps of each run in each round, after one that is not."""
    take_turns: bool = True
    """All runs are in memory at once and take turns; false is one after the other, where they do not fit."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Used by task=export only."""

    run: str | None = setting(None, form="a path")
    """Output directory of the run whose newest checkpoint is written."""
    format: str = setting("auto", one_of=EXPORT_FORMATS)
    """hf: a folder for from_pretrained; weights, safetensors: tensors by name; auto: the recipe's own, else weights."""
    weights: str = setting("auto", one_of=WEIGHTS)
    """Which are written: averaged by trainer.ema, those of the last step, or auto, averaged where there are some."""
    path: str | None = setting(None, form="a path")
    """Folder to write, which is made; null is model in this run's own output directory."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Used by task=eval only."""

    run: str | None = setting(None, form="a path")
    """Output directory of the run whose newest checkpoint is measured on held-out data."""
    weights: str = setting("auto", one_of=WEIGHTS)
    """Which are measured: averaged by trainer.ema, those of the last step, or auto, averaged where there are some."""
    batches: int | None = setting(None, low=1)
    """How many held-out batches; null is trainer.eval_batches, so that they are those that training measures."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Used by task=generate only."""

    run: str | None = setting(None, form="a path")
    """Output directory of the run whose newest checkpoint writes text."""
    weights: str = setting("auto", one_of=WEIGHTS)
    """Which write it: averaged by trainer.ema, those of the last step, or auto, averaged where there are some."""
    prompt: str = "The "
    """What the text begins with, at least one token."""
    length: int = setting(200, low=1)
    """Tokens to write after the prompt."""
    temperature: float = setting(0.8, low=0)
    """What logits are divided by before a token is drawn; 0 takes the likeliest each time."""
    top_k: int | None = setting(None, low=1)
    """How many of the likeliest tokens one is drawn from; null is all."""
    seed: int | None = setting(None, low=0, below=2**63)
    """Of the draws; null is the run's seed."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Used by sweeps (-m) only."""

    resume: str | None = setting(None, form="a path")
    """Folder of a sweep to go on with: jobs that have finished there are not run again, the others go on."""
    parallel: int = setting(1, low=1)
    """How many jobs run at once, each a process; they share the device, its memory and the processors."""
    search: str = setting("all", one_of=SEARCHES)
    """Which jobs: all combinations, or those that the package optuna chooses within ranges, as interval(1e-4,1e-2)."""
    trials: int = setting(20, low=1)
    """How many jobs optuna chooses."""
    objectives: tuple[str, ...] = setting(("val_loss",), form=f"{', '.join(OBJECTIVES)}, or a metric as accuracy:max")
    """What optuna looks for: the lowest of each, of speeds the highest, of the recipe's metrics as they say."""
    executor: str = setting("here", one_of=EXECUTORS)
    """Who runs jobs: processes of this machine, or the package submitit, on Slurm where that is, else here, too."""
    options: Any = setting(None, form="keys of its own, each set by itself")
    """Of submitit's update_parameters, as sweep.options.timeout_min=60; and its cluster, as local or slurm."""
