"""Random programs, and some that are hard for a compiler, by Triton's kernels, interpreted. Run by test_triton.py.

More of them: TRITON_INTERPRET=1 with `python scripts/fuzz.py --kernel triton` or `pytest tests/conformance -k triton`.
"""

from __future__ import annotations

import logging

import pytest

from tests.conformance import harness
from tests.conformance.values import test_indexing, test_numerics
from tests.numerics.fuzz_checking import WRONG, check, legal
from tests.numerics.fuzzing import generate

pytestmark = pytest.mark.skipif(harness.GENERATED != "triton", reason="CPU programs: only where Triton is interpreted")
NUM_PROGRAMS = 6
HARD = [
    (test_numerics, "no_float_algebra"),
    (test_numerics, "nan_in_reductions"),
    (test_numerics, "unsigned_bytes_wrap"),
    (test_numerics, "signed_integers_wrap"),
    (test_numerics, "integer_division_and_remainders"),
    (test_numerics, "float_to_integer_casts"),
    (test_indexing, "index_writes"),
    (test_indexing, "range_is_checked_again_on_later_calls"),
]


@pytest.mark.parametrize("seed", range(3000, 3000 + NUM_PROGRAMS))
def test_random_programs_by_triton(seed):
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    program = legal(generate(seed))
    verdict = check(program, kernel="triton")
    assert verdict.kind != WRONG, f"{verdict.detail}\n{program}"


@pytest.mark.parametrize(("module", "name"), HARD, ids=lambda value: value if isinstance(value, str) else "")
def test_hard_programs_by_triton(module, name):
    known = next(known for known in harness.cases(module.__name__) if known.name == name)
    harness.check(known, harness.GENERATED)
