"""Operators of ours are there as soon as a module that names them is imported, whatever was imported before it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def imports(module: Path) -> frozenset[Path]:
    """The package's modules that this one imports, by statements anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = [ROOT.joinpath(*name.split(".")) for name in names if name.startswith("aottrain.")]
    return frozenset(
        path for each in places for path in (each.with_suffix(".py"), each / "__init__.py") if path.exists()
    )


def reached(module: Path) -> set[Path]:
    found, todo = {module}, [module]
    while todo:
        new = imports(todo.pop()) - found
        found |= new
        todo += new
    return found


def named(text: str) -> set[str]:
    """Operators by name, as torch.ops.aottrain.name or by a short name of that namespace."""
    short = re.findall(r"^ *(?:\w+, )*(\w+) = (?:torch\.ops\.\w+, )*torch\.ops\.aottrain$", text, re.MULTILINE)
    spaces = "|".join([r"torch\.ops\.aottrain", *map(re.escape, short)])
    return set(re.findall(rf"(?<![\w.])(?:{spaces})\.(\w+)", text))


def test_a_module_imports_what_registers_the_operators_that_it_names():
    """Else it works or not by what its importer happened to import: so task=tour once ended with an AttributeError."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "aottrain").rglob("*.py")}
    registering = {path: text for path, text in texts.items() if "ops" in path.relative_to(ROOT).parts}
    used = {path: named(text) for path, text in texts.items()}
    assert sum(map(len, used.values())) > 30
    lacking = []
    for path, names in used.items():
        known = {each for each in reached(path) if each in registering} if names else set()
        for name in names:
            defined = re.compile(rf"[\"'(](?:aottrain::)?{name}\b|^ +{name},$", re.MULTILINE)
            if not any(defined.search(registering[each]) for each in known):
                lacking.append(f"{path.relative_to(ROOT)}: {name}")
    assert lacking == [], "\n".join(lacking)
