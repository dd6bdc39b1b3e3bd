"""Which torch is taken, and what is installed beside it: for scripts/environment.sh, by the Python it installs for.

    python scripts/requirements.py check torch==2.14.1   # before anything is fetched: refuses what is not taken
    python scripts/requirements.py beside test           # when torch is there: what pip is to install, a line each

pyproject.toml says which torch pip may choose by itself. aottrain/versions.py says which may be asked for: for one that
pip would replace, the other requirements are installed one by one, and aottrain without looking at its own.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
from pip._vendor.packaging.requirements import InvalidRequirement, Requirement

ROOT = Path(__file__).resolve().parents[1]


def taken() -> str:
    text = (ROOT / "aottrain" / "versions.py").read_text(encoding="utf-8")
    found = re.search(r'^TAKEN = "(.*)"', text, re.MULTILINE)
    assert found is not None
    return found[1]


def check(asked: str) -> None:
    """Ends the process with one line where an exact release is asked for that is not taken."""
    try:
        requirement = Requirement(asked)
    except InvalidRequirement:  # the path of a wheel, say: which release it is shows when it is there
        return
    exact = [part.version for part in requirement.specifier if part.operator == "==" and "*" not in part.version]
    if requirement.name == "torch" and not all(_holds(taken(), each) for each in exact):
        sys.exit(f"aottrain: AOTTRAIN_TORCH={asked}: aottrain takes torch{taken()} (aottrain/versions.py)")


def beside(extra: str) -> list[str]:
    """What pip is to install now: this tree with its requirements, or these first where torch is to stay as it is."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        sys.exit("aottrain: torch is not installed")
    if not _holds(taken(), installed):
        sys.exit(f"aottrain: torch {installed} is installed: aottrain takes torch{taken()} (aottrain/versions.py)")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    by_default = next(each for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    if _holds(str(by_default.specifier), installed):
        return [f"{ROOT}[{extra}]" if extra else str(ROOT)]
    return [str(each) for each in _flat(project, [*project["dependencies"], *_of(project, extra)])]


def _flat(project: dict[str, Any], texts: list[str]) -> list[Requirement]:
    """Without torch, and with what stands behind an extra that names others of this project."""
    found = []
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            for extra in sorted(requirement.extras):
                found += _flat(project, _of(project, extra))
        elif requirement.name != "torch" and (requirement.marker is None or requirement.marker.evaluate()):
            requirement.marker = None
            found.append(requirement)
    return found


def _of(project: dict[str, Any], extra: str) -> list[str]:
    return project["optional-dependencies"][extra] if extra else []


def _holds(bounds: str, release: str) -> bool:
    return Requirement(f"torch{bounds}").specifier.contains(release, prereleases=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"] and len(sys.argv) == 3:
        check(sys.argv[2])
    elif sys.argv[1:2] == ["beside"] and len(sys.argv) in (2, 3):
        print("\n".join(beside(sys.argv[2] if len(sys.argv) == 3 else "")))
    elif sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
    else:
        sys.exit(__doc__)
