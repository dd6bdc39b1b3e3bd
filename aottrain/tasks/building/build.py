"""RunConfig -> Job: the one place where recipe, data, optimizer and engine meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from aottrain.config.choices import FP8, FP16
from aottrain.config.extensions.recipes import makes_batches, recipe_of
from aottrain.config.extensions.targets import load_target
from aottrain.config.launch import place
from aottrain.config.run import DataConfig, RunConfig
from aottrain.data.ahead import ReadAhead
from aottrain.data.batches import Batches, MadeBatches, PreparedBatches, SourceBatches
from aottrain.data.examples import ExampleBatches, split
from aottrain.data.load import check_count, load
from aottrain.data.parts import PartBatches
from aottrain.errors import ConfigError, RecipeError, UnsupportedError
from aottrain.explain.report import GraphReport
from aottrain.ir.settings.decisions import Record
from aottrain.metrics.memory import distinct_bytes, total_bytes
from aottrain.metrics.preserve import preserved
from aottrain.peers import torch_backend
from aottrain.step import Batch, ClipsItself, TrainStep
from aottrain.tasks.building.model import build_model, model_options
from aottrain.tasks.building.optimizer import choose_optimizer
from aottrain.tasks.building.rungs import Programs
from aottrain.tasks.building.samples import sampler
from aottrain.tasks.measuring.capacity import check_batch, check_weights
from aottrain.tasks.measuring.determinism import decisions_asked, num_threads
from aottrain.trainer.blocks import checkpointed, repeated_modules
from aottrain.trainer.engines import LossModule, ModuleStep, split_batch
from aottrain.trainer.evaluation import patience_of
from aottrain.trainer.job import Job
from aottrain.trainer.optim import build_optimizer, learning_rate, optimizer_state_bytes
from aottrain.trainer.parallel.alike import shapes_of
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.world import ALONE, World
from aottrain.trainer.preparing import start_streams
from aottrain.trainer.weights.averaging import Averages
from aottrain.trainer.weights.scaling import LossScaling

# The compute capability of the first GPUs whose tensor cores take float8.
_FIRST_WITH_FLOAT8 = (8, 9)


def build_job(config: RunConfig, decisions: str | Record | None = None, world: World = ALONE) -> Job:
    """Everything that a run trains with. ConfigError lists what is wrong with the model's options, device or data.

    decisions: those that a run goes on with, instead of what `config.decisions` says. world: the processes that train
    it together, of which each has its part of each batch."""
    recipe, options = recipe_of(config.recipe), model_options(config)
    if mistakes := options.check():
        raise ConfigError([f"recipe.model.{mistake}" for mistake in mistakes])
    if (threads := num_threads(config)) is not None:
        torch.set_num_threads(threads)
    device = chosen_device(config)
    batches = build_batches(config, recipe, options, device)
    if world.size > 1:
        world.agree("the data", batches.fingerprint)
        batches = PartBatches(batches, world.rank, world.size)
    learning_rate(1, config.optimizer.lr, config.lr_schedule, config.trainer.steps)  # so that its errors come first

    scaling = _scaling(config, device, world)
    _check_float8(config, device)
    check_weights(partial(build_model, recipe, options, config), config, device)
    start_streams(config.seed, None)
    model = build_model(recipe, options, config)
    world.agree("the weights of the model", shapes_of(model))
    world.broadcast(model)
    shards = Shards(model, world) if world.mode == "shard" else None
    model.to(device)
    module = LossModule(model, recipe.loss, config.trainer.precision, getattr(recipe, "weight", None), world).train()
    module.shards = shards
    optimizer, optimizer_kernel = choose_optimizer(config, module, device)
    if shards is not None and isinstance(optimizer, ClipsItself):
        optimizer.sum_over = world.sum_of_parts
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    may_run_eagerly = config.engine.on_unsupported == "eager"
    averages = None if config.trainer.ema is None else Averages(model, config.trainer.ema)
    reserved = optimizer_state_bytes(module, config.optimizer, config.trainer.precision)
    reserved += accumulation_bytes(module, batches)
    reserved += 0 if averages is None else distinct_bytes(averages.values.values())
    if scaling is not None:
        module.scaled = scaling.scaled
    return Job(
        name=config.recipe.title,
        module=module,
        step=build_step(config, module, batches.tokens_per_batch, reserved, decisions),
        scaling=scaling,
        optimizer=optimizer,
        optimizer_kernel=optimizer_kernel,
        patience=patience_of(config.trainer),
        averages=averages,
        torch_optimizer=partial(build_optimizer, module, config.optimizer) if may_run_eagerly else None,
        batches=batches,
        device=device,
        world=world,
        # The recipe counts the gradient of every weight.
        flops_per_sample=flops_per_sample(recipe, options, batches) if is_whole else None,
        sample=sampler(recipe, options, model, config.seed, batches.codec, config.trainer.precision),
        metrics=getattr(recipe, "metrics", None),
    )


def _scaling(config: RunConfig, device: torch.device, world: World) -> LossScaling | None:
    """ConfigError: trainer.precision=fp16 on a CPU, or with weights in parts, of whose overflows one process hears."""
    if config.trainer.precision != FP16:
        return None
    if device.type != "cuda":
        raise ConfigError("trainer.precision=fp16: needs a CUDA device; bf16 runs on any")
    if world.mode == "shard":
        raise ConfigError("trainer.precision=fp16: with parallel=shard there is bf16; parallel=ddp has fp16, too")
    return LossScaling(device)


def _check_float8(config: RunConfig, device: torch.device) -> None:
    """ConfigError: trainer.precision=fp8 on a GPU that does not multiply in float8. A CPU does, slowly."""
    if config.trainer.precision == FP8 and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < _FIRST_WITH_FLOAT8:
            raise ConfigError(
                f"trainer.precision=fp8: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; "
                "products in float8 need 8.9 or newer"
            )


def chosen_device(config: RunConfig) -> torch.device:
    """The run's device, which is the current one from now on. ConfigError: see `find_device`."""
    device = find_device(config.device)
    if device.type == "cuda":
        # By its number, as tensors name it. Events and streams belong to the current device.
        own = place().local_rank if place().size > 1 else torch.cuda.current_device()
        device = torch.device("cuda", own if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def accumulation_bytes(module: LossModule, batches: Batches) -> int:
    """What a micro-batch finds in memory because of the others: their summed gradients and their examples."""
    others = batches.at(1)[1:]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return distinct_bytes([*parameters, *(tensor for batch in others for tensor in batch)]) if others else 0


def flops_per_sample(recipe: ModuleType, options: Any, batches: Batches) -> int | None:
    """What the recipe counts for one example, as such or by its tokens; None where it counts nothing."""
    if hasattr(recipe, "flops_per_sample"):
        return recipe.flops_per_sample(options)
    if hasattr(recipe, "flops_per_token"):
        return recipe.flops_per_token(options) * (batches.tokens_per_batch // batches.batch_size)
    return None


def find_device(name: str) -> torch.device:
    """The device of "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:1"; ConfigError where it is absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def build_batches(config: RunConfig, recipe: ModuleType, options: Any, device: torch.device) -> Batches:
    """Examples of the data set that `data.target` gives; else the recipe's own batches if it makes them and `data`
    names no files for it; else those of a source."""
    size, accumulate = config.data.batch_size, config.trainer.accumulate
    if config.data.target is not None:
        return _example_batches(config, config.data.target, device)
    if config.data.name == DataConfig.name and makes_batches(recipe, options):

        def make(batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
            return _checked_batch(recipe.make_batch(options, batch_size, generator), batch_size)

        made = MadeBatches(make, size, accumulate, config.seed, device)
        check_batch(made, device)
        return made
    source = load(config.data, options, size * accumulate)
    view = ReadAhead if source.is_decoded else SourceBatches
    batches = view(source, size, accumulate, config.seed, device, config.data.order)
    check_batch(batches, device)
    if not hasattr(recipe, "prepare"):
        return batches
    return PreparedBatches(batches, partial(recipe.prepare, options), config.seed)


def _example_batches(config: RunConfig, target: str, device: torch.device) -> ExampleBatches:
    keywords = config.data.options or {}
    train, rest = split(load_target("data", target, keywords)(**keywords), config.data.held_out)
    check_count(f"data.target={target}", len(train), config.data.batch_size * config.trainer.accumulate)
    batches = ExampleBatches(
        train, rest, config.data.batch_size, config.trainer.accumulate, config.seed, device, target
    )
    first = batches.at(1)[0][0]
    is_tokens = first.ndim == 2 and not first.is_floating_point()  # a row of whole numbers for each example
    return dataclasses.replace(batches, tokens_per_batch=first.numel() if is_tokens else 0)


def _checked_batch(value: Any, batch_size: int) -> Batch:
    """A recipe's batch as a tuple. RecipeError says what else the recipe gave."""
    batch = tuple(value) if isinstance(value, tuple | list) else ()
    if not batch or not all(isinstance(item, torch.Tensor) for item in batch):
        kind = f"{type(value).__name__} of {[type(item).__name__ for item in batch]}" if batch else type(value).__name__
        raise RecipeError(f"make_batch(options, batch_size, generator) must return a tuple of tensors, not {kind}")
    if batch[0].shape[:1] != (batch_size,):
        text = f"must hold batch_size={batch_size} examples along its first dimension; its shape is"
        raise RecipeError(
            f"the first tensor of make_batch(options, batch_size, generator) {text} {list(batch[0].shape)}"
        )
    return batch


def build_step(
    config: RunConfig,
    module: LossModule,
    tokens_per_batch: int,
    reserved_bytes: int = 0,
    decisions: str | Record | None = None,
) -> TrainStep:
    """The training step of `engine.name`; reserved_bytes: in memory beside what the step sees; decisions: see
    `build_job`.

    Nothing is compiled yet: that happens at the first call, see `prepare`."""
    engine = config.engine.name
    counts: Any = {"tokens_per_batch": tokens_per_batch, "shares": module.shares, "module": module}
    if engine == "eager":
        return ModuleStep(engine, module, **counts)
    if engine == "torch_compile":
        compiled_by = torch_backend(config.engine.backend, config.engine.activation_memory_budget)
        return ModuleStep(engine, torch.compile(module, backend=compiled_by), **counts)
    if engine == "eager_checkpoint":
        if not (blocks := repeated_modules(module)):
            text = f"recipe {config.recipe.title} repeats no block (an nn.ModuleList or nn.Sequential of one class)"
            raise ConfigError(f"engine={engine}: {text}")
        return ModuleStep(engine, checkpointed(module, blocks), **counts)
    import aottrain  # the compiler, which the other engines do without

    plan = {
        "partition": load_partition(config),
        "budget": config.partition.budget,
        "modules": config.partition.modules,
        "kernel": load_kernel(config),
        "loss_head": config.kernel.loss_head,
        "reserved_bytes": reserved_bytes,
        "cost": config.partition.cost,
        "workspaces": True,
        "decisions": decisions_asked(config) if decisions is None else decisions,
    }
    # Of several micro-batches gradients are summed once, at their end.
    reduces = module.world.num_copies > 1 and config.trainer.accumulate == 1
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    options = {
        "on_unsupported": config.engine.on_unsupported,
        "cuda_graphs": config.kernel.cuda_graphs,
        "memory_bytes": total_bytes(device),
        "reduce_over": module.world.copies_group if reduces else None,
    }

    def compiled_with(plan: Any) -> Any:
        return aottrain.compile(module, capture="trace", dynamic="auto", **{**options, **plan})

    def explain(batch: Batch) -> str:
        with_changes = {**plan, **programs.changes}
        return str(aottrain.bisect(module, batch, folder=Path(config.output_dir) / "bisect", **with_changes))

    def compile_for(batch: Batch) -> GraphReport | None:
        with suppress(UnsupportedError):  # the call will run eagerly and be counted, or raise this itself
            if step.call is not module:
                return step.call.prepare(*split_batch(batch, step.splits)[0])
        return None

    compiled = compiled_with(plan)
    more: Any = {"explain": explain, "compile_for": compile_for, "reduces": reduces}
    step = ModuleStep(engine, compiled, **counts, report=compiled.report, **more)
    step.rungs = programs = Programs(step, module, compiled_with, plan)
    return step


def raise_own_error(job: Job) -> None:
    """Where the step cannot be compiled: raise what the program itself raises, if that is why."""
    with preserved(job.module):
        job.module(*job.batches.at(1)[0])


def load_kernel(config: RunConfig) -> str | Callable[..., Any]:
    """The kernel's name, or for kernel=custom the function that `kernel.target` names."""
    return config.kernel.name if config.kernel.target is None else load_target("kernel", config.kernel.target)


def load_partition(config: RunConfig) -> Any:
    """The strategy's name; for partition=policy the function that `partition.target` names, for partition=plan the plan
    that `partition.path` has."""
    partition = config.partition
    if partition.path is not None:
        from aottrain.compiler.partition.stored import read_plan

        return read_plan(partition.path)
    return partition.strategy if partition.target is None else load_target("partition", partition.target)
