"""What of a graph depends on some of its nodes, and what these depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx


def descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on any of the roots, roots included."""
    reached, stack = set(roots), list(roots)
    while stack:
        for user in stack.pop().users:
            if user not in reached:
                reached.add(user)
                stack.append(user)
    return reached


def ancestors(roots: Iterable[fx.Node], stop: Sequence[fx.Node] | set[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that any of the roots needs, roots included; the search does not pass through `stop`."""
    barrier = set(stop)
    reached, stack = set(roots), list(roots)
    while stack:
        node = stack.pop()
        if node in barrier:
            continue
        for source in node.all_input_nodes:
            if source not in reached:
                reached.add(source)
                stack.append(source)
    return reached
