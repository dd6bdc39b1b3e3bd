"""Hard programs, each eagerly and compiled through every front end: what compiles, what runs eagerly, and why.

    python scripts/conformance.py                             # the record's totals and reasons; runs nothing
    python scripts/conformance.py --run                       # every case through every front end
    python scripts/conformance.py values.test_rng --run --frontends cpp  # some of them: modules, or module.case
    python scripts/conformance.py --renew guards.test_guards  # and write down what compiles farther than recorded
    python scripts/conformance.py --renew --accept guards.test_guards.new_case  # and less, such as a new case

Every result must be eager's; a difference is printed and never recorded. Exit code 1 where there is one, or where a
case compiles less than tests/conformance/compiled.json says; 2 where a name is unknown.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["AOTTRAIN_RATES"] = "default"  # as in the tests: no plan depends on the machine
os.environ["AOTTRAIN_FAULTS"] = "raise"

from tests.conformance import record  # noqa: E402

FRONTENDS = ("trace", "dynamo", "cpp")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="modules of tests/conformance, or module.case")
    parser.add_argument("--frontends", nargs="+", choices=FRONTENDS, default=FRONTENDS)
    parser.add_argument("--run", action="store_true", help="compare with eager and with the record")
    parser.add_argument("--renew", action="store_true", help="also write down what compiles farther than recorded")
    parser.add_argument("--accept", action="store_true", help="with --renew: and what compiles less")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in modules() and name.rpartition(".")[0] not in modules()]
    if unknown:
        print(f"conformance.py: {unknown[0]} is none of {', '.join(modules())}", file=sys.stderr)
        return 2
    recorded = record.load()
    failed = False
    if options.run or options.renew:
        failed = run(recorded, options)
    if options.renew:
        record.PATH.write_text(text_of(recorded), encoding="utf-8")
    show(recorded)
    return int(failed)


def modules() -> list[str]:
    """The modules that have cases, as the record names them."""
    folder = ROOT / "tests" / "conformance"
    paths = [path for path in sorted(folder.rglob("test_*.py")) if "cases_of(__name__, " in path.read_text("utf-8")]
    return [".".join(path.relative_to(folder).with_suffix("").parts) for path in paths]


def run(recorded: Any, options: argparse.Namespace) -> bool:
    """Whether anything is wrong, or compiles less than recorded and is not accepted. Changes the record in place."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    failed = False
    for module, case, frontend, now, problem in outcomes(options.names, options.frontends):
        before = record.recorded(module, case.name, frontend)
        change = record.change(module, case.name, frontend, now)
        if problem is not None:
            print(f"{module}.{case.name} WRONG through {frontend}: {problem}", flush=True)
            failed = True
        elif change is not None:
            print(f"{module}.{case.name} {change.split(': python ')[0]}", flush=True)
            worse = record.is_worse(now, before)
            failed |= worse and not options.accept
            if worse and not options.accept:
                continue
        if problem is None and options.renew:
            _write(recorded["falls"], module, case.name, frontend, now)
    return failed


def outcomes(
    names: Sequence[str], frontends: Sequence[str]
) -> Iterator[tuple[str, Any, str, record.Standing, str | None]]:
    """(module, case, front end, how it stands, what differs from eager) of each, in the order of the files."""
    from tests.conformance import harness

    for module in modules():
        if names and not any(name == module or name.startswith(f"{module}.") for name in names):
            continue
        importlib.import_module(record.PACKAGE + module)
        for case in harness.cases(record.PACKAGE + module):
            if names and module not in names and f"{module}.{case.name}" not in names:
                continue
            eager = harness.run(case)
            for frontend in frontends:
                if harness.takes(case, frontend):
                    got = harness.run(case, frontend)
                    problem = harness.disagreement(case, frontend, eager, got)
                    yield module, case, frontend, harness.standing(eager, got), problem


def _write(falls: record.Falls, module: str, name: str, frontend: str, now: record.Standing) -> None:
    texts = falls.setdefault(module, {}).pop(name, {})
    by_frontend = {one: text for frontends, text in texts.items() for one in frontends.split() if one != frontend}
    if now.kind != record.WHOLE:
        by_frontend[frontend] = str(now)
    joined: dict[str, str] = {}
    for text in dict.fromkeys(by_frontend[frontend] for frontend in FRONTENDS if frontend in by_frontend):
        joined[" ".join(frontend for frontend in FRONTENDS if by_frontend.get(frontend) == text)] = text
    if joined:
        falls[module][name] = joined


def text_of(recorded: Any) -> str:
    """The record as JSON, a line for each case, so that changes of it seldom meet."""
    why = [f"  {json.dumps(pattern)}: {json.dumps(text)}" for pattern, text in sorted(recorded["why"].items())]
    falls = []
    for module, cases in sorted(recorded["falls"].items()):
        lines = [f"   {json.dumps(name)}: {json.dumps(texts)}" for name, texts in sorted(cases.items())]
        falls += [f"  {json.dumps(module)}: {{\n" + ",\n".join(lines) + "\n  }"] if lines else []
    return '{\n "why": {\n' + ",\n".join(why) + '\n },\n "falls": {\n' + ",\n".join(falls) + "\n }\n}\n"


def show(recorded: Any) -> None:
    """Cases of each kind by front end, and the reasons, the most frequent first."""
    numbers = count_cases()
    for frontend, counts in record.totals(recorded["falls"], numbers).items():
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in record.KINDS if counts[kind])
        print(f"{frontend:>7}: {numbers[frontend]} cases, {kinds}")
    why: Counter[str] = Counter()
    for reason, count in record.reasons_of(recorded["falls"]).items():
        why[record.why(reason) or f"not said yet: {reason}"] += count
    print("\nWhy not whole, by cases and front ends:")
    for text, count in why.most_common():
        print(f"{count:6} {text}")


def count_cases() -> dict[str, int]:
    """How many cases each front end takes, by the text of the files: nothing is imported."""
    numbers = dict.fromkeys(FRONTENDS, 0)
    for module in modules():
        path = ROOT.joinpath("tests", "conformance", *module.split(".")).with_suffix(".py")
        heads = re.findall(r"^@case\b(.*(?:\n(?!def ).*)*)\ndef ", path.read_text("utf-8"), re.M)
        numbers["trace"] += len(heads)
        numbers["dynamo"] += sum("dynamo_blind=" not in head for head in heads)
        numbers["cpp"] += sum("kernels_differ=" not in head for head in heads)
    return numbers


if __name__ == "__main__":
    sys.exit(main())
