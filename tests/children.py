"""Processes for tests, forked from one that has imported what they all import, which takes seconds of a processor.

`Popen` takes the place of subprocess.Popen: the fixture `quick_children` puts it there. A command that runs this Python
is forked, any other is started as always. What a fork takes over, and a new Python would not: modules that have been
imported, and what libraries read of the environment when they were (numbers of threads). Streams, folder, environment,
arguments, the path of imports, signals and the exit are those of a process of its own. Tests about how a process starts
keep the true one.

    python tests/children.py <a socket's descriptor>     # the process that forks; Linux alone
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import site
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
_REPARENTED_HERE = 36  # PR_SET_CHILD_SUBREAPER of prctl
# What Python and libraries read when they start: where it is another now, a process of its own is started. (Two are
# set by scikit-learn as it is imported.)
_AT_START = re.compile(
    "PYTHON(?!PATH$)|LC_|LANG|LD_|MALLOC_|GLIBC_|OMP_|GOMP_|KMP_(?!DUPLICATE|INIT_AT)|MKL_|ATEN_|TORCH(?!INDUCTOR_CACHE)|TRITON_|CUDA_"
)
_MODULES = ("torch", "torch._dynamo", "torch.testing", "sympy", "networkx", "numpy", "yaml", "hydra", "omegaconf",
            "aottrain", "aottrain.cli.command", "aottrain.compiler.frontends.api", "aottrain.tasks.train",
            "aottrain.tasks.plan", "aottrain.tasks.measuring.runs_in_turns")  # fmt: skip


_true_popen = subprocess.Popen


class Popen(_true_popen):
    """As subprocess.Popen; a command of this Python is forked from the prepared process."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        # The order of these is subprocess's own in every Python from 3.10 on.
        _, preexec, _, pass_fds, cwd, env, _, _, shell, stdin, _, _, stdout, _, stderr = rest[:15]
        _, _, _, _, _, new_session, *_ = rest[15:]
        environment = dict(os.environ if env is None else env)
        if preexec or pass_fds or shell or new_session or not _is_ours(args, environment):
            return super()._execute_child(args, *rest)
        streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
        request = {"arguments": list(map(str, args)), "folder": str(cwd or os.getcwd()), "environment": environment}
        try:
            self.pid = _ask(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*rest[9:15])


@pytest.fixture
def quick_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test and the code that it tests start of this Python is forked."""
    if sys.platform == "linux":
        monkeypatch.setattr(subprocess, "Popen", Popen)


def _is_ours(arguments: Any, environment: dict[str, str]) -> bool:
    if not isinstance(arguments, list | tuple) or len(arguments) < 2 or str(arguments[0]) != sys.executable:
        return False
    first = str(arguments[1])
    known = first.endswith(".py") or (first in ("-m", "-c") and len(arguments) > 2)
    return known and _read_at_start(environment) == _BEGAN


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _AT_START.match(name)}


_BEGAN = _read_at_start(os.environ)


def _ask(request: dict[str, Any], streams: Sequence[int]) -> int:
    """The pid of a new child of this process."""
    here = _prepared()
    socket.send_fds(here, [json.dumps(request).encode()], streams)
    answer = here.recv(100)
    if not answer:
        raise RuntimeError("the process that forks children for tests has ended")
    return int(answer)


@cache
def _prepared() -> socket.socket:
    """Our end of the line to the process that forks. What it forks twice is taken for a child of ours."""
    ctypes.CDLL(None).prctl(_REPARENTED_HERE, 1)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).resolve()), str(there.fileno())]
    environment = {name: value for name, value in os.environ.items() if not _AT_START.match(name)} | _BEGAN
    environment.pop("PYTHONPATH", None)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    _processes.append(_true_popen(command, cwd=ROOT, env=environment, pass_fds=[there.fileno()], **streams))
    there.close()
    return here


_processes: list[Any] = []  # it ends with our end of the line


def serve(line: socket.socket) -> dict[str, Any]:
    """Fork a child for each request. Returns in the children, with the request."""
    tests = os.getppid()
    while True:
        text, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not text:
            os._exit(0)
        if (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            while os.getppid() != tests:
                time.sleep(0.0005)
            line.send(str(os.getpid()).encode())
            line.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return json.loads(text)
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


def become(request: dict[str, Any], installed: Sequence[str]) -> None:
    """The process that a command starts, until it ends. installed: the path of imports without anybody's own."""
    _, first, *rest = request["arguments"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    own = {"-m": request["folder"], "-c": ""}.get(first, os.path.dirname(os.path.abspath(first)))
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [own, *named, *installed]
    sys.path_importer_cache.clear()
    sys.orig_argv = request["arguments"]
    site.execsitecustomize()
    sys.argv = [first, *rest]
    if first == "-m":
        sys.argv = rest
        if not hasattr(sys.modules.get(rest[0]), "__path__"):  # of a package its __main__ is run, which nobody imports
            sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        runpy.run_path(first, run_name="__main__")


_status: list[int] = []


def _leave() -> None:
    """The last thing at a child's end: to take apart what was imported would take longer than many a child runs."""
    if _status:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_status[0])


def _ended_with(code: Any) -> int:
    """The exit code of a SystemExit."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def main(line: socket.socket) -> None:
    """Prepare, fork, and in the children be what is asked for. An interrupt that nothing hears ends them as any."""
    atexit.register(_leave)  # before others are: it runs after them
    installed = sys.path[1:]
    sys.path[:] = [str(ROOT), *installed]  # not this folder's; the code beside the tests, whatever is installed
    for name in _MODULES:
        importlib.import_module(name)
    importlib.import_module("aottrain.config.extensions.recipes").load_recipe("transformer")
    importlib.import_module("hydra.core.plugins").Plugins.instance()  # which imports them
    importlib.import_module("tests.remembering").remember_yaml()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # a child may have another package of this name
    del sys.path[0]
    gc.collect()
    gc.freeze()
    request = serve(line)
    try:
        become(request, installed)
        _status.append(0)
    except SystemExit as end:
        _status.append(_ended_with(end.code))
    except Exception:
        _status.append(1)
        raise


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
