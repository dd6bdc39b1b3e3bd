"""task=train: build, compile, check, train, evaluate; and leave metrics.csv, summary.json, checkpoints and a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aottrain.config.choices import COMPILING_ENGINES
from aottrain.config.extensions.recipes import program_errors, program_files
from aottrain.config.extensions.targets import named_again
from aottrain.config.folders import CHECKPOINTS
from aottrain.config.reading import without_metrics
from aottrain.config.run import RunConfig
from aottrain.counted import counts_told
from aottrain.errors import CheckpointError, ConfigError, OutputError, ParallelError, RecipeError, UnsupportedError
from aottrain.explain.figures import train_graph
from aottrain.ir.settings.budget import bounds_bytes
from aottrain.ir.settings.decisions import FILE, MEASURED, Record, record_from
from aottrain.ir.units import format_bytes, format_count, format_percent, format_seconds
from aottrain.metrics.guest import Guest
from aottrain.metrics.sinks import CsvSink, Sink, write_result, write_summary
from aottrain.report import html
from aottrain.report.runs.drawing.pages import write_page
from aottrain.tasks.building.build import build_job, raise_own_error
from aottrain.tasks.building.guests import open_guest, run_ids
from aottrain.tasks.building.samples import leave_sample
from aottrain.tasks.measuring.capacity import allocator_errors, check_peak
from aottrain.tasks.measuring.determinism import as_deterministic_as_asked, decisions_asked, what_hangs_on_the_model
from aottrain.tasks.notes import resume_command, still_rising, torch_updates, unmeasured, without_cache, without_kernels
from aottrain.tasks.summary import compile_figures, config_summary, job_summary, report_figures
from aottrain.toolchain.frames import roomy
from aottrain.trainer.checkpoint import CheckpointFolder, Loaded
from aottrain.trainer.evaluation import metric_names
from aottrain.trainer.job import Job
from aottrain.trainer.loop import Output, fit
from aottrain.trainer.parallel.link import take_link
from aottrain.trainer.parallel.pieces import FolderOfPieces, check_types, shared_folder
from aottrain.trainer.parallel.together import NoCheckpoints, found_by_first
from aottrain.trainer.parallel.world import ALONE, World, joined, losing_others
from aottrain.trainer.preparing import prepare, restore
from aottrain.trainer.progress import Status
from aottrain.trainer.reliability.identity import Changes, check_identity, identity
from aottrain.trainer.reliability.saving import check_held, copy_bytes
from aottrain.trainer.reliability.signals import interruptible

Say = Callable[[str], None]


def say(line: str) -> None:
    print(line, flush=True)


@dataclass
class RunRecord:
    """What a run leaves behind."""

    config: RunConfig
    directory: Path
    summary: dict[str, Any]
    world: World = ALONE
    """The processes that do this run; this one's folder is the run's where it is the first."""
    sinks: list[Sink] = field(default_factory=list)
    job: Job | None = None
    doing: list[str] = field(default_factory=lambda: ["building the model"])
    """What it has been at, the last of it now, for an error that only says how."""
    exit_code: int = 1
    resumes: str | None = None
    """What goes on from where this run stands; None while there is nothing."""
    is_begun: bool = False
    """Before that a folder that is gone on in keeps the summary of the run before."""

    @property
    def summary_path(self) -> Path:
        return self.directory / "summary.json"

    def write_summary(self) -> None:
        if self.is_begun or not self.summary_path.exists():
            self.is_begun = True
            write_summary(self.summary_path, self.summary)

    def begin(self, title: str) -> None:
        """Say what is done from now on."""
        self.doing.append(title)
        say(title)


def run(config: RunConfig) -> int:
    """Train as `config` says. Returns 0, or 128 + the number of the signal that ended the run early (130, 143).

    Raises ConfigError, CheckpointError, NumericsError, BudgetError, CapacityError, LibraryError, OutOfMemoryError,
    OutputError, RecipeError, UnsupportedError, or Interrupted by a signal that left no time for a checkpoint.
    summary.json is there from the start, and says after each of these what happened ("status": "failed" or
    "interrupted", with the error). Of several processes each runs this; the first one's files are the run's.
    ParallelError: they differ, or one ended.
    """
    with joined(config) as (world, own):
        return _run(own, world)


def _run(config: RunConfig, world: World) -> int:
    directory = Path(config.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    record = RunRecord(config, directory, config_summary(config), world=world, is_begun=config.resume != "auto")
    with interruptible(partial(_end_at_once, record)):
        try:
            record.write_summary()
            with (
                program_errors(config),
                allocator_errors(record.doing, partial(program_files, config)),
                as_deterministic_as_asked(config),
                losing_others(world),
            ):
                record.exit_code = _train(record)
        except BaseException as error:
            if isinstance(error, RecipeError | ConfigError):
                error.steps = record.summary["steps"]
            _fail(record, error)
            raise
        _close(record)
    _say_how_to_go_on(record)
    return record.exit_code


def _checkpoints(record: RunRecord) -> CheckpointFolder:
    """Where this process writes them. ConfigError: all are to, and one of them does not see the folder."""
    world, directory, config = record.world, record.directory / CHECKPOINTS, record.config
    if world.num_parts > 1 and config.parallel.checkpoints == "parts":
        return FolderOfPieces(shared_folder(world, directory), config.trainer, world)
    return (CheckpointFolder if world.is_first else NoCheckpoints)(directory, config.trainer)


@roomy
def _train(record: RunRecord) -> int:
    """From the model's building to the last checkpoint; the exit code."""
    config, summary = record.config, record.summary
    for line in (*without_cache(), *still_rising(config)):
        say(line)
    world = record.world
    checkpoints = _checkpoints(record)
    resume = found_by_first(world, config.resume, checkpoints, say)
    if resume:
        check_held(resume)
    record.begin("building the model, reading the data")
    decisions = decisions_of(config, resume)
    with Status("building"):
        job = record.job = build_job(config, decisions, world)
    if checkpoints.is_in_pieces:
        check_types(job)
    for line in (*job.batches.notes, *filter(None, [take_link(world, config, decisions, job.device)])):
        say(line)
    changes = _check_checkpoint(config, job, checkpoints, resume)
    summary.update(job_summary(config, job))
    record.is_begun, record.resumes = True, str(record.config.resume) if resume else None
    kept_steps, own = resume.step if resume else 0, metric_names(job)
    if lacking := without_metrics(config, own):
        raise ConfigError([str(mistake) for mistake in lacking])
    record.sinks.append(CsvSink(record.directory / "metrics.csv", kept_steps, say, own))
    guest = open_guest(config, record.directory, resume, say)
    record.sinks += [guest] if guest else []
    if resume:
        restore(job, resume, changes)
        summary["steps"] = resume.step
        summary["skipped_steps"] = resume.state.get("skipped_steps", 0)
        summary["rollbacks"] = resume.state.get("rollbacks", 0)
        summary["best_val_loss"] = resume.state.get("best_val_loss")
    record.write_summary()
    _prepare(record, job)
    for line in banner(config, job, summary):
        say(line)
    output = Output(record.sinks, summary, record.summary_path, checkpoints, partial(run_ids, guest))
    record.doing.append("training")
    stop = fit(job, config, output, resume)
    summary["status"] = "finished" if stop.signum is None else "interrupted"
    _say_results(record, job, guest)
    return stop.exit_code


