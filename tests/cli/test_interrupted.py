"""A signal that comes before a run has begun: the exit code and one line, and of the run nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from aottrain.cli import command, main
from aottrain.cli.lock import only_run_in
from aottrain.errors import Interrupted

ROOT = Path(__file__).resolve().parents[2]
RUN = ["recipe=dlrm", "debug=fast", "hydra.run.dir=new/run"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_compiler_is_loaded_leaves_no_folder(here, monkeypatch, capsys, signum):
    monkeypatch.setattr(command, "_task", lambda name: signal.raise_signal(signum))
    before = signal.getsignal(signum)
    usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    signal.signal(signum, usual)  # not as the suite was started, which may be under nohup
    try:
        assert main(RUN) == 128 + signum
        assert signal.getsignal(signum) is usual
    finally:
        signal.signal(signum, before)
    assert capsys.readouterr().err == "aottrain: interrupted\n"
    assert not list(here.iterdir())


@pytest.mark.parametrize("module", ["aottrain.explain.report", "aottrain.cli"])
def test_ctrl_c_before_the_command_line_listens_is_no_traceback(here, module):
    """While its own modules are imported, the first of which is the package's."""
    script = f"""
import importlib.abc, os, signal, sys
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
"""
    (here / "sitecustomize.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", "import os, sys; os.execv(sys.executable, sys.argv[1:])", sys.executable]
    ended = subprocess.run([*command, "-m", "aottrain", "--version"], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_one_that_a_library_drops_is_raised_before_the_run_begins(here, monkeypatch, capsys):
    load = command.importlib.import_module

    def dropping(name: str, *rest: str) -> object:
        if name != "aottrain.tasks.train":
            return load(name, *rest)
        with suppress(KeyboardInterrupt):  # as C++ does that imports a module
            signal.raise_signal(signal.SIGTERM)
        return load(name)

    monkeypatch.setattr(command.importlib, "import_module", dropping)
    assert main(RUN) == 143
    assert capsys.readouterr().err == "aottrain: interrupted\n" and not list(here.iterdir())


def test_what_a_run_has_left_stays(here):
    with pytest.raises(Interrupted), only_run_in(here / "run", "hydra.run.dir"):
        (here / "run" / "summary.json").write_text("{}")
        raise Interrupted(signal.SIGTERM)
    (here / "mine").mkdir()
    with pytest.raises(Interrupted), only_run_in(here / "mine", "hydra.run.dir"):
        raise Interrupted(signal.SIGTERM)
    assert os.listdir("run") == ["summary.json"] and os.listdir("mine") == []


def test_within_torch_nothing_is_raised(here):
    """C++ that imports modules ends the process by SIGABRT where one raises, or goes on as if nothing had been."""
    script = """
import signal, sys, types
from pathlib import Path
from aottrain.cli import command, main
from aottrain.cli.lock import only_run_in
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.__file__ = "/site/torch/__init__.py"
text = '''
def imported():
    try:
        signal.raise_signal(signal.SIGTERM)
    except BaseException:
        return 0
'''
exec(compile(text, "/site/torch/distributed/__init__.py", "exec"))
def run(arguments):
    with only_run_in(Path("new/run"), "hydra.run.dir"):
        return imported()
command.run = run
raise SystemExit(main([]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=here, env=environment)
    assert (ended.returncode, ended.stderr) == (143, "aottrain: interrupted\n")
    assert not list(here.iterdir())


@pytest.mark.parametrize("task", ["tour", "generate", "export"])
def test_tasks_that_take_long_end_by_a_signal(here, monkeypatch, task):
    """In them torch calls what may not raise: their handlers are the trainer's."""
    from aottrain.config.run import RunConfig
    from aottrain.tasks import export, generate, tour

    module = {"tour": tour, "generate": generate, "export": export}[task]
    seen = []
    for name in ("stops", "newest_of_run", "recipe_of"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_: (seen.append(1), signal.raise_signal(signal.SIGTERM)))
    with pytest.raises(Interrupted) as caught:
        module.run(RunConfig(task=task, output_dir=str(here)))
    assert caught.value.signum == signal.SIGTERM and seen == [1]


def test_summary_of_one_that_had_begun(here, monkeypatch):
    from aottrain.tasks import train

    monkeypatch.setattr(train, "build_job", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert main([*RUN, "logger=csv"]) == 143
    summary = json.loads(Path("new/run/summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("interrupted", "Interrupted: by SIGTERM")
