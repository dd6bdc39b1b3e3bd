"""Programs of one's own from the command line: what is refused and how, and what a run's folder may not start."""

from __future__ import annotations

import json
import pickle
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from aottrain.cli import main
from aottrain.config.choices import RUN_TASKS
from aottrain.config.extensions.targets import KINDS
from aottrain.errors import ResumeError
from aottrain.ir.settings.decisions import read_record
from aottrain.trainer.checkpoint import load

MINE = """from dataclasses import dataclass
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Options:
    width: int = 4

    def check(self):
        return [] if self.width > 0 else [f"width={self.width}: must be above 0"]


def build(options):
    return torch.nn.Sequential(torch.nn.Linear(2, options.width), torch.nn.GELU(), torch.nn.Linear(options.width, 2))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def points(n=40):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())


class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


def half(step, total_steps, of=1.0):
    return 0.5 * of
"""
OWN = ["recipe.target=mine", "data.target=mine:points", "optimizer.target=mine:Sign", "lr_schedule.target=mine:half"]
FAST = ["debug=fast", "engine=eager", "trainer.steps=2", "trainer.eval_every=0", "measure.memory=false"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with the module `mine` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(MINE)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def refused(capsys, *arguments: str) -> list[str]:
    capsys.readouterr()
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    title, *lines = printed.err.splitlines()
    assert "mistake" in title and int(title.split()[1]) == len(lines)
    return [line.strip() for line in lines]


@pytest.mark.parametrize("value", ["5", "text", "[1]", "[1,2]"])
def test_options_that_are_no_keys_are_one_line_and_no_fault_of_ours(here, capsys, value):
    said = refused(capsys, "optimizer.target=mine:Sign", "optimizer.weight_decay=0", f"optimizer.options={value}")
    assert said == [f"optimizer.options={value}: is a section, give its keys one by one: optimizer.options.key=value"]


def test_what_is_wrong_is_said_at_once_before_anything_runs(here, capsys):
    line = ["recipe.target=mnie", "data.target=mine:pionts", "optimizer.target=mine:Sign", "optimizer.weight_decay=1",
            "lr_schedule.target=mine:half", "lr_schedule.options.off=1", "kernel.target=mine"]  # fmt: skip
    said = refused(capsys, *line)
    wanted = ["recipe.target=mnie: there is no module mnie; did you mean mine?",
              "data.target=mine:pionts: mine.py has no pionts; did you mean points?",
              "optimizer.weight_decay=1.0: optimizer.target=mine:Sign takes no weight_decay; give 0",
              "lr_schedule.options.off: lr_schedule.target=mine:half takes no off; did you mean of?",
              "kernel.target=mine: kernel=custom needs package.module:function, a callable (GraphModule, "]  # fmt: skip
    assert len(said) == len(wanted)
    assert [text for text in wanted if not any(line.startswith(text) for line in said)] == []
    assert not (here / "outputs").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("recipe.target=mine recipe.model.wdith=3", "recipe.model.wdith=3: unknown key; did you mean recipe.model."),
        ("recipe.target=mine", "mine.py has an Options without context and vocab_size, which a recipe for text needs"),
        ("recipe=mine", "transformer, vae, vit); a program of your own: recipe.target="),
    ],
)
def test_a_mistake_in_naming_a_recipe_is_one_line(here, capsys, line, says):
    more = ["data.target=mine:points"] if "recipe.model" in line else []
    (mistake,) = refused(capsys, *line.split(), *more)
    assert says in mistake


def test_fewer_examples_than_a_step_takes_are_refused(here, capsys):
    (mistake,) = refused(capsys, *FAST, *OWN, "+data.options.n=20", "data.batch_size=8", "trainer.accumulate=3")
    assert mistake.startswith("data.target=mine:points: has ") and "fewer than a step takes (24)" in mistake


def test_all_of_one_s_own_trains_and_goes_on_where_it_stopped(here, capsys):
    line = [*FAST, *OWN, "recipe.model.width=6", "lr_schedule.options.of=0.5"]
    assert main([*line, "trainer.steps=1", "lr_schedule.total_steps=2", "hydra.run.dir=first"]) == 0
    (mistake,) = refused(capsys, "resume=first", "trainer.steps=2", "hydra.run.dir=rest")
    again = f"python -m aottrain resume=first trainer.steps=2 hydra.run.dir=rest {' '.join(OWN)}"
    assert mistake.endswith(f"if you trust it: {again}") and not Path("rest").exists()
    assert main(again.split()[3:]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if " in that run, " in line] == [
        "  trainer.steps: 1 in that run, 2 here"
    ]
    assert load(Path("rest/checkpoints/step_00000002.pt")).state["model"]["0.weight"].shape == (6, 2)


@pytest.fixture
def conf(here):
    """A folder of configuration, whose recipe is the module `mine`."""
    (here / "conf" / "recipe").mkdir(parents=True)
    text = "name: mine\ntarget: mine\nmodel:\n  width: 5 # units of the hidden layer\n"
    (here / "conf" / "recipe" / "mine.yaml").write_text(text)
    return ["--config-dir", "conf"]