def _prepare(record: RunRecord, job: Job) -> None:
    """Compile, refuse what does not fit into memory, and note what compiling took and saves."""
    summary = record.summary

    def check() -> None:
        summary.update(report_figures(job.step.report, summary))
        peak = summary["predicted_peak_bytes"]
        if peak is not None and job.device.type == "cpu":
            peak += copy_bytes(job, record.config)
        if line := check_peak(peak, job.device):
            say(line)

    def note_replan(change: str) -> None:
        summary["replans"] = [*summary["replans"], {"step": 0, "what": change}]
        say(f"while compiling {change}")

    with ExitStack() as inside:
        if job.step.engine in COMPILING_ENGINES:
            record.begin("compiling, and measuring calls that are not in the cache")
        status = inside.enter_context(Status("compiling"))
        inside.enter_context(counts_told(status.count))
        if job.step.engine == "aot":
            from aottrain.compiler.stages import stages_told  # the compiler, which the other engines do without

            inside.enter_context(stages_told(status.tell))
        try:
            replan = note_replan if record.config.trainer.on_oom == "replan" else None
            summary["compile_s"], summary["compile_peak_bytes"] = prepare(job, check, replan)
        except UnsupportedError:  # under engine.on_unsupported=error
            raise_own_error(job)
            raise
    summary.update(compile_figures(job, summary))
    _write_decisions(record)


