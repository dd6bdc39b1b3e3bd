"""task=train: build, compile, check, train, evaluate; and leave metrics.csv, summary.json, checkpoints and a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from aottrain.config import RunConfig
from aottrain.ir.figures import with_optimizer
from aottrain.ir.report import CompileReport, GraphReport
from aottrain.ir.units import format_bytes, format_count, format_seconds
from aottrain.metrics.memory import eager_saved_bytes
from aottrain.metrics.sinks import CsvSink, Sink, write_summary
from aottrain.metrics.wandb_sink import WandbSink
from aottrain.report import html
from aottrain.runtime.machine import describe_machine
from aottrain.tasks.build import accumulation_bytes, build_job
from aottrain.trainer.checkpoint import CheckpointFolder, Loaded, check_identity, find, identity
from aottrain.trainer.job import Job
from aottrain.trainer.loop import Output, fit, prepare, restore
from aottrain.trainer.optim import optimizer_state_bytes

Say = Callable[[str], None]


def say(line: str) -> None:
    print(line, flush=True)


def run(config: RunConfig) -> int:
    """Train as `config` says. Returns 0, or 128 + the number of the signal that ended the run early (130, 143).

    Raises ConfigError, CheckpointError, NumericsError, BudgetError or UnsupportedError. Once the run has begun,
    metrics.csv and summary.json ("status": "failed", with the error) are there after a failure too.
    """
    job = build_job(config)
    directory = Path(config.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    checkpoints = CheckpointFolder(directory / "checkpoints")
    resume = _find_checkpoint(config, job, checkpoints)
    summary = first_summary(config, job)
    sinks: list[Sink] = [CsvSink(directory / "metrics.csv", kept_steps=resume.step if resume else 0)]
    summary_path, exit_code = directory / "summary.json", 1
    try:
        wandb_sink = open_wandb(config, directory, resume)
        sinks += [wandb_sink] if wandb_sink else []
        write_summary(summary_path, summary)
        if resume:
            restore(job, resume)
            summary["steps"] = resume.step
        summary["compile_s"], summary["compile_peak_bytes"] = prepare(job)
        summary.update(compile_figures(job, summary))
        for line in banner(config, job, summary):
            say(line)
        output = Output(sinks, summary, summary_path, checkpoints, lambda: wandb_sink.run_id if wandb_sink else None)
        stop = fit(job, config, output, resume)
        summary["status"] = "finished" if stop.signum is None else "interrupted"
        exit_code = stop.exit_code
        _say_results(config, job, summary, directory, wandb_sink)
    except BaseException as error:
        summary["status"] = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        summary["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        summary.update(report_figures(job.step.report, summary))
        write_summary(summary_path, summary)
        for sink in sinks:
            sink.close(summary, exit_code)
        if job.step.report is not None:
            html.write(job.step.report, directory / "compile_report.html", summary)
    return exit_code


def _find_checkpoint(config: RunConfig, job: Job, checkpoints: CheckpointFolder) -> Loaded | None:
    resume = find(config.resume, checkpoints, say)
    if resume is None:
        if config.resume is not None:
            say(f"resume={config.resume}: no checkpoint in {checkpoints.directory} yet, so this starts at step 1")
        return None
    check_identity(resume.state["identity"], identity(config, job.batches.fingerprint), resume.path)
    say(f"going on after step {resume.step} from {resume.path}")
    if resume.step >= config.trainer.steps:
        say(f"trainer.steps={config.trainer.steps} has been reached already: nothing to train")
    return resume


def first_summary(config: RunConfig, job: Job) -> dict[str, Any]:
    """Every key that summary.json promises, with what is known before the first step and None for the rest."""
    compiled = config.engine.name == "aot"
    notes = {"torch_compile": "torch.compile draws other random numbers than eager, so it cannot be checked"}
    return {
        "status": "running",
        "recipe": config.recipe.name,
        "engine": config.engine.name,
        "kernel": config.kernel.target or config.kernel.name if compiled else None,
        "partition": config.partition.strategy if compiled else None,
        "budget": config.partition.budget if compiled else None,
        "steps": 0,
        "first_loss": None,
        "last_loss": None,
        "val_loss": None,
        "step_ms_median": None,
        "step_ms_p90": None,
        "tokens_per_s": None,
        "compile_s": None,
        "peak_bytes": None,
        "predicted_peak_bytes": None,
        "saved_bytes": None,
        "eager_saved_bytes": None,
        "fallbacks": 0,
        "verify_max_error": 0.0 if config.engine.name in ("eager", "eager_checkpoint") else None,
        "verify_note": notes.get(config.engine.name),
        "num_parameters": sum(parameter.numel() for parameter in job.module.parameters()),
        "optimizer": config.optimizer.name,
        "optimizer_kernel": job.optimizer_kernel,
        "optimizer_bytes": optimizer_state_bytes(job.module, config.optimizer),
        "accumulation_bytes": accumulation_bytes(job.module, job.batches),
        "seed": config.seed,
        "precision": config.trainer.precision,
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        "torch": str(torch.__version__),
        "machine": describe_machine(job.device),
    }


def train_graph(report: CompileReport) -> GraphReport | None:
    """The program that training runs: the last one with a backward; None if there is none."""
    graphs = [graph for graph in report.graphs if graph.mode == "train"]
    return graphs[-1] if graphs else None


def report_figures(report: CompileReport | None, summary: dict[str, Any]) -> dict[str, Any]:
    """What the compiler says of its program, under summary.json's names; nothing for the other engines.

    The predicted peak is that of a training step, as the measured one is: with the optimizer's state and the gradients
    and batches of other micro-batches, which were reserved when it was compiled.
    """
    if report is None:
        return {}
    figures: dict[str, Any] = {"fallbacks": report.num_fallbacks}
    graph = train_graph(with_optimizer(report, summary["optimizer_bytes"]))
    if graph is not None:
        figures["predicted_peak_bytes"] = graph.predicted_peak_bytes
        figures["saved_bytes"] = graph.saved_bytes
    return figures


def compile_figures(job: Job, summary: dict[str, Any]) -> dict[str, Any]:
    """What is saved for the backward, by this engine and by eager; what eager saves is None where it does not fit."""
    try:
        saved: int | None = eager_saved_bytes(job.module, job.batches.at(1)[0])
    except torch.cuda.OutOfMemoryError:
        saved = None
        torch.cuda.empty_cache()
    figures = {"eager_saved_bytes": saved, "optimizer_kernel": job.optimizer_kernel}
    figures |= report_figures(job.step.report, summary)
    if job.step.engine == "eager":
        figures["saved_bytes"] = saved
    return figures


def open_wandb(config: RunConfig, directory: Path, resume: Loaded | None) -> WandbSink | None:
    """The run's wandb sink, or None where the logger is another one or wandb is disabled."""
    if config.logger.name != "wandb" or config.logger.mode == "disabled":
        return None
    engine, partition = config.engine.name, config.partition
    parts = [engine]
    if engine == "aot":
        budget = "" if partition.budget is None else str(partition.budget)
        parts += [config.kernel.name, partition.strategy + budget]
    return WandbSink(
        config.logger,
        directory=directory,
        config=asdict(config),
        name="-".join([*parts, f"s{config.seed}"]),
        group=config.recipe.name,
        tags=[config.recipe.name, *parts],
        run_id=resume.state["wandb_id"] if resume else None,
        say=say,
    )


