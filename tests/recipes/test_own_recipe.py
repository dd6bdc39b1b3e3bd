"""A recipe of one's own with a mistake in it: one line that names its place, exit code 2, and nothing half done."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from aottrain.cli import main
from aottrain.config.extensions import own_code, recipes
from aottrain.config.reading import read_config, read_model
from aottrain.config.run import RunConfig
from aottrain.config.schema import Mistake
from aottrain.errors import RecipeError
from aottrain.ir.units import format_bytes
from aottrain.tasks.measuring import runs_in_turns
from aottrain.tasks.measuring.worker import dump
from tests.sampling import crossed

GOOD = """from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Options:
    width: int = 8
    context: int = 8
    vocab_size: int = 256

    def check(self) -> list[str]:
        return []


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embed = nn.Embedding(options.vocab_size, options.width)
        self.head = nn.Linear(options.width, options.vocab_size)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def build(options):
    return Model(options)


def loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
"""
MAKES = "\n\ndef make_batch(options, batch_size, generator):\n    return {}\n"
TOKENS = "torch.zeros(batch_size, 8, dtype=torch.int64)"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(source): the module of the recipe `own`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    package = recipes._recipes_package()
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "more")])

    def put(source: str) -> None:
        (tmp_path / "more" / "own.py").write_text(source)
        sys.modules.pop(f"{package.__name__}.own", None)

    yield put
    sys.modules.pop(f"{package.__name__}.own", None)


@pytest.fixture
def train(write, tmp_path, capsys):
    """train(source, *arguments) -> exit code, lines of stderr, the run's directory."""
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "own.yaml").write_text("name: own\nmodel:\n  width: 8\n")

    def run(source: str, *arguments: str):
        write(source)
        line = ["--config-dir", "conf", "recipe=own", "debug=fast", "logger=csv", "hydra.run.dir=run"]
        code = main([*line, "trainer.steps=2", *arguments])
        return code, capsys.readouterr().err.splitlines(), tmp_path / "run"

    return run


def read(model: Mapping[str, Any]) -> tuple[RunConfig, list[Mistake]]:
    """The configuration of a run of it, without the command line."""
    sections = {"recipe": {"name": "own", "model": model}, "engine": {"name": "eager"}, "logger": {"name": "csv"}}
    return read_model(read_config(sections)[0])


def changed(before: str, after: str) -> str:
    assert before in GOOD
    return GOOD.replace(before, after)


