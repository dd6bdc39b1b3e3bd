"""What each key does and which names it takes is written once: everything that shows it reads it there."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import aottrain
from aottrain.compiler.frontends.api import _FRONTENDS
from aottrain.compiler.partition.strategies import _STRATEGIES
from aottrain.config import choices as own_choices
from aottrain.config import run
from aottrain.config.documentation import head_of, keys, model_keys, sections
from aottrain.config.extensions.recipes import recipe_names
from aottrain.explain.summary import _CAPTURES
from aottrain.ir.settings import choices
from aottrain.trainer.optim import PLAIN
from scripts import configuration
from scripts.configuration import CONF, README, texts

ROOT = CONF.parent
DEFINING = {Path(inspect.getfile(module)) for module in (choices, own_choices)}
# Each list of names by its own name; the compiler's come with the others' where both have them.
LISTS = {
    name: value
    for module in (choices, own_choices)
    for name, value in vars(module).items()
    if isinstance(value, tuple) and len(value) > 1
}
LARGE = 3  # from this many names on, a list that has them among others is a second one too
_BETWEEN = r"[\s`'\"]*(?:,\s*or|,|\||/|\bor\b|\band\b)[\s`'\"]*"


def documented():
    return {**keys(), **{f"{name}: {key.name}": key for name in recipe_names() for key in model_keys(name).values()}}


def test_the_files_say_what_the_classes_say():
    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, "write it: python scripts/configuration.py"


def test_every_key_has_one_sentence():
    assert [name for name, key in documented().items() if not re.fullmatch(r"\S.*\w\)?\.", key.meaning)] == []
    assert [name for name, purpose in sections().items() if not re.fullmatch(r"[A-Z].*\.", purpose)] == []


def test_a_sentence_stands_in_one_place():
    said = "\n".join(path.read_text(encoding="utf-8") for path in [*ROOT.rglob("aottrain/**/*.py")])
    for key in keys().values():
        assert said.count(key.meaning) == 1, key.name


def test_every_key_stands_in_the_readme():
    text = README.read_text(encoding="utf-8")
    told = [key for key in documented().values() if key.name.rpartition(".")[2] not in ("name", "strategy", "model")]
    assert [key.name for key in told if f"| `{key.name}` | " not in text or key.meaning.split("|")[0] not in text] == []


def names_in(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.Tuple | ast.List | ast.Set):
        return set()
    values = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
    return {value for value in values if isinstance(value, str)}


def docstrings(tree: ast.Module) -> set[int]:
    """Of every string that stands alone, as documentation does."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def second_lists(text: str) -> Iterator[str]:
    """What in a source repeats a list: as a collection, or in a sentence that a person is shown."""
    tree = ast.parse(text)
    silent = docstrings(tree)
    for node in ast.walk(tree):
        found = names_in(node)
        for name, values in LISTS.items() if found else ():
            if found == set(values) or (len(values) >= LARGE and found > set(values)):
                yield f"{node.lineno}: {sorted(found)} is {name}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield from (f"{node.lineno}: {node.value!r} has {name}" for name in lists_told(node.value))


def lists_told(text: str) -> list[str]:
    """The lists whose names stand in a text one after the other, with nothing but a comma or the like between."""
    found = []
    for name, values in LISTS.items():
        if not all(value in text for value in values):
            continue
        word = rf"(?<![\w.])({'|'.join(values)})(?![\w.])"
        runs = re.finditer(rf"{word}(?:{_BETWEEN}{word})+", text)
        if any(set(re.findall(word, run[0])) == set(values) for run in runs):
            found.append(name)
    return found


@pytest.mark.parametrize("folder", ["aottrain", "scripts", "recipes"])
def test_no_source_has_a_second_list(folder):
    sources = [path for path in sorted((ROOT / folder).rglob("*.py")) if path not in DEFINING]
    found = {path.name: list(second_lists(path.read_text(encoding="utf-8"))) for path in sources}
    found = {name: lists for name, lists in found.items() if lists}
    assert found == {}, "read it from aottrain.ir.settings.choices or aottrain.config.choices"


