"""Every YAML file composes into a RunConfig, every key says what it means, and what is refused is said in full."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from aottrain.cli.values import HYDRA_BASE
from aottrain.config.devices import find_target
from aottrain.config.extensions.recipes import load_recipe, recipe_names, recipe_of
from aottrain.config.reading import read_config, read_model
from aottrain.config.run import RecipeConfig, RunConfig
from aottrain.config.schema import Range, build, find, leaves, quoted, setting, suggest
from aottrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
OPTIONS = sorted((path.parent.name, path.stem) for path in CONF.glob("*/*.yaml"))
EXTRA = {
    ("recipe", "custom"): "recipe.target=recipes.resnet",
    ("partition", "policy"): "partition.target=package.module:function",
    ("partition", "plan"): "partition.path=plan.json",
    **{(group, "custom"): f"{group}.target=a.module:f" for group in ("kernel", "data", "optimizer", "lr_schedule")},
}


def composed(*overrides: str) -> dict:
    with initialize_config_dir(str(CONF), **HYDRA_BASE):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids="=".join)
def test_every_option_composes_and_converts(group, option):
    more = [EXTRA[group, option]] if (group, option) in EXTRA else []
    config, mistakes = read_config(composed(f"{group}={option}", *more))
    assert mistakes == []
    config, mistakes = read_model(config)
    if option == "hf" and find_spec("transformers") is None:
        assert [mistake.text.endswith("pip install 'aottrain[hf]'") for mistake in mistakes] == [True]
        return
    assert mistakes == []
    assert isinstance(config.recipe.model, recipe_of(config.recipe).Options)


def test_an_option_is_named_by_its_file():
    for group, option in OPTIONS:
        values = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
        name = values.get("strategy" if group == "partition" else "name", option)
        assert name == option


def test_the_yaml_defaults_are_the_dataclass_defaults():
    config, _ = read_model(read_config(composed())[0])
    assert config == dataclasses.replace(RunConfig(), recipe=config.recipe)
    assert config.recipe.model == load_recipe("transformer").Options()


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_key_has_a_comment(path):
    lines = path.read_text().splitlines()
    entries = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    silent = [line for line in entries if not re.search(r"\S # \S", line)]
    assert silent == []
    assert all(len(line) <= 160 for line in lines)


def test_every_field_is_a_key_of_some_file():
    keys = set()
    for group, option in OPTIONS:
        if group not in ("experiment", "debug"):
            values = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
            keys |= {name for name, _ in leaves({group: values})}
    keys |= {name for name, _ in leaves(yaml.safe_load((CONF / "config.yaml").read_text()))}
    fields = {name for name, _ in leaves(dataclasses.asdict(RunConfig()))} - {"output_dir", "recipe.model"}
    assert fields - keys == set()


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_file_has_exactly_the_options_of_its_module(name):
    values = yaml.safe_load((CONF / "recipe" / f"{name}.yaml").read_text())
    options = {item.name for item in dataclasses.fields(load_recipe(values["name"]).Options)}
    assert set(values["model"]) == options


def test_recipes_are_found_without_importing_them():
    assert "transformer" in recipe_names()


def test_recipes_are_those_beside_the_code_whichever_checkout_is_installed(monkeypatch, tmp_path):
    (tmp_path / "__init__.py").write_text("")

    class Installed:
        """As an editable installation of another checkout finds them."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            place = tmp_path / "__init__.py"
            return spec_from_file_location(name, place) if name == "aottrain.recipes" else None

    monkeypatch.delitem(sys.modules, "aottrain.recipes", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Installed, *sys.meta_path])
    assert recipe_names() == sorted(path.stem for path in (ROOT / "recipes").glob("[!_]*.py"))


@pytest.mark.parametrize("text", ["a", "a\\", 'a"', 'a\\"b', "a\\b", '\\\\"', "it's, [1]", "end\\\\", "two\nlines"])
def test_text_is_quoted_as_hydra_has_it(text):
    assert quoted(text) == QuotedString(text, Quote.double).with_quotes()
    assert OverridesParser.create().parse_override(f"key={quoted(text)}").value() == text


def test_checking_a_configuration_does_not_import_torch():
    script = "import sys, aottrain.config.reading as c; print(c.read_config({'sed': 1})[1][0], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "did you mean seed?" in done.stdout and done.stdout.endswith("False\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = setting(0.5, low=0, high=1)
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    count: int = setting(1, low=1)
    kind: str = setting("a", one_of=("a", "b"))
    flag: bool = True
    limit: int | None = setting(None, low=0)
    inner: Inner = dataclasses.field(default_factory=Inner)