MODULES = {
    "syntax": (changed("def build(options):", "def build(options)"), "more/own.py:27: SyntaxError: expected ':'"),
    "import": ("import nothing_such\n" + GOOD, "more/own.py:1, in <module>, `import nothing_such`: Mod"),
    "no loss, no build": (
        GOOD[: GOOD.index("def build")],
        ["more/own.py has no function build(options)", "more/own.py has no function loss(model, batch)"],
    ),
    "loss takes more": (
        changed("loss(model, batch)", "loss(model, inputs, targets)"),
        "cannot be called as loss(model, batch)",
    ),
    "no Options": (changed("class Options", "class Settings"), "has no dataclass Options"),
    "a plain class": (changed("@dataclass(frozen=True, kw_only=True)\n", ""), "has no dataclass Options"),
    "no default": (changed("width: int = 8", "width: int"), "has an Options whose width has no default"),
    "no context": (changed("    context: int = 8\n", ""), "has an Options without context, which a recipe for text"),
    "no check": (changed("def check", "def verify"), "has an Options without the method check(self)"),
    "check gives a text": (changed("return []", "return 'no'"), "must return a list of texts, it returned 'no'"),
    "check raises": (changed("return []", "return 1 / 0"), "in check, `return 1 / 0`: ZeroDivisionError: division by"),
    "make_batch takes less": (
        GOOD + MAKES.format(TOKENS).replace(", generator", ""),
        "cannot be called as make_batch(options, batch_size,",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_is_no_recipe_is_a_mistake_in_the_configuration(write, name):
    source, says = MODULES[name]
    write(source)
    _, mistakes = read({"width": 8})
    expected = [says] if isinstance(says, str) else says
    assert len(mistakes) == len(expected)
    for mistake, text in zip(mistakes, expected, strict=True):
        assert str(mistake).startswith("recipe=own: ") and text in str(mistake)


@pytest.mark.parametrize("name", ["syntax", "no loss, no build", "check raises"])
def test_such_a_mistake_is_a_line_before_anything_is_done(train, name):
    source, says = MODULES[name]
    code, err, directory = train(source)
    expected = [says] if isinstance(says, str) else says
    assert code == 2 and not directory.exists() and len(err) == 1 + len(expected)
    for line, text in zip(err[1:], expected, strict=True):
        assert line.startswith("  recipe=own: ") and text in line


HEAD = "nn.Linear(options.width, options.vocab_size)"
PROGRAMS = {
    "wrong shape": (
        changed(HEAD, "nn.Linear(9, options.vocab_size)"),
        "more/own.py:24, in forward, `return self.head(self.embed(tokens))`: RuntimeError: ",
    ),
    "unknown name": (
        changed("self.head(self", "heads(self"),
        "in forward, `return heads(self.embed(tokens))`: NameError",
    ),
    "too few classes": (changed(HEAD, "nn.Linear(options.width, 9)"), "IndexError: Target"),
    "loss raises": (
        changed("    inputs, targets = batch\n", "    raise KeyError('w')\n"),
        "in loss, `raise KeyError('w')`",
    ),
    "no scalar": (
        changed("targets.flatten())", "targets.flatten(), reduction='none')"),
        "returned a tensor of shape [32]",
    ),
    "nothing": (
        changed("    return F.cross", "    F.cross"),
        "must return a scalar tensor to go back from: it returned None",
    ),
    "a number": (changed("targets.flatten())", "targets.flatten()).item()"), "it returned float"),
    "detached": (changed("targets.flatten())", "targets.flatten()).detach()"), "does not depend on any parameter"),
    "build gives nothing": (
        changed("    return Model", "    Model"),
        "must return a torch.nn.Module, it returned NoneType",
    ),
    "build raises": (
        changed("Model(options)\n", "Model(options, 3)\n"),
        "in build, `return Model(options, 3)`: TypeError",
    ),
    "no parameters": (
        changed("return Model(options)", "return nn.Identity()"),
        "has no parameter that takes a gradient",
    ),
    "a bare batch": (
        GOOD + MAKES.format(TOKENS),
        "make_batch(options, batch_size, generator) must return a tuple of tensors",
    ),
    "a batch of another size": (GOOD + MAKES.format("(torch.zeros(3), torch.zeros(3))"), "its shape is [3]"),
    "make_batch raises": (GOOD + MAKES.format("batch_sise"), "in make_batch, `return batch_sise`: NameError"),
}


@pytest.mark.parametrize(("name", "engine"), crossed(PROGRAMS, ["aot", "eager"], one_in=2))
def test_what_a_recipe_s_own_code_raises_is_one_line_and_the_log_has_the_rest(train, name, engine):
    source, says = PROGRAMS[name]
    code, err, directory = train(source, f"engine={engine}")
    assert code == 2 and len(err) == 1 and err[0].startswith("aottrain: RecipeError: ") and says in err[0], err
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "failed" and says in summary["error"] and summary["steps"] == 0
    assert "Traceback" in (directory / "aottrain.log").read_text()


@pytest.mark.parametrize("name", ["wrong shape", "loss raises", "nothing", "no scalar"])
@pytest.mark.parametrize("more", ["task=plan", "engine.on_unsupported=error"])
def test_planning_and_refusing_fallbacks_say_the_same(train, name, more):
    source, says = PROGRAMS[name]
    code, err, _ = train(source, more)
    assert code == 2 and len(err) == 1 and says in err[0], err


def test_a_run_that_is_timed_in_turns_says_the_same(train, tmp_path, monkeypatch, capsys):
    source, says = PROGRAMS["unknown name"]
    train(source, "engine=eager")
    config, mistakes = read({})
    assert not mistakes
    dump(replace(config, output_dir=str(tmp_path / "timed")), tmp_path / "config.json")
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
    assert runs_in_turns.main(tmp_path / "config.json") == 1
    assert f"RecipeError: more/own.py:24, {says}" in capsys.readouterr().err


def test_an_error_after_steps_were_taken_is_a_run_that_failed(train):
    source = GOOD + "\n\ndef generate(model, prompt, num_bytes, temperature, generator):\n    return model.nothing\n"
    code, err, directory = train(source, "engine=eager")
    assert code == 1 and len(err) == 1 and "in generate, `return model.nothing`: AttributeError" in err[0]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 2 and list((directory / "checkpoints").glob("*.pt"))


def test_a_recipe_that_ends_the_process_is_told_like_one_that_raises(tmp_path):
    """Its exit code would be the run's, and nothing would say why."""
    names: dict[str, Any] = {}
    exec(compile("def loss(model, batch):\n    raise SystemExit(0)", str(tmp_path / "mine.py"), "exec"), names)
    told = pytest.raises(RecipeError, match=r"mine.py:2, in loss: SystemExit: 0")
    with told, own_code.own_errors(lambda: [str(tmp_path / "mine.py")]):
        names["loss"](None, None)


@pytest.mark.parametrize("function", [own_code.shown, format_bytes])
def test_an_error_of_this_package_beneath_a_recipe_s_line_keeps_its_traceback(tmp_path, function):
    """As one in the middle of a trace has, in whichever folder of the package."""
    scope: dict = {"call": function}
    file = str(tmp_path / "own.py")
    exec(compile("def loss():\n    call('')\n", file, "exec"), scope)
    with pytest.raises((ValueError, TypeError)) as raised:
        scope["loss"]()
    assert own_code.error_text(raised.value, [file]) is None


ROWS = (
    GOOD.replace("context: int = 8\n    vocab_size: int = 256", "num_features: int = 2")
    .replace("nn.Embedding(options.vocab_size, options.width)", "nn.Linear(options.num_features, options.width)")
    .replace("nn.Linear(options.width, options.vocab_size)", "nn.Linear(options.width, 1)")
    .replace(
        "F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())",
        "(model(inputs)[:, 0] - targets).square().mean()",
    )
)


def test_a_recipe_takes_the_data_that_its_options_name(train, tmp_path):
    lines = [f"{number / 10},{-number / 10},{number / 5 + 1}" for number in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,y", *lines]))
    code, err, directory = train(ROWS, "engine=eager", "data=arrays", "data.path=rows.csv", "data.batch_size=8")
    assert (code, err) == (0, [])
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["epochs"] == 16 / 36 and summary["last_loss"] < summary["first_loss"]
    code, err, _ = train(ROWS, "engine=eager", "hydra.run.dir=other")
    assert code == 2 and err[1].strip() == "data=text: the recipe takes data=arrays"
