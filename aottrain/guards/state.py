"""Guards on what a program can read beside its arguments: the module tree, closures, globals and attributes."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from aottrain.compat_dispatch import profile_again
from aottrain.errors import UnsupportedError
from aottrain.guards.assigned import Assigned, Settling
from aottrain.guards.containers import (
    Comparison,
    Differs,
    Slot,
    has_others,
    hold_the_same,
    read,
    restore_slots,
    restore_tables,
    unknown,
)
from aottrain.guards.contents import Contents, Generators
from aottrain.guards.counter import refusal
from aottrain.guards.guards import BY_IDENTITY, is_another
from aottrain.guards.lifetimes import Loss
from aottrain.guards.ownership import is_users
from aottrain.guards.reaching import Reach


class StateGuard(Reach):
    """What a call of `target` with these objects among its arguments can reach, as it was when this guard was made.

    holds(): tensors and modules are the same objects with the same metadata; plain values are equal; containers have
    the same items. `reachable`: identities of the tensors that are guarded; `seen`: of all. restore() undoes changes.
    watching(): around every trace. What a function reads beside its arguments (closure, globals, defaults) is looked at
    when it first runs: of a large library a program runs little, and the rest of it is none of its concern.
    release(): after the last trace; from then on nothing is kept alive that can be let go, and the guard is `lost`,
    which means that it will not hold again, once something has been.
    Raises UnsupportedError for what cannot be compared: an iterator.
    """

    def __init__(self, target: Any, arguments: Iterable[Any] = (), assigned: Assigned | None = None):
        super().__init__(assigned)
        if assigned is not None:
            assigned.begin()
        self.lost = self._released = False
        self._compared: tuple[int, Comparison] | None = None
        self._differs: Differs | None = None  # what differed when this was last asked
        self._watched: list[Any] = []
        self._kinds_of_assigned: list[tuple[Any, type]] = []
        self._settling = Settling()
        self._equals: list[Slot] = []
        self._refusal: UnsupportedError | None = None
        for value in (target, *arguments):
            self._lasting = value is target or isinstance(value, BY_IDENTITY)
            self._visit(value, 0)
        self._lasting = True

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A call that is traced; what the program may assign beside its result is told apart."""
        assigned = self.assigned
        return function(*args, **kwargs) if assigned is None else assigned.run(function, *args, **kwargs)

    def told(self) -> tuple[str, ...]:
        """What is compared before each call, a line each."""
        counts = {
            "tensors: the same objects, with the same type, shape, strides and device": len(self._tensors),
            "attributes, items, variables: the same, or equal": len(self._slots) + len(self._plain),
        }
        return tuple(f"{count:,} {text}" for text, count in counts.items() if count)

    def holds(self) -> bool:
        """Quick where what differed the last time still does: a program that changes its own state is asked often."""
        differs = self._differs
        if self.lost or (differs is not None and differs()):
            return False
        self._differs = differs = self._difference()
        return differs is None and not self.lost

    def _difference(self) -> Differs | None:
        if (differs := self._comparison().difference()) is not None:
            return differs
        for table, key, kept in self._equals:
            if (now := read(table, key)) is not kept and not hold_the_same(kept, now):
                return unknown
        for items, expected in self._items:
            if has_others(items, expected):
                return functools.partial(has_others, items, expected)
        for tensor, description in self._tensors:
            if is_another(tensor, description):
                return functools.partial(is_another, tensor, description)
        if any(type(read(slot, None)) is not kind for slot, kind in self._kinds_of_assigned):
            return unknown
        if self._settling.have_settled():
            return unknown
        filled = any(function.cache_info().misses != misses for function, misses in self._caches)
        return unknown if filled or self._contents.have_changed() else None

    def _comparison(self) -> Comparison:
        """Made anew where more is guarded than when it was made."""
        size = len(self._slots) + len(self._plain) + len(self._sizes)
        if self._compared is None or (self._compared[0] != size and not self._released):
            self._compared = size, Comparison(self._slots, self._plain, self._sizes, self._mortal)
        return self._compared[1]

    def check_unchanged(self) -> None:
        """Raises UnsupportedError where a trace has changed what it could reach."""
        self._generators.check_unmoved()
        if self.assigned is not None:
            self.assigned.check_unchanged()
        if not self.holds():
            self._take_equals()
        if not self.holds():
            raise refusal(self._changed_name())

    def _take_equals(self) -> None:
        """Where the program has put another object of a user's class that holds the same, as a registry does whose
        state is copied and never written to, what it holds is guarded from now on, not which object it is."""
        for slot in self._slots:
            table, key, kept = slot
            if not isinstance(table, dict) or not is_users(kept) or isinstance(kept, (type, nn.Module)):
                continue
            if (now := read(table, key)) is not kept and hold_the_same(kept, now):
                self._equals.append(slot)
                self._keep.append(self._mortal.pop(id(kept), kept))
        taken = set(map(id, self._equals))
        self._slots, self._differs = [slot for slot in self._slots if id(slot) not in taken], None

    def _changed_name(self) -> str:
        """Of the first attribute, variable or item with a name that is another one; "" where none is found."""
        changed = [key for table, key, kept in self._slots if read(table, key) is not kept]
        changed += [key for table, key, kept in self._plain if repr(read(table, key)) != repr(kept)]
        added = [list(table)[size:] for table, size in self._sizes if isinstance(table, dict)]
        return next((key for key in (*changed, *itertools.chain(*added)) if isinstance(key, str)), "")

    def release(self, is_refused: bool = False) -> None:
        """is_refused: of a call that cannot be compiled. It is tried again where what the program assigns is of another
        type, as a sum that begins with a number, or is a number that no longer changes."""
        self._comparison()
        if is_refused and self.assigned is not None:
            self._kinds_of_assigned = self.assigned.kinds()
            self._settling = Settling(self.assigned.counters())
        loss = Loss(self)
        self._watched = [weakref.ref(value, loss) for value in self._mortal.values()]
        self._released = True
        self._tensors = [(self._reference(tensor()), description) for tensor, description in self._tensors]
        self._slots, self._plain, self._sizes, self._copies = [], [], [], []
        self._functions, self._mortal, self._torchs, self._modules = {}, {}, {}, []
        self.seen, self.reachable, self._generators = set(), set(), Generators()
        self.assigned = None

    def lose(self) -> None:
        """Something that was guarded is gone: so is all that was known about the rest."""
        self.lost, self._differs = True, None
        self._compared, self._equals = (0, Comparison((), (), ())), []
        self._tensors, self._items, self._caches, self._keep, self._watched = [], [], [], [], []
        self._contents = Contents()

    def _reference(self, tensor: Any) -> Callable[[], Any]:
        return weakref.ref(tensor) if id(tensor) in self._mortal else (lambda: tensor)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, guard what each function that runs can read, as it is before the function runs. Raises again what
        an earlier trace found that cannot be guarded: a function is looked at once."""
        if self._refusal is not None:
            raise self._refusal
        before, ran = sys.getprofile(), self._ran

        def watch(frame: types.FrameType, event: str, called: Any) -> None:
            if event == "call" and frame.f_code not in ran:
                profiler = sys.getprofile()  # that of another guard, where that one hands on what it sees
                sys.setprofile(None)  # not this one's own calls
                try:
                    self._run(frame)
                except UnsupportedError as error:
                    self._refusal = error
                    raise
                finally:
                    sys.setprofile(profiler)
            if callable(before) and event in ("call", "c_call"):  # nobody asks what returns
                before(frame, event, called)

        told = nullcontext() if self.assigned is None else self.assigned.watching()
        with self._classes_asked.answered(), told:
            sys.setprofile(watch)
            try:
                yield
            finally:
                profile_again(before)

    def clear_caches(self) -> None:
        """Drop what functools.lru_cache and the like have kept of a trace: stand-ins."""
        for function, misses in self._caches:
            if function.cache_info().misses != misses:
                function.cache_clear()

    def restore(self) -> None:
        """Put the containers and attribute tables back as they were: what tracing did to them never happened."""
        if self.assigned is not None:
            self.assigned.forget()
        restore_tables(self._copies)
        restore_slots([*self._slots, *self._plain])
        self._contents.restore()
        self._generators.restore()
