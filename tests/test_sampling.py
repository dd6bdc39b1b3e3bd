"""What a sample of combinations has, and what runs the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import sampling
from tests.sampling import crossed, pytest_collection_modifyitems


def test_every_value_is_in_the_sample():
    found = crossed("abcde", range(7), one_in=3)
    assert len(found) == 35
    sampled = [parameter.values for parameter in found if not parameter.marks]
    assert {letter for letter, _ in sampled} == set("abcde") and {number for _, number in sampled} == set(range(7))
    assert 10 <= len(sampled) <= 13 and sampled[0] == ("a", 0)
    with pytest.raises(AssertionError, match="in no combination"):
        crossed("abcde", [1], one_in=3)


@pytest.fixture
def left_of(monkeypatch):
    """left_of(arguments, whole) -> (what is run, what is left out) of five tests, two of them for the whole run."""
    monkeypatch.setattr(sampling, "_left", set())

    def collected(arguments, whole):
        told = []
        hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(item.nodeid for item in items))
        config = SimpleNamespace(getoption=lambda name: whole, args=arguments, hook=hook)
        marks = {"t.py::one[2]": "whole", "t.py::two[2]": "whole"}
        names = ["t.py::one[1]", "t.py::one[2]", "t.py::two[1]", "t.py::two[2]", "t.py::three"]
        items = [SimpleNamespace(nodeid=n, get_closest_marker=lambda name, n=n: marks.get(n) == name) for n in names]
        pytest_collection_modifyitems(config, items)
        return [item.nodeid for item in items], told

    return collected


def test_further_combinations_are_run_where_all_is_asked_for_or_they_are_named(left_of):
    some = ["t.py::one[1]", "t.py::two[1]", "t.py::three"]
    assert left_of(["t.py"], whole=False) == (some, ["t.py::one[2]", "t.py::two[2]"])
    assert left_of(["t.py::one[2]"], whole=False)[1] == ["t.py::two[2]"]
    kept, told = left_of(["t.py"], whole=True)
    assert len(kept) == 5 and told == []
