"""All processes plan with one link: measured by the first with the others' help, a model's, or as it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.parallel.groups import run_together

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")


def test_all_take_the_same_link(tmp_path):
    script = str(Path(__file__).with_name("links.py"))
    ended = run_together([script], tmp_path, AOTTRAIN_CACHE_DIR=str(tmp_path / "cache"), AOTTRAIN_RATES="")
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    first, second = [[json.loads(line) for line in each.out.splitlines()] for each in ended]
    assert first == second
    measured, fixed, recorded, half, both, eager = first
    latency_s, bytes_per_s, (key, choice, source, num_times), line = measured
    assert key == "2 processes by gloo" and num_times == 2 and source in ("measured", "busy")
    assert choice == {"latency_s": latency_s, "link_bytes_per_s": bytes_per_s}
    assert line.startswith("2 processes, planned for ") and line.endswith(")")
    model = {"latency_s": 1e-4, "link_bytes_per_s": 1e9}
    assert fixed[:3] == recorded[:3] == [1e-4, 1e9, [key, model, "model", 0]]
    assert half[:3] == [0.25, 1e9, [key, {"link_bytes_per_s": 1e9}, "model", 0]]
    assert both == [0.25, 1e6, None, "2 processes, planned for 250 ms and 977 KiB/s between them "
                    "(parallel.latency, parallel.bandwidth)"]  # fmt: skip
    assert eager[3] == "2 processes"
