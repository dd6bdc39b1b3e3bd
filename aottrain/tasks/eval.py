"""task=eval: the model of a run on held-out data: loss, perplexity, accuracy; a table and eval.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from aottrain.config.extensions.recipes import program_errors, recipe_of
from aottrain.config.run import RunConfig
from aottrain.errors import UnsupportedError
from aottrain.explain.report import CompileReport
from aottrain.metrics.sinks import write_summary
from aottrain.metrics.throughput import StepTimer
from aottrain.step import Batch
from aottrain.tasks.building.build import build_job, load_kernel, raise_own_error
from aottrain.tasks.building.loading import load_weights, newest_of_run
from aottrain.tasks.measuring.determinism import as_deterministic_as_asked, decisions_asked
from aottrain.trainer.evaluation import (
    TOP,
    Scored,
    Tally,
    bits_per_byte,
    evaluating,
    mean_loss,
    own_figures,
    perplexity,
)
from aottrain.trainer.job import Job
from aottrain.trainer.reliability.signals import interruptible

FILE = "eval.json"
# What the table shows, by its key in eval.json: the name, and how the number is written.
ROWS = {
    "loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ".4g"),
    "bits_per_byte": ("bits a byte", ".3f"),
    "accuracy": ("accuracy", ".2%"),
    "top_accuracy": (f"in the first {TOP}", ".2%"),
    "num_batches": ("batches", ","),
    "num_examples": ("examples", ","),
    "seconds": ("seconds", ".3g"),
}


def run(config: RunConfig) -> int:
    """Measure the newest checkpoint of `eval.run` on held-out data; print a table and write eval.json.

    ConfigError: the data or the device is not there. ResumeError: there is no checkpoint, or it is of another model.
    UnsupportedError: it cannot be compiled, under engine.on_unsupported=error. OutputError: eval.json is not written.
    """
    with interruptible(), program_errors(config), as_deterministic_as_asked(config):
        loaded = newest_of_run("eval.run", config.eval.run)
        job = build_job(config)
        for line in job.batches.notes:
            print(line)
        load_weights(job.module.model, loaded, "eval.weights", config.eval.weights)
        figures, report = measure(config, job)
    found = {"run": config.eval.run, "checkpoint": str(loaded.path), "step": loaded.step, "recipe": job.name, **figures}
    path = Path(config.output_dir, FILE)
    write_summary(path, found)
    print(render(found, report))
    print(f"results: {path}", flush=True)
    return 0


def measure(config: RunConfig, job: Job) -> tuple[dict[str, Any], CompileReport | None]:
    """What eval.json says of the model as it is now, and the report of its compilation, where it was compiled.

    seconds: of the pass over the batches, without reading them and without compiling.
    """
    predict = getattr(recipe_of(config.recipe), "predict", None)
    module = job.module if predict is None else Scored(job.module, predict)
    tally = Tally()
    with evaluating(module):
        batches = job.batches.held_out(config.eval.batches or config.trainer.eval_batches)
        call, report = prepared(config, job, module, batches)
        timer = StepTimer(job.device)
        with timer.time(0):
            loss = mean_loss(call if predict is None else _counting(call, tally), job.module.shares, batches)
        seconds = timer.read()[0] / 1e3
        own = own_figures(job, batches)
    return {
        "run_by": "eager" if report is None or report.num_eager_calls else "aot",
        "loss": loss,
        "perplexity": perplexity(loss, job.batches),
        "bits_per_byte": bits_per_byte(loss, job.batches),
        "accuracy": tally.accuracy,
        "top_accuracy": tally.top_accuracy,
        "num_batches": len(batches),
        "num_examples": sum(len(batch[0]) for batch in batches),
        "seconds": seconds,
        "metrics": own,
    }, report


def prepared(
    config: RunConfig, job: Job, module: torch.nn.Module, batches: Sequence[Batch]
) -> tuple[Callable[..., Any], CompileReport | None]:
    """What runs the module: under engine aot a program of its forward alone, for which there is no budget to keep to,
    compiled here for the first batch; else the module itself."""
    if config.engine.name != "aot":
        return module, None
    import aottrain  # the compiler, which the other engines do without

    compiled = aottrain.compile(
        module,
        capture="trace",
        dynamic="auto",
        kernel=load_kernel(config),
        loss_head=config.kernel.loss_head,
        on_unsupported=config.engine.on_unsupported,
        cuda_graphs=config.kernel.cuda_graphs,
        decisions=decisions_asked(config),
    )
    with suppress(UnsupportedError):  # the call will run eagerly and be counted, or raise this itself
        compiled.prepare(*batches[0])
    if not compiled.report.graphs:
        raise_own_error(job)
    return compiled, compiled.report


def _counting(call: Callable[..., Any], tally: Tally) -> Callable[..., torch.Tensor]:
    def loss_of(*batch: torch.Tensor) -> torch.Tensor:
        loss, predicted = call(*batch)
        tally.add(predicted)
        return loss

    return loss_of


def render(found: dict[str, Any], report: CompileReport | None) -> str:
    """The table, and what of it ran eagerly though it was to be compiled."""
    lines = [f"{found['recipe']} after step {found['step']} of {found['run']}, held-out data, run by {found['run_by']}"]
    width = max(len(name) for name in (*(name for name, _ in ROWS.values()), *found["metrics"]))
    lines += [f"  {name:<{width}}  {found[key]:{form}}" for key, (name, form) in ROWS.items() if found[key] is not None]
    lines += [f"  {name:<{width}}  {value:.4g}" for name, value in found["metrics"].items()]
    fallbacks = report.fallbacks if report else ()
    return "\n".join([*lines, *(f"runs eagerly: {item.reason} {item.source}".rstrip() for item in fallbacks)])
