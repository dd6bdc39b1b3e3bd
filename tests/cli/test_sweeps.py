"""Sweeps that finish: what is missing is run, several jobs at once, and the figures by which jobs are compared."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from pathlib import Path

import pytest

from aottrain.cli import main
from tests.cli.test_cli import command, here  # noqa: F401

COUNTING = """
import json
import re
import sys
import time
from pathlib import Path

def run(config):
    folder = Path(config.output_dir)
    with open(folder / "ran.txt", "a") as file:
        file.write(f"{config.resume}\\n")
    if config.seed == 2 and not (folder / "summary.json").exists():
        (folder / "summary.json").write_text(json.dumps({"status": "failed"}))
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "step_00000001.pt").write_bytes(b"")
        return 1
    loss = 1.0 / config.seed
    figures = {"status": "finished", "val_loss": loss, "best_val_loss": loss / 2, "compile_s": 3.0}
    (folder / "summary.json").write_text(json.dumps(figures))
    return 0
"""

# The first time it goes on until it is told to end, and may.
LASTING = """
import signal
import time
from pathlib import Path

def run(config):
    folder = Path(config.output_dir)
    ran, summary = folder / "ran.txt", folder / "summary.json"
    with ran.open("a") as file:
        file.write(f"{config.resume}\\n")
    if config.seed == 2 or config.resume:
        summary.write_text('{"status": "finished"}')
        return 0
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    with ran.open("a") as file:
        file.write("began\\n")
    while not told:
        time.sleep(0.01)
    while not Path("may_end").exists():
        time.sleep(0.01)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step_00000001.pt").write_bytes(b"")
    with ran.open("a") as file:
        file.write("ended\\n")
    return 143
"""


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_what_is_missing_is_run_and_goes_on_from_its_checkpoint(quick_children, here):  # noqa: F811
    first = command("-m", "seed=1,2,3", "hydra.sweep.dir=all", "sweep.parallel=2", folder=here, stub=COUNTING)
    out, err = first.communicate()
    assert first.returncode == 1, err
    assert "job 1 failed (seed=2)" in err and "job 2 finished" in out
    assert [row["status"] for row in rows(here / "all")] == ["finished", "failed", "finished"]
    killed = here / "all" / "2" / "summary.json"
    killed.write_text(json.dumps({"status": "running", "steps": 7}))
    again = command("sweep.resume=all", folder=here, stub=COUNTING)
    out, err = again.communicate()
    assert again.returncode == 0, err
    assert "1 of 3 jobs have finished already" in out and "lowest held-out loss: 0.1667, job 2 (seed=3)" in out
    ran = [(here / "all" / str(number) / "ran.txt").read_text().split() for number in range(3)]
    assert ran == [["None"], ["None", "auto"], ["None", "auto"]]
    (one, two, three) = rows(here / "all")
    assert [row["status"] for row in (one, two, three)] == ["finished"] * 3
    assert (two["val_loss"], two["best_val_loss"], two["compile_s"]) == ("0.5", "0.25", "3.0")
    assert "sweep.parallel" not in one


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_job_ends_with_a_sweep_that_was_killed_and_goes_on_with_it(quick_children, here):  # noqa: F811
    first = command("-m", "seed=1,2", "hydra.sweep.dir=all", folder=here, stub=LASTING)
    ran = here / "all" / "0" / "ran.txt"
    while not ran.exists() or "began" not in ran.read_text():
        assert first.poll() is None
        time.sleep(0.01)
    first.kill()
    again = command("sweep.resume=all", folder=here, stub=LASTING)
    assert again.stdout is not None
    said = iter(again.stdout.readline, "")
    assert any(re.search(r"all/0: process \d+ still runs there; waiting for its end\n", line) for line in said)
    (here / "may_end").touch()
    _, err = again.communicate(timeout=60)
    first.communicate(timeout=60)
    assert again.returncode == 0, err
    assert ran.read_text().split() == ["None", "began", "ended", "auto"]
    assert [row["status"] for row in rows(here / "all")] == ["finished"] * 2


def test_a_sweep_that_is_gone_on_with_takes_no_other_settings(quick_children, here):  # noqa: F811
    (here / "old" / ".hydra").mkdir(parents=True)
    (here / "old" / ".hydra" / "overrides.yaml").write_text("- -m\n- seed=1,2\n- optimizer.target=torch.optim:Rprop\n")
    wrong = {
        ("sweep.resume=old", "trainer.steps=3"): "beside it only sweep.parallel and its targets are given, not trainer",
        ("sweep.resume=old",): "a folder alone starts no code, so name again what starts some, if you trust it: optim",
        ("sweep.resume=nowhere",): "sweep.resume=nowhere: no sweep was recorded there",
        ("-m", "seed=1,2", "sweep.parallel=0"): "sweep.parallel=0: must be a whole number >= 1",
    }
    for arguments, text in wrong.items():
        process = command(*arguments, folder=here, stub=COUNTING)
        _, err = process.communicate()
        assert process.returncode == 2 and text in err, err


def test_a_job_lies_below_the_sweep_s_folder(here, capsys):  # noqa: F811
    for subdir in ("../${seed}", ".", "/${seed}"):
        assert main(["-m", "seed=7", "hydra.sweep.dir=all", f"hydra.sweep.subdir={subdir}"]) == 2
        assert f"must be a folder below hydra.sweep.dir={here / 'all'}" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_a_run_is_no_sweep_to_go_on_with(here, capsys):  # noqa: F811
    (here / "one" / ".hydra").mkdir(parents=True)
    (here / "one" / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
    (here / "one" / "summary.json").write_text('{"status": "interrupted", "steps": 3}')
    assert main(["sweep.resume=one"]) == 2
    assert "sweep.resume=one: holds one run, not a sweep; to go on with it: python -m aottrain resume=one\n" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "recorded",
    [
        "+hydra.callbacks.mine._target_=os.mkdir",
        "+hydra.job.env_set.LD_PRELOAD=mine.so",
        "hydra.searchpath=[file://mine]",
        "hydra/job_logging=mine",
        "+sweep.options.setup=[mkdir canary]",
        "sweep.options={setup:[mkdir canary]}",
        "++optimizer.target=os:mkdir",
        "recipe.target=one,two",
    ],
)
def test_what_may_start_code_is_named_again(here, recorded, capsys):  # noqa: F811
    (here / "old" / ".hydra").mkdir(parents=True)
    (here / "old" / ".hydra" / "overrides.yaml").write_text(json.dumps(["-m", "seed=1,2", recorded]))
    assert main(["sweep.resume=old"]) == 2
    assert f"a folder alone starts no code, so name again what starts some, if you trust it: {recorded}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "listed, told",
    [
        (["seed=range(0,1e8)"], "lists no values, or more than 10,000"),
        (["seed=range(0,100000000)"], "lists no values, or more than 10,000"),
        (["seed=shuffle(range(0,100000000))"], "lists no values, or more than 10,000"),
        (["seed=range(0,3,0)"], "lists no values, or more than 10,000"),
        (["seed=range(3,0)"], "lists no values, or more than 10,000"),
        (["partition.budget=range(0.0,1.0,1e-9)"], "lists no values, or more than 10,000"),
        (["seed=range(0,200)", "trainer.steps=range(1,52)"], "a sweep: has at most 10,000 jobs, not 200 x 51"),
        (["partition.budget=range(0.0,1.0)", "seed=range(5,5)"], "seed=range(5,5): lists no values, or more than"),
    ],
)
def test_a_sweep_has_an_end(here, listed, told, capsys):  # noqa: F811
    assert main(["-m", *listed]) == 2
    assert told in capsys.readouterr().err
