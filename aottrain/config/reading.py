"""A RunConfig from plain values, with every mistake in them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from aottrain.config.choices import OBJECTIVES, RUN_TASKS, TOKENIZERS
from aottrain.config.extensions.metrics import FORM, Judge, own_objectives
from aottrain.config.extensions.own_code import shown
from aottrain.config.extensions.recipes import lacks_for_data, program_errors, recipe_names, recipe_of
from aottrain.config.extensions.targets import KINDS, Kind, is_well_formed
from aottrain.config.folders import is_address
from aottrain.config.run import DEVICES as DEVICE_FORMS
from aottrain.config.run import ParetoConfig, PartitionConfig, RunConfig
from aottrain.config.schema import Mistake, build, join, no_section, show, suggest
from aottrain.errors import ConfigError, RecipeError
from aottrain.ir.settings.budget import ALLOWED, parse_budget
from aottrain.ir.settings.decisions import DEFAULT, MEASURED
from aottrain.ir.settings.devices import DEVICES, is_file, is_specified


def read_config(values: Mapping[str, Any]) -> tuple[RunConfig, list[Mistake]]:
    """The RunConfig that a composed dictionary says, and every mistake in it that can be told without importing torch.

    `recipe.model` is left as the plain dictionary that it came as: see `read_model`.
    """
    config, mistakes = build(RunConfig, {key: value for key, value in values.items() if key != "output_dir"})
    if "output_dir" in values:
        mistakes.append(Mistake("output_dir", "is set by Hydra; write hydra.run.dir=...", show(values["output_dir"])))
    seen = {mistake.key for mistake in mistakes}
    return config, mistakes + [mistake for mistake in _contradictions(config) if mistake.key not in seen]


def _contradictions(config: RunConfig) -> list[Mistake]:
    """Mistakes that are seen only by looking at several keys, or at a text's form."""
    mistakes = []
    schedule, engines = config.lr_schedule, config.compare.engines
    mistakes += _partition_mistakes(config.partition)
    for kind in KINDS.values():
        mistakes += _target_mistakes(kind, getattr(config, kind.group))
    mistakes += _section_mistakes("sweep.options", config.sweep.options)
    mistakes += _device_mistakes(config)
    if schedule.total_steps is not None and schedule.total_steps <= schedule.warmup_steps:
        text = f"must be more than lr_schedule.warmup_steps={schedule.warmup_steps}"
        mistakes.append(Mistake("lr_schedule.total_steps", text, show(schedule.total_steps)))
    if not engines or len(set(engines)) < len(engines):
        mistakes.append(Mistake("compare.engines", "must name at least one engine, and none twice", show(engines)))
    save_every, keep_every = config.trainer.save_every, config.trainer.keep_every
    if keep_every and (not save_every or keep_every % save_every):
        text = f"must be a multiple of trainer.save_every={save_every}, the steps that have a checkpoint, or 0"
        mistakes.append(Mistake("trainer.keep_every", text, show(keep_every)))
    if config.trainer.patience is not None and not config.trainer.eval_every:
        text = "needs trainer.eval_every, the steps after which the held-out loss is measured"
        mistakes.append(Mistake("trainer.patience", text, show(config.trainer.patience)))
    mistakes += _judging_mistakes(config)
    mistakes += _pareto_mistakes(config.pareto)
    if config.task in RUN_TASKS and getattr(config, config.task).run is None:
        text = f"task={config.task} needs the output directory of a run"
        mistakes.append(Mistake(f"{config.task}.run", text, "null"))
    if not config.generate.prompt:
        mistakes.append(Mistake("generate.prompt", "must not be empty", ""))
    if config.task == "pareto" and config.partition.strategy != "budget":
        text = "task=pareto varies the budget; use partition=budget"
        mistakes.append(Mistake("partition", text, config.partition.strategy))
    if config.logger.name in ("wandb", "mlflow") and not config.logger.project.strip():
        mistakes.append(Mistake("logger.project", "must not be empty"))
    return mistakes


def _judging_mistakes(config: RunConfig) -> list[Mistake]:
    """Of what names a metric, as far as no recipe is needed."""
    mistakes = []
    try:
        Judge.of(config.trainer.judge_by)
    except ValueError:
        mistakes.append(Mistake("trainer.judge_by", f"must be {FORM}", config.trainer.judge_by))
    objectives = config.sweep.objectives
    unknown = [name for name in objectives if name not in {*OBJECTIVES, *own_objectives(objectives)}]
    if unknown or not objectives:
        near = suggest(unknown[0], OBJECTIVES) if unknown else ""
        text = f"each must be one of {', '.join(OBJECTIVES)}, or a metric of the recipe's own, as accuracy:max{near}"
        mistakes.append(Mistake("sweep.objectives", text, show(objectives)))
    return mistakes


