"""The command line: what is refused and how, what help shows, and what a sweep does with jobs that fail."""

from __future__ import annotations

import csv
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.utils import JobRuntime

from aottrain import __version__
from aottrain.cli import main, preflight, sweeps
from aottrain.cli.compose import Composer
from aottrain.cli.jobs import Outcome, SweepJob, table
from aottrain.cli.values import value_at
from aottrain.config import folders
from aottrain.config.folders import no_checkpoint
from aottrain.config.reading import read_config
from aottrain.errors import OutOfMemoryError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    return tmp_path


_shipped: list[Any] = []


@pytest.fixture
def shipped(monkeypatch):
    """What Hydra composes of no overrides is each command line's first look: composed once for all that are refused."""
    compose = Composer._hydra

    def composed(composer: Composer, texts: Sequence[str]) -> Any:
        if texts or composer.folders or composer.config_name != "config":
            return compose(composer, texts)
        if not _shipped:
            _shipped.append(compose(composer, texts))
        return _shipped[0]

    monkeypatch.setattr(Composer, "_hydra", composed)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The mistakes that a wrong command line is answered with; nothing else may have happened."""
    before = set(Path.cwd().rglob("*"))
    assert main(arguments) == 2
    printed = capsys.readouterr()
    title, *lines = printed.err.splitlines()
    assert "mistake" in title and "Traceback" not in printed.err
    assert all(line.startswith(f"aottrain {__version__}: ") for line in printed.out.splitlines())
    assert title.split()[1] == str(len(lines)) and all(line.startswith("  ") for line in lines)
    assert set(Path.cwd().rglob("*")) == before
    return [line.strip() for line in lines]


WRONG = [  # command line, how the mistake begins, something that it says
    ("partition.bugdet=0.4", "partition.bugdet=0.4:", "did you mean partition.budget?"),
    ("+partition.bugdet=0.4", "partition.bugdet=0.4:", "did you mean partition.budget?"),
    ("++partition.bugdet=0.4", "partition.bugdet=0.4:", "did you mean partition.budget?"),
    ("~partition.bugdet", "partition.bugdet:", "did you mean partition.budget?"),
    ("~partition.budget", "~partition.budget:", "cannot be removed"),
    ("+partition.budget=0.4", "+partition.budget=0.4:", "without +"),
    ("~logger", "~logger:", "options: csv, mlflow, tensorboard, wandb"),
    ("+kernel=aten", "+kernel=aten:", "write kernel=option"),
    ("kernel@engine=aten", "kernel@engine=aten:", "write kernel=option"),
    ("budget=0.4", "budget=0.4:", "did you mean partition.budget?"),
    ("model.width=64", "model.width=64:", "did you mean recipe.model.width?"),
    ("partiton=min_cut", "partiton=min_cut:", "did you mean partition?"),
    ("task=trian", "task=trian:", "did you mean train?"),
    ("learning_rate=1e-3", "learning_rate=0.001:", "did you mean optimizer.lr?"),
    ("data.sequence_length=64", "data.sequence_length=64:", "did you mean recipe.model.context?"),
    ("epochs=3", "epochs=3:", "did you mean trainer.steps?"),
    ("recipe=resnet seq_len=64", "seq_len=64:", "unknown key (groups"),  # which has no context
    ("out_dir=here", "out_dir=here:", "did you mean hydra.run.dir?"),
    ("recipe=gpt2", "recipe=gpt2:", "did you mean size=gpt2_124m or size=gpt2_1b5 or size=gpt2_350m?"),
    ("logger=none", "logger=none:", "did you mean logger=csv, which writes metrics.csv alone?"),
    ("logger=null", "logger=null:", "did you mean logger=csv,"),
    ("engine=inductor", "engine=inductor:", "did you mean engine=torch_compile?"),
    ("optimizer=cosine", "optimizer=cosine:", "did you mean lr_schedule=cosine?"),
    ("data.path=~/nobody", f"data.path={Path.home() / 'nobody'}:", "no such file or folder"),
    ("debug=null size=null experiment=null seed=-1", "seed=-1:", "whole number"),
    ("kernel=cuda9", "kernel=cuda9:", "options: aten, auto, cpp, custom, inductor, triton"),
    (
        "hydra.run.dir=",
        "hydra.run.dir=:",
        "must name a folder; . is the current one",
    ),  # as of a variable that is not set
    ("kernel=null", "kernel=null:", "options: aten, auto, cpp, custom, inductor, triton"),
    ("kernel={name:aten}", "kernel={name:aten}:", "set its keys one by one"),
    ("compare=[1]", "compare=[1]:", "is a section, give its keys one by one: engines, steps"),
    ("recipe.model=[1]", "recipe.model=[1]:", "is a section, give its keys one by one: num_layers, "),
    ("hydra.run=[1]", "hydra.run=[1]:", "is a section, give its keys one by one: dir"),
    ("trainer.freeze={}", "trainer.freeze={}:", "must be a list, written [a,b]"),
    ("compare.engines={a:1}", "compare.engines={a:1}:", "must be a list, written [a,b]"),
    ("hydra.sweep.subdir=[a,b]", "hydra.sweep.subdir=[a,b]:", "Cannot convert 'list' to string"),
    ("hydra.job.chdir=abc", "hydra.job.chdir=abc:", "Value 'abc' is not a valid bool"),
    ("device=h100", "device=h100:", "did you mean h100-sxm or h100-pcie or h100-hbm2e?"),
    ("device=rtx4090", "device=rtx4090:", "did you mean rtx-4090?"),
    ("experiment=nope", "experiment=nope:", "budget_sweep"),
    ("engine=egaer", "engine=egaer:", "did you mean eager?"),
    ("plan", "plan:", "neither a flag nor group=option nor key=value; did you mean task=plan?"),
    ("help", "help:", "did you mean --help?"),
    ("trainer.steps", "trainer.steps:", "is a key; write trainer.steps=value"),
    ("=", "=:", "write it without spaces"),
    (
        "compare.engines=eager",
        "compare.engines=eager:",
        "must be a list of aot, eager, eager_checkpoint, torch_compile, written",
    ),
    ("optimizer", "optimizer:", "is a group; write optimizer=option (options: adamw"),
    ("optimizr", "optimizr:", "neither a flag nor group=option nor key=value; did you mean optimizer?"),
    ("optimizer.target=torch.optim.SGD", "optimizer.target=", "; did you mean optimizer.target=torch.optim:SGD?"),
    (
        "optimizer.target=torch.optim:SGD optimizer.momentum=0.9",
        "optimizer.momentum=0.9:",
        "; what optimizer.target takes itself is optimizer.options.momentum",
    ),
    ("--steps=3", "--steps=3:", "without dashes"),
    ("--multi", "--multi:", "unknown flag"),
    ("partition.zzz=1", "partition.zzz=1:", "keys of partition: "),
    ("zzz=1", "zzz=1:", "groups: "),
    ("partition.budget=[0.1", "partition.budget=[0.1:", "not a valid override"),
    ("data.path=a;b", "data.path=a;b:", "quoted twice"),
    ("partition.budget=nope(1)", "partition.budget=nope(1):", "not a valid override"),
    ("kernel=aten,custom", "kernel=aten,custom:", "add -m"),
    ("partition.budget=1.4", "partition.budget=1.4:", "from 0 to 1"),
    ("partition.budget=-0.1", "partition.budget=-0.1:", "from 0 to 1"),
    ("partition.budget=7parsecs", "partition.budget=7parsecs:", "bytes such as"),
    ("partition.budget=6GiBs", "partition.budget=6GiBs:", '"6GiB"'),
    ("partition.budget=true", "partition.budget=true:", "a number"),
    ("partition.budget=null", "partition.budget=null:", "a number from 0 to 1"),
    ("partition=min_cut partition.budget=0.4", "partition.budget=0.4:", "takes no budget"),
    ("kernel=custom", "kernel.target=null:", "package.module:function"),
    ("kernel=custom kernel.target=nowhere", "kernel.target=nowhere:", "package.module:function"),
    ("kernel=custom kernel.target=no_such_module:f", "kernel.target=no_such_module:f:", "no_such_module"),
    ("kernel.target=os:sep", "kernel.target=os:sep:", "callable"),
    ("kernel=auto kernel.target=os:sep", "kernel.target=os:sep:", "unknown key with kernel=auto"),
    ("optimizer.momentum=0.5", "optimizer.momentum=0.5:", "unknown key with optimizer=adamw"),
    ("engine=eager engine.on_unsupported=error", "engine.on_unsupported=error:", "unknown key with engine=eager"),
    ("trainer.steps=-3", "trainer.steps=-3:", ">= 1"),
    ("trainer.steps=1e3", "trainer.steps=1000.0:", "a whole number"),
    ("trainer.steps=many", "trainer.steps=many:", "a whole number"),
    ("trainer.steps=true", "trainer.steps=true:", "a whole number"),
    ("trainer.precision=int8", "trainer.precision=int8:", "fp32, bf16"),
    ("trainer={steps:3}", "trainer={steps:3}:", "set its keys one by one"),
    ("trainer.num_threads=0", "trainer.num_threads=0:", "from 1 to 4096 or null"),
    ("trainer.num_threads=99999999999999999999", "trainer.num_threads=99999999999999999999:", "from 1 to 4096"),
    ("optimizer.lr=-1", "optimizer.lr=-1:", "> 0"),
    ("optimizer.lr=nan", "optimizer.lr=nan:", "a number"),
    (f"optimizer.lr=1{400 * '0'}", "optimizer.lr=1000", "must be a number > 0"),  # no float holds it
    ("optimizer.beta1=1", "optimizer.beta1=1:", "< 1"),
    ("data.batch_size=0", "data.batch_size=0:", ">= 1"),
    ("data.path=nowhere", "data.path=", "no such file or folder"),
    ("data.path=empty_folder", "data.path=", "holds no data"),
    ("data.path=empty_file.txt", "data.path=", "the file is empty"),
    ("data.path=binary_folder", "data.path=", ".txt"),
    ("recipe=resnet data.path=some_text.txt", "data.path=", "makes its own data"),
    ("data.path=${oc.env:NO_SUCH_VARIABLE}", "data.path:", "NO_SUCH_VARIABLE"),
    ("data.held_out=1", "data.held_out=1:", "< 1"),
    ("data=tokens", "data.path=null:", "data=tokens needs a file or folder"),
    ("data=tokens data.path=empty_file.txt", "data.path=", "the file is empty"),
    ("data=tokens data.path=some_text.txt data.dtype=int8", "data.dtype=int8:", "auto, uint16, uint32"),
    ("data=images", "data=images:", "the recipe takes data=text or data=tokens"),
    (
        "recipe=gcn data=images",
        "data=images:",
        "one that takes this has an Options with image_size and num",
    ),
    ("recipe=resnet data=tokens data.path=some_text.txt", "data=tokens:", "the recipe takes data=images"),
    ("recipe=resnet data=images data.pad=-1", "data.pad=-1:", ">= 0"),
    ("data.pad=1", "data.pad=1:", "unknown key with data=text"),
    ("data.order=sorted", "data.order=sorted:", "random, epochs"),
    ("data.tokenizer=nowhere.json", "data.tokenizer=", "no such file; allowed: null, bpe, bytes, the path"),
    ("data=tokens data.path=some_text.txt data.tokenizer=bpe", "data.tokenizer=bpe:", "has tokens already"),
    ("logger.mode=ofline", "logger.mode=ofline:", "offline, online, disabled"),
    ("logger.tags=a", "logger.tags=a:", "[a,b]"),
    ("task=trian", "task=trian:", "train, compare, plan"),
    ("seed=-1", "seed=-1:", ">= 0"),
    ("seed=pi", "seed=pi:", "a whole number"),
    ("device=tpu", "device=tpu:", "cuda:N"),
    ("device=cuda:99", "device=cuda:99:", "CUDA"),
    ("resume=nowhere", "resume=", "no such file or folder"),
    ("decisions=nowhere", "decisions=", "nowhere: no such file or folder; allowed: measured"),
    ("decisions=some_text.txt", "decisions=", "some_text.txt: "),
    ("recipe.name=nothing", "recipe.name=nothing:", "unknown recipe (recipes: "),
    ("recipe.model.num_heads=5", "recipe.model.num_heads=5:", "width=192"),
    ("recipe.model.dropout=1.5", "recipe.model.dropout=1.5:", "below 1"),
    ("recipe.model.width=wide", "recipe.model.width=wide:", "a whole number"),
    ("recipe.model.wdith=8", "recipe.model.wdith=8:", "did you mean recipe.model.width?"),
    ("recipe.model={wdith:8}", "recipe.model.wdith=8:", "did you mean recipe.model.width?"),
    ("lr_schedule.total_steps=5", "lr_schedule.total_steps=5:", "warmup_steps=100"),
    ("compare=3", "compare=3:", "one by one"),
    ("compare.engines=[aot,magic]", "compare.engines=[aot,magic]:", "aot, eager, eager_checkpoint, torch_compile"),
    ("compare.engines=[aot,aot]", "compare.engines=[aot,aot]:", "none twice"),
    ("pareto.budgets=[]", "pareto.budgets=[]:", "at least one budget"),
    ("pareto.budgets=[1,1.0]", "pareto.budgets=[1,1.0]:", "none twice"),
    ("pareto.budgets=[0.4,1.4]", "pareto.budgets=[0.4,1.4]:", "a number from 0 to 1, bytes such as"),
    ("pareto.budgets=[0.4,6GiBB]", "pareto.budgets=[0.4,6GiBB]:", "a number from 0 to 1, bytes such as"),
    ("pareto.budgets=[1GiB,1024MiB]", "pareto.budgets=[1GiB,1024MiB]:", "none twice"),
    ("pareto.torch_budgets=[]", "pareto.torch_budgets=[]:", "at least one"),
    ("pareto.torch_backends=[nvfuser]", "pareto.torch_backends=[nvfuser]:", "inductor, aot_eager"),
    ("engine=torch_compile engine.activation_memory_budget=2", "engine.activation_memory_budget=2:", "from 0 to 1"),
    ("engine.backend=aot_eager", "engine.backend=aot_eager:", "unknown key with engine=aot"),
    ("pareto.budgets=0.4", "pareto.budgets=0.4:", "written [a,b]"),
    ("pareto.engines=[aot]", "pareto.engines=[aot]:", "eager, eager_checkpoint, torch_compile"),
    ("pareto.engines=[eager,eager]", "pareto.engines=[eager,eager]:", "none twice"),
    ("pareto.steps=0", "pareto.steps=0:", ">= 1"),
    ("task=pareto partition=min_cut", "partition=min_cut:", "use partition=budget"),
    ("hydra.rundir=x", "hydra.rundir=x:", "did you mean hydra.run.dir?"),
    ("hydra.run.dir=${nothing}", "hydra.run.dir:", "nothing"),
    ("hydra.mode=${nothing}", "hydra.mode:", "nothing"),
    ("-m hydra.sweeper.params=${nothing}", "hydra.sweeper.params:", "nothing"),
    ("hydra.job.name=${nothing}", "hydra.job.name:", "nothing"),
    ("hydra.job.name=a/b", "hydra.job.name=a/b:", "it has no /"),
    ("trainer.steps=1000000000000000000000", "trainer.steps=", "number >= 1, less than 9223372036854775808"),
    ("task=${nothing}", "task:", "nothing"),
    ("resume=${nothing}", "resume:", "nothing"),
    ("hydra.run.dir=empty_file.txt/x", "hydra.run.dir=", "is a file"),
    ("hydra/launcher=nope", "hydra/launcher=nope:", "basic"),
    ("output_dir=x", "output_dir=x:", "unknown key"),
    ("--config-dir nowhere", "--config-dir nowhere:", "no such folder"),
    ("--config-name nowhere", "nowhere:", "primary config"),
]


@pytest.mark.parametrize("logger", ["tensorboard", "mlflow"])
def test_a_logger_that_is_not_installed_is_refused(here, shipped, capsys, monkeypatch, logger):
    """By tasks that log; the others do without."""
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    (mistake,) = refusal(capsys, f"logger={logger}")
    assert mistake.startswith(f"logger={logger}: needs ") and f"pip install 'aottrain[{logger}]'" in mistake
    config, _ = read_config({"task": "plan", "logger": {"name": logger}})
    assert preflight.missing_packages(config) == []


@pytest.mark.parametrize(("line", "start", "says"), WRONG, ids=[line for line, _, _ in WRONG])
def test_a_wrong_command_line_is_refused(here, shipped, capsys, line, start, says):
    (here / "empty_folder").mkdir()
    (here / "empty_file.txt").touch()
    (here / "some_text.txt").write_text("text")
    (here / "binary_folder").mkdir()
    (here / "binary_folder" / "x.bin").write_bytes(b"x")
    mistakes = refusal(capsys, *line.split())
    assert len(mistakes) == 1
    assert mistakes[0].startswith(start) and says in mistakes[0]


def test_all_mistakes_are_said_at_once(here, capsys):
    line = ["kernel=cuda9", "+partition.bugdet=1", "trainer.steps=-3", "data.path=nowhere", "optimizer.lr=[1",
            "recipe.model.num_heads=5", "hydra.rundir=x", "task=trian"]  # fmt: skip
    mistakes = refusal(capsys, *line)
    keys = {mistake.split("=")[0] for mistake in mistakes}
    assert keys == {"kernel", "partition.bugdet", "trainer.steps", "data.path", "optimizer.lr",
                    "recipe.model.num_heads", "hydra.rundir", "task"}  # fmt: skip


def test_a_sweep_s_mistakes_are_found_before_its_first_job(here, capsys):
    line = ["-m", "kernel=aten,cuda9", "trainer.steps=5,0", "recipe.model.num_heads=6,5"]
    starts = {mistake.split(":")[0] for mistake in refusal(capsys, *line)}
    assert starts == {"kernel=cuda9", "trainer.steps=0", "recipe.model.num_heads=5"}


def test_mistakes_in_a_file_of_one_s_own_name_the_file(here, capsys):
    for group, option, text in (
        ("optimizer", "mine", "name: adamw\nlr: -1\nbetaa: 3\n"),
        ("trainer", "broken", "steps: [1\nx: 2\n"),
        ("experiment", "far", "# @package _global_\ndata:\n  batch_size: none\n"),
    ):
        (here / "own" / group).mkdir(parents=True)
        (here / "own" / group / f"{option}.yaml").write_text(text)
    line = ["--config-dir", "own", "optimizer=mine", "trainer=broken", "experiment=far"]
    mistakes = sorted(refusal(capsys, *line))
    assert len(mistakes) == 4
    assert "batch_size=none" in mistakes[0] and "far.yaml" in mistakes[0]
    assert "betaa=3: unknown key" in mistakes[1] and "mine.yaml" in mistakes[1]
    assert "lr=-1" in mistakes[2] and "mine.yaml" in mistakes[2]
    assert "trainer=broken" in mistakes[3] and "broken.yaml, line 2" in mistakes[3]


def test_help_is_one_screen(here, capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    words = ("budget* checkpoint min_cut", "aot* eager", "adamw* custom lion sgd", "trainer.steps", "--config-dir")
    assert all(word in text for word in words)
    # A name that fills its column ran into the sentence.
    assert all(" What to do" in line for line in lines if line.startswith("  task="))


def test_the_values_that_the_help_shows_are_the_defaults(here, capsys):
    """It said 300 steps where a run takes 500."""
    assert main(["--cfg", "job"]) == 0
    defaults = yaml.safe_load(capsys.readouterr().out)
    assert main(["--help"]) == 0
    text = capsys.readouterr().out.partition("Keys most used")[2]
    shown = re.findall(r"  ([\w.]+)=([\d.e-]+)(?= |$)", text, re.MULTILINE)
    assert len(shown) >= 6
    for key, value in shown:
        assert float(value) == float(value_at(defaults, key)), key


def test_an_output_folder_that_the_system_does_not_make_is_one_line(here, capsys):
    """/proc takes no folders, though it says that it may be written to: it ended in a traceback."""
    assert main(["hydra.run.dir=/proc/mine"]) == 2
    err = capsys.readouterr().err
    assert "hydra.run.dir=/proc/mine: cannot be made: /proc/mine: No such file" in err and "Traceback" not in err


def test_version(here, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"aottrain {__version__}\n"


def command(*arguments: str, folder: Path, stub: str = "") -> subprocess.Popen[str]:
    """`python -m aottrain`; `stub` is the source of a module that stands in for aottrain.tasks.train and the recipe."""
    (folder / "stub").mkdir(exist_ok=True)
    if stub:
        (folder / "stub" / "stub_train.py").write_text(stub)
        (folder / "stub" / "stub_recipe.py").write_text(RECIPE)
        names = ("aottrain.tasks.train", "stub_train"), ("aottrain.recipes.transformer", "stub_recipe")
        hook = "import sys\n" + "".join(f"import {stub}; sys.modules[{name!r}] = {stub}\n" for name, stub in names)
        (folder / "stub" / "sitecustomize.py").write_text(hook)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "stub"), str(ROOT)])}
    return subprocess.Popen(
        [sys.executable, "-m", "aottrain", *arguments],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


# Without torch, whose import would take most of these tests' time.
RECIPE = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Options:
    num_layers: int = 4
    width: int = 192
    num_heads: int = 6
    context: int = 128
    dropout: float = 0.1
    vocab_size: int = 256
    label_smoothing: float = 0.0

    def check(self):
        return []

def build(options): ...
def loss(model, batch): ...
"""

