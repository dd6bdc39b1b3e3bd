"""What Python does in a backward beside computing gradients happens in each, as in eager, and is refused by a trace."""

from __future__ import annotations

import random
import time

import numpy
import pytest
import torch

import aottrain
from tests.conformance.backwards import gradients_of, with_backward, with_hook

X = torch.ones(2)
RUNS_EAGERLY = "ignore:aottrain runs this call eagerly"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "read by a backward"
    path.write_text("a")
    return path


def pythons_numbers(g, file):
    return g * random.random()


def numpys_numbers(g, file):
    return g * numpy.random.rand()


def a_file(g, file):
    with open(file, "a+") as opened:
        opened.write("b")
        opened.seek(0)
        return g * len(opened.read())


def a_clock(g, file):
    return g * float(time.perf_counter() > 0)


def printing(g, file):
    print("said")
    return g * 2


def torchs_generator(g, file):
    with torch.random.fork_rng(devices=[]):
        return g * 2


def torchs_seed(g, file):
    torch.manual_seed(3)
    return g * 2


def the_default_type(g, file):
    torch.set_default_dtype(torch.float64)
    return g * torch.ones(2).sum()


FORMULAS = {
    pythons_numbers: "Random.random",
    numpys_numbers: "draws from Python's or NumPy's random generator",
    a_file: "open",
    a_clock: "perf_counter",
    printing: "print",
    torchs_generator: "torch's random generator",
    torchs_seed: "manual_seed of torch's random generator",
    the_default_type: "changes torch's settings",
}


@pytest.fixture(autouse=True)
def settings_given_back():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings(RUNS_EAGERLY)
@pytest.mark.parametrize("made", [with_backward, with_hook], ids=["a_function", "a_hook"])
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_happen_each_time(formula, made, file, capsys):
    program = made(lambda g: formula(g, file))
    compiled = aottrain.compile(program, capture="trace")
    found = []
    for run in (program, compiled):
        file.write_text("a")
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        found.append((gradients_of(run, X, X, X), file.read_text(), capsys.readouterr().out, torch.initial_seed()))
        torch.set_default_dtype(torch.float32)
    assert found[0] == found[1]
    # Once the default type is another one the backward changes nothing.
    assert [fallback.count for fallback in compiled.report.fallbacks] == [1 if formula is the_default_type else 3]


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_are_refused_and_leave_nothing(formula, file):
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    program = aottrain.compile(with_backward(lambda g: formula(g, file)), capture="trace", on_unsupported="error")
    with pytest.raises(aottrain.UnsupportedError, match=FORMULAS[formula]):
        program(X.clone().requires_grad_())
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert torch.get_default_dtype() == torch.float32 and file.read_text() == "a"
