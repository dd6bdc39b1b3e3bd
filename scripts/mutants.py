"""Would the tests notice a small mistake? Mutants of the package's functions, a sample over all its folders.

    python scripts/mutants.py cover FOLDER             # which test runs which block: once, about as long as the suite
    python scripts/mutants.py run FOLDER --count 200   # mutants, a line of JSON each in FOLDER/mutants.jsonl
    python scripts/mutants.py table FOLDER             # what came of them, and who survived

All three go on where they were stopped. A mutant is killed where a test fails, or the process dies or never ends; it
survives the tests that run its block, of which the cheapest of every file are tried up to --seconds of one processor;
UNSEEN is one in a block that no test ran in its own process. tests/mutation/survivors.md says of each survivor of the
sample that was looked at what it is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.forking import prepare, run_forked  # noqa: E402
from tests.mutation.covering import Coverage, Recorder  # noqa: E402
from tests.mutation.mutating import Mutant, mutants  # noqa: E402
from tests.mutation.trying import INVALID, KILLED, PACKAGE_TESTS, SURVIVED, UNSEEN, load_tests, tests_for, try_mutant  # noqa: E402

# Tests of texts, of scripts and of this very thing run no code of the package in their own process.
LEFT_OUT = ("tests/scripts/", "tests/test_architecture.py", "tests/test_planted_bugs.py", "tests/conformance/peers/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("cover", "run", "table"))
    parser.add_argument("folder", type=Path, help="of what is found")
    parser.add_argument("--tests", nargs="*", default=[], help="cover: only these files")
    parser.add_argument("--count", type=int, default=200, help="run: how many mutants, over all folders")
    parser.add_argument("--seed", type=int, default=0, help="run: of the sample")
    parser.add_argument("--under", default="", help="run: those of the sample whose path starts so")
    parser.add_argument("--part", default="0/1", help="run: 1/3 is the second third of the sample, for several at once")
    parser.add_argument("--again", action="store_true", help="run: what survived before, or was not seen")
    parser.add_argument("--seconds", type=float, default=20.0, help="run: of one processor, of tests for one mutant")
    options = parser.parse_args()
    os.chdir(ROOT)
    options.folder.mkdir(parents=True, exist_ok=True)
    return {"cover": cover, "run": run, "table": table}[options.action](options)


def cover(options: argparse.Namespace) -> int:
    prepare()
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    for file in options.tests or [file for file in files if not file.startswith(LEFT_OUT)]:
        out = options.folder / (file.removesuffix(".py").replace("/", ".") + ".cover")
        if out.exists():
            continue
        part = out.with_suffix(".part")
        part.unlink(missing_ok=True)
        ended = run_forked(lambda: _cover(file, part), 900, 7200)  # noqa: B023
        if part.exists():
            part.rename(out)
        print(file, ended.why or ("all passed" if ended.value == 0 else f"pytest ended with {ended.value}"), flush=True)
    return 0


def _cover(file: str, path: Path) -> int:
    import pytest

    return int(pytest.main([file, "-q", "-p", "no:cacheprovider"], plugins=[Recorder(path)]))


def run(options: argparse.Namespace) -> int:
    prepare()
    coverage = Coverage(options.folder)
    files = {f"tests/{name}" for names in PACKAGE_TESTS.values() for name in names}
    present = load_tests(ROOT, files | coverage.seconds.keys())
    path = options.folder / "mutants.jsonl"
    tried = {entry["key"]: entry for entry in _read(path)}
    part, parts = map(int, options.part.split("/"))
    for mutant in sample(options.count, options.seed)[part::parts]:
        if not mutant.path.startswith(options.under):
            continue
        key = f"{mutant.path}#{mutant.number}"
        if key in tried and not (options.again and tried[key]["verdict"] in (SURVIVED, UNSEEN)):
            continue
        candidates = tests_for(ROOT, mutant, coverage, options.seconds)
        tests = [test for test in candidates if "::" not in test or test in present]
        outcome = try_mutant(ROOT, mutant, tests, int(3 * options.seconds) + 20)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "mutant": str(mutant), "package": mutant.package, **outcome}) + "\n")
        print(f"{outcome['verdict']:<9} {mutant}" + (f"  by {outcome['by']}" if outcome["by"] else ""), flush=True)
    return 0


def sample(count: int, seed: int) -> list[Mutant]:
    """Mutants of all folders, of each about as many as it has places for one, and three at least; in a mixed order, so
    that any beginning of it is a sample too."""
    by_package: dict[str, list[Mutant]] = {}
    for folder in ("aottrain", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            own = path.relative_to(ROOT)
            by_package.setdefault(str(own.parent), []).extend(mutants(str(own), path.read_text(encoding="utf-8")))
    places = sum(map(len, by_package.values()))
    chosen: list[Mutant] = []
    for package, candidates in sorted(by_package.items()):
        rng = random.Random(f"{seed} {package}")
        chosen += rng.sample(candidates, min(len(candidates), max(3, round(count * len(candidates) / places))))
    random.Random(seed).shuffle(chosen)
    return chosen


def table(options: argparse.Namespace) -> int:
    latest = {entry["key"]: entry for entry in _read(options.folder / "mutants.jsonl")}
    verdicts = (KILLED, SURVIVED, UNSEEN, INVALID)
    counts: dict[str, Counter[str]] = {}
    for entry in latest.values():
        counts.setdefault(entry["package"], Counter())[entry["verdict"]] += 1
    print(f"{'':<32}" + "".join(f"{verdict:>10}" for verdict in verdicts))
    for package, own in [*sorted(counts.items()), ("all", sum(counts.values(), Counter[str]()))]:
        print(f"{package:<32}" + "".join(f"{own[verdict]:>10}" for verdict in verdicts))
    for entry in latest.values():
        if entry["verdict"] in (SURVIVED, UNSEEN):
            print(f"{entry['verdict']}: {entry['mutant']}")
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
