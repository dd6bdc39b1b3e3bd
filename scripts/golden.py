"""Write what programs are compiled to, which tests/golden compares: `python scripts/golden.py`, or names of some.

A commit that changes these texts says why.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["AOTTRAIN_RATES"] = "default"  # no clock decides
os.environ["AOTTRAIN_FAULTS"] = "raise"

from tests.golden.texts import FOLDER, NAMES, text_of  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="programs of tests/golden; default: all")
    options = parser.parse_args()
    if unknown := set(options.names).difference(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: allowed are {', '.join(NAMES)}")
    for name in options.names or NAMES:
        path, text = FOLDER / f"{name}.txt", text_of(name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.name)
    if not options.names:
        for path in FOLDER.iterdir():
            if path.stem not in NAMES:
                path.unlink()
                print(f"{path.name}: removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
