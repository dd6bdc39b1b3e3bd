"""Last uses, of plain letters."""

from __future__ import annotations

from aottrain.ir.analysis.liveness import freed_after, last_uses


def test_the_last_step_that_touches_a_value():
    assert last_uses(["ab", "", "bc", "a"]) == {"a": 3, "b": 2, "c": 2}
    assert last_uses([]) == {}


def test_values_are_freed_in_the_order_of_their_first_uses_but_for_those_kept():
    last = last_uses(["cab", "bc", "d"])
    assert freed_after(last, "") == {0: ["a"], 1: ["c", "b"], 2: ["d"]}
    assert freed_after(last, {"a", "c"}) == {1: ["b"], 2: ["d"]}
