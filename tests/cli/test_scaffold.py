"""`new recipe NAME` writes files that work as they are, and `ls` says what there is to choose from."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from aottrain.cli import main
from aottrain.config.choices import ENGINES, OPTIMIZERS, PARTITIONS, TASKS
from aottrain.config.extensions.recipes import recipe_names


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("ring_of_mine", "test_ring_of_mine"):
        sys.modules.pop(name, None)


def test_a_new_recipe_trains_and_passes_its_test_as_it_is(here, capsys):
    assert main(["new", "recipe", "ring_of_mine"]) == 0
    written = sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())
    assert written == ["conf/recipe/ring_of_mine.yaml", "ring_of_mine.py", "test_ring_of_mine.py"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2] == "train it: python -m aottrain --config-dir conf recipe=ring_of_mine debug=fast"
    assert main([*printed[-2].split()[5:], "engine=eager", "measure.memory=false", "hydra.run.dir=run"]) == 0
    tests = importlib.import_module("test_ring_of_mine")
    for name in [name for name in dir(tests) if name.startswith("test_")]:
        getattr(tests, name)()


@pytest.mark.parametrize(("is_there", "first"), [(True, ""), (False, "pip install pytest && ")])
def test_who_lacks_pytest_is_told_how_to_get_it(here, capsys, monkeypatch, is_there, first):
    find_spec = importlib.util.find_spec
    known = {} if is_there else {"pytest": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: known[name] if name in known else find_spec(name))
    assert main(["new", "recipe", "ring_of_mine"]) == 0
    assert capsys.readouterr().out.endswith(f"\ntest it:  {first}python -m pytest test_ring_of_mine.py\n")


def test_it_writes_over_nothing(here, capsys):
    Path("test_ring_of_mine.py").write_text("mine")
    assert main(["new", "recipe", "ring_of_mine"]) == 2
    assert "test_ring_of_mine.py is there already, and is not written over" in capsys.readouterr().err
    assert Path("test_ring_of_mine.py").read_text() == "mine" and list(here.rglob("*.yaml")) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("new", "new: write new recipe NAME"),
        ("new recipe", "new recipe: write new recipe NAME"),
        ("new model x", "new model x: write new recipe NAME"),
        ("new recipe a-b", "must be a Python name"),
        ("new recipe class", "must be a Python name"),
        ("new recipe a.b", "must be a Python name"),
        ("new recipe llama", "is a recipe already"),
        ("new recipe custom", "is a recipe already"),
        ("new recipe json", "is the name of another module, "),
        ("ls optimisers", "ls optimisers: unknown group; did you mean optimizer?"),
    ],
)
def test_what_it_cannot_do_is_one_line(here, capsys, line, says):
    assert main(line.split()) == 2
    _, mistake = capsys.readouterr().err.splitlines()
    assert says in mistake and list(here.iterdir()) == []


def test_ls_says_each_option_with_its_meaning(here, capsys):
    (here / "conf" / "optimizer").mkdir(parents=True)
    (here / "conf" / "optimizer" / "slow.yaml").write_text("# Small steps. As nobody wants them.\nname: sgd\n")
    assert main(["--config-dir", "conf", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0].rstrip("*"): line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
    assert {*TASKS, *recipe_names(), *OPTIMIZERS, *ENGINES, *PARTITIONS, "text", "cpp", "wsd", "slow"} <= set(shown)
    assert shown["slow"] == "Small steps." and shown["adamw"] == "AdamW (Loshchilov & Hutter, 2019)."
    assert shown["plan"].startswith("compile and say what a training step would save")
    assert main(["ls", "engine"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("engine=  Who runs a step: ") and len(lines) == len(ENGINES)


@pytest.mark.parametrize("line", (["new", "--help"], ["new", "recipe", "-h"]))
def test_its_help_names_what_it_writes(line, capsys):
    assert main(line) == 0
    assert "new recipe NAME: writes NAME.py, conf/recipe/NAME.yaml, test_NAME.py" in capsys.readouterr().out
