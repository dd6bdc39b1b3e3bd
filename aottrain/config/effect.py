"""Keys that a person gives and that the run, as it is configured, never reads: each is said before it begins.

A task or an engine uses some of the keys alone; the others are listed here and nowhere else. The tests run the tasks
and compare this with what they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import ModuleType

from aottrain.config.choices import RUN_TASKS
from aottrain.config.extensions.metrics import own_objectives
from aottrain.config.extensions.recipes import makes_batches, writes_text
from aottrain.config.launch import place
from aottrain.config.run import DataConfig, RunConfig
from aottrain.ir.settings.decisions import DEFAULT, MEASURED

# What is done beside the steps.
_AROUND = ("trainer.eval_every", "trainer.save_every", "trainer.save", "trainer.keep_last", "trainer.keep_every",
           "trainer.keep_best", "trainer.judge_by", "trainer.sample_bytes", "trainer.sample_at_evals")  # fmt: skip
_BESIDE = (*_AROUND, "trainer.eval_batches")
# What is done where a step goes wrong.
_MISHAPS = ("trainer.on_nonfinite", "trainer.on_spike", "trainer.spike_deviations", "trainer.max_skips",
            "trainer.max_rollbacks", "trainer.rollback_every", "trainer.on_oom")  # fmt: skip
_TRAINING = ("optimizer", "lr_schedule", "verify", "measure", "logger", "profile", "trainer.steps", "trainer.log_every",
             "trainer.patience", *_MISHAPS, *_AROUND)  # fmt: skip
_PEERS_OWN = ("engine.backend", "engine.activation_memory_budget")
_COMPILER = ("partition", "kernel", "engine")
# Of which only the type of the device tells whether they are read; finding that out imports torch.
OF_DEVICE = ("kernel.cuda_graphs",)


@dataclass(frozen=True)
class Idle:
    """Keys without effect."""

    keys: tuple[str, ...]
    """Dotted names; that of a section stands for all its keys."""
    why: str
    but: str = ""
    """What they do have an effect on."""

    def names(self, key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in self.keys)


def without_effect(
    config: RunConfig, given: Mapping[str, str], recipe: ModuleType | None = None, device: str = ""
) -> list[str]:
    """A line for each reason for which something that was given has no effect.

    given: what was typed, by its key. recipe: that of `config`, whose options are read; device: its type, as "cuda";
    what hangs on them is left out where they are not known yet.
    """
    lines, said = [], set()
    for item in (*idle(config), *_of_recipe(config, recipe), *_of_device(device)):
        typed = {key: text for key, text in given.items() if item.names(key) and key not in said}
        typed = {key: text for key, text in typed.items() if not _asks_for_nothing(config, key)}
        said |= typed.keys()
        if typed:
            verb = "has" if len(typed) == 1 else "have"
            but = f" but on {item.but}" if item.but else ""
            lines.append(f"warning: {', '.join(typed.values())} {verb} no effect{but}: {item.why}")
    return lines


def _asks_for_nothing(config: RunConfig, key: str) -> bool:
    """Whether it only says that something is not to be done, which is so: `trainer.sample_bytes=0`."""
    section, _, name = key.partition(".")
    return key in (*_BESIDE, "verify.steps") and not getattr(getattr(config, section), name)


def idle(config: RunConfig) -> Iterator[Idle]:
    """What the configuration alone tells, the task first."""
    task = config.task
    for section in ("compare", "plan", "pareto", *RUN_TASKS):
        if section != task:
            yield Idle((section,), f"task={section} alone reads it")
    if task in RUN_TASKS:
        yield Idle(("resume",), f"the run is {task}.run")
    elif task != "train":
        yield Idle(("resume",), f"task={task} begins with new weights", "the settings, which are those of that run")
    yield from _OF_TASK[task](config)
    if config.logger.mode == "disabled":
        yield Idle(("logger.project", "logger.group", "logger.run_name", "logger.tags"), "logger.mode=disabled")
    read = {"objectives"} if own_objectives(config.sweep.objectives) else set()  # of a job
    others = tuple(f"sweep.{item.name}" for item in fields(config.sweep) if item.name not in read)
    yield Idle(others, "a sweep alone reads it")
    if not config.trainer.keep_best and config.trainer.patience is None:
        yield Idle(("trainer.judge_by",), "trainer.keep_best=false and trainer.patience=null judge nothing")
    if config.sweep.search != "optuna":
        idle_ones = ("sweep.trials", *(() if read else ("sweep.objectives",)))
        yield Idle(idle_ones, "sweep.search=all runs all combinations")
    if config.sweep.executor != "submitit":
        yield Idle(("sweep.options",), "sweep.executor=here takes none")
    is_planned = task == "plan" and config.parallel.world is not None
    if place().size == 1 and not is_planned and config.parallel.name != "none":
        yield Idle(("parallel",), "this is the only process; torchrun starts several")
    elif not is_planned:
        yield Idle(("parallel.world",), "torchrun has started the processes")
    if config.parallel.name == "shard" and config.parallel.replicas == 1:
        yield Idle(("parallel.replica_latency", "parallel.replica_bandwidth"), "parallel.replicas=1")
        yield Idle(("parallel.compare_every",), "parallel.replicas=1: no two processes hold the same")
    yield from _of_bad_steps(config)
    yield from _of_saves(config)
    if config.resume is None:
        yield Idle(("resume_override",), "resume is null")
    if config.trainer.deterministic and config.decisions == MEASURED:
        yield Idle(("decisions",), "trainer.deterministic=true takes decisions=default")
    elif config.decisions == DEFAULT and config.partition.cost == "measured":
        yield Idle(("partition.cost",), "decisions=default prices by FLOPs and bytes")


def _of_saves(config: RunConfig) -> Iterator[Idle]:
    if not config.trainer.save_every:
        yield Idle(("trainer.save",), "trainer.save_every=0 writes the last alone, now", "what SIGUSR1 asks for")


def _of_bad_steps(config: RunConfig) -> Iterator[Idle]:
    nonfinite, spike = config.trainer.on_nonfinite, config.trainer.on_spike
    policies = f"trainer.on_nonfinite={nonfinite} and trainer.on_spike={spike}"
    if "skip" not in (nonfinite, spike):
        yield Idle(("trainer.max_skips",), f"{policies} leave out no step")
    if "rollback" not in (nonfinite, spike):
        yield Idle(("trainer.max_rollbacks", "trainer.rollback_every"), f"{policies} never go back")
    if spike == "ignore":
        yield Idle(("trainer.spike_deviations",), "trainer.on_spike=ignore does not look")


def _of_train(config: RunConfig) -> Iterator[Idle]:
    engine = config.engine.name
    if engine != "aot":
        own = "; its own is engine.activation_memory_budget" if engine == "torch_compile" else ""
        yield Idle(("partition",), f"engine={engine} takes none{own}")
        yield Idle(("kernel",), f"engine={engine} runs kernels of its own")
        yield Idle(("verify",), f"engine={engine} is not ours to check")
    elif not config.verify.every:
        if not config.verify.steps:
            keys = ("verify.loss_tolerance", "verify.grad_tolerance", "verify.bisect", "verify.on_breach")
            yield Idle(keys, "verify.steps=0 checks nothing")
        yield Idle(("verify.share",), "verify.every=0 checks nothing in flight")


def _of_compare(config: RunConfig) -> Iterator[Idle]:
    schedule, engines = config.lr_schedule, config.compare.engines
    scheduled = schedule.total_steps is None and config.trainer.steps > schedule.warmup_steps
    but = "the learning rate" if scheduled else ""
    yield Idle(("trainer.steps",), f"task=compare measures compare.steps={config.compare.steps}", but)
    yield Idle(("engine.name",), "task=compare runs compare.engines")
    yield from _of_steps_alone("compare")
    yield Idle(("logger.run_name",), "each run is called by its engine")
    if "aot" not in engines:
        yield Idle(_COMPILER[:2], "compare.engines has no aot")
    if "torch_compile" not in engines:
        yield Idle(_PEERS_OWN, "compare.engines has no torch_compile")


def _of_pareto(config: RunConfig) -> Iterator[Idle]:
    pareto, schedule = config.pareto, config.lr_schedule
    scheduled = schedule.total_steps is None and config.trainer.steps > schedule.warmup_steps
    but = "the learning rate" if scheduled else ""
    yield Idle(("trainer.steps",), "task=pareto measures pareto.rounds of pareto.steps", but)
    yield Idle(("engine.name", *_PEERS_OWN), "task=pareto runs aot, and pareto.engines by pareto.torch_budgets")
    yield Idle(("partition.budget",), "task=pareto runs pareto.budgets")
    yield from _of_steps_alone("pareto")
    yield Idle(("logger", "profile", "trainer.log_every", "measure.memory", *_MISHAPS),
               "task=pareto logs nothing and always measures memory")  # fmt: skip
    if "torch_compile" not in pareto.engines:
        yield Idle(("pareto.torch_backends", "pareto.torch_budgets"), "pareto.engines has no torch_compile")
    if not pareto.engines:
        yield Idle(("pareto.match_peaks",), "pareto.engines has none")


def _of_steps_alone(task: str) -> Iterator[Idle]:
    yield Idle(_BESIDE, f"task={task} takes steps and does nothing beside them")
    yield Idle(("verify",), f"task={task} checks no step")


def _of_plan(config: RunConfig) -> Iterator[Idle]:
    """No step is run; but what a step would be trained with belongs to the run that is planned, and is not named."""
    if config.engine.name != "aot":
        yield Idle(("engine.name", *_PEERS_OWN), "task=plan plans for engine=aot")


def _of_eval(config: RunConfig) -> Iterator[Idle]:
    yield Idle((*_TRAINING, "partition"), "task=eval trains nothing")
    if config.eval.batches is not None:
        yield Idle(("trainer.eval_batches",), f"eval.batches={config.eval.batches} stands")
    if config.engine.name != "aot":
        own = ("kernel", *_PEERS_OWN, "engine.on_unsupported", "decisions")
        yield Idle(own, f"task=eval runs the model eagerly under engine={config.engine.name}")


def _of_generate(config: RunConfig) -> Iterator[Idle]:
    unread = ("trainer.eval_batches", "trainer.num_threads", "trainer.ema", "kernel.loss_head", "kernel.cuda_graphs")
    yield Idle((*_TRAINING, "partition", *unread), "task=generate trains nothing")
    if config.engine.name != "aot":
        own = ("kernel", *_PEERS_OWN, "engine.on_unsupported", "decisions")
        yield Idle(own, f"task=generate runs the model eagerly under engine={config.engine.name}")
    if config.generate.temperature == 0:
        yield Idle(("generate.top_k", "generate.seed"), "generate.temperature=0 draws nothing")
    if config.generate.seed is not None:
        yield Idle(("seed",), f"generate.seed={config.generate.seed} stands")


def _of_export(config: RunConfig) -> Iterator[Idle]:
    yield Idle((*_TRAINING, *_COMPILER, "trainer", "data", "seed", "device", "decisions"),
               "task=export writes the weights as they are")  # fmt: skip


def _of_measure(config: RunConfig) -> Iterator[Idle]:
    unread = ("recipe", "data", "engine", "partition", "kernel", "optimizer", "lr_schedule", "verify", "logger")
    yield Idle((*unread, "trainer", "measure", "seed", "decisions"), "task=measure takes the rates of the machine")


def _of_tour(config: RunConfig) -> Iterator[Idle]:
    unread = ("recipe", "data", "engine", "partition", "optimizer", "lr_schedule", "trainer", "verify", "logger")
    yield Idle((*unread, "seed", "decisions"), "task=tour shows small programs of its own")


_OF_TASK = {
    "train": _of_train,
    "compare": _of_compare,
    "plan": _of_plan,
    "pareto": _of_pareto,
    "export": _of_export,
    "eval": _of_eval,
    "generate": _of_generate,
    "tour": _of_tour,
    "measure": _of_measure,
}


def _of_recipe(config: RunConfig, recipe: ModuleType | None) -> Iterator[Idle]:
    options = config.recipe.model
    if recipe is None or not isinstance(options, recipe.Options):
        return
    name = config.recipe.title
    if config.data.target is None and config.data.name == DataConfig.name and makes_batches(recipe, options):
        used = ("name", "target", "batch_size")
        keys = tuple(f"data.{key}" for key in DataConfig.__dataclass_fields__ if key not in used)
        yield Idle(keys, f"recipe {name} makes its own data")
    if not writes_text(recipe, options):
        yield Idle(("trainer.sample_bytes", "trainer.sample_at_evals"), f"recipe {name} writes no text")


def _of_device(device: str) -> Iterator[Idle]:
    if device and device != "cuda":
        yield Idle(OF_DEVICE, f"there are none on a {device.upper()}")
