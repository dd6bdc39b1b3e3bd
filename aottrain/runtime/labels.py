"""What a profiler calls a generated kernel: its name, the modules and the lines of the program that it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import record_function

_is_on = [False]


@contextmanager
def labelled_launches() -> Iterator[None]:
    """Inside, each launch is a range of its own in a profile."""
    before, _is_on[0] = _is_on[0], True
    try:
        yield
    finally:
        _is_on[0] = before


def with_labels(plain: Callable[..., Any], make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """`plain`, and inside `labelled_launches` what `make` gives, once: the same program with its launches labelled."""
    made: list[Callable[..., Any]] = []

    def run(inputs: list[Any]) -> list[Any]:
        if not _is_on[0]:
            return plain(inputs)
        if not made:
            made.append(make())
        return made[0](inputs)

    return run


def labelled(launch: Callable[..., None], label: str) -> Callable[..., None]:
    def run(*arguments: Any, **memory: Any) -> None:
        with record_function(label):
            launch(*arguments, **memory)

    return run
