"""Memory that a collective has in hand: from its start until it has arrived nothing else may touch what it writes, and
nothing may write what it reads. Checked in every compile, on the order in which calls run (law 5 for what is not done
when its call returns).

What a start gives and what `arrived` gives are one storage, so whoever reads it, through whatever views, is found by
its memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from aottrain.errors import VerificationError
from aottrain.ir.graph import calls, info, results
from aottrain.ir.ops import communicates, ends_flight, starts_flight
from aottrain.ir.schedule import KernelCall

Memory = Callable[[fx.Node], fx.Node]


def start_of(end: fx.Node) -> fx.Node:
    """The call that has started what this waits for."""
    source = end.args[0]
    assert isinstance(source, fx.Node)
    while not starts_flight(source.target) and source.op == "call_function" and source.args:
        below = source.args[0]
        if not isinstance(below, fx.Node):
            break
        source = below
    return source


def flown(call: KernelCall | fx.Node) -> tuple[fx.Node, ...]:
    """What others may still read when this waits for them: it lives until then."""
    if isinstance(call, KernelCall) or not ends_flight(call.target):
        return ()
    return tuple(start_of(call).all_input_nodes)


def verify_flights(graph: fx.Graph, order: Sequence[KernelCall | fx.Node], memory_of: Memory) -> None:
    """Raises VerificationError unless each collective that is started arrives before anything touches its memory, and
    before the graph ends; and unless collectives run in the order of the graph, which all processes share."""
    written: dict[fx.Node, fx.Node] = {}  # memory that arrives, with its start
    read: dict[fx.Node, list[fx.Node]] = {}  # of each start, what it may still read
    talks = [call for call in order if isinstance(call, fx.Node) and communicates(call.target)]
    if talks != [node for node in calls(graph) if communicates(node.target) and node in set(talks)]:
        raise VerificationError("collectives run in another order than the graph has them in")
    for call in order:
        if isinstance(call, KernelCall):
            _check_free(call.kernel.name, map(memory_of, call.buffers), written)
            _check_unwritten(call.kernel.name, map(memory_of, call.writes), read)
        elif starts_flight(call.target):
            _check_free(call.name, map(memory_of, call.all_input_nodes), written)
            items = [user for user in call.users if user.target is operator.getitem] or [call]
            written.update((memory_of(item), call) for item in items)
            read[call] = [memory_of(source) for source in call.all_input_nodes]
        elif ends_flight(call.target):
            memory = memory_of(call)
            start = written.pop(memory, None)
            if start is None:
                raise VerificationError(f"{call.name} waits for {memory.name}, which nothing has under way")
            if start not in written.values():
                del read[start]
        elif not info(call).is_free:
            _check_free(call.name, map(memory_of, call.all_input_nodes), written)
            written_to = [call, *(call.args[place] for place in info(call).writes)]
            _check_unwritten(call.name, (memory_of(node) for node in written_to if isinstance(node, fx.Node)), read)
    _check_free("the caller", (memory_of(node) for node in results(graph) if node is not None), written)
    if written:
        memory, start = next(iter(written.items()))
        raise VerificationError(f"nothing waits for {memory.name}, which {start.name} has started")


def verify_apart(
    order: Sequence[KernelCall | fx.Node],
    memory_of: Memory,
    offsets: Mapping[fx.Node, int],
    size_of: Callable[[fx.Node], int],
) -> None:
    """Raises VerificationError where the arena gives another value bytes that a collective still reads or writes.

    offsets: in the arena.
    """
    held: dict[fx.Node, fx.Node] = {}  # memory in an arena, with the start that has it
    for call in order:
        starts = isinstance(call, fx.Node) and starts_flight(call.target)
        if isinstance(call, fx.Node) and (starts or ends_flight(call.target)):
            start = call if starts else start_of(call)
            for memory in map(memory_of, (start, *start.users, *start.all_input_nodes)):
                if memory in offsets and starts:
                    held[memory] = start
                elif not starts:
                    held.pop(memory, None)
            continue
        written = call.writes if isinstance(call, KernelCall) else (call,)
        for memory in (memory for memory in map(memory_of, written) if memory in offsets):
            for other, start in held.items():
                first, end = offsets[other], offsets[other] + size_of(other)
                if other is not memory and first < offsets[memory] + size_of(memory) and offsets[memory] < end:
                    raise VerificationError(
                        f"{memory.name} has bytes of {other.name}, which {start.name} has under way"
                    )


def _check_free(name: str, memories: Iterable[fx.Node], written: dict[fx.Node, fx.Node]) -> None:
    for memory in memories:
        if memory in written:
            start = written[memory].name
            raise VerificationError(f"{name} touches {memory.name}, which {start} has under way")


def _check_unwritten(name: str, memories: Iterable[fx.Node], read: dict[fx.Node, list[fx.Node]]) -> None:
    for memory in memories:
        for start, sources in read.items():
            if memory in sources:
                raise VerificationError(f"{name} writes {memory.name}, which {start.name} still reads")
