"""A target that is not there, or is not what it must be: one line with the file, the line and the nearest name."""

from __future__ import annotations

import sys

import pytest

from aottrain.config.extensions.recipes import recipe_of
from aottrain.config.extensions.targets import KINDS, is_open, load_target, named_again
from aottrain.config.reading import read_config
from aottrain.config.run import RecipeConfig
from aottrain.errors import ConfigError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").touch()
    (tmp_path / "own" / "data.py").write_text("def points(n, *, noise=0.0): ...\nvalue = 3\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own", "wrong")]:
        del sys.modules[name]


WRONG = [  # group, target, source of the module `wrong`, what is said behind the target
    ("data", "own.dta:points", "", "there is no module own.dta; did you mean data? (own is own/__init__.py)"),
    ("data", "onw.data:points", "", "there is no module onw; did you mean own? (it is looked for in this folder, on "),
    ("recipe", "own.py", "", "there is no module own.py; did you mean own? (own is own/__init__.py)"),
    ("data", "own.data:pionts", "", "own/data.py has no pionts; did you mean points?"),
    ("data", "own.data:value", "", "is not a callable, own/data.py has a int there"),
    ("data", "own.data:points", "", "cannot be called as (), it takes (n, *, noise=0.0)"),
    ("lr_schedule", "wrong:f", "def f(step): ...", "cannot be called as (step, total_steps), it takes (step)"),
    ("kernel", "wrong:f", "def f(g): ...", "cannot be called as (graph_module, example_inputs), it takes (g)"),
    ("partition", "wrong:f", "def f(): ...", "cannot be called as (forward_value), it takes ()"),
    ("optimizer", "wrong:f", "def f(): ...", "must be a class of torch.optim.Optimizer, it is a function"),
    ("recipe", "wrong", "\n1 / 0", "cannot be imported: wrong.py:2, in <module>, `1 / 0`: ZeroDivisionError"),
    ("recipe", "wrong", "def x(:", "cannot be imported: wrong.py:1: SyntaxError"),
    ("recipe", "wrong", "raise SystemExit(3)", "wrong.py:1, in <module>, `raise SystemExit(3)`: SystemExit: 3"),
    ("recipe", "wrong", "import nothing_such", "wrong.py:1, in <module>, `import nothing_such`: ModuleNot"),
    ("recipe", "wrong", "import own.nothing", "wrong.py:1, in <module>, `import own.nothing`: ModuleNotFoundError"),
]


@pytest.mark.parametrize(("group", "target", "source", "says"), WRONG, ids=[f"{w[1]} {w[3]}" for w in WRONG])
def test_what_is_wrong_is_one_line(here, group, target, source, says):
    (here / "wrong.py").write_text(source)
    with pytest.raises(ConfigError) as raised:
        load_target(group, target)
    (line,) = raised.value.mistakes
    assert line.startswith(f"{group}.target={target}: ") and says in line and "\n" not in line


def test_an_option_that_it_does_not_take_is_named(here):
    with pytest.raises(ConfigError) as raised:
        load_target("data", "own.data:points", {"n": 3, "noize": 1, "zz": 2})
    assert raised.value.mistakes == [
        "data.options.noize: data.target=own.data:points takes no noize; did you mean noise? (it takes n, noise)",
        "data.options.zz: data.target=own.data:points takes no zz (it takes n, noise)",
    ]


def test_a_module_that_is_no_recipe_is_said_with_its_file(here):
    (here / "wrong.py").write_text("def build(options): ...\n")
    with pytest.raises(ConfigError) as raised:
        recipe_of(RecipeConfig(name="custom", target="wrong"))
    assert raised.value.mistakes == [
        "recipe.target=wrong: wrong.py has no dataclass Options with the recipe's settings",
        "recipe.target=wrong: wrong.py has no function loss(model, batch)",
    ]


@pytest.mark.parametrize("target", ["mine:f", "./mine", "a..b", "a b", "1a", "", "a;b", None])
def test_a_target_s_letters_are_checked_before_anything_is_imported(target):
    _, (mistake,) = read_config({"recipe": {"name": "custom", "target": target}})
    assert "recipe=custom needs package.module, a module with Options, build and loss" in str(mistake)


@pytest.mark.parametrize("group", KINDS)
def test_an_option_of_ours_takes_none_and_custom_needs_one(group):
    name = "strategy" if group == "partition" else "name"
    _, (mistake,) = read_config({group: {"target": "a" if group == "recipe" else "a:b"}})
    assert f"takes no target; use {group}={KINDS[group].option}" in str(mistake)
    _, mistakes = read_config({group: {name: KINDS[group].option}})
    assert f"{group}.target=null: {group}={KINDS[group].option} needs package.module" in str(mistakes[-1])


def test_what_a_target_declares_are_keys_and_are_values_by_name():
    values = {"optimizer": {"target": None}, "data": {"name": "text"}, "recipe": {"target": "x"}}
    keys = ("optimizer.options.a", "data.options.a", "recipe.model.a", "recipe.modela", "kernel.options.a")
    assert [key for key in keys if is_open(key, values)] == ["optimizer.options.a", "recipe.model.a"]
    _, (mistake,) = read_config({"optimizer": {"name": "custom", "target": "a:b", "options": [1]}})
    assert str(mistake) == "optimizer.options=[1]: is a section, give its keys one by one: optimizer.options.key=value"


def test_the_targets_of_a_run_as_they_are_typed_again():
    config, _ = read_config({"kernel": {"name": "custom", "target": "a:b"}, "recipe": {"name": "x", "target": "y.z"}})
    assert named_again(config) == ["recipe.target=y.z", "kernel.target=a:b"]
