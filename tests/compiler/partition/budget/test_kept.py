"""What planning found in another process is used again, and believed only where it is found to be so."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler.link import backends, room
from aottrain.compiler.partition.budget import kept
from aottrain.ir.settings.decisions import MEASURED, Decision
from aottrain.measure import decisions
from aottrain.measure.decisions import Ledger
from aottrain.toolchain import kept as files
from tests.zoo import ResidualTrunk

KERNELS = ["aten", "cpp"]


class Counted:
    """What a compile searched and scheduled."""

    searches = schedules = 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of its own. What would be measured is answered by the fixed model, as in all tests, and kept."""
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept, "ledger_of_measurements", lambda: Ledger(MEASURED))
    return tmp_path


@pytest.fixture
def counted(folder, monkeypatch):
    count = Counted()
    search, plan = kept.find_frontier, backends.plan_program

    def counting_search(*args):
        count.searches += 1
        return search(*args)

    def counting_plan(*args, **options):
        count.schedules += 1
        return plan(*args, **options)

    monkeypatch.setattr(kept, "find_frontier", counting_search)
    for each in (backends, room):
        monkeypatch.setattr(each, "plan_program", counting_plan)
    return count


def planned(kernel, budget=0.4, width=32):
    torch.manual_seed(0)
    trunk = ResidualTrunk(lambda: [nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)])
    step = aottrain.compile(trunk, capture="trace", kernel=kernel, budget=budget)
    report = step.prepare(torch.ones(64, width))
    return report.saved, report.recomputed, report.saved_bytes, report.predicted_peak_bytes


@pytest.mark.parametrize("kernel", KERNELS)
def test_another_compile_searches_and_schedules_nothing_that_is_known(counted, kernel):
    first = planned(kernel)
    searches, schedules = counted.searches, counted.schedules
    again = planned(kernel)
    assert again == first
    assert (searches, counted.searches) == (1, 1)
    if kernel == "cpp":
        others = counted.schedules - schedules
        assert others == 3 < schedules  # what confirms a peak, and the two of the plan that runs
    assert planned(kernel, 0.9)[-1] >= first[-1]
    assert counted.searches == 1  # the family is that of all budgets


def test_another_program_has_plans_of_its_own(counted):
    first = planned("cpp")
    assert planned("cpp", width=48) != first
    assert counted.searches == 2
    assert len(list(files._file(kept.PEAKS, "").iterdir())) == 2


def _change(kind, change):
    """Every file of the kind says something else."""
    for file in files._file(kind, "").iterdir():
        files.keep(kind, file.name, change(files.read_kept(kind, file.name)))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"peaks": {number: size // 2 for number, size in found["peaks"].items()}},
        lambda found: found | {"peaks": {number: 2 * size for number, size in found["peaks"].items()}},
        lambda found: found | {"peaks": {"1000": 1}},
        lambda found: found | {"least": {}, "peaks": {number: None for number in found["peaks"]}},
        lambda found: {"peaks": []},
        lambda found: 7,
    ],
)
def test_wrong_peaks_change_no_plan(counted, change):
    right = planned("cpp")
    _change(kept.PEAKS, change)
    assert planned("cpp") == right
    schedules = counted.schedules
    assert planned("cpp") == right
    assert counted.schedules == schedules + 3  # they were mended


@pytest.mark.parametrize(
    "change",
    [
        lambda found: [["search", [10**6], [0]]],
        lambda found: [["search", [], [10**6]]],
        lambda found: [*found, *found],
        lambda found: [["search", None, 3]],
        lambda found: [],
        lambda found: {"a": 1},
    ],
    ids=["no such value", "no such op", "twice", "no lists", "empty", "a dict"],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_family_is_searched_anew(counted, kernel, change):
    right = planned(kernel)
    _change(kept.FAMILIES, change)
    assert planned(kernel) == right
    assert counted.searches == 2


def test_a_damaged_file_counts_as_missing(counted):
    right = planned("cpp")
    for kind in (kept.FAMILIES, kept.PEAKS):
        for file in files._file(kind, "").iterdir():
            whole = file.read_bytes()
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            assert files.read_kept(kind, file.name) is None
    assert planned("cpp") == right
    assert counted.searches == 2


def test_a_file_of_another_name_is_not_read(folder):
    files.keep("kind", "one", [1])
    files._file("kind", "one").rename(files._file("kind", "other"))
    assert files.read_kept("kind", "other") is None


def test_another_users_file_is_not_read(folder):
    files.keep("kind", "key", [1])
    assert files.read_kept("kind", "key") == [1]
    files._file("kind", "key").chmod(0o666)
    assert files.read_kept("kind", "key") is None


def test_peaks_that_hang_on_another_answer_are_not_believed(folder, monkeypatch):
    ledger = Ledger(MEASURED)
    monkeypatch.setattr(kept, "ledger_of_measurements", lambda: ledger)
    first = kept.KeptPeaks("key")
    ledger.decisions["library", "mm"] = Decision("library", "mm", "onednn", "measured")
    first.keep({0: 10}, {})
    ledger.decisions.clear()
    same = kept.KeptPeaks("key")
    assert same.peaks == {0: 10} and same.agrees()
    same.believe()
    assert ledger.decisions["library", "mm"].choice == "onednn"  # a later run that is given this one's answers has it
    ledger.decisions["library", "mm"] = Decision("library", "mm", "aten", "measured")
    assert not kept.KeptPeaks("key").agrees()


def test_answers_of_a_busy_machine_are_not_kept(folder, monkeypatch):
    ledger = Ledger(MEASURED)
    monkeypatch.setattr(kept, "ledger_of_measurements", lambda: ledger)
    peaks = kept.KeptPeaks("key")
    ledger.decisions["library", "mm"] = Decision("library", "mm", "aten", "busy")
    peaks.keep({0: 10}, {})
    assert not kept.KeptPeaks("key").peaks


def test_nothing_is_kept_where_a_model_or_a_record_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    planned("aten")
    assert not (tmp_path / kept.FAMILIES).exists()
    with decisions.deciding(MEASURED):
        assert decisions.ledger_of_measurements() is None  # AOTTRAIN_RATES=default
    monkeypatch.delenv("AOTTRAIN_RATES")
    with decisions.deciding(MEASURED) as ledger:
        assert decisions.ledger_of_measurements() is ledger


def test_the_oldest_files_go(folder, monkeypatch):
    monkeypatch.setattr(files, "MOST_FILES", 3)
    for number in range(5):
        files.keep("kind", str(number), number)
        os.utime(files._file("kind", str(number)), (number, number))
    assert sorted(path.name for path in files._file("kind", "").iterdir()) == ["2", "3", "4"]


def test_keys_differ_where_parts_do():
    assert files.key_of(["a", "b"]) == files.key_of(["a", "b"])
    assert len({files.key_of(parts) for parts in (["a", "b"], ["ab"], ["ab", ""], ["b", "a"], ["a\0b"])}) == 5