TASK = """
import json
from pathlib import Path
from aottrain.errors import BudgetError

def run(config):
    print("group", config.logger.group)
    if config.partition.budget == 0.5:
        raise BudgetError("the smallest budget is 0.6")
    if config.engine.name == "torch_compile":
        raise RuntimeError("a bug")
    summary = {"status": "finished", "last_loss": 2.5, "saved_bytes": 1024}
    Path(config.output_dir, "summary.json").write_text(json.dumps(summary))
    return 0
"""


def test_an_error_that_ctrl_c_leads_to_is_no_mistake_of_the_input(tmp_path):
    """OmegaConf raises one of its own where it is interrupted with a node half made, and undoes what it did."""
    script = """
import signal
from aottrain.cli import command, main
def run(arguments):
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        None._invalidate_flags_cache()
command.run = run
raise SystemExit(main([]))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (130, "aottrain: interrupted\n")


def test_wrong_input_is_answered_without_torch_and_traceback(here):
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = command("partition.budget=7parsecs", folder=here)
    out, err = process.communicate()
    assert process.returncode == 2 and out == "" and "Traceback" not in err and "partition.budget=7parsecs" in err
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor, for other programs run, too; the usual is 0.4 s, and importing torch takes several.
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 2
    script = "import sys; from aottrain.cli import main; main(['seed=x']); print({'torch', 'wandb'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


NAMED = """
from pathlib import Path

