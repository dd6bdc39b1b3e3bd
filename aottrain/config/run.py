"""RunConfig: everything a run is told, as frozen dataclasses. Values come from conf/ and the command line.

Every field's type and range is written here and nowhere else; what each key means is said beside it in conf/.
`recipe.model` is the recipe module's own frozen dataclass `Options` (recipes/transformer.py): a part owns its options.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from aottrain.config.schema import Mistake, build, join, setting, show, suggest
from aottrain.errors import ConfigError
from aottrain.ir.budget import ALLOWED, parse_budget
from aottrain.ir.decisions import DEFAULT, MEASURED

TASKS = ("train", "compare", "plan", "pareto")
ENGINES = ("aot", "eager", "eager_checkpoint", "torch_compile")
PEERS = ("eager", "eager_checkpoint", "torch_compile")
TORCH_BACKENDS = ("inductor", "aot_eager")
STRATEGIES = ("budget", "min_cut", "save_all", "checkpoint", "recompute_all", "policy")
COSTS = ("roofline", "measured")
KERNELS = ("auto", "cpp", "triton", "aten", "inductor", "custom")
OPTIMIZER_KERNELS = ("auto", "generated", "torch")
LOSS_HEADS = ("auto", "chunked", "whole")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    name: str = "transformer"
    model: Any = None


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    strategy: str = setting("budget", one_of=STRATEGIES)
    budget: Any = 1.0
    cost: str = setting("roofline", one_of=COSTS)
    modules: tuple[str, ...] = ()
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    name: str = setting("auto", one_of=KERNELS)
    target: str | None = None
    loss_head: str = setting("auto", one_of=LOSS_HEADS)
    cuda_graphs: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    name: str = setting("aot", one_of=ENGINES)
    on_unsupported: str = setting("eager", one_of=("eager", "error"))
    backend: str = setting("inductor", one_of=TORCH_BACKENDS)
    activation_memory_budget: float | None = setting(None, low=0, high=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`beta1` and `beta2` belong to adamw and lion, `eps` to adamw, `momentum` to sgd; the other keys to all."""

    name: str = setting("adamw", one_of=("adamw", "sgd", "lion"))
    kernel: str = setting("auto", one_of=OPTIMIZER_KERNELS)
    lr: float = setting(2e-3, above=0)
    beta1: float = setting(0.9, low=0, below=1)
    beta2: float = setting(0.95, low=0, below=1)
    eps: float = setting(1e-8, above=0)
    momentum: float = setting(0.9, low=0, below=1)
    weight_decay: float = setting(0.1, low=0)
    clip_norm: float | None = setting(1.0, above=0)


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    name: str = setting("cosine", one_of=("cosine", "constant"))
    warmup_steps: int = setting(100, low=0)
    min_lr_ratio: float = setting(0.1, low=0, high=1)
    total_steps: int | None = setting(None, low=1)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: str = setting("text", one_of=("text",))
    path: str | None = None
    batch_size: int = setting(16, low=1)
    held_out: float = setting(0.1, above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    name: str = setting("wandb", one_of=("wandb", "csv"))
    mode: str = setting("offline", one_of=("offline", "online", "disabled"))
    project: str = "aottrain"
    group: str | None = None
    run_name: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    steps: int = setting(500, low=1)
    accumulate: int = setting(1, low=1)
    precision: str = setting("fp32", one_of=("fp32", "bf16"))
    log_every: int = setting(10, low=1)
    eval_every: int = setting(100, low=0)
    eval_batches: int = setting(16, low=1)
    save_every: int = setting(0, low=0)
    sample_bytes: int = setting(300, low=0)
    num_threads: int | None = setting(None, low=1)
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    steps: int = setting(1, low=0)
    loss_tolerance: float = setting(1e-5, above=0)
    grad_tolerance: float = setting(1e-4, above=0)
    bisect: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    warmup_steps: int = setting(5, low=0)
    memory: bool = True


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    engines: tuple[str, ...] = setting(("eager", "torch_compile", "aot"), one_of=ENGINES)
    steps: int = setting(30, low=1)
    rounds: int = setting(1, low=1)
    loss_steps: int = setting(10, low=1)
    loss_tolerance: float = setting(1e-3, above=0)


@dataclass(frozen=True, kw_only=True)
class ParetoConfig:
    budgets: tuple[Any, ...] = (1.0, 0.7, 0.4, 0.2, 0.0)
    match_peaks: bool = True
    engines: tuple[str, ...] = setting(PEERS, one_of=PEERS)
    torch_backends: tuple[str, ...] = setting(("inductor", "aot_eager"), one_of=TORCH_BACKENDS)
    torch_budgets: tuple[float, ...] = setting((1.0, 0.5, 0.2, 0.0), low=0, high=1)
    rounds: int = setting(6, low=1)
    steps: int = setting(5, low=1)
    take_turns: bool = True


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    task: str = setting("train", one_of=TASKS)
    seed: int = setting(1234, low=0, below=2**63)
    device: str = "auto"
    resume: str | None = None
    decisions: str = MEASURED
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    pareto: ParetoConfig = field(default_factory=ParetoConfig)
    output_dir: str = "."


def read_config(values: Mapping[str, Any]) -> tuple[RunConfig, list[Mistake]]:
    """The RunConfig that a composed dictionary says, and every mistake in it that can be told without importing torch.

    `recipe.model` is left as the plain dictionary that it came as: see `read_model`.
    """
    config, mistakes = build(RunConfig, {key: value for key, value in values.items() if key != "output_dir"})
    if "output_dir" in values:
        mistakes.append(Mistake("output_dir", "is set by Hydra; write hydra.run.dir=...", show(values["output_dir"])))
    seen = {mistake.key for mistake in mistakes}
    return config, mistakes + [found for found in _contradictions(config) if found.key not in seen]


def _contradictions(config: RunConfig) -> list[Mistake]:
    """Mistakes that are seen only by looking at several keys, or at a text's form."""
    found = []
    schedule, engines = config.lr_schedule, config.compare.engines
    found += _partition_mistakes(config.partition)
    found += _target_mistakes("kernel", config.kernel.name, "custom", config.kernel.target, _KERNEL)
    if config.recipe.name not in recipe_names():
        text = f"unknown recipe{suggest(config.recipe.name, recipe_names())} (recipes: {', '.join(recipe_names())})"
        found.append(Mistake("recipe.name", text, config.recipe.name))
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        found.append(Mistake("device", "must be one of auto, cpu, cuda, cuda:N", config.device))
    if schedule.total_steps is not None and schedule.total_steps <= schedule.warmup_steps:
        text = f"must be more than lr_schedule.warmup_steps={schedule.warmup_steps}"
        found.append(Mistake("lr_schedule.total_steps", text, show(schedule.total_steps)))
    if not engines or len(set(engines)) < len(engines):
        found.append(Mistake("compare.engines", "must name at least one engine, and none twice", show(engines)))
    found += _pareto_mistakes(config.pareto)
    if config.task == "pareto" and config.partition.strategy != "budget":
        text = "task=pareto varies the budget; use partition=budget"
        found.append(Mistake("partition", text, config.partition.strategy))
    if config.logger.name == "wandb" and not config.logger.project.strip():
        found.append(Mistake("logger.project", "must not be empty"))
    return found


def _pareto_mistakes(pareto: ParetoConfig) -> list[Mistake]:
    found = []
    try:
        budgets = [parse_budget(budget) for budget in pareto.budgets]
        if not budgets or len(set(budgets)) < len(budgets):
            text = "must name at least one budget, and none twice"
            found.append(Mistake("pareto.budgets", text, show(pareto.budgets)))
    except ValueError:
        found.append(Mistake("pareto.budgets", f"each must be {ALLOWED}", show(pareto.budgets)))
    if len(set(pareto.engines)) < len(pareto.engines):
        found.append(Mistake("pareto.engines", "must name none twice", show(pareto.engines)))
    for key in ("torch_backends", "torch_budgets"):
        values = getattr(pareto, key)
        if not values or len(set(values)) < len(values):
            text = "must name at least one, and none twice; leave torch_compile out of pareto.engines for none"
            found.append(Mistake(f"pareto.{key}", text, show(values)))
    return found


_KERNEL = "a callable (GraphModule, example_inputs) -> callable"
_POLICY = "a callable aottrain.ForwardValue -> save | recompute | free"


def _partition_mistakes(partition: PartitionConfig) -> list[Mistake]:
    found = []
    if partition.strategy == "budget":
        try:
            parse_budget(partition.budget)
        except ValueError:
            found.append(Mistake("partition.budget", f"must be {ALLOWED}", show(partition.budget)))
    elif partition.budget is not None:
        text = f"partition={partition.strategy} takes no budget; leave it out or use partition=budget"
        found.append(Mistake("partition.budget", text, show(partition.budget)))
    if partition.strategy != "checkpoint" and partition.modules:
        text = f"partition={partition.strategy} takes no modules; use partition=checkpoint"
        found.append(Mistake("partition.modules", text, show(partition.modules)))
    return found + _target_mistakes("partition", partition.strategy, "policy", partition.target, _POLICY)


def _target_mistakes(group: str, name: str, wants: str, target: str | None, what: str) -> list[Mistake]:
    """`target`: package.module:function, for the option that wants one and for no other."""
    if name == wants and not re.fullmatch(r"[\w.]+:[\w.]+", target or ""):
        return [Mistake(f"{group}.target", f"{group}={wants} needs package.module:function, {what}", show(target))]
    if name != wants and target is not None:
        return [Mistake(f"{group}.target", f"{group}={name} takes no target; use {group}={wants}", target)]
    return []


def read_model(config: RunConfig) -> tuple[RunConfig, list[Mistake]]:
    """The configuration with `recipe.model` as the recipe's `Options`. Imports the recipe, and with it torch."""
    prefix = "recipe.model"
    values = {} if config.recipe.model is None else config.recipe.model
    model, mistakes = build(load_recipe(config.recipe.name).Options, values, prefix)
    seen = {mistake.key for mistake in mistakes}
    found = [Mistake.from_line(join(prefix, line)) for line in model.check()]
    mistakes += [mistake for mistake in found if mistake.key not in seen]
    return dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, model=model)), mistakes


def absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with paths that no later change of directory can break; `~` is the home directory."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(os.path.expanduser(path))

    data = dataclasses.replace(config.data, path=absolute(config.data.path))
    resume = config.resume if config.resume == "auto" else absolute(config.resume)
    named = config.decisions if config.decisions in (MEASURED, DEFAULT) else absolute(config.decisions)
    return dataclasses.replace(config, data=data, resume=resume, decisions=named)


def load_recipe(name: str) -> ModuleType:
    """The recipe module `name`, from the installed package or from the checkout's recipes/ folder."""
    if name not in recipe_names():
        raise ConfigError(f"recipe.name={name}: unknown recipe (recipes: {', '.join(recipe_names())})")
    return importlib.import_module(f"{_recipes_package().__name__}.{name}")


def recipe_names() -> list[str]:
    """Every recipe there is, found without importing any."""
    modules = pkgutil.iter_modules(_recipes_package().__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def _recipes_package() -> ModuleType:
    """The package `aottrain.recipes`: where it is installed, or, in a plain checkout, the folder beside `aottrain/`."""
    name = "aottrain.recipes"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    folder = Path(__file__).resolve().parents[2] / "recipes"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not folder.is_dir():
        raise ConfigError(f"recipe: no recipes found, neither as {name} nor in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    return package
