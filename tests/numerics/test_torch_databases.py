"""torch's own databases of operators and modules: every entry through the direct door gives what eager gives.

`scripts/databases.py` runs them with other types, more samples, and through TorchDynamo.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")

from tests.numerics.database_checking import (  # noqa: E402
    EAGER,
    EQUAL,
    NOTHING,
    REFUSED,
    WRONG,
    check_module,
    check_operator,
    modules,
    operators,
)

NUM_CHUNKS = 8
NUM_SAMPLES = 2
MODULES_PER_ENTRY = 3
# At least so many of an eighth's entries are compiled whole; the others need values (item, nonzero) or sparse tensors.
MIN_COMPILED_SHARE = 0.93


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_operator_of_torch(chunk):
    counts: Counter[str] = Counter()
    wrong = {}
    for op in operators(torch.float32)[chunk::NUM_CHUNKS]:
        verdict = check_operator(op, torch.float32, "trace", NUM_SAMPLES)
        counts[verdict.kind] += 1
        if verdict.kind in (WRONG, REFUSED):
            wrong[op.formatted_name] = verdict.why
    assert not wrong
    assert counts[EQUAL] >= MIN_COMPILED_SHARE * (counts[EQUAL] + counts[EAGER]), counts
    assert counts[NOTHING] <= 0.1 * sum(counts.values()), counts


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_module_of_torch(chunk, training):
    wrong = {}
    for entry in modules(torch.float32)[chunk::NUM_CHUNKS]:
        verdict = check_module(entry, torch.float32, "trace", MODULES_PER_ENTRY, training=training)
        if verdict.kind in (WRONG, REFUSED):
            wrong[entry.name] = verdict.why
    assert not wrong
