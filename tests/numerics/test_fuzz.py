"""Random programs, fixed seeds: compiled at a random budget, each must be eager's in everything that shows.

`scripts/fuzz.py` runs as many more as one likes.
"""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.numerics.fuzz_checking import (
    EAGER,
    EQUAL,
    LENIENT,
    PARTLY,
    REFUSED,
    ROUNDED,
    STRIDED,
    WRONG,
    Observation,
    check,
    compare,
    legal,
    minimised,
)
from tests.numerics.fuzz_ops import KINDS, RANDOM_KINDS, WRITES
from tests.numerics.fuzzing import BACKWARDS, Program, generate, minimise
from tests.numerics.rounding_noise import RandomRounding

NUM_PROGRAMS = 200
NUM_DYNAMO_PROGRAMS = 12
NUM_KERNEL_PROGRAMS = 12
PART = 20
_counts: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("torch")  # which prints every shape that a program gets wrong on purpose
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, PART))
def test_random_programs_are_eagers(first):
    for seed in range(first, first + PART):
        program = legal(generate(seed))
        verdict = check(program)
        _counts[verdict.kind] += 1
        if verdict.kind == WRONG:
            raise AssertionError(f"seed {seed}: {verdict.detail}\n{minimised(program)}")


def test_few_of_them_ran_eagerly():
    assert _counts.keys() <= {EQUAL, ROUNDED, STRIDED, EAGER, REFUSED, LENIENT, PARTLY}
    assert _counts[EAGER] + _counts[REFUSED] <= 0.1 * sum(_counts.values())


@pytest.mark.parametrize("seed", range(1000, 1000 + NUM_DYNAMO_PROGRAMS))
def test_random_programs_through_dynamo(seed):
    program = legal(generate(seed))
    verdict = check(program, "dynamo")
    assert verdict.kind != WRONG, f"{verdict.detail}\n{program}"


@pytest.mark.parametrize("seed", range(2000, 2000 + NUM_KERNEL_PROGRAMS))
def test_random_programs_by_generated_kernels(seed):
    program = legal(generate(seed))
    verdict = check(program, kernel="cpp")
    assert verdict.kind != WRONG, f"{verdict.detail}\n{program}"


def run_of(value: Tensor) -> Observation:
    found = Observation()
    found.see("output 0", value)
    return found


def test_rounding_noise_excuses_only_what_it_reaches():
    """The sign of a difference that is zero but for rounding may be any; a difference of 1e-3 may not."""
    exact = torch.linspace(1, 2, 64)
    noise = []
    for seed in range(4):
        with RandomRounding(seed):
            found = run_of(((exact * 3) / 3 - exact).sign())
            found.see("output 1", exact * 3)
        noise.append(found)
    wanted = run_of(((exact * 3) / 3 - exact).sign())
    wanted.see("output 1", exact * 3)
    other_signs, off = run_of(wanted.seen[0][2].neg()), run_of(wanted.seen[0][2])
    other_signs.see("output 1", exact * 3)
    off.see("output 1", exact * 3 * 1.001)
    assert WRONG in compare(wanted, other_signs, rounding=True)[1]
    assert WRONG not in compare(wanted, other_signs, rounding=True, noise=noise)[1]
    assert WRONG in compare(wanted, off, rounding=True, noise=noise)[1]


def test_rounding_at_random_leaves_the_programs_draws():
    with RandomRounding(0):
        torch.manual_seed(3)
        torch.rand(4)
        state = torch.get_rng_state()
    torch.manual_seed(3)
    torch.rand(4)
    assert torch.equal(state, torch.get_rng_state())


def test_programs_use_every_kind_of_statement():
    text = "\n".join(generate(seed).source for seed in range(NUM_PROGRAMS))
    for kind, (_, templates) in (KINDS | RANDOM_KINDS).items():
        # What stands before the first hole, or after the last, and is long enough to be told from others.
        parts = [max(template.replace("}", "{").split("{"), key=len) for template in templates]
        used = sum(part in text for part in parts)
        assert used >= 0.6 * len(parts), f"of {len(parts)} statements of the kind {kind}, {used} are used"
    callers = {generate(seed).backward for seed in range(NUM_PROGRAMS)}
    assert callers == set(BACKWARDS)
    assert "torch.no_grad()" in text and "requires_grad_()" in text and "channels_last" in text


def test_a_seed_is_one_program_and_prints_as_a_script():
    assert generate(7) == generate(7) and generate(7) != generate(8)
    script = str(legal(generate(7)))
    exec(compile(script, "script", "exec"), {"__name__": "script"})


def test_minimising_keeps_what_fails():
    program = next(p for p in map(generate, range(100)) if any(".mul_(" in text for _, text in p.body))
    small = minimise(program, lambda candidate: any(".mul_(" in text for _, text in candidate.body))
    assert len(small.body) == 1 and not small.state and not small.after
    assert all(isinstance(text, str) for text in WRITES) and isinstance(small, Program)
