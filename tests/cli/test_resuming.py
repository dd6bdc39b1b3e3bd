"""`resume=<run>`: a run goes on with its own settings; what is given beside it stands, and is shown."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from aottrain.cli import main
from aottrain.cli.lock import only_run_in
from aottrain.errors import CapacityError

TINY = ["recipe.model.num_layers=1", "recipe.model.width=16", "recipe.model.num_heads=2", "recipe.model.context=16"]
FAST = ["debug=fast", "engine=eager", "trainer.eval_every=0", "trainer.sample_bytes=0", "measure.memory=false", *TINY]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def configuration(folder: str) -> dict:
    return yaml.safe_load(Path(folder, ".hydra", "config.yaml").read_text())


def losses(folder: str) -> list[str]:
    with Path(folder, "metrics.csv").open(newline="") as file:
        return [row["train/loss"] for row in csv.DictReader(file)]


def differences(printed: str) -> list[str]:
    return [line.strip() for line in printed.splitlines() if " in that run, " in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of three steps whose settings are not the defaults, in its schedule of six."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("a text of one's own, " * 40)
    line = ["partition.budget=0.4", "optimizer=sgd", "optimizer.momentum=0.8", "logger=wandb", "logger.mode=disabled"]
    line += ["data.path=text.txt", "lr_schedule.total_steps=6", "trainer.steps=3", "hydra.run.dir=first"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        assert main([*FAST, *line]) == 0
    return folder


@pytest.fixture
def first(trained, here):
    """That run, as if it had been started here."""
    shutil.copytree(trained, here, dirs_exist_ok=True)
    for record in Path(here, "first", ".hydra").iterdir():
        record.write_text(record.read_text().replace(str(trained), str(here)))
    return "first"


def test_alone_it_takes_that_run_s_own_settings(first, here, monkeypatch, capsys):
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")  # paths are those of the folder in which the run was started
    assert main(["resume=../first", "trainer.steps=4", "hydra.run.dir=again"]) == 0
    assert differences(capsys.readouterr().out) == ["trainer.steps: 3 in that run, 4 here"]
    wanted, got = configuration("../first"), configuration("again")
    assert got["trainer"].pop("steps") == 4 and wanted["trainer"].pop("steps") == 3
    assert got.pop("resume") == "../first" and wanted.pop("resume") is None
    wanted["data"]["path"] = got["data"]["path"]
    assert Path(got["data"]["path"]).samefile(here / "text.txt")
    assert got == wanted


def test_what_is_given_beside_it_stands_and_is_shown(first, capsys):
    assert main([f"resume={first}", "trainer.steps=6", "partition.budget=1.0", "hydra.run.dir=second"]) == 0
    shown = ["partition.budget: 0.4 in that run, 1.0 here", "trainer.steps: 3 in that run, 6 here"]
    assert differences(capsys.readouterr().out) == shown
    config = configuration("second")
    assert config["partition"]["budget"] == 1.0 and config["optimizer"]["momentum"] == 0.8
    # and that run can be gone on with in its turn, from any of its checkpoints
    (checkpoint,) = Path("second", "checkpoints").glob("*.pt")
    assert main([f"resume={checkpoint}", "trainer.steps=7", "hydra.run.dir=third"]) == 0
    assert differences(capsys.readouterr().out) == ["trainer.steps: 6 in that run, 7 here"]
    assert configuration("third")["partition"]["budget"] == 1.0
    assert len(losses("third")) == 1 and json.loads(Path("third/summary.json").read_text())["steps"] == 7


def test_what_cannot_be_gone_on_from_is_bad_input(first, capsys):
    assert main([f"resume={first}", "optimizer.lr=0.5", "hydra.run.dir=second"]) == 2
    assert "optimizer.lr: " in capsys.readouterr().err
    assert not Path("second").exists()
    (checkpoint,) = Path(first, "checkpoints").glob("*.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert main([f"resume={first}", "hydra.run.dir=third"]) == 2
    assert "none of its 1 checkpoints can be read" in capsys.readouterr().err
    assert main([f"resume={checkpoint}", "hydra.run.dir=fourth"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert f"{checkpoint}: is damaged: its checksum is not the one in latest.json" in line


def test_going_on_in_parts_is_bitwise_going_on_at_once(first):
    assert main([f"resume={first}", "trainer.steps=6", "hydra.run.dir=rest"]) == 0
    settings = configuration("rest")
    straight = [*FAST, "optimizer=sgd", "optimizer.momentum=0.8", "data.path=text.txt", "lr_schedule.total_steps=6"]
    assert main([*straight, "trainer.steps=6", "logger=csv", "hydra.run.dir=straight"]) == 0
    assert losses(first) + losses("rest") == losses("straight")
    assert settings["lr_schedule"]["total_steps"] == 6


def test_in_its_own_folder_a_run_goes_on_with_its_own_settings_too(first, capsys):
    assert main(["resume=auto", "trainer.steps=4", "hydra.run.dir=first"]) == 0
    assert differences(capsys.readouterr().out) == ["trainer.steps: 3 in that run, 4 here"]
    assert configuration("first")["partition"]["budget"] == 0.4 and len(losses("first")) == 4


def test_an_option_of_a_group_replaces_the_group_and_an_experiment_what_it_sets(first, capsys):
    line = [f"resume={first}", "partition=min_cut", "experiment=bf16", "debug=fast", "hydra.run.dir=second"]
    assert main(line) == 2  # bfloat16 is another run
    printed = capsys.readouterr()
    found = differences(printed.out)
    assert "partition.strategy: budget in that run, min_cut here" in found
    assert "partition.budget: 0.4 in that run, null here" in found
    assert "trainer.precision: fp32 in that run, bf16 here" in found
    assert "trainer.steps: 3 in that run, 5 here" in found and "logger.name: wandb in that run, csv here" in found
    assert not any(line.startswith(("optimizer", "data", "engine")) for line in found)
    *_, last = printed.err.splitlines()
    assert "trainer.precision: 'fp32' in the checkpoint, 'bf16' in this run" in last


def test_without_a_record_the_defaults_are_taken_and_that_is_said(first, capsys):
    (Path(first) / ".hydra" / "config.yaml").unlink()
    assert main([*FAST, f"resume={first}", "trainer.steps=4"]) == 2
    assert "no .hydra/config.yaml beside it: what is not given here has its default" in capsys.readouterr().out


def test_a_damaged_record_is_refused(first, capsys):
    (Path(first) / ".hydra" / "config.yaml").write_text("trainer: [1\n")
    assert main([f"resume={first}"]) == 2
    assert "config.yaml, line 2: not valid YAML" in capsys.readouterr().err


def test_a_setting_that_is_there_no_more_is_named_and_left_out(first, capsys):
    record = Path(first) / ".hydra" / "config.yaml"
    record.write_text(record.read_text().replace("  momentum: 0.8", "  momentum: 0.8\n  nesterov: true"))
    assert main([f"resume={first}", "trainer.steps=4"]) == 0
    assert "optimizer.nesterov: true in that run, no such key here" in differences(capsys.readouterr().out)


def test_the_configuration_can_be_looked_at_before(first, capfd):
    assert main(["--cfg", "job", f"resume={first}", "trainer.steps=9"]) == 0
    shown = yaml.safe_load(capfd.readouterr().out)
    assert shown["partition"]["budget"] == 0.4 and shown["trainer"]["steps"] == 9


@pytest.mark.parametrize(("left", "says"), [
    ("finished", "has a run of 7 steps (finished), which would be written over; give another hydra.run.dir"),
    ("running", "has a run of 7 steps (gone before its end), which would be written over; give another hydra.run.dir"),
    ("compare.csv", "has a comparison, which would be written over"),
    ("sweep.csv", "has a sweep, which would be written over"),
])  # fmt: skip
def test_a_folder_in_which_another_run_was_is_refused_and_stays_as_it_is(here, capsys, left, says):
    (here / "old").mkdir()
    left, status = (left, "finished") if left.endswith(".csv") else ("summary.json", left)
    (here / "old" / left).write_text(json.dumps({"steps": 7, "status": status}))
    assert main([*FAST, "hydra.run.dir=old"]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in Path("old").iterdir()] == [left]


@pytest.mark.parametrize("wrong", [
    ["data.batch_size=2000000000"],  # before the model is built
    ["engine=aot", "partition.budget=1000B"],  # after it was traced
])  # fmt: skip
def test_of_a_run_that_is_refused_after_loading_nothing_is_left_that_was_not_there(here, capsys, wrong):
    assert main([*FAST, *wrong, "logger=wandb", "hydra.run.dir=new/run"]) == 2
    assert not list(here.iterdir())
    (here / "mine").mkdir()
    assert main([*FAST, *wrong, "logger=csv", "hydra.run.dir=mine"]) == 2
    assert json.loads(Path("mine/summary.json").read_text())["status"] == "failed"
    with pytest.raises(CapacityError), only_run_in(here / "other", "hydra.run.dir"):
        (here / "other" / "results.txt").write_text("something")
        (here / "other" / "summary.json").write_text("{}")
        raise CapacityError
    assert sorted(os.listdir("other")) == ["results.txt", "summary.json"]


def test_a_finished_run_is_gone_on_with_by_the_command_that_its_refusal_names(first, capsys):
    before = losses(first)
    assert main([*FAST, "data.path=text.txt", f"hydra.run.dir={first}"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "hydra.run.dir=" in line]
    assert line.endswith("resume=auto hydra.run.dir=first trainer.steps=6") and losses(first) == before
    assert main(["-m", *FAST, "data.path=text.txt", f"hydra.sweep.dir={first}"]) == 2
    assert "resume=auto hydra.run.dir=first trainer.steps=6" in capsys.readouterr().err
    assert main(["resume=auto", f"hydra.run.dir={first}", "trainer.steps=4"]) == 0
    assert len(losses(first)) == 4


@pytest.mark.parametrize("line", [["resume=first"], ["resume=auto", "hydra.run.dir=first"]], ids=str)
def test_a_finished_run_that_is_gone_on_with_as_it_was_is_told_to_have_made_its_steps(first, here, capsys, line):
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}

    before = files()
    assert main(line) == 0
    *_, told = capsys.readouterr().out.splitlines()
    made = "first has made all its steps, trainer.steps=3, and has finished"
    assert told == f"{made}: nothing is run; a larger trainer.steps goes on with it"
    assert files() == before
    assert main([*line, "trainer.eval_batches=3"]) == 0  # which is another held-out loss
    assert "nothing to train" in capsys.readouterr().out


NO_TORCH = "import sys; sys.modules['torch'] = None; from aottrain.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("key", ["resume=", "task=eval eval.run="])
def test_a_folder_that_is_no_run_is_refused_before_torch_is_imported(here, key):
    (here / "some").mkdir()
    (here / "some" / "notes.txt").write_text("nothing of a run")
    done = subprocess.run([sys.executable, "-c", NO_TORCH, *f"{key}some".split()], capture_output=True, text=True)
    assert done.returncode == 2 and "the folder has no checkpoint" in done.stderr, done.stderr
    assert "torch" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["metrics.csv", ".hydra/config.yaml", ".lock", "flight.json"])
@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "pipe"])
def test_a_folder_whose_files_lead_elsewhere_is_refused(tmp_path, monkeypatch, capsys, name, kind):
    """A folder of another's may have links by which a run would write over one's own files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("mine")
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    targets = {"link": tmp_path / "mine", "dangling": tmp_path / "new", "loop": path}
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(targets[kind])
    assert main(["hydra.run.dir=run", "resume=auto", "debug=fast", "logger=csv"]) == 2
    printed = capsys.readouterr().err
    assert f"what is written to {path.name} there would land elsewhere" in printed and "Traceback" not in printed
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "new").exists()