def _fail(record: RunRecord, error: BaseException) -> None:
    """Leave what is known, then let the error go on; one in doing so is told, but hides none."""
    record.summary["status"] = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    record.summary["error"] = f"{type(error).__name__}: {error}"
    try:
        _close(record)
    except (OutputError, KeyboardInterrupt) as second:  # torchrun ends those that a lost one has left
        say(f"{type(second).__name__}: {second}")
    if isinstance(error, KeyboardInterrupt | ParallelError):
        _say_how_to_go_on(record)


def _end_at_once(record: RunRecord, error: KeyboardInterrupt) -> None:
    """Where the error cannot be raised: how it ended, and no more."""
    record.summary.update(status="interrupted", error=f"{type(error).__name__}: {error}")
    record.write_summary()
    _say_how_to_go_on(record)


def _close(record: RunRecord) -> None:
    """The summary, the sinks' ends, the compile report. OutputError: one of them cannot be written."""
    report = None if record.job is None else record.job.step.report
    errors: list[OutputError] = []

    def figures() -> None:  # they are made when they are asked for
        if record.is_begun:
            record.summary.update(report_figures(report, record.summary))

    def page() -> None:
        if report is not None:
            write_result(record.directory / "compile_report.html", html.render(report, record.summary))

    guests = [sink for sink in record.sinks if isinstance(sink, Guest)]  # they take the pages along
    ends = [partial(sink.close, record.summary, record.exit_code) for sink in record.sinks if sink not in guests]
    curves = [partial(write_page, [record.directory])] if record.is_begun else []  # it links the others
    last = [partial(guest.publish, record.directory, report) for guest in guests]
    last += [partial(guest.close, record.summary, record.exit_code) for guest in guests]
    for end in (figures, record.write_summary, *ends, page, partial(_write_decisions, record), *curves, *last):
        try:
            end()
        except OutputError as error:
            errors.append(error)
        except OSError as error:
            errors.append(OutputError(f"{error.filename or record.directory}: cannot be written: {error.strerror}"))
        except MemoryError:  # what ended the run may be that there is none
            errors.append(OutputError(f"{record.directory}: a figure, page or list cannot be made: there is no memory"))
    if errors:
        if record.summary["status"] in ("finished", "running"):
            record.summary.update(status="failed", error=f"OutputError: {errors[0]}")
            with suppress(OutputError):
                record.write_summary()
        raise errors[0]


def _write_decisions(record: RunRecord) -> None:
    """What was decided so far, for another run to take; nothing where nothing was compiled."""
    report = None if record.job is None else record.job.step.report
    if report is None or not report.graphs:
        return
    write_result(record.directory / FILE, json.dumps(report.decisions.to_dict(), indent=1) + "\n")


def _say_how_to_go_on(record: RunRecord) -> None:
    if record.summary["status"] == "finished":
        return
    target = str(record.directory) if record.summary.get("checkpoint") else record.resumes
    target = str(record.directory) if target == "auto" else target
    nothing = "no checkpoint was written: there is nothing to go on with"
    say(f"go on with: {resume_command(target, named_again(record.config))}" if target else nothing)


def decisions_of(config: RunConfig, resume: Loaded | None) -> str | Record:
    """Those of the checkpoint that this goes on from, unless `decisions` says otherwise. CheckpointError: damaged."""
    if resume is None or config.decisions != MEASURED or not resume.state.get("decisions"):
        return decisions_asked(config)
    try:
        return record_from(resume.state["decisions"])
    except ValueError as error:
        raise CheckpointError(f"{resume.path}: {error}") from error


def _check_checkpoint(config: RunConfig, job: Job, checkpoints: CheckpointFolder, resume: Loaded | None) -> Changes:
    """What is another here than in the checkpoint, which is said. CheckpointError: it is of another run."""
    if resume is None:
        if config.resume is not None:
            say(f"resume={config.resume}: no checkpoint in {checkpoints.directory} yet, so this starts at step 1")
        return Changes()
    saved, current = resume.state.get("identity", {}), identity(config, job.batches.fingerprint)
    changes = check_identity(saved, current, resume.path, config.resume_override)
    for line in changes.lines:
        say(line)
    say(f"going on after step {resume.step} from {resume.path}")
    if resume.step >= config.trainer.steps:
        say(f"trainer.steps={config.trainer.steps} has been reached already: nothing to train")
    return changes


