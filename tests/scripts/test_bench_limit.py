"""scripts/bench_limit.py: which calls are timed, and by whom."""

from __future__ import annotations

import torch

from scripts import bench_limit


def test_equal_calls_are_timed_once_and_each_library_computes_the_same():
    a, b, images, weight = torch.randn(8, 16), torch.randn(16, 4), torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)

    def step() -> None:
        torch.mm(a, b), torch.mm(a * 2, b), torch.mm(b.t(), a.t())
        torch.nn.functional.conv2d(images, weight)

    with torch.no_grad():
        calls = bench_limit.recorded(step)
    assert [call.name for call in calls] == ["mm", "mm", "mm", "convolution"]
    times = bench_limit.timed(calls)
    assert sorted(each.count for each in times.values()) == [1, 1, 2]
    for call in calls:
        results = [run() for run in call.candidates().values()]
        assert bench_limit.ATEN in call.candidates()
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])


def test_copies_have_a_rate():
    assert bench_limit.copy_rates([1 << 12])[1 << 12] > 0
