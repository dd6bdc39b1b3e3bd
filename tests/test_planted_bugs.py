"""Is the suite able to fail? Bugs are planted in the compiler, one at a time; the check beside each must see it."""

from __future__ import annotations

import re

import pytest
import torch

from tests.numerics.comparison import isolated
from tests.planted import BUGS

__all__ = ["isolated"]

# What a mistake in the plant itself raises: here, in a compiled call that was compared, or in a stage that gave up.
_MISTAKES = (TypeError, ValueError, AttributeError, LookupError, NameError, ArithmeticError, ImportError)
_NAMES = "|".join(kind.__name__ for base in _MISTAKES for kind in (base, *base.__subclasses__()))
_TOLD = re.compile(rf"(?:compiled|ran eagerly: \w+): ((?:{_NAMES}|AssertionError)\b.*)")


def crash(error: Exception) -> str:
    """How the planted code broke down, where nothing was compared; "" where an answer was wrong."""
    if isinstance(error, _MISTAKES):
        return repr(error)
    told = _TOLD.search(str(error))
    return told[1] if told else ""


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    plant, check = BUGS[name]
    check()
    grad_mode = torch.is_grad_enabled()
    with monkeypatch.context() as patch:
        plant(patch)
        try:
            check()
        except Exception as error:
            assert not crash(error), f"the plant crashes, which proves nothing: {crash(error)}"
            return
        finally:
            torch.set_grad_enabled(grad_mode)
            torch._dynamo.reset()  # which one of them spoils
    pytest.fail(f"{check.__name__} passes although this bug is planted: {name}")


def test_there_are_many():
    assert len(BUGS) >= 60


@pytest.mark.parametrize(
    "error",
    [
        TypeError("f() takes 2 positional arguments but 3 were given"),
        AssertionError("WRONG: eager: no error; compiled: TypeError: f() takes 2 positional arguments"),
        AssertionError("ran eagerly: analyse: AttributeError: no such thing"),
        AssertionError("WRONG: eager: no error; compiled: AssertionError: "),
    ],
)
def test_a_plant_that_crashes_proves_nothing(error):
    assert crash(error)


@pytest.mark.parametrize("text", ["", "WRONG: output 0: [1.0] became [2.0]", "ran eagerly: an input is sparse"])
def test_a_wrong_answer_is_no_crash(text):
    assert not crash(AssertionError(text))
