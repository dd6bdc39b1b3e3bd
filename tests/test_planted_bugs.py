"""Is the suite able to fail? Bugs are planted in the compiler, one at a time; the check beside each must see it."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.comparison import isolated
from tests.planted import BUGS

__all__ = ["isolated"]


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    plant, check = BUGS[name]
    check()
    grad_mode = torch.is_grad_enabled()
    with monkeypatch.context() as patch:
        plant(patch)
        try:
            check()
        except Exception:
            return
        finally:
            torch.set_grad_enabled(grad_mode)
    pytest.fail(f"{check.__name__} passes although this bug is planted: {name}")


def test_there_are_many():
    assert len(BUGS) >= 40
