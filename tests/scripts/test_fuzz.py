"""scripts/fuzz.py: counts and exit codes. In this process: another would import torch for as long as all else takes."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from scripts import fuzz


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments) -> (exit code, what it printed, what it said of errors)."""
    threads, level = torch.get_num_threads(), logging.getLogger("torch").level

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fuzz.py", *arguments])
        return fuzz.main(), *capsys.readouterr()

    yield call
    torch.set_num_threads(threads)
    logging.getLogger("torch").setLevel(level)


def test_programs_are_counted(run):
    code, printed, errors = run("--count", "2", "--seed", "1")
    assert code == 0, errors
    assert "2/2 after " in printed and "next seed 3: " in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA is there, and Triton compiles for it")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is interpreted in this process")
def test_triton_without_its_interpreter_is_one_line_and_exit_code_2(run):
    code, printed, errors = run("--kernel", "triton", "--count", "1")
    assert code == 2 and printed == ""
    assert "TRITON_INTERPRET=1" in errors and len(errors.splitlines()) == 1
