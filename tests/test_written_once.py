"""What is known once is written once: numbers and formulas that several languages or modules would each need a copy of.

A copy is silently wrong after the original changes. Each pattern matches the digits alone, so that a copy is seen in
Python, in C++ and in Triton.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PHILOX = "aottrain/ops/philox_constants.py"
SHARED = "aottrain/ops/native/shared.py"
# What it is: the pattern of its text, and the one file that has it.
ONCE = {
    "Philox's first multiplier": (r"0xD2511F53|3528531795", PHILOX),
    "Philox's second multiplier": (r"0xCD9E8D57|3449720151", PHILOX),
    "Philox's first key step": (r"0x9E3779B9|2654435769", PHILOX),
    "Philox's second key step": (r"0xBB67AE85|3144134277", PHILOX),
    "bfloat16 from float32 in C++": (r"0x7fc0", SHARED),
    "bfloat16 to float32 in C++": (r"struct bf16", SHARED),
    "the exponential's series": (r"0\.0083694197", SHARED),
    "log2(e), of arguments of exponentials": (r"1\.44269504", SHARED),
    "log(2), its first part": (r"0\.693145752", SHARED),
    "log(2), the rest": (r"1\.42860677e-6", SHARED),
}


def places(root: Path, pattern: str) -> list[str]:
    """The file of each place where the package's code has a number of this pattern."""
    whole = re.compile(rf"(?<![\w.])(?:{pattern})(?=[uUlLfF]*\b)", re.IGNORECASE)
    texts = ((path, path.read_text(encoding="utf-8")) for path in sorted((root / "aottrain").rglob("*.py")))
    return [path.relative_to(root).as_posix() for path, text in texts for _ in whole.finditer(text)]


@pytest.mark.parametrize("what", ONCE)
def test_it_is_written_once(what):
    pattern, place = ONCE[what]
    assert places(ROOT, pattern) == [place]


def test_a_copy_is_seen(tmp_path):
    (tmp_path / "aottrain").mkdir()
    text = "first, second = 0xD2511F53, 0xCD9E8D57\nother = 0x9E3779B97F4A7C15\nTEXT = 'k0 += 0xd2511f53u;'\n"
    (tmp_path / "aottrain" / "copy.py").write_text(text, encoding="utf-8")
    counts = [len(places(tmp_path, pattern)) for pattern, _ in list(ONCE.values())[:4]]
    assert counts == [2, 1, 0, 0]
