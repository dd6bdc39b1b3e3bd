"""What summary.json says of a run: its keys, and what is known of them before a step is taken."""

from __future__ import annotations

from typing import Any

import torch

from aottrain.config.run import RunConfig
from aottrain.explain.figures import bytes_by_kind, train_graph, with_optimizer
from aottrain.explain.report import CompileReport
from aottrain.measure.machine import describe_machine
from aottrain.metrics.memory import eager_saved_bytes
from aottrain.tasks.building.build import accumulation_bytes
from aottrain.trainer.job import Job
from aottrain.trainer.optim import optimizer_state_bytes


def first_summary(config: RunConfig, job: Job) -> dict[str, Any]:
    """Every key that summary.json promises, with what is known before the first step and None for the rest."""
    return {**config_summary(config), **job_summary(config, job)}


def config_summary(config: RunConfig) -> dict[str, Any]:
    """The keys of summary.json, with what is known before the model is built."""
    compiled = config.engine.name == "aot"
    notes = {
        "eager": "the step is eager's own",
        "eager_checkpoint": "the step is eager's own",
        "torch_compile": "torch.compile draws other random numbers than eager, so it cannot be checked",
    }
    return {
        "status": "running",
        "recipe": config.recipe.title,
        "engine": config.engine.name,
        "kernel": config.kernel.target or config.kernel.name if compiled else None,
        "partition": config.partition.strategy if compiled else None,
        "budget": config.partition.budget if compiled else None,
        "steps": 0,
        "skipped_steps": 0,
        "rollbacks": 0,
        "replans": [],
        "first_loss": None,
        "last_loss": None,
        "val_loss": None,
        "best_val_loss": None,
        "val_bits_per_byte": None,
        "epochs": None,
        "step_ms_median": None,
        "step_ms_p90": None,
        "save_ms": None,
        "idle_share": None,
        "tokens_per_s": None,
        "mfu": None,
        "compile_s": None,
        "peak_bytes": None,
        "predicted_peak_bytes": None,
        "saved_bytes": None,
        "saved_by_module": None,
        "eager_saved_bytes": None,
        "fallbacks": 0,
        "decisions": None,
        "verify_max_error": None,
        "verify_update_error": None,
        "verify_checks": 0,
        "verify_drift": None,
        "verify_note": notes.get(config.engine.name),
        "num_parameters": None,
        "num_trained": None,
        "optimizer": config.optimizer.title,
        "optimizer_kernel": None,
        "optimizer_bytes": None,
        "accumulation_bytes": None,
        "seed": config.seed,
        "precision": config.trainer.precision,
        "device": config.device,
        "torch": str(torch.__version__),
        "machine": None,
    }


def job_summary(config: RunConfig, job: Job) -> dict[str, Any]:
    """What is known of it once the model is built."""
    sizes = [(job.module.size_of(name), weight.requires_grad) for name, weight in job.module.model.named_parameters()]
    return {
        "num_parameters": sum(size for size, _ in sizes),
        "num_trained": sum(size for size, is_trained in sizes if is_trained),
        "optimizer_kernel": job.optimizer_kernel,
        "optimizer_bytes": optimizer_state_bytes(job.module, config.optimizer, config.trainer.precision),
        "accumulation_bytes": accumulation_bytes(job.module, job.batches),
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        "machine": describe_machine(job.device),
    }


def report_figures(report: CompileReport | None, summary: dict[str, Any]) -> dict[str, Any]:
    """What the compiler says of its program, under summary.json's names; nothing for the other engines.

    The predicted peak is that of a training step, as the measured one is: with the optimizer's state and the gradients
    and batches of other micro-batches, which were reserved when it was compiled.
    """
    if report is None:
        return {}
    figures: dict[str, Any] = {"fallbacks": report.num_fallbacks}
    graph = train_graph(with_optimizer(report, summary["optimizer_bytes"]))
    if report.graphs:
        figures["decisions"] = f"{report.decisions.fingerprint}, {report.decisions}"
    if graph is not None:
        figures["predicted_peak_bytes"] = graph.predicted_peak_bytes
        figures["saved_bytes"] = graph.saved_bytes
        figures["saved_by_module"] = bytes_by_kind(graph.saved)
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
