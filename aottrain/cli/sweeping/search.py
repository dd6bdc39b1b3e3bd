"""`sweep.search=optuna`: the package optuna chooses each job of a sweep by what the ones before it came to.

Ranges are written as Hydra has them:

    optimizer.lr='tag(log,interval(1e-4,1e-2))'    # numbers, evenly by their logarithm
    trainer.ema='interval(0.9,0.999)'              # numbers
    recipe.model.num_layers='int(interval(1,8))'   # whole numbers
    partition.budget=0.2,0.5,1.0                   # one of these

The study is a journal in the sweep's folder, from which `sweep.resume` goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from aottrain.cli.jobs import Outcome, Supply, SweepJob
from aottrain.cli.values import text_of
from aottrain.config.choices import HIGHEST_IS_BEST
from aottrain.config.extensions.metrics import own_objectives
from aottrain.config.run import RunConfig
from aottrain.config.schema import Mistake
from aottrain.errors import ConfigError
from aottrain.metrics.sinks import OWN

JOURNAL = "optuna.log"
STUDY = "aottrain"
OBJECTIVES = "objectives"
"""The attribute of a study that has them."""
REFUSED = 2
"""The exit code of a job that could not begin."""


@dataclass(frozen=True)
class Dimension:
    """A key and what it may be."""

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """Values such that one that is wrong is found before anything runs, if the ends of a range are."""
        return self.choices or (repr(self.low), repr(self.high))

    def value(self, trial: Any) -> str:
        if self.choices:
            return str(trial.suggest_categorical(self.key, self.choices))
        suggest = trial.suggest_int if isinstance(self.low, int) else trial.suggest_float
        return repr(suggest(self.key, self.low, self.high, log=self.log))


def read_space(overrides: Sequence[Override]) -> tuple[dict[str, str], list[Dimension], list[Mistake]]:
    """The overrides that are the same in each job, by key, and the others."""
    fixed: dict[str, str] = {}
    space: dict[str, Dimension] = {}
    mistakes = []
    for item in overrides:
        key = item.get_key_element()
        if not item.is_sweep_override():
            fixed[key] = text_of(item)
        elif item.is_hydra_override():
            mistakes.append(Mistake(text_of(item), "cannot be searched over"))
        elif item.is_discrete_sweep():
            space[key] = Dimension(key, tuple(map(str, item.sweep_string_iterator())))
        else:
            space[key], wrong = _interval(key, text_of(item), item.value())
            mistakes += wrong
    return fixed, list(space.values()), mistakes


def _interval(key: str, text: str, value: Any) -> tuple[Dimension, list[Mistake]]:
    form = "write interval(a,b), int(interval(a,b)) or tag(log,interval(a,b)), with a < b, and 0 < a for log"
    if not isinstance(value, IntervalSweep) or value.tags - {"log"}:
        return Dimension(key), [Mistake(text, f"cannot be searched over; {form}")]
    dimension = Dimension(key, low=value.start, high=value.end, log="log" in value.tags)
    wrong = not dimension.low < dimension.high or (dimension.log and dimension.low <= 0)
    return dimension, [Mistake(text, form)] if wrong else []


class Search(Supply):
    """The jobs that optuna asks for, at most `trials` that finish, those of the journal included."""

    def __init__(
        self,
        study: Any,
        space: Sequence[Dimension],
        config: RunConfig,
        make: Callable[[int, Mapping[str, str]], SweepJob],
    ):
        super().__init__([])
        self.study, self.space, self.make = study, space, make
        self.objectives, self.total = config.sweep.objectives, config.sweep.trials
        self._left = config.sweep.trials

    def go_on(self) -> None:
        """With what the journal has: what has finished is there, what was running goes on, and fills up the rest."""
        for trial in self.study.get_trials(deepcopy=False):
            if any(dimension.key not in trial.params for dimension in self.space):  # killed before all were drawn
                if not trial.state.is_finished():
                    self._fail(trial.number)
                continue
            values = {dimension.key: str(trial.params[dimension.key]) for dimension in self.space}
            outcome = Outcome(self.make(trial.number, values))
            self.outcomes.append(outcome)
            outcome.take_finished()
            if trial.state.is_finished():
                outcome.exit_code = 0 if trial.state.name == "COMPLETE" else 1
                outcome.status = "finished" if outcome.exit_code == 0 else "failed"
                self._left -= outcome.exit_code == 0
            elif outcome.exit_code == 0:
                self._tell(trial.number, outcome)
                self._left -= 1
            else:
                self.waiting.append(outcome)
                self._left -= 1
        self.total = len(self.outcomes) + max(self._left, 0)

    def next(self) -> Outcome | None:
        if (outcome := super().next()) is not None or self._left <= 0:
            return outcome
        self._left -= 1
        trial = self.study.ask()
        values = {dimension.key: dimension.value(trial) for dimension in self.space}
        outcome = Outcome(self.make(trial.number, values))
        self.outcomes.append(outcome)
        return outcome

    def ended(self, outcome: Outcome) -> None:
        if outcome.exit_code == REFUSED and any(name in outcome.error for name in own_objectives(self.objectives)):
            self._left, self.waiting = 0, []  # no other job has the metric either
        if outcome.exit_code == 0 or outcome.status == "failed":
            self._tell(outcome.job.number, outcome)  # one that was interrupted goes on later

    def _tell(self, number: int, outcome: Outcome) -> None:
        own = own_objectives(self.objectives)
        names = [f"{OWN}{own[name].name}" if name in own else name for name in self.objectives]
        values = [outcome.figures.get(name) for name in names]
        known = outcome.exit_code == 0 and all(isinstance(value, int | float) for value in values)
        if known:
            self.study.tell(number, values)
            return
        self._fail(number)
        if outcome.exit_code == 0:
            lacking = [name for name, value in zip(self.objectives, values, strict=True) if value is None]
            outcome.status = "failed"
            print(f"job {number} has no {', '.join(lacking)}, which the search is by", flush=True)

    def _fail(self, number: int) -> None:
        from optuna.trial import TrialState

        self.study.tell(number, state=TrialState.FAIL)

    def verdict(self) -> str:
        """Which jobs are best: none other has as good figures in all objectives, and better ones in one."""
        lines = []
        for trial in sorted(self.study.best_trials, key=lambda trial: trial.number):
            values = zip(self.objectives, trial.values, strict=True)
            figures = ", ".join(f"{name} {value:.6g}" for name, value in values)
            settings = " ".join(f"{key}={value}" for key, value in trial.params.items())
            lines.append(f"best: job {trial.number} ({settings}): {figures}\n")
        return "".join(lines)


def open_study(folder: Path, config: RunConfig) -> Any:
    """The journal in that folder, new or as it is. The sampler's draws follow from the run's seed. ConfigError: it is
    damaged, or of another search."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    objectives = list(config.sweep.objectives)
    highest = {*HIGHEST_IS_BEST, *(name for name, judge in own_objectives(objectives).items() if judge.is_highest)}
    directions = ["maximize" if name in highest else "minimize" for name in objectives]
    try:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL)))
        study = optuna.create_study(storage=storage, study_name=STUDY, directions=directions, load_if_exists=True)
        study.get_trials(deepcopy=False)
    except Exception as error:  # JSON's, the system's, and whatever optuna's parts come to
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"sweep.search=optuna: {folder / JOURNAL} cannot be read: {text}") from error
    if len(study.directions) != len(directions):
        names = ",".join(config.sweep.objectives)
        text = f"the search in {folder} has {len(study.directions)} objectives, which stay as they are"
        raise ConfigError(f"sweep.objectives=[{names}]: {text}")
    before = study.user_attrs.get(OBJECTIVES, objectives)  # a journal of before they were noted has none
    if before != objectives:
        text = f"the search in {folder} is by [{','.join(before)}], which stays as it is"
        raise ConfigError(f"sweep.objectives=[{','.join(objectives)}]: {text}")
    study.set_user_attr(OBJECTIVES, objectives)
    seed = (config.seed + len(study.get_trials(deepcopy=False))) % 2**32  # one that goes on draws no trial again
    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=config.sweep.parallel > 1)
    return study