def _device_mistakes(config: RunConfig) -> list[Mistake]:
    mistakes = []
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        if not is_specified(config.device):
            names = ", ".join(DEVICES)
            kinds = [name for name in DEVICES if name.startswith(f"{config.device}-")]
            near = f"; did you mean {' or '.join(kinds)}?" if kinds else suggest(config.device, DEVICES)
            text = f"is not known{near}; must be {DEVICE_FORMS} (names: {names})"
            mistakes.append(Mistake("device", text, config.device))
        elif config.task != "plan":
            text = f"is planned for by task=plan alone; task={config.task} needs one of auto, cpu, cuda, cuda:N"
            mistakes.append(Mistake("device", text, config.device))
    plan = config.plan
    try:
        for budget in plan.budgets:
            parse_budget(budget)
    except ValueError:
        mistakes.append(Mistake("plan.budgets", f"each must be {ALLOWED}", show(plan.budgets)))
    if plan.budgets and config.partition.strategy != "budget":
        text = f"partition={config.partition.strategy} takes no budget; use partition=budget"
        mistakes.append(Mistake("plan.budgets", text, show(plan.budgets)))
    given = [key for key, value in dataclasses.asdict(plan).items() if value not in ((), 1)]
    if given and config.task == "plan" and not is_specified(config.device) and not mistakes:
        text = f"device={config.device} is planned as it is; give the name of a device (names: {', '.join(DEVICES)})"
        mistakes += [Mistake(f"plan.{key}", text, show(getattr(plan, key))) for key in given]
    return mistakes


def _pareto_mistakes(pareto: ParetoConfig) -> list[Mistake]:
    mistakes = []
    try:
        budgets = [parse_budget(budget) for budget in pareto.budgets]
        if not budgets or len(set(budgets)) < len(budgets):
            text = "must name at least one budget, and none twice"
            mistakes.append(Mistake("pareto.budgets", text, show(pareto.budgets)))
    except ValueError:
        mistakes.append(Mistake("pareto.budgets", f"each must be {ALLOWED}", show(pareto.budgets)))
    if len(set(pareto.engines)) < len(pareto.engines):
        mistakes.append(Mistake("pareto.engines", "must name none twice", show(pareto.engines)))
    for key in ("torch_backends", "torch_budgets"):
        values = getattr(pareto, key)
        if not values or len(set(values)) < len(values):
            text = "must name at least one, and none twice; leave torch_compile out of pareto.engines for none"
            mistakes.append(Mistake(f"pareto.{key}", text, show(values)))
    return mistakes


def _partition_mistakes(partition: PartitionConfig) -> list[Mistake]:
    mistakes = []
    if partition.strategy == "budget":
        try:
            parse_budget(partition.budget)
        except ValueError:
            mistakes.append(Mistake("partition.budget", f"must be {ALLOWED}", show(partition.budget)))
    elif partition.budget is not None:
        text = f"partition={partition.strategy} takes no budget; leave it out or use partition=budget"
        mistakes.append(Mistake("partition.budget", text, show(partition.budget)))
    if (partition.strategy == "plan") != (partition.path is not None):
        text = "partition=plan needs the path of a plan.json" if partition.path is None else (
            f"partition={partition.strategy} takes no path; use partition=plan"
        )  # fmt: skip
        mistakes.append(Mistake("partition.path", text, show(partition.path)))
    if partition.strategy != "checkpoint" and partition.modules:
        text = f"partition={partition.strategy} takes no modules; use partition=checkpoint"
        mistakes.append(Mistake("partition.modules", text, show(partition.modules)))
    return mistakes


def _target_mistakes(kind: Kind, section: Any) -> list[Mistake]:
    """`target`: for the option of the group that wants one and for no other; and its `options`, keys with values."""
    group, target = kind.group, section.target
    name = section.strategy if group == "partition" else section.name
    takes_one = name == kind.option or (group == "recipe" and name not in recipe_names())
    if group == "recipe" and takes_one and name != kind.option and target is None:
        text = f"unknown recipe{suggest(name, recipe_names())} (recipes: {', '.join(recipe_names())})"
        return [Mistake("recipe.name", f"{text}; one of your own is named by {kind.key}", name)]
    if takes_one and not is_well_formed(group, target):
        near = kind.near(target)
        meant = f"; did you mean {kind.key}={near}?" if near else ""
        return [Mistake(kind.key, f"{group}={name} needs {kind.form}, {_meaning(kind)}{meant}", show(target))]
    if not takes_one and target is not None:
        return [Mistake(kind.key, f"{group}={name} takes no target; use {group}={kind.option}", show(target))]
    return _section_mistakes(kind.options_key, getattr(section, kind.options)) if kind.options else []