def run(config):
    print(config.data.path, Path(config.data.path).read_text(encoding="utf-8"))
    Path(config.output_dir, "é").write_text("é")
    return 0
"""


def test_letters_beyond_ascii_work_wherever_the_machine_is_set_to(here, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONUTF8", "0")
    (here / "Bücher (2)").mkdir()
    (here / "Bücher (2)" / "größe.txt").write_text("Maß", encoding="utf-8")
    line = ['data.path="Bücher (2)/größe.txt"', 'hydra.run.dir="Läufe, 1"', "logger=csv"]
    process = command(*line, folder=here, stub=NAMED)
    out, err = process.communicate()
    assert process.returncode == 0 and err == "" and f"{here}/Bücher (2)/größe.txt Maß" in out
    assert (here / "Läufe, 1" / "é").read_text(encoding="utf-8") == "é"
    assert "größe.txt" in (here / "Läufe, 1" / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")


LOUD = """
import sys, warnings
from aottrain.errors import NumericsError

def run(config):
    print("printed")
    print("and to stderr", file=sys.stderr)
    warnings.warn("a warning")
    raise NumericsError("step 3: wrong\\nsecond line")
"""


def test_the_first_line_comes_before_torch_and_the_log_has_all_that_was_printed(here):
    process = command("hydra.run.dir=mine", folder=here, stub=LOUD)
    out, err = process.communicate()
    assert process.returncode == 1
    first = f"aottrain {__version__}: train transformer, engine aot, in mine; loading torch"
    assert out.splitlines() == [first, "printed"]
    logged = (here / "mine" / "aottrain.log").read_text()
    assert err.endswith("aottrain: NumericsError: step 3: wrong\nsecond line\n") and "a warning" in err
    assert all(line in logged.splitlines() for line in (first, "printed", "and to stderr", "second line"))
    assert "a warning" in logged and "NumericsError: step 3: wrong" in logged
    script = "import sys; from aottrain.cli import main; import aottrain.cli.compose as c\n" \
             "c.read_model = lambda config: sys.exit(str('torch' in sys.modules))\n" \
             "main(['hydra.run.dir=other'])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.stderr == "False\n" and done.stdout == first.replace("mine", "other") + "\n"


@pytest.mark.parametrize("arguments", [["recipe=nope"], ["--cfg", "job"]], ids=" ".join)
def test_nothing_is_warned_of(here, arguments, capsys, monkeypatch):
    """By whichever release of Hydra runs."""
    monkeypatch.setattr(sys, "argv", ["aottrain"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(arguments) == (2 if "recipe=nope" in arguments else 0)
    assert "arning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hydra", "omegaconf", "torch"])
def test_without_a_dependency_one_line_says_what_to_do(here, name):
    (here / "stub" / name).mkdir(parents=True)
    (here / "stub" / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no', name='{name}')")
    process = command("debug=fast", "hydra.run.dir=mine", folder=here)
    _, err = process.communicate()
    assert process.returncode == 2 and err == (
        f"aottrain: {sys.executable} has no {name}: write `bash scripts/train.sh` for `python -m aottrain`, "
        "or `source .venv/bin/activate` before it\n"
    )


def test_a_module_of_one_s_own_that_is_missing_is_not_taken_for_a_dependency(quick_children, here):
    process = command("logger=csv", folder=here, stub="def run(config):\n    import no_such_module")
    _, err = process.communicate()
    assert process.returncode == 1 and "Traceback" in err and "no_such_module" in err


def test_a_task_s_own_error_is_one_line(quick_children, here):
    process = command("partition.budget=0.5", "logger=csv", folder=here, stub=TASK)
    _, err = process.communicate()
    assert process.returncode == 2 and err == "aottrain: BudgetError: the smallest budget is 0.6\n"


def test_who_reads_no_further_gets_no_traceback(quick_children, here):
    """As `| head -3` does."""
    stub = "def run(config):\n    for _ in range(100000):\n        print('a line', flush=True)"
    process = command("logger=csv", "hydra.run.dir=here", folder=here, stub=stub)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 128 + signal.SIGPIPE


def test_a_bug_keeps_its_traceback(quick_children, here):
    process = command("engine=torch_compile", "hydra.run.dir=here", folder=here, stub=TASK)
    _, err = process.communicate()
    assert process.returncode == 1 and "Traceback" in err and "stub_train.py" in err and "a bug" in err
    assert (here / "here" / ".hydra" / "config.yaml").is_file()


def test_a_failing_job_does_not_stop_a_sweep(quick_children, here):
    process = command("-m", "partition.budget=0.1,0.5,1.0", "hydra.sweep.dir=all", folder=here, stub=TASK)
    out, err = process.communicate()
    assert process.returncode == 1
    assert f"job 1 failed (partition.budget=0.5): exit code 2, {here / 'all' / '1'}" in err
    assert out.count("group sweep-all") == 3
    rows = list(csv.DictReader((here / "all" / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["finished", "failed", "finished"]
    assert [row["exit_code"] for row in rows] == ["0", "2", "0"]
    assert [row["partition.budget"] for row in rows] == ["0.1", "0.5", "1.0"]
    assert [row["last_loss"] for row in rows] == ["2.5", "", "2.5"]
    for number, budget in enumerate(("0.1", "0.5", "1.0")):
        kept = (here / "all" / str(number) / ".hydra" / "overrides.yaml").read_text()
        assert f"- partition.budget={budget}\n" in kept


def test_the_table_of_a_sweep_is_written_for_people():
    jobs = [SweepJob(i, {"seed": str(i), "kernel": "cpp"}, Path(str(i)), ()) for i in range(3)]
    figures = [
        {"last_loss": 2.51234, "step_ms_median": 0.4567, "tokens_per_s": 5123.4, "peak_bytes": 83_600_000},
        {"last_loss": 0.5, "step_ms_median": 1234.5, "tokens_per_s": 12.0, "peak_bytes": 2048, "saved_bytes": 0},
    ]
    outcomes = [Outcome(job, 0, "finished", found) for job, found in zip(jobs, figures, strict=False)]
    rows = [line.split("  ") for line in table([*outcomes, Outcome(jobs[2])]).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["job", "seed", "status", "loss", "step (median)", "tokens/s", "peak", "saved"]
    assert cells[2] == ["0", "0", "finished", "2.512", "457 us", "5,123", "79.7 MiB"]
    assert cells[3] == ["1", "1", "finished", "0.5", "1.23 s", "12", "2.00 KiB", "0 B"]
    assert cells[4] == ["2", "2", "not run"]


def test_the_first_line_of_a_sweep_comes_before_its_jobs_are_checked(here, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(Composer, "check", lambda *_, **__: seen.append(capsys.readouterr().out) or (None, []))
    monkeypatch.setattr(sweeps, "run_sweep", lambda planned, folder, *_: 0)
    assert main(["-m", "seed=1,2"]) == 0
    assert seen == [f"aottrain {__version__}: a sweep of 2 jobs; checking them\n", ""]


def test_an_experiment_s_file_can_be_a_sweep(quick_children, here):
    line = ["experiment=engines", "logger.group=mine", "+hydra.job.env_set.A=b", "hydra.sweep.dir=all"]
    process = command(*line, "hydra.sweep.subdir='${hydra.job.num}_x'", folder=here, stub=TASK)
    out, err = process.communicate()
    assert process.returncode == 1 and out.count("group mine") == 3
    assert "job 1 failed (engine=torch_compile" in err and "a bug" in err
    assert sorted(path.name for path in (here / "all").iterdir()) == [
        ".hydra", "0_x", "1_x", "2_x", "sweep.csv", "sweep.html",
    ]  # fmt: skip


WAITING = """
import time

