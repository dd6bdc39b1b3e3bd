"""Which releases of torch aottrain takes; what differs between them stands in compat.py and its neighbours."""

from __future__ import annotations

import re
import warnings

# scripts/requirements.py reads this line. pyproject.toml, by which pip chooses by itself, may end earlier.
TAKEN = ">=2.11,<2.16"


def warn_of(release: str) -> None:
    """One line where this torch is newer than any that aottrain's tests have run with."""
    _, first_untried = re.findall(r"\d+\.\d+", TAKEN)
    found = re.match(r"\d+\.\d+", release)
    if found and _numbers(found[0]) >= _numbers(first_untried):
        warnings.warn(f"aottrain takes torch{TAKEN}, and was not tried with {release}", stacklevel=2)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
