"""torch's own databases of operators and modules: by the direct trace a share of the entries gives eager's results.

Their samples are below the size from which kernels are generated; some entries are computed by kernels all the same.
`scripts/databases.py` runs all entries, with other types, more samples, by generated kernels, and through TorchDynamo.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")

from aottrain.toolchain.native import find_compiler  # noqa: E402
from tests.numerics.database_checking import (  # noqa: E402
    ALWAYS,
    ALWAYS_MODULES,
    EAGER,
    EQUAL,
    NOISY,
    NOTHING,
    REFUSED,
    SMALL_DATABASES,
    WRONG,
    check_module,
    check_operator,
    modules,
    operators,
    sample,
)
from tests.sampling import record_sample  # noqa: E402
from tests.skips import NO_COMPILER  # noqa: E402

NUM_CHUNKS = 4
NUM_SAMPLES = 2
MODULES_PER_ENTRY = 2
# At least so many of a chunk's entries, apart from those that are always run, are compiled whole; the others need
# values (item, nonzero) or sparse tensors.
MIN_COMPILED_SHARE = 0.9


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_operators_of_torch(chunk, whole, record_property):
    counts: Counter[str] = Counter()
    wrong = {}
    known = operators(torch.float32)
    sampled = known if whole else sample(known, ALWAYS)
    record_sample(record_property, "operators of torch", len(sampled), len(known), "python scripts/databases.py")
    for op in sampled[chunk::NUM_CHUNKS]:
        verdict = check_operator(op, torch.float32, "trace", NUM_SAMPLES)
        counts[verdict.kind] += op.name not in ALWAYS
        if verdict.kind in (WRONG, REFUSED):
            wrong[op.formatted_name] = verdict.why
    assert not wrong
    assert counts[EQUAL] >= MIN_COMPILED_SHARE * (counts[EQUAL] + counts[EAGER]), counts
    assert counts[NOTHING] <= 0.1 * sum(counts.values()), counts


@pytest.mark.parametrize("database", SMALL_DATABASES)
def test_functions_and_operators_of_others(database):
    """Custom Functions, operators written in Python, operators that take functions: never silently otherwise."""
    verdicts = {
        op.formatted_name: check_operator(op, torch.float32, "trace", 1)
        for op in operators(torch.float32, database=database)
    }
    assert not {name: verdict.why for name, verdict in verdicts.items() if verdict.kind in (WRONG, REFUSED)}
    assert any(verdict.kind == EQUAL for verdict in verdicts.values())


# One of each kind that kernels compute: pointwise by several formulas, types, reductions, norms, softmax, losses,
# pooling, lookups, scatters, masks, and movements.
BY_KERNELS = (
    "nn.functional.gelu", "pow", "clamp", "where", "atan2", "floor_divide", "mean", "var", "amax", "logsumexp",
    "log_softmax", "nn.functional.layer_norm", "nn.functional.group_norm", "nn.functional.cross_entropy",
    "nn.functional.smooth_l1_loss", "nn.functional.max_pool2d", "nn.functional.embedding", "cumsum",
    "gather", "index_select", "masked_fill", "cat", "flip", "tril",
)  # fmt: skip


@pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)
@pytest.mark.parametrize("part", range(3))
def test_operators_by_generated_kernels(part):
    names = BY_KERNELS[part::3]
    found = {op.name for op in operators(torch.float32)}
    assert found >= set(names)
    for op in operators(torch.float32):
        if op.name in names and not op.variant_test_name:
            verdict = check_operator(op, torch.float32, "trace", NUM_SAMPLES, kernel="cpp")
            assert verdict.kind in (EQUAL, NOISY), f"{op.name}: {verdict.why}"
            assert verdict.num_kernels > 0, f"{op.name}: no kernel was generated"


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("chunk", range(2))
def test_modules_of_torch(chunk, training, whole, record_property):
    wrong = {}
    known = modules(torch.float32)
    sampled = known if whole else sample(known, ALWAYS_MODULES)
    command = "python scripts/databases.py --database module_db"
    record_sample(record_property, "modules of torch", len(sampled), len(known), command)
    for entry in sampled[chunk::2]:
        verdict = check_module(entry, torch.float32, "trace", MODULES_PER_ENTRY, training=training)
        if verdict.kind in (WRONG, REFUSED):
            wrong[entry.name] = verdict.why
    assert not wrong
