"""The notebook of the tour: its cells run, one after the other, and what they say is so."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import recipes

NOTEBOOK = Path(recipes.__file__).with_name("tour.ipynb")


def cells() -> list[str]:
    """The text of each cell of code. Outputs are not kept: they would be of somebody's machine."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


def shown(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; the value of its last line, if that is an expression."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


def test_the_notebook_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    values = [shown(cell, names) for cell in cells()]
    out = capsys.readouterr().out
    assert names["error"] < 1e-6 and names["compiled"].report.fallbacks == []
    assert "0 saved (0 B), 5 recomputed" in out and "static int kernel_0" in out and "@triton.jit" in out
    report = next(value for value in values if hasattr(value, "_repr_html_"))
    assert "<svg" in report._repr_html_()
    assert (tmp_path / names["page"].parent.name / "tour.html").stat().st_size > 10_000
