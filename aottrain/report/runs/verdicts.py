"""What a comparison of runs comes to, in sentences. A difference within the spread of what was measured is called
level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from aottrain.config.extensions.metrics import Judge
from aottrain.ir.units import format_bytes, format_percent
from aottrain.metrics.sinks import OWN
from aottrain.report.runs.reading import HELD_OUT, LOSS, Points, Run, number
from aottrain.report.runs.settings import changing
from aottrain.report.runs.spread import EQUAL_PEAK, quartiles, time_ratio

_Key = TypeVar("_Key")

_NUM_NAMED = 3
_TOLERANCE = 1e-3  # where no configuration says what compare.loss_tolerance is
_SAME_WORK = 1e-3
_WHICH_MODEL = ("recipe.name", "recipe.target", "recipe.model.type", "recipe.model.path")


def verdicts(runs: Sequence[Run], differing: Mapping[str, Sequence[str]], *, by_task: bool = False) -> list[str]:
    """The sentences: fastest, least memory, losses. by_task: task=compare has judged the losses itself."""
    if not runs:
        return []
    failed = [run for run in runs if run.status == "failed"]
    told = [fastest(runs, same_work=by_task), least_memory(runs)]
    models = [key for key in _WHICH_MODEL if key in differing]
    if models and not by_task:
        told.append(f"As {_differ(models)}, these are different models: no loss, time or peak is like another's.")
        told += [not_finite(run) for run in runs][:_NUM_NAMED]
    else:
        told.append(judged_losses(runs) if by_task else losses(runs, differing))
    if failed:
        reason = failed[0].text("error") or failed[0].text("reason") if len(failed) == 1 else ""
        told.append(f"{_names([run.name for run in failed])} failed{f': {reason}' if reason else ''}.")
    return [text for text in told if text]


def reference(runs: Sequence[Run]) -> Run:
    """What the others are compared with: eager, if it is there."""
    return next((run for run in runs if run.engine == "eager" and run.status != "failed"), runs[0])


def per_unit(runs: Sequence[Run]) -> tuple[dict[str, tuple[tuple[float, ...], ...]], str]:
    """({name: times of its rounds}, of what). Of a step, where every step does the same work; else of a token, or of
    a sample, in the same units; {} where that is not known."""
    steps = timed(runs)
    shown = [run for run in runs if run.name in steps]
    for rate, unit in (("tokens_per_s", "token"), ("samples_per_s", "sample")):
        works = [_work(run, rate) for run in shown]
        known = [work for work in works if work]
        if known and len(known) == len(works):
            if max(known) - min(known) <= _SAME_WORK * max(known):
                return steps, "step"
            shares = zip(shown, known, strict=True)
            return {r.name: tuple(tuple(t / work for t in times) for times in r.rounds) for r, work in shares}, unit
    return steps, "step"


def timed(runs: Sequence[Run]) -> dict[str, tuple[tuple[float, ...], ...]]:
    """{name: times of its rounds} of the runs that have some and have not failed."""
    return {run.name: run.rounds for run in runs if run.rounds and run.status != "failed"}


def _work(run: Run, rate: str) -> float | None:
    """Tokens or samples of a step."""
    per_s, median = run.number(rate), run.number("step_ms_median")
    return per_s * median / 1e3 if per_s and median else None


def fastest(runs: Sequence[Run], *, same_work: bool = False) -> str:
    """Which run was fastest, by how much, and who is level with it. same_work: their steps are known to be the same."""
    times, unit = (timed(runs), "step") if same_work else per_unit(runs)
    if len(times) < 2:
        return ""
    order = sorted(times, key=lambda name: _median(times[name]))
    best, others = order[0], order[1:]
    ratios = {name: time_ratio(times[name], times[best]) for name in others}
    level = [name for name, ratio in ratios.items() if ratio is None or ratio.verdict != "slower"]
    base = reference([run for run in runs if run.name in times]).name
    against = next((name for name in (base, *others) if name != best), None)
    if not level:
        text = f"{best} was fastest"
        named = dict.fromkeys([against, others[0]] if against else [others[0]])
        speeds = [f"{ratios[name]} the speed of {name}" for name in named if name]
        text += f": {', '.join(speeds)}"
    else:
        text = f"No run was fastest: {_names([best, *level])} are level"
        if len(level) == 1:
            text += f" ({ratios[level[0]]})"
        elif against and against not in level:
            text += f", {best} has {ratios[against]} the speed of {against}"
    by = "" if unit == "step" else f", by the time of a {unit}, for their steps differ"
    return f"{text}{by}."


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return quartiles([time for times in rounds for time in times])[1]


def spread_note(runs: Sequence[Run]) -> str:
    """What stands in the brackets of `fastest`."""
    times = timed(runs)
    if len(times) < 2:
        return ""
    counts = {len(rounds) for rounds in times.values()}
    if len(counts) == 1 and min(counts) > 1:
        rounds = f"the lowest and the highest of {min(counts)} rounds"
        return f"In brackets: {rounds}. Level: faster in one, slower in another."
    return (
        "In brackets: what the middle halves of the step times allow. Level: these overlap. The runs were measured one "
        "after the other, so a drift of the machine counts as theirs."
    )


def least_memory(runs: Sequence[Run]) -> str:
    """Which run had the lowest measured peak."""
    peaks = {run.name: peak for run in runs if (peak := run.number("peak_bytes")) and run.status != "failed"}
    if len(peaks) < 2:
        return ""
    order = sorted(peaks, key=lambda name: peaks[name])
    lowest = peaks[order[0]]
    level = [name for name in order if peaks[name] <= lowest * (1 + EQUAL_PEAK)]
    if len(level) == len(order):
        return f"All needed as much memory: a peak of {format_bytes(lowest)}, within {EQUAL_PEAK:.0%}."
    base = reference([run for run in runs if run.name in peaks]).name
    against = base if base not in level else order[-1]
    share = f", {format_percent(lowest / peaks[against])} of {against}'s"
    if len(level) > 1:
        return f"{_names(level)} needed least memory, a peak of {format_bytes(lowest)} within {EQUAL_PEAK:.0%}{share}."
    return f"{order[0]} needed least memory: a peak of {format_bytes(lowest)}{share}."


def judged_losses(runs: Sequence[Run]) -> str:
    """What task=compare said of them."""
    judged = [run for run in runs if run.text("verdict")]
    if not judged:
        return "The losses were not compared."
    bad = [run for run in judged if run.text("verdict") not in ("reference", "equal", "failed")]
    tolerance = _tolerance(runs)
    errors = {run.name: error for run in judged if (error := run.number("max_loss_error")) is not None}
    others = {name: error for name, error in errors.items() if name != reference(judged).name}
    worst = max(others, key=lambda name: others[name], default="")
    by = f"by {others[worst]:.1e} at most ({worst}), relative; allowed is {tolerance:g}" if worst else ""
    if not bad:
        return f"The losses agree, dropout off: they differ {by}." if by else "The losses agree."
    reasons = "; ".join(f"{run.name} {run.text('verdict')}: {run.text('reason')}".rstrip(": ") for run in bad)
    return f"The losses do not all agree: {reasons}."


def losses(runs: Sequence[Run], differing: Mapping[str, Sequence[str]]) -> str:
    """Whether they agree, of runs that train the same; else which came lowest."""
    broken = [told for run in runs if (told := not_finite(run))]
    text = _agreement(runs, differing)
    return " ".join(part for part in (text, *broken[:_NUM_NAMED]) if part)


def _agreement(runs: Sequence[Run], differing: Mapping[str, Sequence[str]]) -> str:
    curves = {run.name: dict(run.metrics[LOSS]) for run in runs if run.metrics.get(LOSS)}
    if len(curves) < 2:
        return ""
    others = changing(list(differing))
    if others:
        return _best(runs, others)
    base = reference([run for run in runs if run.name in curves]).name
    errors = {name: loss_gap(curves[name], curves[base]) for name in curves if name != base}
    known = {name: gap for name, gap in errors.items() if gap is not None}
    if not known:
        return "The losses have no step in common."
    worst = max(known, key=lambda name: known[name][0])
    gap, step = known[worst]
    tolerance = _tolerance(runs)
    by = f"by {gap:.1e} at most ({worst}, step {step:.0f}), relative to {base}"
    if gap == 0:
        return f"The losses agree with those of {base} to the last bit."
    if gap <= tolerance:
        return f"The losses agree: they differ {by}; allowed is {tolerance:g}."
    beyond = [name for name, (error, _) in known.items() if error > tolerance]
    drops = any((number(run.settings.get("recipe.model.dropout")) or 0) > 0 for run in runs)
    if drops and len({run.engine for run in runs if run.name in (base, *beyond)}) > 1:
        return f"The losses differ {by}: with dropout each engine draws its own random numbers; task=compare has none."
    return f"The losses of {_names(beyond)} do not agree with those of {base}: they differ {by}."


def loss_gap(losses: Mapping[float, float], other: Mapping[float, float]) -> tuple[float, float] | None:
    """(largest relative difference, its step) over the steps that both have; infinite where one is not a number."""
    common = [step for step in losses if step in other]
    if not common:
        return None

    def gap(step: float) -> float:
        error = abs(losses[step] - other[step]) / max(abs(other[step]), 1e-12)
        return math.inf if math.isnan(error) else error

    worst = max(common, key=gap)
    return gap(worst), worst


def _best(runs: Sequence[Run], keys: Sequence[str]) -> str:
    """By the last figure that all judge by, or where not all have one by the last held-out loss, else the last loss."""
    judge = judge_of_all(run.settings.get("trainer.judge_by") for run in runs)
    loss = Judge()
    named = [(judge.title, f"{OWN}{judge.name}", judge), (loss.title, HELD_OUT, loss), ("loss", LOSS, loss)]
    begun = [run for run in runs if run.metrics.get(LOSS)]
    fitting = (each for each in named if all(last(run.metrics.get(each[1])) is not None for run in begun))
    title, name, judge = next(fitting, named[-1])
    ends = {run.name: end for run in runs if (end := last(run.metrics.get(name))) is not None}
    if not ends:
        return ""
    (first, best), (worst, _) = best_shown(ends, judge), best_shown(ends, judge.reversed)
    is_early = any(run.status == "running" for run in runs if run.name in (best if first != worst else ends))
    has = "ended with" if not is_early else "has so far" if len(best) == 1 else "have so far"
    told = f"{_names(best)} {has} the {judge.end} {title}, {first} (the {judge.reversed.end} is {worst})."
    if first == worst:
        told = f"All {has} a {title} of {first}."
    return f"{told} As {_differ(keys)}, the losses need not agree."


def continued(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run that began where another one had stopped, in a folder of its own: the steps before had
    the settings of that other run."""
    told = []
    for run in runs:
        begun = min((step for step, _ in run.metrics.get(LOSS, ())), default=1)
        source = run.settings.get("resume")
        if begun > 1 and source not in (None, "auto"):
            told.append(f"{run.name} went on after step {begun - 1:.0f} of {source}.")
    return told