def run(config):
    print("started", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return 130
"""


@pytest.mark.parametrize("taken", [".hydra", "aottrain.log"])
def test_a_folder_that_takes_no_configuration_or_log_is_a_mistake_of_the_input(here, capsys, taken):
    (here / "run").mkdir()
    (here / "run" / taken).mkdir() if taken.endswith(".log") else (here / "run" / taken).touch()
    assert main(["recipe=dlrm", "debug=fast", "hydra.run.dir=run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    reason = "Is a directory" if taken.endswith(".log") else "File exists"
    assert line == f"  hydra.run.dir={here / 'run'}: cannot be written to: {here / 'run' / taken}: {reason}"


def test_an_interrupted_sweep_names_what_was_not_run(quick_children, here):
    process = command("-m", "seed=1,2,3", "hydra.sweep.dir=all", folder=here, stub=WAITING)
    assert process.stdout is not None
    while "started" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err and "started" not in out
    assert "job 0 interrupted" in err and "job 1 was not run (seed=2)" in err and "job 2 was not run (seed=3)" in err
    rows = list(csv.DictReader((here / "all" / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["interrupted", "not run", "not run"]


def begun(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    while "started" not in process.stdout.readline():
        assert process.poll() is None
    return process


@pytest.mark.parametrize("line", [["hydra.run.dir=mine"], ["-m", "seed=1,2", "hydra.sweep.dir=mine"]], ids=str)
def test_a_folder_that_another_run_writes_to_is_refused_and_stays_as_it_is(quick_children, here, line):
    first = begun(command(*line, "trainer.steps=7", folder=here, stub=WAITING))
    before = {path: path.read_bytes() for path in (here / "mine").rglob("*") if path.is_file()}
    second = command(*line, "trainer.steps=9", folder=here)
    _, err = second.communicate()
    assert second.returncode == 2 and err == (
        f"aottrain: BusyError: {here / 'mine'}: another run (process {first.pid}) writes there; "
        f"wait until it ends, or give another {line[-1].split('=')[0]}\n"
    )
    assert {path: path.read_bytes() for path in (here / "mine").rglob("*") if path.is_file()} == before
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    assert not list((here / "mine").rglob(".lock"))


def test_the_lock_of_a_run_that_was_killed_holds_nobody_back(quick_children, here):
    first = begun(command("hydra.run.dir=mine", folder=here, stub=WAITING))
    first.kill()
    first.communicate()
    assert (here / "mine" / ".lock").read_text() == f"{first.pid}\n"
    third = command("hydra.run.dir=mine", "logger=csv", folder=here, stub=TASK)
    assert third.communicate()[1] == "" and third.returncode == 0


def test_a_lock_is_had_by_one_at_a_time_however_they_take_turns(quick_children, tmp_path):
    script = "import sys, time\nfrom pathlib import Path\nfrom aottrain.cli.lock import only_run_in\n" \
             "from aottrain.errors import BusyError\nfolder = Path(sys.argv[1])\nheld = 0\nwhile held < 200:\n" \
             "    try:\n        with only_run_in(folder, 'k'):\n            (folder / 'in').touch(exist_ok=False)\n" \
             "            (folder / 'in').unlink()\n            held += 1\n" \
             "    except BusyError:\n        time.sleep(0)\n"  # fmt: skip
    racers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT) for _ in range(3)]
    assert [racer.wait() for racer in racers] == [0, 0, 0]


def test_two_runs_in_the_same_second_do_not_share_a_directory(quick_children, here):
    processes = [command("logger=csv", "seed=1", folder=here, stub=TASK) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    [process.communicate() for process in processes]
    assert len(list((here / "outputs" / "transformer").iterdir())) == 2


def test_a_plain_checkout_works_from_any_folder(here):
    """One that nothing was installed of: what an editable installation adds to Python's finders is taken away."""
    code = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "").lower()]