def _section_mistakes(key: str, options: Any) -> list[Mistake]:
    """Of a value that is to be keys of its own, or null."""
    if isinstance(options, Mapping) and all(isinstance(name, str) for name in options) or options is None:
        return []
    return [no_section(key, options)]


def _meaning(kind: Kind) -> str:
    """What a target of the kind is, as its key says it."""
    from aottrain.config.documentation import keys  # reads sources, which only a mistake needs

    text = keys()[kind.key].meaning.removesuffix("; needed.")
    return text[:1].lower() + text[1:]


def read_model(config: RunConfig) -> tuple[RunConfig, list[Mistake]]:
    """The configuration with `recipe.model` as the recipe's `Options`. Imports the recipe, and with it torch."""
    prefix = "recipe.model"
    values = {} if config.recipe.model is None else config.recipe.model
    target = config.recipe.target
    given = ("recipe", config.recipe.name) if target is None else ("recipe.target", target)
    try:
        recipe = recipe_of(config.recipe)
        if config.data.target is None and (lacks := lacks_for_data(recipe)):
            return config, [Mistake(given[0], f"{shown(str(recipe.__file__))} {lacks}", given[1])]
        with program_errors(config):
            model, mistakes = build(recipe.Options, values, prefix)
            lines = model.check()
    except ConfigError as error:
        return config, [Mistake.from_line(line) for line in error.mistakes]
    except RecipeError as error:
        return config, [Mistake(given[0], str(error), given[1])]
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        text = f"Options.check() must return a list of texts, it returned {lines!r}"
        return config, [Mistake(given[0], text, given[1])]
    mistakes += [] if hasattr(recipe, "metrics") else without_metrics(config)
    seen = {mistake.key for mistake in mistakes}
    refused = [Mistake.from_line(join(prefix, line)) for line in lines]
    mistakes += [mistake for mistake in refused if mistake.key not in seen]
    return dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, model=model)), mistakes


def without_metrics(config: RunConfig, names: Collection[str] = ()) -> list[Mistake]:
    """What is judged by a metric that is not among these, which the recipe has."""
    trainer = config.trainer
    mistakes = []
    if trainer.keep_best or trainer.patience is not None:
        with suppress(ValueError):  # a wrong form, which is a mistake of its own
            text = Judge.of(trainer.judge_by).lacks(names)
            mistakes = [Mistake("trainer.judge_by", text, trainer.judge_by)] if text else []
    lacks = [text for judge in own_objectives(config.sweep.objectives).values() if (text := judge.lacks(names))]
    return mistakes + [Mistake("sweep.objectives", text, show(config.sweep.objectives)) for text in lacks]


def absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with paths that no later change of directory can break; `~` is the home directory."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else os.path.abspath(os.path.expanduser(path))

    tokenizer = config.data.tokenizer
    tokenizer = tokenizer if tokenizer in TOKENIZERS else absolute(tokenizer)
    data = dataclasses.replace(config.data, path=absolute(config.data.path), tokenizer=tokenizer)
    adapter = dataclasses.replace(config.adapter, base=absolute(config.adapter.base))
    of_runs = {task: getattr(config, task) for task in RUN_TASKS}
    of_runs = {task: dataclasses.replace(section, run=absolute(section.run)) for task, section in of_runs.items()}
    of_runs["export"] = dataclasses.replace(of_runs["export"], path=absolute(config.export.path))
    uri = config.logger.uri
    logger = dataclasses.replace(config.logger, uri=uri if uri is None or is_address(uri) else absolute(uri))
    resume = config.resume if config.resume == "auto" else absolute(config.resume)
    named = config.decisions if config.decisions in (MEASURED, DEFAULT) else absolute(config.decisions)
    changed: dict[str, Any] = {"data": data, "adapter": adapter, "logger": logger, "resume": resume, **of_runs}
    changed["decisions"] = named
    changed["partition"] = dataclasses.replace(config.partition, path=absolute(config.partition.path))
    changed["device"] = absolute(config.device) if is_file(config.device) else config.device
    return dataclasses.replace(config, **changed)
