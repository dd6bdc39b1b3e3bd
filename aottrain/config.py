"""RunConfig: everything a run is told, as frozen dataclasses. Values come from conf/ and the command line through cli.py.

`recipe.model` is the recipe module's own frozen dataclass (see recipes/transformer.py): a component owns its options.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    name: str = "transformer"
    model: Any = None


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    strategy: str = "budget"
    budget: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    name: str = "aten"
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    name: str = "aot"
    on_unsupported: str = "eager"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    name: str = "cosine"
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    total_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: str = "text"
    path: str | None = None
    batch_size: int = 16
    held_out: float = 0.1


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    name: str = "wandb"
    mode: str = "offline"
    project: str = "aottrain"
    group: str | None = None
    run_name: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    steps: int = 300
    accumulate: int = 1
    precision: str = "fp32"
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 16
    save_every: int = 0
    sample_bytes: int = 300
    num_threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    steps: int = 1
    loss_tolerance: float = 1e-4
    grad_tolerance: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    warmup_steps: int = 5
    memory: bool = True


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    engines: tuple[str, ...] = ("eager", "torch_compile", "aot")
    steps: int = 30
    loss_steps: int = 10
    loss_tolerance: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    task: str = "train"
    seed: int = 1234
    device: str = "auto"
    resume: str | None = None
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
    output_dir: str = "."
