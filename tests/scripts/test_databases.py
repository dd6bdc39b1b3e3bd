"""scripts/databases.py: counts, reasons and exit codes; its comparison finds what a wrong compiler would give."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")

from tests.numerics.database_checking import EQUAL, WRONG, check_operator, difference, operators  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "databases.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_counts_and_reasons_are_printed(quick_children: None) -> None:
    done = run("sin", "nonzero", "--samples", "1", "--kernel", "aten")
    assert done.returncode == 0, done.stderr
    assert "nonzero: ran eagerly: " in done.stdout
    assert "1 equal, 1 of them with gradients" in done.stdout
    assert "1 ran eagerly, 0 of them with gradients" in done.stdout
    assert "0 by generated kernels" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--part", "2/2"), ("--part", "x"), ("--dtype", "float3"), ("--frontend", "back")]
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], monkeypatch, capsys) -> None:
    """In this process: a fourth one would import torch for as many seconds as all else takes."""
    monkeypatch.setattr(sys, "argv", ["databases.py", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert printed.err.splitlines()[-1].startswith("databases.py: error: ")


@pytest.mark.parametrize("formula", [torch.cos, lambda x: x.sin().t(), lambda x: x.sin() * 1.001])
def test_a_wrong_compiler_is_found(formula, monkeypatch) -> None:
    op = next(op for op in operators(torch.float32) if op.name == "sin")
    assert check_operator(op, torch.float32, "trace", 1).kind == EQUAL

    def compile(function, **options):
        def compiled(x):
            return formula(x)

        return compiled

    monkeypatch.setattr("aottrain.compile", compile)
    assert check_operator(op, torch.float32, "trace", 1).kind == WRONG


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2, 2), torch.ones(2, 2).t().contiguous().t()),
        (torch.ones(2), torch.ones(2).requires_grad_()),
        (torch.ones(2), torch.full((2,), torch.nan)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.ones(2, dtype=torch.complex64), 1j * torch.ones(2, dtype=torch.complex64)),
        (None, torch.zeros(2)),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
        (1, True),
    ],
)
def test_differences_are_seen(wanted, got) -> None:
    assert difference(wanted, wanted) is None
    assert difference(wanted, got) is not None
