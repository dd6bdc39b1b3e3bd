"""What is given and never read is said: the list of such keys is compared with what the tasks read when they run."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from pathlib import Path

import pytest
import yaml

from aottrain.cli import main
from aottrain.config import effect
from aottrain.config.documentation import keys
from aottrain.config.effect import without_effect
from aottrain.config.extensions.recipes import recipe_of
from aottrain.config.reading import read_config, read_model
from aottrain.config.run import RunConfig
from aottrain.config.schema import find
from aottrain.tasks import compare, pareto
from aottrain.tasks import train as trained
from aottrain.tasks.measuring.runs_in_turns import begin_training
from tests.sampling import WHOLE
from tests.tasks.trained import TEXT, train

SECTIONS = {name: hint for name, hint in typing.get_type_hints(RunConfig).items() if dataclasses.is_dataclass(hint)}
# Who reads a key without doing what it says: the reader of the configuration, copies of it, and this list itself.
NOT_USERS = ("dataclasses", "copy", "aottrain.cli", "aottrain.config.reading", "aottrain.config.effect",
             "aottrain.config.schema", "tests")  # fmt: skip
OWN = {"task", "output_dir", "recipe.model", "recipe.name", "recipe.target"}


@pytest.fixture
def read(monkeypatch):
    """The keys of configurations that are read from now on, by their dotted names."""
    seen = set()

    def watch(cls, prefix):
        names = {field.name for field in dataclasses.fields(cls)}

        def getattribute(self, name):
            if name in names and not sys._getframe(1).f_globals["__name__"].startswith(NOT_USERS):
                seen.add(f"{prefix}{name}")
            return object.__getattribute__(self, name)

        monkeypatch.setattr(cls, "__getattribute__", getattribute, raising=False)

    watch(RunConfig, "")
    for name, cls in SECTIONS.items():
        watch(cls, f"{name}.")
    return seen


def configured(folder: str) -> tuple[RunConfig, list[str]]:
    """What a run in this folder was told, and the keys that can be given with its options of groups."""
    values = yaml.safe_load(Path(folder, ".hydra", "config.yaml").read_text())
    config, mistakes = read_model(read_config(values)[0])
    assert not mistakes
    return config, [key for key in keys() if find(values, key)[0] and key not in OWN]


def said(config: RunConfig, key: str) -> list[str]:
    return without_effect(config, {key: key}, recipe_of(config.recipe), "cuda")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), "transformer", TEXT)


SMALL = ["debug=fast", "trainer.steps=2", "kernel=aten", *(f"recipe.model.{option}" for option in TEXT)]
IMAGES = ["debug=fast", "trainer.steps=2", "engine=eager", "recipe=resnet", "recipe.model.width=4",
          "recipe.model.num_blocks=1", "recipe.model.image_size=8"]  # fmt: skip
# By what is built on the way and not asked, as the optimizer of a model that is measured.
READ_ANYWAY = {
    "eval": ("optimizer.", "lr_schedule.", "trainer.steps", "trainer.patience", "partition.", "trainer.eval_batches"),
    "generate": ("optimizer.",),
    "images": ("trainer.sample_bytes",),
    "compare": "",  # a child reads what it is told, see below
    "pareto": "",
}


@pytest.mark.parametrize("line", [
    pytest.param(SMALL, id="train"),
    pytest.param([*SMALL, "engine=eager", "optimizer=sgd", "lr_schedule=wsd"], id="eager"),
    pytest.param(IMAGES, id="images", marks=WHOLE),
    pytest.param(["task=eval", "eval.run=RUN", "eval.batches=1", "engine=aot", "kernel=aten"], id="eval", marks=WHOLE),
    pytest.param(["task=generate", "generate.run=RUN", "generate.length=2"], id="generate"),
    pytest.param([*SMALL, "task=compare", "compare.engines=[eager]"], id="compare"),
    pytest.param([*SMALL, "task=pareto"], id="pareto", marks=WHOLE),
])  # fmt: skip
def test_what_a_task_does_not_read_is_said_and_nothing_else(line, run, read, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = request.node.callspec.id
    monkeypatch.setattr(compare, "run", lambda config: trained.run(children_of_compare(config)[2]))
    monkeypatch.setattr(pareto, "run", first_of_pareto)
    read.clear()
    assert main([*(text.replace("RUN", str(run)) for text in line), "hydra.run.dir=out"]) == 0
    used = set(read)
    assert len(used) > 10
    config, known = configured("out")
    known = [key for key in known if not key.startswith(("compare.", "pareto."))]
    unsaid = [key for key in known if key not in used and not said(changed(config, key), key)]
    assert set(unsaid) <= {"verify.bisect", "verify.on_breach"}  # where a check fails
    wrongly = [key for key in used if key in known and any(" but on " not in text for text in said(config, key))]
    assert [key for key in wrongly if not key.startswith(READ_ANYWAY.get(name, ()))] == []


def first_of_pareto(config):
    child = children_of_pareto(config)[0]
    Path(child.output_dir).mkdir()
    begin_training(child)
    return 0


def changed(config: RunConfig, key: str) -> RunConfig:
    """The configuration with another value of the key, which need not be a possible one."""
    section, _, name = key.rpartition(".")
    owner = getattr(config, section) if section else config
    value = getattr(owner, name)
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else ("other",)
    owner = dataclasses.replace(owner, **{name: other})
    return dataclasses.replace(config, **{section: owner}) if section else owner


def children_of_compare(config):
    ways = (lambda config, engine: compare.timed_config(config, engine, 0), compare.loss_config)
    return [of(config, engine) for engine in ("aot", "eager") for of in ways]


def children_of_pareto(config):
    points = pareto.Point("a", "aot", 0.4), pareto.Point("b", "torch_compile", 0.4, backend="inductor")
    return [pareto.point_config(config, point) for point in points]


@pytest.mark.parametrize("children", [children_of_compare, children_of_pareto])
def test_what_a_task_sets_for_its_children_is_said(children, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = children.__name__.rpartition("_")[2]
    monkeypatch.setattr(f"aottrain.tasks.{task}.run", lambda config: 0)
    assert main([*SMALL, f"task={task}", "hydra.run.dir=out", "engine=torch_compile"]) == 0
    config, known = configured("out")
    plain = children(config)
    own = [key for key in known if children(changed(config, key)) == plain and not key.startswith(f"{task}.")]
    assert len(own) > 5 and "trainer.save_every" in own
    assert [key for key in own if not said(changed(config, key), key)] == []


@pytest.mark.parametrize(("line", "wanted"), [
    ("engine=eager partition.budget=0.4", ["partition.budget=0.4 has no effect: engine=eager takes none"]),
    ("engine=torch_compile partition=min_cut kernel=cpp",
     ["partition=min_cut has no effect: engine=torch_compile takes none; its own is engine.activation_memory_budget",
      "kernel=cpp has no effect: engine=torch_compile runs kernels of its own"]),
    ("task=compare trainer.steps=200 trainer.save_every=5 verify.steps=3 engine=eager trainer.sample_bytes=0",
     ["trainer.steps=200 has no effect but on the learning rate: task=compare measures compare.steps=30",
      "engine=eager has no effect: task=compare runs compare.engines",
      "trainer.save_every=5 has no effect: task=compare takes steps and does nothing beside them",
      "verify.steps=3 has no effect: task=compare checks no step"]),
    ("task=plan engine=eager trainer.steps=3", ["engine=eager has no effect: task=plan plans for engine=aot"]),
    ("pareto.rounds=2", ["pareto.rounds=2 has no effect: task=pareto alone reads it"]),
    ("trainer.deterministic=true decisions=measured",
     ["decisions=measured has no effect: trainer.deterministic=true takes decisions=default"]),
    ("kernel.cuda_graphs=true", ["kernel.cuda_graphs=true has no effect: there are none on a CPU"]),
    ("verify.steps=0 verify.bisect=true", ["verify.bisect=true has no effect: verify.steps=0 checks nothing"]),
    ("debug=fast engine=eager", []),  # what a file sets was not asked for one by one
    ("recipe=resnet data.order=epochs trainer.sample_bytes=9",
     ["data.order=epochs has no effect: recipe resnet makes its own data",
      "trainer.sample_bytes=9 has no effect: recipe resnet writes no text"]),
])  # fmt: skip
def test_a_line_names_what_was_typed_and_why(line, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = re.search(r"task=(\w+)|$", line)[1] or "train"
    monkeypatch.setattr(f"aottrain.tasks.{task}.run", lambda config: 0)
    assert main([*line.split(), "device=cpu"]) == 0
    printed = [text for text in capsys.readouterr().out.splitlines() if text.startswith("warning: ")]
    assert printed == [f"warning: {text}" for text in wanted]


@pytest.mark.parametrize(("total", "steps", "but"), [(None, 500, "the learning rate"), (9, 500, ""), (None, 1, "")])
def test_a_comparison_takes_the_length_of_the_schedule_alone(total, steps, but):
    config = RunConfig()
    schedule = dataclasses.replace(config.lr_schedule, total_steps=total, warmup_steps=10)
    config = dataclasses.replace(
        config, task="compare", lr_schedule=schedule, trainer=dataclasses.replace(config.trainer, steps=steps)
    )
    (idle,) = [each for each in effect._of_compare(config) if each.keys == ("trainer.steps",)]
    assert idle.but == but
