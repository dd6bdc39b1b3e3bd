"""scripts/bench_rates.py: which kernels are shown, and what they lose."""

from __future__ import annotations

from aottrain.explain.records import KernelRecord
from scripts.bench_rates import Rate, shown


def rate(name, seconds, moved_bytes):
    return Rate(name, seconds, KernelRecord((name,), "sum", (), "", "", moved_bytes))


def test_what_loses_the_most_time_to_a_copy_comes_first():
    """Not what takes the longest, nor what moves the fewest bytes a second."""
    rates = [rate("long", 3e-3, 30_000_000), rate("slow", 1e-6, 10), rate("losing", 2e-3, 1_000_000)]
    rows = shown(rates, 10e9)
    assert [row[0] for row in rows] == ["losing", "slow", "long"]
    assert rows[0] == ("losing", "2.000", "1.900", "0.5", "sum")


def test_a_few_are_shown():
    assert len(shown([rate(f"kernel_{i}", 1e-3, i) for i in range(50)], 1e9)) < 10
