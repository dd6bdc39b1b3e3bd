"""Is the suite able to fail? A sample of the planted bugs, each of which ordinary tests have to see.

All of them: `python scripts/planted.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aottrain.errors import VerificationError
from tests.planted_bugs import planting
from tests.planted_bugs.planting import EDITS, source_of
from tests.planted_bugs.trying import breakdown

ROOT = Path(__file__).resolve().parent.parent
BUGS = planting.all_bugs()
AREAS = sorted({bug.area for bug in BUGS.values()})


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it forks, and may have run nothing in threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)


def test_a_sample_is_found(quick_children):
    done = run(str(ROOT / "scripts" / "planted.py"), "--quick")
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_many_in_every_area():
    assert len(BUGS) >= 150 and len(AREAS) >= 15
    for area in AREAS:
        assert sum(bug.area == area for bug in BUGS.values()) >= 4, area


def test_each_names_tests_that_there_are():
    for bug in BUGS.values():
        assert bug.tests, bug.name
        for test in bug.tests:
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            name = name.partition("[")[0]
            assert f"def {name}(" in text or f"\n{name} = " in text, f"{bug.name}: {test}"


def test_each_text_that_is_changed_stands_there_once():
    stale = [name for name, function, old in EDITS if source_of(function)[1].count(old) != 1]
    assert stale == []


TRIAL = """
from aottrain.data import batches, order
from tests.forking import prepare
from tests.planted_bugs.planting import Area
from tests.planted_bugs.trying import load_tests, try_bug
from tests.planted_bugs import planting

DRAWS, MAKES = "neighbouring_seeds_and_steps_draw_unlike", "a_recipe_can_make_its_own_batches"
here, test = Area("trial"), f"tests/data/test_text_data.py::test_{DRAWS}"
here.edit("wrong", test, order.step_generator, "seed * 0x9E3779B97F4A7C15", "seed * 0")
here.edit("crash", test, order.step_generator, "seed * 0x9E3779B97F4A7C15", "seed.nothing")
here.attribute("signature", test.replace(DRAWS, MAKES), batches, "to_device", lambda: None)
here.edit("no bug", test, order.step_generator, "seed * 0x9E3779B97F4A7C15", "seed * 0x9E3779B97F4A7C17")
here.edit("stale", test, order.step_generator, "what is not there", "")
here.edit("typo", test + "s", order.step_generator, "seed * 0x9E3779B97F4A7C15", "seed * 0")
prepare()
load_tests(planting.BUGS.values())
print([try_bug(bug)[0] for bug in planting.BUGS.values()])
"""


def test_only_a_wrong_answer_is_found(quick_children):
    done = run("-c", TRIAL)
    assert done.stdout.strip() == str(["found", "INVALID", "INVALID", "NOT FOUND", "INVALID", "INVALID"]), done.stderr


@pytest.mark.parametrize(
    "error",
    [
        TypeError("f() takes 2 positional arguments but 3 were given"),
        AssertionError("WRONG: eager: no error; compiled: TypeError: f() takes 2 positional arguments"),
        AssertionError("ran eagerly: analyse: AttributeError: no such thing"),
        AssertionError("WRONG: eager: no error; compiled: AssertionError: "),
        RuntimeError("shapes do not fit"),
    ],
)
def test_a_plant_that_crashes_proves_nothing(error):
    assert breakdown(error)


@pytest.mark.parametrize("text", ["", "WRONG: output 0: [1.0] became [2.0]", "ran eagerly: an input is sparse"])
def test_a_wrong_answer_is_no_crash(text):
    assert not breakdown(AssertionError(text)) and not breakdown(VerificationError(text))


ABORTS = """
import faulthandler, os
from tests.forking import run_forked

def abort():
    faulthandler.enable()
    os.abort()

print(run_forked(abort, 10, 60).why)
print(run_forked(os.abort, 10, 60).why)
"""


def test_where_a_process_was_ended_is_said(quick_children):
    first, second = run("-c", ABORTS).stdout.splitlines()
    assert first.startswith("ended by signal 6: Fatal Python error: Aborted") and "in abort" in first
    assert second == "ended by signal 6"


def scaled(x: int, factor: int = 2) -> int:
    return x * factor


def test_an_edited_function_is_the_same_one(monkeypatch):
    monkeypatch.setattr(scaled, "__code__", scaled.__code__)
    held = scaled
    planting.edit(scaled, "x * factor", "x + factor")
    assert held(5) == 7 and held(5, factor=3) == 8
    with pytest.raises(planting.Stale):
        planting.edit(scaled, "x - factor", "x")