@pytest.mark.parametrize(
    ("key", "value"),
    [("count", 0), ("count", 1.0), ("count", "1"), ("count", True), ("count", None), ("kind", "c"), ("kind", None),
     ("flag", 1), ("flag", "yes"), ("limit", -1), ("limit", "x"), ("inner.rate", 1.5), ("inner.rate", "half"),
     ("inner.rate", float("nan")), ("inner.rate", True), ("inner.names", "ab"), ("inner.names", [None]), ("inner", 3),
     ("cuont", 2), ("inner.rat", 0.1)],
)  # fmt: skip
def test_a_wrong_value_is_named(key, value):
    section, _, name = key.rpartition(".")
    _, mistakes = build(Outer, {section: {name: value}} if section else {name: value})
    assert [mistake.key for mistake in mistakes] == [key]
    assert str(mistakes[0]).count("\n") == 0


def test_a_right_value_is_taken_in_the_field_s_type():
    values = {"count": 3, "kind": "b", "limit": 0, "inner": {"rate": 1, "names": ["x", 2]}}
    outer, mistakes = build(Outer, values)
    assert mistakes == []
    assert outer == Outer(count=3, kind="b", limit=0, inner=Inner(rate=1.0, names=("x", "2")))
    assert isinstance(outer.inner.rate, float)


def test_all_mistakes_are_collected():
    _, mistakes = build(Outer, {"count": -1, "flag": "no", "inner": {"rate": 2, "rote": 1}})
    assert {mistake.key for mistake in mistakes} == {"count", "flag", "inner.rate", "inner.rote"}


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer", "resume", "sweep.resume", "eval.run", "adapter.base"])
def test_a_path_that_is_empty_is_refused(key):
    """As of a shell's variable without a value; data.path would be the current folder, and sweep.resume no sweep."""
    section, _, name = key.rpartition(".")
    _, mistakes = read_config({section: {name: ""}} if section else {name: ""})
    assert [mistake.key for mistake in mistakes] == [key] and str(mistakes[0]).endswith(", not empty")


@pytest.mark.parametrize("value", [5, "text", [1], {1: 2}, True])
def test_keys_of_its_own_are_no_value(value):
    for section, more in (("optimizer", {"name": "custom", "target": "torch.optim:RMSprop"}), ("sweep", {})):
        _, mistakes = read_config({section: {**more, "options": value}})
        assert [str(each).partition(": ")[2] for each in mistakes] == [
            f"is a section, give its keys one by one: {section}.options.key=value"
        ]


def test_a_wait_is_not_longer_than_torch_counts():
    _, mistakes = read_config({"parallel": {"name": "ddp", "timeout": 1e20}})
    assert [str(each) for each in mistakes] == ["parallel.timeout=1e+20: must be a number > 0 and <= 1000000"]


def test_a_contradiction_is_found_beside_a_wrong_value():
    _, mistakes = read_config({"partition": {"strategy": "min_cut", "budget": 0.5}, "data": {"batch_size": 0}})
    assert {mistake.key for mistake in mistakes} == {"partition.budget", "data.batch_size"}


@pytest.mark.parametrize(
    ("word", "expected"),
    [("partition.bugdet", "partition.budget"), ("bugdet", "partition.budget"), ("lr", "optimizer.lr"),
     ("model.width", "recipe.model.width"), ("partiton", "partition"), ("zzz", ""), ("seeker", "seed"),
     ("partition.zzz", "")],
)  # fmt: skip
def test_the_nearest_name_is_suggested(word, expected):
    known = ["partition", "partition.budget", "partition.strategy", "optimizer.lr", "recipe.model.width", "seed"]
    assert suggest(word, known) == (f"; did you mean {expected}?" if expected else "")


def test_find_says_where_a_dotted_name_ends():
    values = {"a": {"b": [1, {"c": 2}]}}
    assert find(values, "a.b.1.c")[0]
    assert find(values, "a.x") == (False, ["b"], "a")
    assert find(values, "x") == (False, ["a"], "")


def test_a_range_is_about_numbers():
    """What else a key takes, and a truth value, is judged elsewhere."""
    within = Range(low=2, below=5)
    assert [within.admits(value) for value in (1, 2, 4.5, 5)] == [False, True, True, False]
    assert all(within.admits(value) for value in (None, "6GiB", "auto", True, False))


@pytest.mark.parametrize(("name", "target", "title"), [
    ("llama", None, "llama"),
    ("custom", "mine.model", "mine.model"),
    ("custom", None, "custom"),
    ("mine", "mine.model", "mine"),  # a file of one's own, which has a name
])  # fmt: skip
def test_what_a_recipe_is_called_where_it_is_shown(name, target, title):
    assert RecipeConfig(name=name, target=target).title == title


def test_a_file_of_rates_that_has_no_keys_is_refused(tmp_path):
    (tmp_path / "device.yaml").write_text("- cuda\n- 1\n")
    with pytest.raises(ConfigError, match=r"device=.*device.yaml: must be a file that task=measure wrote: keys with"):
        find_target(str(tmp_path / "device.yaml"))
