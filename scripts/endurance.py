"""Modules that change their own state, called thousands of times: nothing may grow, and nothing replaced stay alive.

    python scripts/endurance.py                                # 10,000 calls of each kind by a direct trace
    python scripts/endurance.py --frontend dynamo --calls 1000 Counts

Of each kind a line: the objects and bytes that the calls leave behind after a warm-up, beyond those that the same
module leaves in eager, and how many replaced parameters, buffers and modules are still alive. Exit code 1 where that is
more than --objects, --bytes or none, or where a result is not eager's; 2 where the input is wrong.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aottrain  # noqa: E402
from aottrain.ir.settings.choices import CAPTURES  # noqa: E402
from tests.conformance.guards.test_changing_state import ASKING, ASSIGNING, KINDS, growth  # noqa: E402

_KINDS = [*KINDS, *ASKING, *ASSIGNING]
# Calls of which all that is replaced is watched.
_NUM_WATCHED = 50
# Bytes that a compiled program leaves in its first thousand calls, within torch, and no more in those that follow.
_OF_COMPILED = 1 << 16


class Outcome(NamedTuple):
    """Objects and bytes are those beyond eager's."""

    objects: int
    bytes: int
    num_replaced: int
    num_alive: int
    """Of what was replaced."""
    is_equal: bool
    """Whether the last result is eager's."""


def endure(kind: Callable[[], nn.Module], frontend: str, num_calls: int) -> Outcome:
    x = torch.ones(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        eager, module = kind(), kind()
        expected = growth(eager, x, num_calls)
        call = aottrain.compile(module, capture=frontend)
        compiled = growth(call, x, num_calls)
        for _ in range(_NUM_WATCHED):
            eager(x)
        num_replaced, num_alive = _replaced(call, module, x)
        is_equal = torch.equal(call(x), eager(x))
    return Outcome(compiled[0] - expected[0], compiled[1] - expected[1], num_replaced, num_alive, is_equal)


def _replaced(call: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Of what some calls replace: how many there are, and how many of them live on."""
    seen: dict[int, weakref.ref[Any]] = {}
    dead = 0
    for _ in range(_NUM_WATCHED):
        for value in _state(module):
            reference = seen.get(id(value))
            if reference is None or reference() is not value:
                dead += reference is not None  # its place in memory is another's now
                seen[id(value)] = weakref.ref(value)
        del value
        call(x)
    gc.collect()
    now = {id(value) for value in _state(module)}
    replaced = [reference() is not None for place, reference in seen.items() if place not in now or reference() is None]
    return len(replaced) + dead, sum(replaced)


def _state(module: nn.Module) -> list[Any]:
    return [*module.modules(), *module.parameters(), *module.buffers()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [kind.__name__ for kind in _KINDS]
    parser.add_argument("--calls", type=_positive, default=10_000, help="of each kind, after the warm-up")
    parser.add_argument("--frontend", choices=CAPTURES, default="trace")
    parser.add_argument("--objects", type=_positive, default=20, help="that may be left beyond eager's")
    parser.add_argument("--bytes", type=_positive, default=4096, help="that may be left beyond eager's")
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"only these of {', '.join(names)}")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.kinds if name not in names]
    if unknown:
        parser.error(f"no kind {unknown[0]}; there are {', '.join(names)}")
    failed = 0
    for kind in _KINDS:
        if options.kinds and kind.__name__ not in options.kinds:
            continue
        outcome = endure(kind, options.frontend, options.calls)
        bad = (
            outcome.objects > options.objects
            or outcome.bytes > options.bytes + (_OF_COMPILED if kind in ASSIGNING else 0)
            or outcome.num_alive
            or not outcome.is_equal
        )
        failed += bool(bad)
        alive = f"{outcome.num_alive} of {outcome.num_replaced} replaced alive"
        result = "" if outcome.is_equal else ", result is not eager's"
        verdict = "GROWS" if bad else "ok"
        print(f"{kind.__name__:20} {outcome.objects:+6} objects {outcome.bytes:+9,} bytes, {alive}{result}: {verdict}")
    print(f"{options.calls:,} calls each, front end {options.frontend}: {failed} kinds grow")
    return 1 if failed else 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
