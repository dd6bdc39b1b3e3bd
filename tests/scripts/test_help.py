"""Each script answers --help with one page, or with one line that names the command it is a part of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
MOST_LINES = 45  # a page


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("quick_children")
def test_it_says_what_it_is_for(script, tmp_path):
    command = [sys.executable, str(script), "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    lines = ended.stdout.strip().splitlines()
    assert lines and len(lines) <= MOST_LINES
    if len(lines) == 1:
        named = [word for word in lines[0].replace(",", " ").split() if word.endswith(".py")]
        assert named and all((ROOT / "scripts" / Path(name).name).is_file() for name in named)
    elif lines[0].startswith("usage:"):
        said = ended.stdout.split("\n\n", 2)[1]
        assert said.strip() and not said.startswith("options:"), "nothing says what it is for"
    assert not list(tmp_path.iterdir())