def banner(config: RunConfig, job: Job, summary: dict[str, Any]) -> list[str]:
    """What is about to be trained, by whom, and what compiling it took and saved."""
    batches, accumulate = job.batches, config.trainer.accumulate
    size, unit = (batches.tokens_per_batch, "tokens") if batches.tokens_per_batch else (batches.batch_size, "samples")
    lines = [
        f"{job.name}: {format_count(summary['num_parameters'])} parameters, {size * accumulate:,} {unit} a step, "
        f"{summary['device']}, {config.trainer.precision}, torch {torch.__version__}"
    ]
    eager_saved = summary["eager_saved_bytes"]
    of_eager = f" of the {format_bytes(eager_saved)} that eager saves" if eager_saved else ""
    if job.step.engine == "eager":
        lines.append("engine eager" + (f": saves {format_bytes(eager_saved)} for the backward" if eager_saved else ""))
        return lines
    compiled = f"compiled in {format_seconds(summary['compile_s'])}"
    if job.step.engine == "eager_checkpoint":
        return [*lines, f"engine {job.step.engine}: each repeated block runs again in the backward"]
    if job.step.engine != "aot":
        return [*lines, f"engine {job.step.engine}: {compiled}"]
    budget = "" if config.partition.budget is None else f" {config.partition.budget}"
    saved = f", saves {format_bytes(summary['saved_bytes'])}{of_eager}" if summary["saved_bytes"] is not None else ""
    lines.append(f"engine aot, kernel {summary['kernel']}, partition {summary['partition']}{budget}: {compiled}{saved}")
    if config.optimizer.kernel == "auto" and job.optimizer_kernel.startswith("torch"):
        lines.append(f"optimizer {config.optimizer.name} runs as {job.optimizer_kernel}")
    for fallback in job.step.report.fallbacks if job.step.report else ():
        lines.append(f"runs eagerly: {fallback.reason} {fallback.source}".rstrip())
    return lines


def _say_results(
    config: RunConfig, job: Job, summary: dict[str, Any], directory: Path, wandb_sink: WandbSink | None
) -> None:
    """What came out, a sample of what the model writes, and where everything lies."""
    median, rate = summary["step_ms_median"], summary["tokens_per_s"] or summary.get("samples_per_s")
    unit = "tokens/s" if summary["tokens_per_s"] else "samples/s"
    figures = [f"{summary['status']} after step {summary['steps']}"]
    figures += [f"{name} {summary[key]:.4f}" for name, key in LOSSES if summary[key] is not None]
    figures += [f"{median:.1f} ms a step (median), {rate:,.0f} {unit}"] if median and rate else []
    figures += [f"peak {format_bytes(summary['peak_bytes'])}"] if summary["peak_bytes"] else []
    say(", ".join(figures))
    if job.sample is not None and config.trainer.sample_bytes and summary["status"] == "finished":
        say(f"--- it writes:\n{job.sample(config.trainer.sample_bytes)}\n---")
    say(f"results: {directory.resolve()}")
    if wandb_sink is not None and wandb_sink.mode == "offline" and wandb_sink.directory:
        say(f"wandb: wandb sync {wandb_sink.directory}")


LOSSES = (("loss", "last_loss"), ("held-out loss", "val_loss"))
