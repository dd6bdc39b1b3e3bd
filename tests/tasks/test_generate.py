"""task=generate: what a run's model writes, and what cannot be asked of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aottrain.cli import main
from tests.tasks.trained import IMAGES, TEXT, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on text, whose model has the tokens of ASCII, and one on images."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("a text of one's own, " * 60)
    options = [*TEXT, "vocab_size=128"]
    text = train(folder, "transformer", options, "data.path=text.txt")
    return {"text": text, "images": train(folder, "resnet", IMAGES)}


@pytest.fixture
def write(runs, tmp_path, monkeypatch):
    """Writes by the run on text; the exit code, and what sample.txt says where that is 0."""
    monkeypatch.chdir(tmp_path)

    def call(*overrides, run="text"):
        code = main(["task=generate", f"generate.run={runs[run]}", "hydra.run.dir=out", *overrides])
        return code, Path("out/sample.txt").read_text() if code == 0 else None

    return call


def test_it_writes_on_from_the_prompt_the_same_for_the_same_seed(write, capsys):
    code, text = write("generate.prompt= a, (b) ", "generate.length=30")
    printed = capsys.readouterr().out
    assert code == 0 and text.startswith(" a, (b) ") and f"---\n{text}---\n" in printed
    assert all(character.isprintable() or character in "\n\t" for character in text)
    again = ["generate.prompt= a, (b) ", "generate.length=30"]
    assert write(*again, "seed=5", "generate.seed=1234")[1] == text != write(*again, "generate.seed=7")[1]


def test_it_runs_compiled_as_eagerly(write, capsys):
    asked = ["generate.temperature=0", "generate.length=30"]
    text = write(*asked, "engine=aot", "kernel=aten")[1]
    assert "run by aot:\n" in capsys.readouterr().out
    assert write(*asked, "engine=eager", "hydra.run.dir=other")[0] == 0
    assert "run by eager:\n" in capsys.readouterr().out and Path("other/sample.txt").read_text() == text


def test_one_likeliest_token_is_the_likeliest(write):
    greedy = write("generate.temperature=0", "generate.length=20")[1]
    assert write("generate.top_k=1", "generate.length=20", "generate.seed=7")[1] == greedy


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("generate.top_k=0", "generate.top_k=0: "),
        ("generate.temperature=-0.5", "generate.temperature=-0.5: "),
        ("generate.length=0", "generate.length=0: "),
        ("generate.prompt=", "generate.prompt="),
        ("generate.run=null", "task=generate needs the output directory of a run"),
        ("generate.run=nowhere", "no such folder"),
        ("generate.run=.", "the folder has no checkpoint"),
        ("generate.prompt=naïve", "has token 195, but the model's tokens are below recipe.model.vocab_size=128"),
        ("recipe.model.width=32", "is not of this model"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(write, capsys, override, says):
    assert write(override)[0] == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err and len(err.splitlines()) <= 2 and not Path("out/sample.txt").exists()


def test_a_recipe_that_writes_nothing_names_those_that_do(write, capsys):
    assert write(run="images")[0] == 2
    *_, able = capsys.readouterr().err.partition("task=generate needs; there is ")
    assert {"hf", "llama", "transformer"} <= set(able.strip().split(", ")) and "resnet" not in able


def test_a_sweep_lists_prompts_as_any_other_values(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["-m", "task=generate", f"generate.run={runs['text']}", "generate.prompt=a,b", "generate.top_k=0"]
    assert main(line) == 2
    assert "sweep of 2 jobs" in capsys.readouterr().out


def test_top_k_needs_a_recipe_that_takes_it(write, monkeypatch, capsys):
    source = "from recipes.transformer import *\nfrom recipes.transformer import build\n"
    source += "def generate(model, prompt, num_tokens, temperature, generator):\n    return prompt[:1] * num_tokens\n"
    Path("own.py").write_text(source)
    monkeypatch.syspath_prepend(Path.cwd())
    options = [f"recipe.model.{option}" for option in (*TEXT, "vocab_size=128")]
    line = ["recipe=custom", "recipe.target=own", *options, "generate.prompt=ab", "generate.length=3"]
    assert write(*line)[1] == "abaaa\n"
    assert write(*line, "generate.top_k=2", "hydra.run.dir=other")[0] == 2
    assert "generate.top_k=2: the generate of recipe=own takes no top_k; use null" in capsys.readouterr().err
