"""A check of the loop: a step's compiled numbers against eager's, and its generated update against torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aottrain.errors import NumericsError, is_likely_out_of_memory, lack_text
from aottrain.ops.random.mode import philox_eager
from aottrain.step import Batch, ClipsItself
from aottrain.trainer.job import Job
from aottrain.trainer.progress import Progress
from aottrain.trainer.reliability.memory import freed
from aottrain.trainer.verify.joined import NotCompared, verify_joined
from aottrain.trainer.verify.updates import verify_update
from aottrain.trainer.verify.verification import Outcome, Verification, run_compiled, verify_outcome

if TYPE_CHECKING:
    from aottrain.config.run import RunConfig
    from aottrain.trainer.loop import Output


def verify(
    job: Job, step: int, micro_batches: Sequence[Batch], config: RunConfig, output: Output, progress: Progress
) -> Verification | None:
    """Check this step's compiled numbers against eager's, and its generated update against torch's, before it is
    taken; what came of it, None where there was nothing to check or no memory for it. NumericsError: see
    `verify_outcome`."""
    try:
        compiled = run_compiled(job.step, job.module, micro_batches)
        verification = _verify_outcome(job, step, micro_batches, compiled, config, output, progress)
        _verify_joined(job, step, compiled, micro_batches, config, output, progress)
        _verify_update(job, step, compiled, config, output, progress)
        return verification
    except (MemoryError, RuntimeError) as error:  # that eager does not fit may be why the step is compiled
        if not is_likely_out_of_memory(error):
            raise
        output.summary["verify_note"] = note = lack_text(error, "the check")
        progress.say(f"step {step} could not be verified: {note}")
    freed(job.device)  # here, where the error holds nothing of the step any more
    return None


def _verify_outcome(
    job: Job,
    step: int,
    micro_batches: Sequence[Batch],
    compiled: Outcome,
    config: RunConfig,
    output: Output,
    progress: Progress,
) -> Verification | None:
    eager, summary = sum(compiled.ran_eagerly), output.summary
    if eager:
        of_all = f"{eager} of {len(micro_batches)} micro-batches"
        part = "the step runs" if eager == len(micro_batches) else f"of step {step} {of_all} run"
        summary["verify_note"] = f"{part} eagerly: see fallbacks"
    is_eager = eager == len(micro_batches)
    if job.world.all_hold(is_eager):  # eager's gradients are summed over all: of a batch without a share none runs here
        progress.say(f"step {step} runs eagerly, so there is nothing to verify")
        return None
    try:
        verification = verify_outcome(step, compiled, job.step, job.module, micro_batches, config.verify, philox_eager)
    except NumericsError as error:
        if not config.verify.bisect or job.step.explain is None or is_eager:
            raise
        suspect = micro_batches[(error.micro_batch or compiled.ran_eagerly.index(False) + 1) - 1]
        raise NumericsError(f"{error}\n{job.step.explain(suspect)}") from error
    summary["verify_max_error"] = max(verification.max_error, summary.get("verify_max_error") or 0.0)
    progress.say(
        f"verified step {step} against eager: largest relative error {verification.loss_error:.1e} of the loss, "
        f"{verification.grad_error:.1e} of a gradient or buffer"
        + (f" ({verification.worst})" if verification.grad_error else "")
        + ("" if verification.noise is None else f"; eager's own rounding error is up to {verification.noise:.1e}")
        + _only_rounding(verification)
        + (f"; {of_all} run eagerly" if eager else "")
    )
    return verification


def _only_rounding(verification: Verification) -> str:
    if not (names := verification.only_rounding):
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"; rounding is all that there is, by eager as well, of {names[0]}{more}"


def _verify_joined(
    job: Job,
    step: int,
    compiled: Outcome,
    micro_batches: Sequence[Batch],
    config: RunConfig,
    output: Output,
    progress: Progress,
) -> None:
    """Of several processes the first step that is checked, against one process on all their batches."""
    if job.world.size == 1 or "verify_joined_error" in output.summary:
        return
    output.summary["verify_joined_error"] = None
    found = verify_joined(job, step, compiled, micro_batches, config.verify)
    if isinstance(found, NotCompared):
        progress.say(f"step {step} could not be compared with one process on the joined batch: {found.why}")
    elif isinstance(found, str):
        text = f"warning: {job.world.size} processes together are not one process on their joined batch, which is right"
        progress.say(f"{text} only where a loss or a layer looks at several examples at once: {found}")
    elif found is not None:
        output.summary["verify_joined_error"] = found.max_error
        progress.say(
            f"verified step {step} against one process on the joined batch: largest relative error "
            f"{found.loss_error:.1e} of the loss, {found.grad_error:.1e} of a gradient"
            + (f" ({found.worst})" if found.grad_error else "")
        )


def _verify_update(
    job: Job, step: int, compiled: Outcome, config: RunConfig, output: Output, progress: Progress
) -> None:
    if not isinstance(job.optimizer, ClipsItself):
        return  # torch's own
    names = {parameter: name for name, parameter in job.module.named_parameters()}
    verification = verify_update(step, job.optimizer, names, compiled.gradients, config.optimizer)
    largest = output.summary.get("verify_update_error") or 0.0
    output.summary["verify_update_error"] = max(verification.error, largest)
    progress.say(
        f"verified its update against torch's in float64: largest relative error {verification.error:.1e}"
        + (f" ({verification.worst})" if verification.error else "")
    )