def record(folder: str, choices: dict, **values) -> None:
    """The record of a run, as `resume=` reads it."""
    Path(folder, ".hydra").mkdir(parents=True)
    Path(folder, ".hydra", "config.yaml").write_text(yaml.safe_dump(values))
    Path(folder, ".hydra", "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))


def test_a_file_of_one_s_own_names_a_target_and_so_does_the_command_line(conf, capfd):
    recipe = {"name": "mine", "target": "mine", "model": {"width": 7}}
    data = {"name": "custom", "target": "mine:points"}
    record("first", {"recipe": "mine", "data": "custom"}, recipe=recipe, data=data)
    (mistake,) = refused(capfd, *conf, "resume=first", "seed=2")
    assert mistake.endswith("conf resume=first seed=2 data.target=mine:points")
    for line in (conf, ["recipe.target=mine"]):
        assert main([*line, "--cfg", "job", "resume=first", "data.target=mine:points"]) == 0
        shown = yaml.safe_load(capfd.readouterr().out)
        assert shown["recipe"] == recipe and shown["data"]["target"] == "mine:points"


def test_the_usage_checks_hold_for_a_file_of_one_s_own(conf, capsys):
    (mistake,) = refused(capsys, *conf, "recipe=mine", "data.target=mine:points", "recipe.model.wdith=3")
    assert "did you mean recipe.model.width?" in mistake
    Path("conf/recipe/mine.yaml").write_text("name: mine\ntarget: mine\nmodel:\n  wdith: 5\n")
    (mistake,) = refused(capsys, *conf, "recipe=mine", "data.target=mine:points")
    assert mistake.startswith("recipe.model.wdith=5: unknown key") and mistake.endswith("conf/recipe/mine.yaml)")
    Path("conf/recipe/mine.yaml").write_text("name: mine\nmodel:\n  width: 5\n")
    (mistake,) = refused(capsys, *conf, "recipe=mine")
    assert "unknown recipe" in mistake and "one of your own is named by recipe.target" in mistake


class Runs:
    """What runs a program where it is unpickled."""

    def __reduce__(self):
        return Path("ran").touch, ()


EVIL = {kind.group: "evil" if kind.takes is None else "evil:half" for kind in KINDS.values()}


@pytest.fixture
def evil(here):
    """A module that leaves a trace where it is imported, and a run's folder that names it wherever one can be named."""
    (here / "evil.py").write_text(f"import pathlib\npathlib.Path('ran').touch()\n{MINE}")
    options = {kind.group: kind.option for kind in KINDS.values()}
    named = {group: {"strategy" if group == "partition" else "name": option} for group, option in options.items()}
    sections = {group: {**section, "target": EVIL[group]} for group, section in named.items()}
    callbacks = {"callbacks": {"x": {"_target_": "evil.Sign"}}}
    record("run", options, **sections, hydra=callbacks, trainer={"_target_": "evil.build", "steps": 3})
    record("plain", {"engine": "aot"}, kernel=sections["kernel"])
    for folder in ("run", "plain"):
        Path(folder, "checkpoints").mkdir()
        torch.save({"format": 1, "model": Runs()}, Path(folder, "checkpoints", "step_00000001.pt"))
    yield
    assert not Path("ran").exists() and "evil" not in sys.modules


OF_A_RUN = [f"task={task} {task}.run=run" for task in RUN_TASKS]


@pytest.mark.parametrize(
    "line", ["resume=run", "resume=auto hydra.run.dir=run", "--cfg job resume=run/checkpoints", *OF_A_RUN]
)
def test_a_run_s_folder_starts_no_code(evil, capsys, line):
    (mistake,) = refused(capsys, *line.split())
    again = [f"{group}.target={target}" for group, target in EVIL.items()]
    assert f": that run used code of {', '.join(again)}; a run's folder alone starts no code" in mistake
    assert "Hydra" not in mistake


def test_nor_does_a_sweep_of_such_runs_or_one_target_among_none(evil, capsys):
    said = refused(capsys, "-m", "resume=run", "seed=1,2")
    assert len(said) == 1 and "that run used code of recipe.target=evil" in said[0]
    (mistake,) = refused(capsys, "resume=plain", "recipe=transformer")
    assert mistake.endswith("python -m aottrain resume=plain recipe=transformer kernel.target=evil:half")


def test_what_a_folder_names_is_no_part_of_a_command(evil, capsys):
    record("other", {}, kernel={"name": "custom", "target": "evil:f; rm -r ~"})
    (mistake,) = refused(capsys, "resume=other")
    assert mistake == "resume=other: its record names what cannot be a target: kernel.target='evil:f; rm -r ~'"


def test_a_checkpoint_and_a_record_of_decisions_start_no_code(evil, capsys):
    for content in (pickle.dumps({"format": 1, "model": Runs()}), None):
        if content:
            Path("bytes.pt").write_bytes(content)
        with pytest.raises(ResumeError, match="is damaged, or no checkpoint of aottrain"):
            load(Path("bytes.pt" if content else "run/checkpoints/step_00000001.pt"))
    decision = {"kind": "kernel", "key": "evil:half", "choice": "evil:half", "source": "measured", "seconds": None}
    Path("decisions.json").write_text(json.dumps({"format": 1, "decisions": [decision], "_target_": "evil.half"}))
    with suppress(ValueError):
        read_record("decisions.json")


def test_an_optimizer_may_demand_its_learning_rate(here, capsys):
    lines = ["import torch", "class Plain(torch.optim.SGD):", "    def __init__(self, params, lr):"]
    text = "\n".join([*lines, "        super().__init__(params, lr=lr)"])
    (here / "plain.py").write_text(text, encoding="utf-8")
    line = ["debug=fast", "engine=eager", "optimizer.target=plain:Plain", "trainer.steps=1"]
    assert main(line) == 0, capsys.readouterr().err
