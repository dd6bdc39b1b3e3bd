"""What programs are compiled to, byte by byte as it was kept: a change of structure alone changes none of it."""

from __future__ import annotations

import difflib

import pytest

from aottrain.compat import onednn
from tests.golden.texts import FOLDER, NAMES, text_of
from tests.recorded import RECORDED_TORCH, on_recorded_torch

SHOWN_LINES = 40


@pytest.mark.skipif(not on_recorded_torch(), reason=f"the texts are those of torch {RECORDED_TORCH}")
@pytest.mark.parametrize("name", NAMES)
def test_compiled_as_it_was(name):
    with onednn(True):  # whatever the setting: it decides which convolutions write to planned memory
        kept, made = (FOLDER / f"{name}.txt").read_text(encoding="utf-8"), text_of(name)
    if made != kept:
        lines = difflib.unified_diff(kept.splitlines(), made.splitlines(), "kept", "made now", lineterm="", n=1)
        shown = "\n".join(list(lines)[:SHOWN_LINES])
        pytest.fail(f"{name} is compiled to another text; if that is meant: python scripts/golden.py {name}\n{shown}")


def test_every_text_has_its_program():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(NAMES)