@pytest.mark.parametrize(
    "text",
    ["x = ('eager', 'error')", "for x in ['trace', 'dynamo']: pass", "x = {'chunked', 'whole', 'auto'}",
     "x = ('adamw', 'sgd', 'lion', 'adam')", "say('use adamw, sgd or lion')",
     "say(f'{x}: fp32 | bf16 | bf16_weights | fp16 | fp8')"],
)  # fmt: skip
def test_a_planted_list_is_found(text):
    assert list(second_lists(text))


@pytest.mark.parametrize("text", ["x = ('eager', 'aot')", '"""cosine or constant"""', "say('adamw or sgd')"])
def test_a_selection_is_no_list(text):
    assert not list(second_lists(text))


def test_no_head_of_a_file_has_a_second_list():
    assert [path.name for path in sorted(CONF.rglob("*.yaml")) if lists_told(head_of(path))] == []


def test_no_sentence_has_a_second_list():
    told = {**{name: key.meaning for name, key in documented().items()}, **sections()}
    told |= {name: comment for name, _, comment in configuration._hydra_keys()}
    assert {name: lists_told(text) for name, text in told.items() if lists_told(text)} == {}
    assert lists_told(configuration.INTRODUCTION) == []


def test_every_name_of_a_group_is_a_file_of_it():
    """A group's key `name` takes what there are files for, and no more."""
    compared = set()
    for key in keys().values():
        group, _, last = key.name.partition(".")
        if last in ("name", "strategy") and key.one_of:
            assert set(key.one_of) == {path.stem for path in (CONF / group).glob("*.yaml")}, key.name
            compared.add(group)
    assert compared >= {"engine", "kernel", "partition", "optimizer", "data", "parallel"}, compared


def test_what_is_chosen_by_a_table_is_in_it():
    assert PLAIN.keys() == set(own_choices.OPTIMIZERS)
    assert _FRONTENDS.keys() == _CAPTURES.keys() == set(choices.CAPTURES)
    assert _STRATEGIES.keys() | {"budget", "checkpoint"} == set(choices.STRATEGIES)
    for task in own_choices.TASKS:
        assert (ROOT / "aottrain" / "tasks" / f"{task}.py").exists()


def test_the_documentation_of_compile_names_every_value():
    text = inspect.getdoc(aottrain.compile)
    offered = ("STRATEGIES", "COSTS", "KERNELS", "LOSS_HEADS", "CAPTURES", "RNGS", "ON_UNSUPPORTED")
    missing = [value for name in offered for value in LISTS[name] if not re.search(rf"\b{value}\b", text)]
    assert missing == []


def test_configuration_and_compiler_read_the_same_lists():
    assert set(run.PartitionConfig.__dataclass_fields__["strategy"].metadata["range"].one_of) > set(choices.STRATEGIES)
    assert keys()["partition.cost"].one_of is choices.COSTS
    assert keys()["kernel.loss_head"].one_of is choices.LOSS_HEADS
    assert keys()["engine.on_unsupported"].one_of is choices.ON_UNSUPPORTED


def test_a_stale_text_fails_the_check(tmp_path, monkeypatch, capsys):
    for name in ("ROOT", "CONF"):
        monkeypatch.setattr(configuration, name, tmp_path / ("conf" if name == "CONF" else ""))
    monkeypatch.setattr(configuration, "README", tmp_path / "conf" / "README.md")
    for path in CONF.rglob("*.*"):
        if path.suffix in (".yaml", ".md"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8").replace("Optimizer steps of the run", "old")
            copy.write_text(text, encoding="utf-8")
    for arguments, code, said in (["--check"], 1, "differs"), ([], 0, "written"), (["--check"], 0, ""):
        monkeypatch.setattr(sys, "argv", ["configuration.py", *arguments])
        assert configuration.main() == code
        out = capsys.readouterr().out
        assert said in out and ("conf/README.md" in out) == bool(said)


def test_it_runs_as_a_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["configuration.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(configuration.__file__)), run_name="__main__")
    assert ended.value.code == 0
