"""What is found of nodes once, while their graphs stay as they are."""

from __future__ import annotations

import threading

import pytest
from torch import fx

from aottrain.ir.analysis.unchanged import once, unchanged


def counted():
    asked: list[fx.Node] = []

    @once
    def position(node: fx.Node) -> int:
        asked.append(node)
        return len(asked)

    return position, asked


def node() -> fx.Node:
    return fx.Graph().placeholder("x")


def test_each_node_is_asked_once_inside_and_each_time_outside():
    position, asked = counted()
    first, second = node(), node()
    with unchanged():
        assert [position(first), position(second), position(first)] == [1, 2, 1]
        with unchanged():
            assert position(second) == 2
        assert position(first) == 1
    assert [position(first), position(first)] == [3, 4]
    with unchanged():
        assert position(first) == 5
    assert asked == [first, second, first, first, first]


def test_nothing_is_kept_where_an_error_leaves():
    position, _ = counted()
    kept = node()
    with pytest.raises(ValueError, match="left"), unchanged():
        position(kept)
        raise ValueError("left")
    assert position(kept) == 2


def test_another_thread_keeps_its_own():
    position, asked = counted()
    kept = node()
    with unchanged():
        position(kept)
        thread = threading.Thread(target=position, args=(kept,))
        thread.start()
        thread.join()
        assert position(kept) == 1
    assert asked == [kept, kept]


def test_functions_are_kept_apart():
    first, _ = counted()
    second, asked = counted()
    kept = node()
    with unchanged():
        first(kept)
        second(kept)
    assert asked == [kept]