def banner(config: RunConfig, job: Job, summary: dict[str, Any]) -> list[str]:
    """What is about to be trained, by whom, and what compiling it took and saved."""
    batches, accumulate = job.batches, config.trainer.accumulate
    size, unit = (batches.tokens_per_batch, "tokens") if batches.tokens_per_batch else (batches.batch_size, "samples")
    parameters = f"{format_count(summary['num_parameters'])} parameters"
    if summary["num_trained"] != summary["num_parameters"]:
        parameters = f"{format_count(summary['num_trained'])} trained of {parameters}"
    lines = [
        f"{job.name}: {parameters}, {size * accumulate:,} {unit} a step, "
        f"{summary['device']}, {config.trainer.precision}, torch {torch.__version__}"
    ]
    if config.optimizer.target is not None:
        lines.append(f"optimizer {config.optimizer.title}: {job.optimizer_kernel}")
    if num_bytes := copy_bytes(job, config):
        host = f"{format_bytes(num_bytes)} of the host's memory beside the predicted peak"
        lines.append(f"trainer.save=background: checkpoints are written from a copy, which takes {host}")
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
    lines += torch_updates(config, job.optimizer_kernel)
    if job.step.report is not None:
        graph = train_graph(job.step.report)
        lines += without_kernels(config, graph) + unmeasured(job.step.report)
        lines += what_hangs_on_the_model(config, graph)
    for fallback in job.step.report.fallbacks if job.step.report else ():
        lines.append(f"runs eagerly: {fallback.reason} {fallback.source}".rstrip())
    return lines


def _say_results(record: RunRecord, job: Job, guest: Guest | None) -> None:
    """What came out, a sample of what the model writes, and where everything lies."""
    summary, directory = record.summary, record.directory
    median, rate = summary["step_ms_median"], summary["tokens_per_s"] or summary.get("samples_per_s")
    unit = "tokens/s" if summary["tokens_per_s"] else "samples/s"
    figures = [f"{summary['status']} after step {summary['steps']}"]
    figures += [f"{name} {summary[key]:.4f}" for name, key in LOSSES if summary[key] is not None]
    figures += [f"{name} {value:.4g}" for name, value in job.own_figures.items()]
    bits, epochs = summary["val_bits_per_byte"], summary["epochs"]
    figures += [f"{bits:.3f} bits a byte"] if bits is not None else []
    figures += [f"{epochs:,.2f} epochs"] if epochs is not None else []
    figures += [f"{format_seconds(median / 1e3)} a step (median), {rate:,.0f} {unit}"] if median and rate else []
    if (save := summary.get("save_ms")) is not None and median:
        figures += [f"a save holds steps up for {format_seconds(save / 1e3)} ({format_percent(save / median)} of one)"]
    mfu = summary.get("mfu")
    figures += [f"{format_percent(mfu)} of the device's peak FLOP/s"] if mfu else []
    figures += [f"peak {format_bytes(summary['peak_bytes'])}"] if summary["peak_bytes"] else []
    say(", ".join(figures))
    if (idle := summary.get("idle_share") or 0.0) > _MUCH_IDLE and _may_replay(record.config):
        why = f"before {format_percent(idle)} of the steps the device had nothing left to do, and waited for the host"
        say(f"{why}; kernel.cuda_graphs=true starts the kernels of a step at once, and holds more memory")
    num_bytes = record.config.trainer.sample_bytes
    if num_bytes and summary["status"] == "finished":
        leave_sample(job, num_bytes, directory, say)
    say(f"results: {directory.resolve()}")
    if guest is not None and guest.hint:
        say(f"{guest.name}: {guest.hint}")


def _may_replay(config: RunConfig) -> bool:
    """Whether CUDA graphs could be asked for."""
    is_settled = config.kernel.cuda_graphs or bounds_bytes(config.partition.budget)
    return config.engine.name == "aot" and not is_settled


LOSSES = (("loss", "last_loss"), ("held-out loss", "val_loss"))
_MUCH_IDLE = 0.5
