"""What a person should know before training begins, a line each: things that are missing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from aottrain.config.choices import GENERATING
from aottrain.config.run import RunConfig
from aottrain.config.schema import command_line, naming
from aottrain.explain.report import CompileReport, GraphReport
from aottrain.ir.settings.choices import GENERATED
from aottrain.ir.settings.decisions import COUNTED, FILE
from aottrain.toolchain.cache import cache_obstacle, was_said


def without_cache() -> list[str]:
    """Whether anything that is measured and compiled can be kept for the next run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same is a warning where no trainer tells it
        obstacle = cache_obstacle()
    return [f"warning: nothing is cached: {obstacle}"] if obstacle else []


def still_rising(config: RunConfig) -> list[str]:
    """Whether a run ends before the learning rate has reached its peak."""
    warmup, steps, peak = config.lr_schedule.warmup_steps, config.trainer.steps, config.optimizer.lr
    if steps >= warmup or config.lr_schedule.total_steps is not None or config.lr_schedule.target is not None:
        return []
    return [
        f"the learning rate rises in all {steps} steps, to {peak * steps / warmup:.2e} of optimizer.lr={peak:g}: "
        f"lr_schedule.warmup_steps={warmup}"
    ]


def without_kernels(config: RunConfig, graph: GraphReport | None) -> list[str]:
    """Why PyTorch's operators run where generated kernels were to be expected. Of those that were asked for by name the
    compiler has said it."""
    expected = config.kernel.name in GENERATING and config.kernel.name not in GENERATED
    if graph is None or not expected or graph.kernel != "aten" or not graph.kernel_reason:
        return []
    if was_said(graph.kernel_reason):
        return []
    return [f"no generated kernels, PyTorch's operators run one by one: {graph.kernel_reason}"]


def torch_updates(config: RunConfig, optimizer_kernel: str) -> list[str]:
    """That PyTorch updates where generated kernels were to be expected; and why, unless that has been said."""
    if config.optimizer.kernel != "auto" or not optimizer_kernel.startswith("torch"):
        return []
    reason = optimizer_kernel.removeprefix("torch (").removesuffix(")")
    return [f"optimizer {config.optimizer.title} runs as {'torch' if was_said(reason) else optimizer_kernel}"]


def unmeasured(report: CompileReport) -> list[str]:
    """How decisions were made, where it was not by measuring."""
    record = report.decisions
    sources = {decision.source for decision in record.decisions if decision.kind not in COUNTED}
    if sources <= {"measured", "cache"}:
        return []
    again = "; start it again while the machine is quiet, or give decisions=<a run that has measured them>"
    return [f"{record} ({FILE}){again if 'busy' in sources else ''}"]


def resume_command(directory: str, targets: Sequence[str] = ()) -> str:
    """What to type in this folder to go on with the run that wrote `directory`, whose targets are named again."""
    return command_line([naming("resume", directory), *targets])
