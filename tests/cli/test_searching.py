"""Sweeps whose jobs optuna chooses, and those that submitit runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from aottrain.cli import main
from aottrain.cli.jobs import SweepJob
from aottrain.cli.sweeping import submitted
from aottrain.cli.sweeping.search import Dimension, Search, open_study
from aottrain.config.run import RunConfig, SweepConfig
from aottrain.errors import ConfigError
from tests.cli.test_cli import command, here, shipped  # noqa: F401
from tests.cli.test_sweeps import rows

STUB = """
import json, math
from pathlib import Path

def run(config):
    folder, lr = Path(config.output_dir), config.optimizer.lr
    with open(folder / "ran.txt", "a") as file:
        file.write(f"{config.resume}\\n")
    if config.trainer.accumulate == 3:
        raise RuntimeError("planted")
    loss = math.log10(lr / 1e-3) ** 2
    figures = {"val_loss": loss, "peak_bytes": 1000 * config.data.batch_size, "status": "finished"}
    (folder / "summary.json").write_text(json.dumps(figures))
    return 0
"""
RANGES = ["optimizer.lr=tag(log,interval(1e-5,1e-1))", "data.batch_size=int(interval(2,5))"]


@pytest.fixture
def extra():
    for name in ("optuna", "submitit"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def test_a_search_stays_in_its_ranges_is_gone_on_with_and_names_the_best(quick_children, extra, here):  # noqa: F811
    line = ["-m", *RANGES, "sweep.search=optuna", "sweep.trials=2", "hydra.sweep.dir=all"]
    process = command(*line, "sweep.objectives=[val_loss,peak_bytes]", folder=here, stub=STUB)
    out, err = process.communicate()
    assert process.returncode == 0, err
    first = rows(here / "all")
    assert [row["status"] for row in first] == ["finished"] * 2
    again = command("sweep.resume=all", "sweep.trials=3", folder=here, stub=STUB)
    out, err = again.communicate()
    assert again.returncode == 0 and "2 of 3 jobs have finished already" in out, err
    all_rows = rows(here / "all")
    assert all_rows[:2] == first and len({row["optimizer.lr"] for row in all_rows}) == 3
    for row in all_rows:
        assert 1e-5 <= float(row["optimizer.lr"]) <= 1e-1 and int(row["data.batch_size"]) in range(2, 6)
        assert float(row["peak_bytes"]) == 1000 * int(row["data.batch_size"])
    assert [(here / "all" / str(number) / "ran.txt").read_text() for number in range(3)] == ["None\n"] * 3
    figures = [(float(row["val_loss"]), float(row["peak_bytes"])) for row in all_rows]
    better = [[a <= loss and b <= peak and (a, b) != (loss, peak) for a, b in figures] for loss, peak in figures]
    best = [number for number, than_it in enumerate(better) if not any(than_it)]
    named = [int(line.split()[2]) for line in out.splitlines() if line.startswith("best: job ")]
    assert named == best


def test_what_was_running_when_a_search_was_killed_goes_on_and_what_fails_is_listed(quick_children, extra, here):  # noqa: F811
    import optuna
    from optuna.storages.journal import JournalFileBackend

    line = ["-m", "optimizer.lr=interval(0.1,0.2)", "trainer.accumulate=3,3", "sweep.search=optuna", "sweep.trials=2"]
    process = command(*line, "hydra.sweep.dir=all", folder=here, stub=STUB)
    out, err = process.communicate()
    assert process.returncode == 1 and "job 0 failed" in err and "job 1 failed" in err and "best: " not in out
    study = optuna.load_study(
        study_name="aottrain", storage=optuna.storages.JournalStorage(JournalFileBackend(str(here / "all/optuna.log")))
    )
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL"]
    running = study.ask()  # as one that was being run when all was killed
    running.suggest_float("optimizer.lr", 0.1, 0.2)
    running.suggest_categorical("trainer.accumulate", ("3", "3"))
    study.ask()  # killed before anything was drawn
    (here / "all" / "2" / "checkpoints").mkdir(parents=True)
    (here / "all" / "2" / "checkpoints" / "step_00000001.pt").write_bytes(b"")
    again = command("sweep.resume=all", "sweep.trials=1", folder=here, stub=STUB.replace("== 3", "== 4"))
    out, err = again.communicate()
    assert "job 2" in out and (here / "all" / "2" / "ran.txt").read_text() == "auto\n", err
    assert [row["status"] for row in rows(here / "all")] == ["failed", "failed", "finished"]
    (here / "all" / "optuna.log").write_text('{"op_code": 99}\n')
    _, err = (process := command("sweep.resume=all", folder=here, stub=STUB)).communicate()
    assert process.returncode == 2 and "optuna.log cannot be read: " in err and "Traceback" not in err


@pytest.mark.parametrize(("line", "says"), [
    ("-m sweep.search=optuna seed=1", "sweep.search=optuna: nothing to search over; write key=a,b, key='interval("),
    ("-m sweep.search=optuna optimizer.lr=interval(2,1)", "write interval(a,b), int(interval(a,b)) or tag(log,"),
    ("-m sweep.search=optuna optimizer.lr=tag(log,interval(0,1))", "with a < b, and 0 < a for log"),
    ("-m sweep.search=optuna optimizer.beta1=interval(0.5,1.5)", "optimizer.beta1=1.5: must be a number >= 0 and < 1"),
    ("-m optimizer.lr=interval(1,2)", "or sweep.search=optuna beside it"),
    ("-m seed=1,2 sweep.search=opt", "sweep.search=opt: must be one of all, optuna"),
    ("-m seed=1,2 sweep.search=optuna sweep.objectives=[loss]", "sweep.objectives=[loss]: each must be one of "),
    ("-m seed=1,2 sweep.executor=slurm", "sweep.executor=slurm: must be one of here, submitit"),
    ("-m seed=1,2 sweep.executor=submitit sweep.options.zzz=1", "sweep.options={zzz:1}: "),
    ("-m seed=1,2 hydra/launcher=submitit_local", "sweep.executor=submitit for a cluster"),
    ("-m seed=1,2 hydra/sweeper=optuna", "write sweep.search=optuna for a search"),
])  # fmt: skip
def test_what_cannot_be_searched_or_submitted_is_one_line(line, says, extra, here, shipped, capsys):  # noqa: F811
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err and not list(here.iterdir())


@pytest.mark.parametrize(("name", "key"), [("optuna", "sweep.search"), ("submitit", "sweep.executor")])
def test_without_the_package_it_says_what_to_install(name, key, here, shipped, capsys, monkeypatch):  # noqa: F811
    find = importlib.util.find_spec
    absent = lambda asked, *more: None if asked == name else find(asked, *more)  # noqa: E731
    for module in ("search", "submitted"):
        monkeypatch.setattr(f"aottrain.cli.sweeping.{module}.find_spec", absent)
    assert main(["-m", "seed=1,2", f"{key}={name}"]) == 2
    line = f"{key}={name}: needs the package {name}, which is not installed: pip install 'aottrain[search]'"
    assert line in capsys.readouterr().err


def test_a_job_that_fails_elsewhere_ends_alone_and_is_listed(extra, here):  # noqa: F811
    line = ["-m", "trainer.accumulate=2,3", "sweep.executor=submitit", "sweep.options.cluster=local"]
    process = command(*line, "sweep.parallel=2", "hydra.sweep.dir=all", folder=here, stub=STUB)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1 and "job 1 failed (trainer.accumulate=3): exit code 1" in err, err
    log = next(line for line in out.splitlines() if line.startswith("what submitit's job ")).partition(": ")[2]
    assert "RuntimeError: planted" in Path(log).read_text()
    assert [row["status"] for row in rows(here / "all")] == ["finished", "failed"]
    assert json.loads((here / "all" / "0" / "summary.json").read_text())["status"] == "finished"
    assert list(Path(here, "all", "submitit").glob("*/*_result.pkl"))


def test_a_search_that_goes_on_counts_what_its_journal_and_its_folders_have(tmp_path):
    """Of four that may finish: one the journal has, one that failed, one that finished untold, one that was cut off."""

    def trial(number, name):
        return SimpleNamespace(
            number=number, params={"a": number}, state=SimpleNamespace(name=name, is_finished=lambda: name != "RUNNING")
        )

    told, names = [], ("COMPLETE", "FAIL", "RUNNING", "RUNNING")
    for number in (0, 2):
        (tmp_path / str(number)).mkdir()
        figures = {"status": "finished", "val_loss": 1.5}
        (tmp_path / str(number) / "summary.json").write_text(json.dumps(figures))
    study = SimpleNamespace(
        get_trials=lambda deepcopy: [trial(number, name) for number, name in enumerate(names)],
        tell=lambda *values: told.append(values),
        ask=lambda: SimpleNamespace(number=4, suggest_categorical=lambda key, choices: choices[0]),
    )
    config = RunConfig(sweep=SweepConfig(search="optuna", trials=4, objectives=["val_loss"]))
    search = Search(study, [Dimension("a", ("7", "8"))], config, lambda number, values: SweepJob(
        number, values, tmp_path / str(number), []))  # fmt: skip
    search.go_on()
    assert told == [(2, [1.5])] and [outcome.job.number for outcome in search.waiting] == [3]
    assert [outcome.status for outcome in search.outcomes] == ["finished", "failed", "finished", "not run"]
    assert search.total == 5
    assert search.next().job.number == 3
    asked = search.next()
    assert (asked.job.number, asked.job.overrides) == (4, {"a": "7"}) and search.next() is None


def test_a_search_goes_by_metrics_of_the_recipe_with_their_direction(extra, tmp_path):
    def search(*objectives, trials=2):
        config = RunConfig(sweep=SweepConfig(search="optuna", trials=trials, objectives=objectives))
        make = lambda number, values: SweepJob(number, values, tmp_path / str(number), [])  # noqa: E731
        return Search(open_study(tmp_path, config), [Dimension("a", ("1", "2"))], config, make)

    supply = search("accuracy:max", "val_loss")
    for accuracy in (0.25, 0.5):
        outcome = supply.next()
        outcome.job.directory.mkdir()
        figures = {"status": "finished", "val_loss": 1.0, "val_metrics": {"accuracy": accuracy}}
        (outcome.job.directory / "summary.json").write_text(json.dumps(figures))
        outcome.take_finished()
        supply.ended(outcome)
    assert supply.verdict().startswith("best: job 1 (a=") and "accuracy:max 0.5, val_loss 1\n" in supply.verdict()
    assert supply.outcomes[1].figures["val/accuracy"] == 0.5
    with pytest.raises(ConfigError, match=r"is by \[accuracy:max,val_loss\], which stays as it is"):
        search("accuracy:min", "val_loss")
    supply = search("accuracy:max", "val_loss", trials=9)
    outcome = supply.next()
    outcome.exit_code, outcome.error = 2, "ConfigError: sweep.objectives=[accuracy:max]: the recipe has no metric"
    outcome.status = "failed"
    supply.ended(outcome)
    assert supply.next() is None  # no other job has it either


def test_a_submitted_job_is_waited_for_and_what_it_raised_is_a_failure(monkeypatch, capsys):
    def job(*done, result):
        answers = iter(done)
        return SimpleNamespace(done=lambda: next(answers), result=result, job_id=5, paths=SimpleNamespace(stderr="err"))

    def fail():
        raise RuntimeError("no result")

    monkeypatch.setattr(submitted.time, "sleep", lambda seconds: None)
    ended = submitted.Submitted(job(False, False, True, result=lambda: "3"))
    assert ended.poll() is None and ended.wait() == 3 == ended.poll()
    assert submitted.Submitted(job(True, result=fail)).wait() == 1 and "printed: err" in capsys.readouterr().out
