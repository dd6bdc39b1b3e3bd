"""What compiles, case by case and front end by front end, in `compiled.json`; `scripts/conformance.py` renews it.

The record lists only what does not compile wholly: in "falls" each such case with its reasons, in "why" of each pattern
of reasons why it is so. A case that is not listed must compile wholly. Where one compiles less than recorded its test
fails, and where it compiles farther, too: then the record is to be renewed, so that it stays so.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("compiled.json")
PACKAGE = f"{__package__}."
# From best to worst. PARTLY: some calls, or some of what TorchDynamo cut them into, ran eagerly. NOTHING: neither a
# program nor a call that was counted: the case compiles nothing. REFUSED: an error where eager gives a result.
WHOLE, PARTLY, EAGER, NOTHING, REFUSED = KINDS = ("whole", "partly", "eager", "nothing", "refused")
# By module and case, and by the front ends of which it is so: a kind and the reasons, "eager: this; that".
Falls = dict[str, dict[str, dict[str, str]]]


@dataclass(frozen=True)
class Standing:
    """How far one case compiles through one front end, and the reasons why no farther."""

    kind: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {'; '.join(self.reasons)}" if self.reasons else self.kind


def standing(num_graphs: int, reasons: Iterable[str], refusal: str | None) -> Standing:
    """Of one run: how many programs there were, why calls ran eagerly, and the error that eager did not give."""
    if refusal is not None:
        return Standing(REFUSED, (_plain(refusal),))
    lines = tuple(dict.fromkeys(map(_plain, reasons)))
    if not lines:
        return Standing(WHOLE if num_graphs else NOTHING)
    return Standing(PARTLY if num_graphs else EAGER, lines)


def _plain(reason: str) -> str:
    """One line, without what differs from process to process."""
    text = (reason.strip().splitlines() or [""])[0]
    text = re.sub(r"0x[0-9a-f]+", "0x", text.replace(";", ","))
    return re.sub(r"\[torch\.\w+ \[[\d, ]*\]\].*", "...", text)[:110].rstrip()


@functools.cache
def load() -> dict[str, object]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def recorded(module: str, name: str, frontend: str) -> str:
    """The kind and reasons as they are recorded: "whole" of what is not listed."""
    cases: Falls = load()["falls"]  # type: ignore[assignment]
    texts = cases.get(module.removeprefix(PACKAGE), {}).get(name, {})
    return next((text for frontends, text in texts.items() if frontend in frontends.split()), WHOLE)


def change(module: str, name: str, frontend: str, now: Standing) -> str | None:
    """In words, how a case stands otherwise than recorded; None where it stands as it did."""
    before = recorded(module, name, frontend)
    if before.split(":")[0] == now.kind:
        return None
    if is_worse(now, before):
        return f"through {frontend} it compiles less than recorded: {str(now)!r} for {before!r}"
    part = module.removeprefix(PACKAGE)
    return (
        f"through {frontend} it compiles farther than recorded, {str(now)!r} for {before!r}: "
        f"python scripts/conformance.py --renew {part}.{name}"
    )


def is_worse(now: Standing, before: str) -> bool:
    return KINDS.index(now.kind) > KINDS.index(before.split(":")[0])


def why(reason: str) -> str:
    """Why a reason is one: "by design: ..." or "open: ..."; "" where nobody has said so yet."""
    patterns: dict[str, str] = load()["why"]  # type: ignore[assignment]
    return next((text for pattern, text in patterns.items() if re.match(pattern, reason)), "")


def totals(falls: Falls, counts: Mapping[str, int]) -> dict[str, Counter[str]]:
    """By front end, how many cases are of each kind; counts: how many cases the front end has."""
    kinds = {frontend: Counter({WHOLE: count}) for frontend, count in counts.items()}
    for cases in falls.values():
        for texts in cases.values():
            for frontends, text in texts.items():
                for frontend in frontends.split():
                    kinds[frontend][text.split(":")[0]] += 1
                    kinds[frontend][WHOLE] -= 1
    return kinds


def reasons_of(falls: Falls) -> Counter[str]:
    """How many cases and front ends give each reason."""
    counts: Counter[str] = Counter()
    for cases in falls.values():
        for texts in cases.values():
            for frontends, text in texts.items():
                for reason in filter(None, text.partition(": ")[2].split("; ")):
                    counts[reason] += len(frontends.split())
    return counts
