"""A forked child is for its parent what a process of its own would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import children

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone"),
    pytest.mark.usefixtures("quick_children"),
]

SEEN = """
import json, os, sys
loaded = "torch" in sys.modules
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("A"), os.environ.get("HOME"), os.getpid(), loaded, __name__]))
print(sys.stdin.read(), end="", file=sys.stderr)
sys.exit({code})
"""
PROGRAMS = {"-c": ["-c", SEEN], "-m": ["-m", "seen"], "a file": ["seen.py"]}


@pytest.mark.parametrize("given", PROGRAMS)
@pytest.mark.parametrize(("code", "status"), [("0", 0), ("3", 3), ("None", 0), ("'why'", 1)])
def test_what_it_sees_and_how_it_ends(tmp_path, monkeypatch, given, code, status):
    monkeypatch.delenv("HOME", raising=False)
    text = SEEN.replace("{code}", code)
    (tmp_path / "seen.py").write_text(text)
    first, *rest = [text if part is SEEN else part for part in PROGRAMS[given]]
    environment = {**os.environ, "A": "b"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, first, *rest, "x"], cwd=tmp_path, env=environment, **pipes)
    out, err = process.communicate("said\n")
    arguments, folder, *others = json.loads(out)
    assert arguments == [{"-m": str(tmp_path / "seen.py")}.get(first, first), "x"] and folder == str(tmp_path)
    assert others == ["b", None, process.pid, True, "__main__"]
    assert err == "said\n" + "why\n" * status if code == "'why'" else err == "said\n"
    assert process.returncode == status


def test_an_error_is_shown_with_the_place_and_what_is_printed_is_not_lost():
    done = subprocess.run([sys.executable, "-c", "print('a', end='')\n1 / 0"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "a"
    assert 'File "<string>", line 2' in done.stderr and done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(signum):
    program = "import time; print(1, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process:
        assert process.stdout.readline() == "1\n" and process.poll() is None
        process.send_signal(signum)
        assert process.wait() == -signum


def test_what_was_registered_for_the_end_is_done(tmp_path):
    program = "import atexit, threading, time\natexit.register(lambda: print('end'))\n" \
              "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "thread\nend\n"


def test_its_imports_are_found_where_a_process_of_its_own_finds_them(tmp_path, monkeypatch):
    for folder in ("named", "started_in"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"in_{folder}.py").touch()
    (tmp_path / "named" / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "named"))
    program = "import in_named, in_started_in, importlib.util; print(customized, importlib.util.find_spec('tests'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "started_in", capture_output=True, text=True)
    assert done.stdout == "True None\n", done.stderr


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["true"], {}),
        ([sys.executable, "-X", "dev", "-c", ""], {}),
        ([sys.executable, "-c", ""], {"env": {**os.environ, "LC_ALL": "other"}}),
        ([sys.executable, "-c", ""], {"env": {**os.environ, "OMP_NUM_THREADS": "17"}}),
        ([sys.executable, "-c", ""], {"start_new_session": True}),
    ],
    ids=["another program", "a flag of Python", "a language", "what a library reads when it is loaded", "a session"],
)
def test_what_a_fork_would_not_have_is_a_process_of_its_own(monkeypatch, command, options):
    monkeypatch.setattr(children, "_ask", lambda *_: pytest.fail("forked"))
    assert subprocess.run(command, **options).returncode == 0
