"""Is the test suite able to fail? Bugs are planted, one at a time, and the tests named beside each must see it.

    python scripts/planted.py                     # all of them: some ten minutes of one processor
    python scripts/planted.py --quick             # the sample that the test suite runs
    python scripts/planted.py --area kernels      # one part of the project
    python scripts/planted.py --resume found.jsonl  # go on where a run stopped; a line of JSON for each bug

Each is planted in a process of its own. It is found where every test that it names fails by a wrong answer or a wrong
structure. A plant that crashes, or whose test fails without it, is invalid. Exits 1 if any is not found or invalid.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.forking import prepare  # noqa: E402
from tests.planted_bugs.planting import Bug, all_bugs  # noqa: E402
from tests.planted_bugs.trying import FOUND, INVALID, MISSED, load_tests, try_bug  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--area", help="only bugs in this part of the project")
    parser.add_argument("--name", help="only bugs whose names contain this")
    parser.add_argument("--quick", action="store_true", help="only the sample that the test suite runs")
    parser.add_argument("--unplanted", action="store_true", help="also that the tests pass without the bug")
    parser.add_argument("--resume", type=Path, help="a file of what was found: read, and added to")
    options = parser.parse_args()
    os.chdir(ROOT)
    prepare()
    bugs = [bug for bug in all_bugs().values() if _is_asked_for(bug, options)]
    tried = _read(options.resume)
    load_tests(bug for bug in bugs if bug.name not in tried)
    table: dict[str, Counter[str]] = {}
    for bug in bugs:
        verdict, why = tried.get(bug.name) or _try(bug, options.unplanted)
        if options.resume and bug.name not in tried:
            with options.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"bug": bug.name, "area": bug.area, "verdict": verdict, "why": why}) + "\n")
        table.setdefault(bug.area, Counter())[verdict] += 1
        print(f"{verdict:<9}  {bug.area}: {bug.name}" + (f": {why}" if verdict != FOUND else ""), flush=True)
    print(_table(table))
    return 0 if all(set(counts) == {FOUND} for counts in table.values()) else 1


def _is_asked_for(bug: Bug, options: argparse.Namespace) -> bool:
    if options.quick and not bug.quick:
        return False
    return options.area in (None, bug.area) and (options.name or "") in bug.name


def _try(bug: Bug, unplanted: bool) -> tuple[str, str]:
    if unplanted:
        verdict, why = try_bug(bug, planted=False)
        if verdict != FOUND:
            return verdict, why
    return try_bug(bug)


def _read(path: Path | None) -> dict[str, tuple[str, str]]:
    if path is None or not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {entry["bug"]: (entry["verdict"], entry["why"]) for entry in entries}


def _table(table: dict[str, Counter[str]]) -> str:
    verdicts = (FOUND, MISSED, INVALID)
    rows = [("area", "bugs", *verdicts)]
    rows += [
        (area, *(str(n) for n in (counts.total(), *(counts[v] for v in verdicts)))) for area, counts in table.items()
    ]
    total = sum(table.values(), Counter[str]())
    rows.append(("all", *(str(n) for n in (total.total(), *(total[v] for v in verdicts)))))
    return "\n".join(f"{row[0]:<14}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