sys.path_hooks[:] = [hook for hook in sys.path_hooks if "editable" not in getattr(hook, "__module__", "").lower()]
from aottrain.cli import main
sys.exit(main(["--cfg", "job", "--package", "partition", "partition.budget=0.25"]) or main(["ls", "recipe"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "budget: 0.25" in done.stdout and "mamba" in done.stdout


def test_a_warning_of_this_package_is_one_line_without_its_source(quick_children, here):
    task = "import warnings\n\ndef run(config):\n    warnings.warn('no compiler', stacklevel=2)\n    return 0\n"
    process = command("hydra.run.dir=all", folder=here, stub=task)
    _, err = process.communicate()
    assert process.returncode == 0 and err == "warning: no compiler\n"


def test_keys_that_a_size_sets_name_it_and_its_recipe(here, capsys, shipped):
    lines = refusal(capsys, "recipe=resnet", "size=gpt2_124m")
    assert len(lines) == 4 and all("(set by size=gpt2_124m, which is of recipe=transformer)" in line for line in lines)


def test_options_that_cannot_be_read_are_named_and_listed(here, capsys):
    folder = here / "own" / "optimizer"
    folder.mkdir(parents=True)
    (folder / "odd.yaml").write_bytes(b"\xff\xfe")
    os.mkfifo(folder / "pipe.yaml")
    assert main(["--config-dir", "own", "ls", "optimizer"]) == main(["--config-dir", "own", "--help"]) == 0
    printed = capsys.readouterr().out
    assert " odd" in printed and "pipe" not in printed
    said = refusal(capsys, "--config-dir", "own", "optimizer=odd")
    assert said == ["optimizer=odd: its file is not UTF-8: invalid start byte at byte 0"]


def test_of_a_large_folder_not_all_is_searched_for_runs(here, monkeypatch):
    (here / "a" / "checkpoints").mkdir(parents=True)
    (here / "a" / "checkpoints" / "step_1.pt").write_bytes(b"")
    for number in range(9):
        (here / "a" / str(number)).mkdir()
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    monkeypatch.setattr(folders, "MOST_ENTRIES", 3)
    assert folders.no_checkpoint(here) == (
        f"the folder has no checkpoint; the newest run in it that has one is {here / 'a'}; "
        "not all of it was searched for runs, for it has more than 3 files and folders"
    )
    assert not {str(here / "a" / str(number)) for number in range(9)} & {*map(str, listed)}


def test_a_folder_of_runs_names_its_newest_one(here):
    for depth in ("a", "a/b"):
        folder = here / depth / "run"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "step_1.pt").write_bytes(b"")
        assert no_checkpoint(here).endswith(f"the newest run in it that has one is {folder}")
        (folder / "checkpoints" / "step_1.pt").unlink()
        (folder / "checkpoints" / "step_2.pt").symlink_to("gone")  # as one that is removed while it is looked for
        assert no_checkpoint(here) == "the folder has no checkpoint"
        (folder / "checkpoints" / "step_2.pt").unlink()


def test_what_hydra_does_without_memory_hides_no_error(here, capsys, monkeypatch):
    """After the task, whose error is the one to tell."""
    get = JobRuntime.get

    def run(_: Any) -> int:
        monkeypatch.setattr(JobRuntime, "get", lambda *_: raising(MemoryError()))
        raise OutOfMemoryError("memory ran out while training")

    monkeypatch.setattr("aottrain.cli.command._task", lambda _: run)
    assert main(["hydra.run.dir=run"]) == 1
    monkeypatch.setattr(JobRuntime, "get", get)
    assert "memory ran out while training" in capsys.readouterr().err


def raising(error: BaseException) -> Any:
    raise error