def checked_space(
    overrides: Sequence[Override], check: Callable[[int, Sequence[str]], list[Mistake]]
) -> tuple[dict[str, str], list[Dimension]]:
    """ConfigError: what is wrong with it; each end of each range has been checked as a job."""
    fixed, space, mistakes = read_space(overrides)
    if find_spec("optuna") is None:
        text = "needs the package optuna, which is not installed: pip install 'aottrain[search]'"
        mistakes.append(Mistake("sweep.search", text, "optuna"))
    if not space and not mistakes:
        text = "nothing to search over; write key=a,b, key='interval(a,b)' or key='int(interval(a,b))'"
        mistakes.append(Mistake("sweep.search", text, "optuna"))
    if not mistakes:
        first = {dimension.key: dimension.ends[0] for dimension in space}
        for place, dimension in enumerate(space):
            for value in dimension.ends[place > 0 :]:  # the first of all was the first dimension's
                values = {**first, dimension.key: value}
                mistakes += check(0, job_texts(fixed, values))
    if mistakes:
        raise ConfigError([str(mistake) for mistake in dict.fromkeys(mistakes)])
    return fixed, space


def job_texts(fixed: Mapping[str, str], values: Mapping[str, str]) -> list[str]:
    return [*fixed.values(), *(f"{key}={value}" for key, value in values.items())]
