"""Fields of a report that are found when they are read: once, and not while a program is compiled."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler import reporting
from aottrain.explain.late import Late


@dataclasses.dataclass(frozen=True)
class Pair(Late):
    near: int
    far: int = dataclasses.field(default_factory=int)


def counted() -> tuple[Pair, list[int]]:
    asked: list[int] = []
    return Pair(1).late({"far": lambda: asked.append(1) or 7}), asked


def test_it_is_found_once_at_the_first_read():
    pair, asked = counted()
    assert pair.near == 1 and not asked
    assert pair.far == pair.far == 7 and len(asked) == 1
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'further'"):
        _ = pair.further  # type: ignore[attr-defined]


def test_a_changed_one_still_waits():
    pair, asked = counted()
    changed = pair.changed(near=2)
    assert changed.near == 2 and not asked and changed.far == 7
    assert pair.changed(far=3).far == 3 and len(asked) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair)), dataclasses.replace])
def test_a_copy_has_all_of_it(copied):
    pair, _ = counted()
    assert copied(pair) == Pair(1, 7) == pair
    assert dataclasses.asdict(counted()[0]) == {"near": 1, "far": 7}


def test_no_other_plan_is_made_before_the_report_is_read(monkeypatch):
    asked: list[str] = []
    for name in ("plan_partition", "find_gap", "marginals", "kernel_records", "graph_text"):
        original = getattr(reporting, name)
        monkeypatch.setattr(reporting, name, lambda *given, n=name, f=original: asked.append(n) or f(*given))
    step = aottrain.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), capture="trace", kernel="aten")
    report = step.prepare(torch.ones(3, 4))
    assert not asked and report.predicted_peak_bytes > 0 and not asked
    assert report.save_all_bytes >= report.min_cut_saved_bytes > 0 and asked == ["plan_partition"] * 2
    assert report.saved and report.gap is not None and report.forward_text
    assert sorted(asked[2:]) == ["find_gap", "graph_text", "marginals"]