def best_shown(figures: Mapping[_Key, float], judge: Judge) -> tuple[str, list[_Key]]:
    """The best figure as it is shown, and whose it is: figures that look the same tie."""
    form = ".4f" if judge.is_loss else ".4g"
    best = f"{(max if judge.is_highest else min)(figures.values()):{form}}"
    return best, [key for key, figure in figures.items() if f"{figure:{form}}" == best]


def judge_of_all(asked: Iterable[Any]) -> Judge:
    """What all runs judge by, as their `trainer.judge_by` says; the loss where that differs, or says nothing."""
    texts = {str(text) for text in asked}
    try:
        return Judge.of(texts.pop()) if len(texts) == 1 else Judge()
    except ValueError:
        return Judge()


def _differ(keys: Sequence[str]) -> str:
    return f"{_names(keys)} differ{'s' if len(keys) == 1 else ''}"


def last(points: Points | None) -> float | None:
    """The last value, if it is finite."""
    return number(points[-1][1]) if points else None


def not_finite(run: Run) -> str:
    """A sentence, where a loss is not a number."""
    step = next((step for step, loss in run.metrics.get(LOSS, ()) if not math.isfinite(loss)), None)
    return "" if step is None else f"The loss of {run.name} is not finite at step {step:.0f}."


def _tolerance(runs: Sequence[Run]) -> float:
    known = [number(run.settings.get("compare.loss_tolerance")) for run in runs]
    return next((value for value in known if value is not None), _TOLERANCE)


def _names(names: Sequence[str]) -> str:
    """`a, b and c`; of many the first ones."""
    if len(names) > _NUM_NAMED + 1:
        return f"{', '.join(names[:_NUM_NAMED])} and {len(names) - _NUM_NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
