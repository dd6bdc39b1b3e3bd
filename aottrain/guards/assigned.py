"""Attributes of modules that a program assigns while it runs: their new values are results of its call, and are put
there after each. What such an attribute held before is guarded as little as the program reads of it."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.compat import flatten_values
from aottrain.errors import UnsupportedError
from aottrain.guards.bytecode import may_catch, names_of
from aottrain.guards.containers import MISSING
from aottrain.guards.counter import Counter, Key, refusal
from aottrain.guards.guards import alias_pattern, describe
from aottrain.ir.values import PLAIN_TYPES

_OTHER_EACH_TIME = "the program assigns other attributes each time that it is traced"
# With these a program reads attributes where no descriptor of their class is asked.
_PAST_CLASSES = {"__dict__", "vars", "dir", "copy", "deepcopy", "pickle", "__getattribute__", "__getstate__",
                 "__reduce_ex__"}  # fmt: skip
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.")
_MAX_ROUNDS = 8
OWN, BUFFERS = _TABLES = ("", "_buffers")  # where a module keeps what may be assigned


def _table(module: nn.Module, place: str) -> Any:
    return vars(module)[place] if place else vars(module)


class Kind(enum.Enum):
    """What is guarded of the value that an assigned attribute has before the call."""

    UNREAD = "nothing: the program assigns it before it reads it"
    COUNTER = "that it is an int: the program only adds to it"
    TENSORS = "a tensor's description, or those of a tuple of tensors: they are inputs"
    GUARDED = "the value itself, as of any other attribute"


_LEFT_OUT = (Kind.UNREAD, Kind.COUNTER, Kind.TENSORS)  # by the guard's comparison


class Unforeseen(Exception):
    """Signal, not an error: the program assigns attributes of which more is known now. It is to be traced again."""


class Assigned:
    """What the traces of one call have found. `begin`: before each; `met`: of each module that the program can reach.

    twice: whether eager runs again, in the backward, what runs now. num_regions: how often that has been so.
    """

    def __init__(self, twice: Callable[[], Any], num_regions: Callable[[], int]):
        self._twice, self._count_regions = twice, num_regions
        self._kinds: dict[Key, Kind] = {}
        self._num_rounds = 0
        self.begin()

    def begin(self) -> None:
        self._owners: dict[int, nn.Module] = {}
        self._was: dict[Key, Any] = {}  # what each attribute and buffer was when its module was met
        self._before: dict[Key, Any] = {}  # and in this run, where stand-ins may be in the places of buffers
        self._reads_past = self._may_catch = False
        self._thread = threading.get_ident()
        self._told: tuple[ExitStack, set[Any]] | None = None
        self._running = False
        self._read, self._written = set[Key](), set[Key]()
        self._counters: list[Counter] = []
        self.forget()

    def forget(self) -> None:
        """What was found at other sizes."""
        self._put: tuple[tuple[Key, bool], ...] | None = None

    def met(self, module: nn.Module) -> None:
        """The guard looks at a module. What wrappers of torch.distributed change of themselves goes with what they do
        outside of Python at each call."""
        if type(module).__module__.startswith(_WRAPPERS):
            return
        self._owners[id(module)] = module
        here = _entries({id(module): module})
        self._was.update(here)
        self._before.update(here)
        self._tell()

    def left_out(self, table: Any) -> frozenset[str]:
        """The names in it that the guard is not to compare, where it is one of a module's."""
        found = self._of_kind(*_LEFT_OUT)
        return frozenset(name for owner, place, name in found if _table(self._owners[owner], place) is table)

    def look_at(self, code: CodeType) -> None:
        """A function of the user's is about to run."""
        self._reads_past = self._reads_past or not _PAST_CLASSES.isdisjoint(names_of(code))
        self._may_catch = self._may_catch or may_catch(code)

    def inputs(self) -> list[Tensor]:
        """Tensors that the program reads out of attributes which it assigns."""
        return [tensor for key in self._of_kind(Kind.TENSORS) for tensor in flatten_values(self._was.get(key))[0]]

    def _of_kind(self, *kinds: Kind) -> list[Key]:
        """Of the modules that have been met."""
        return [key for key, kind in self._kinds.items() if kind in kinds and key[0] in self._owners]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around all code of the user's: the classes of modules tell when it reads and writes these attributes."""
        with ExitStack() as undo:
            self._told = undo, set()
            self._tell()
            try:
                yield
            finally:
                self._told = None

    def _tell(self) -> None:
        if self._told is not None:
            undo, done = self._told
            for owner, _, name in self._of_kind(*Kind):
                if (told := (type(self._owners[owner]), name)) not in done:
                    done.add(told)
                    _install(undo, *told, self)

    def get(self, owner: Any, name: str, default: Any) -> Any:
        """What the attribute is; the default where there is none. Called by the classes."""
        value, key = vars(owner).get(name, MISSING), (id(owner), OWN, name)
        self._is_asked((id(owner), BUFFERS, name))  # which `nn.Module.__getattr__` then finds
        if self._is_asked(key) and key not in self._written and self._kinds[key] in (Kind.UNREAD, Kind.COUNTER):
            self._read.add(key)
            if type(value) is int:
                self._counters.append(value := Counter(value, key))
        return default if value is MISSING else value

    def wrote(self, owner: Any, name: str) -> None:
        if self._is_asked(key := (id(owner), OWN, name)):
            self._written.add(key)

    def _is_asked(self, key: Key) -> bool:
        """Raises UnsupportedError in a backward, which comes when the attributes have their new values."""
        if key not in self._kinds or threading.get_ident() != self._thread:
            return False
        if not self._running or self._twice():
            raise UnsupportedError(f"the program's backward reads or changes an attribute that it assigns, {key[2]}")
        return True

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result; where attributes were assigned, the result and their new values, and the attributes are what they
        were. Raises Unforeseen where these are others than those that the guard leaves out, or are read."""
        self._read, self._written, self._counters, self._running = set(), set(), [], True
        self._before, num_regions = _entries(self._owners), self._count_regions()
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if self._counters and not isinstance(error, UnsupportedError):
                raise refusal(self._counters[0].name) from error  # code of C's may not take it for the int that it is
            self._foresee({})
            raise
        finally:
            self._running = False
        changed = {} if self._reads_past else self._changed(self._count_regions() > num_regions)
        self._foresee(changed)
        put = tuple((key, type(value) is Counter and value.key == key) for key, value in changed.items())
        if self._put is not None and put != self._put:
            raise UnsupportedError(_OTHER_EACH_TIME)
        self._put = put
        for owner, place, name in changed:
            _restore(_table(self._owners[owner], place), name, self._before.get((owner, place, name), MISSING))
        values = [value.steps if is_step else value for value, (_, is_step) in zip(changed.values(), put, strict=True)]
        self._check_counters((result, values))
        return (result, tuple(values)) if put else result

    def _check_counters(self, results: Any) -> None:
        """Raises UnsupportedError where one would be a result, or where code of C's may have refused it, for it is no
        number, and the program has gone on."""
        for counter in self._counters:
            if self._may_catch or any(type(leaf) is Counter for leaf in flatten_values(results)[0]):
                raise refusal(counter.name)

    def _changed(self, has_regions: bool) -> dict[Key, Any]:
        """The attributes and buffers that are others, with their values; none where one is gone, or cannot be a result,
        or where it is not known whether eager assigns a buffer twice."""
        now = _entries(self._owners)
        changed = {key: value for key, value in now.items() if value is not self._before.get(key, MISSING)}
        is_known = not (has_regions and any(place == BUFFERS for _, place, _ in changed))
        return changed if is_known and self._before.keys() <= now.keys() and _can_be_results(changed) else {}

    def _foresee(self, changed: Mapping[Key, Any]) -> None:
        """Raises Unforeseen where more is known now."""
        found = {key: Kind.UNREAD for key in changed if key not in self._kinds}
        for key in {*self._read, *(key for key in found if key[1] == BUFFERS)}:  # which are inputs
            kind = _guarded_kind(key[2], self._was.get(key, MISSING))
            if kind is Kind.COUNTER:  # the guard leaves it out already
                self._kinds[key] = kind
            elif self._kinds.get(key) is not kind:
                found[key] = kind
        if found:
            self._num_rounds += 1
            if self._num_rounds > _MAX_ROUNDS:
                raise UnsupportedError(_OTHER_EACH_TIME)
            self._kinds.update(found)
            raise Unforeseen

    def check_unchanged(self) -> None:
        """Raises UnsupportedError where an attribute that no guard compares is another one after the traces."""
        now = _entries(self._owners)
        for key in self._of_kind(*_LEFT_OUT):
            if now.get(key, MISSING) is not self._was.get(key, MISSING):
                raise refusal(key[2])

    def kinds(self) -> list[tuple[_Slot, type]]:
        """What type of value each attribute has that the guard leaves out."""
        keys = self._of_kind(*_LEFT_OUT)
        return [(self._slot(key), type(self._was.get(key, MISSING))) for key in keys]

    def counters(self) -> list[_Slot]:
        """Those that hold a number which the program reads."""
        return list(map(self._slot, self._of_kind(Kind.COUNTER)))

    def _slot(self, key: Key, is_step: bool = False) -> _Slot:
        return _Slot(weakref.ref(self._owners[key[0]]), *key[1:], is_step)

    def settle(self) -> Assignments | None:
        """For the calls of the program that was traced; None where it assigns nothing."""
        if not self._put:
            return None
        tensors = list(map(self._slot, self._of_kind(Kind.TENSORS)))
        return Assignments([self._slot(*each) for each in self._put], self.counters(), tensors)


def _entries(owners: Mapping[int, nn.Module]) -> dict[Key, Any]:
    """All that the modules keep; not what torch keeps in them for itself."""
    return {
        (owner, place, name): value
        for owner, module in owners.items()
        for place in _TABLES
        for name, value in _table(module, place).items()
        if name not in ("_parameters", BUFFERS) and not is_recurrents(module, name)
    }


def is_recurrents(module: nn.Module, name: str) -> bool:
    """Whether it is the list of its weights that a recurrent layer keeps: it is made anew for stand-ins."""
    return isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")


def _can_be_results(values: Mapping[Key, Any]) -> bool:
    leaves = flatten_values(list(values.values()))[0]
    return all(isinstance(leaf, (Tensor, torch.SymInt, *PLAIN_TYPES)) for leaf in leaves)


def _guarded_kind(name: str, value: Any) -> Kind:
    """What must hold of a value that the program reads. Raises UnsupportedError where it is likely to be another one at
    each call: a program for each is none."""
    if type(value) is int:
        return Kind.COUNTER
    if value is MISSING or value is None or isinstance(value, (bool, str)):
        return Kind.GUARDED
    leaves = flatten_values(value)[0] if isinstance(value, (Tensor, tuple)) else []
    if leaves and all(type(leaf) is Tensor and not leaf.requires_grad for leaf in leaves):
        return Kind.TENSORS
    raise refusal(name)


def _restore(table: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        table.pop(name, None)
    else:
        table[name] = value


class Without:
    """A table but for some keys, of which only the length is asked."""

    def __init__(self, table: Mapping[str, Any], names: frozenset[str]):
        self._table, self._names = table, names

    def __len__(self) -> int:
        return len(self._table) - len(self._names & self._table.keys())


def _install(undo: ExitStack, cls: type, name: str, assigned: Assigned) -> None:
    """Raises UnsupportedError where something of the class is told of the attribute already."""
    default = next((vars(kind)[name] for kind in cls.__mro__ if name in vars(kind)), MISSING)
    if isinstance(default, _Told):  # that of a base
        default = default.default
    if hasattr(type(default), "__get__"):
        raise refusal(name)
    if name in vars(cls):
        undo.callback(setattr, cls, name, default)
    else:
        undo.callback(delattr, cls, name)
    setattr(cls, name, _Told(name, assigned, default))


class _Told:
    """In a class: its instances keep this attribute where they did, and `assigned` is told of it."""

    def __init__(self, name: str, assigned: Assigned, default: Any):
        self._name, self._assigned, self.default = name, assigned, default

    def __get__(self, owner: Any, cls: type) -> Any:
        value = self.default if owner is None else self._assigned.get(owner, self._name, self.default)
        if value is MISSING:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {self._name!r}")
        return value

    def __set__(self, owner: Any, value: Any) -> None:
        self._assigned.wrote(owner, self._name)
        vars(owner)[self._name] = value

    def __delete__(self, owner: Any) -> None:
        if self._name not in vars(owner):
            raise AttributeError(self._name)
        self._assigned.wrote(owner, self._name)
        del vars(owner)[self._name]


@dataclass(frozen=True)
class _Slot:
    """An attribute of a module that this does not keep alive."""

    owner: Callable[[], nn.Module | None]
    place: str
    name: str
    is_step: bool = False
    """Whether its new value is what is to be added to the old one."""

    def get(self, _: Any = None, default: Any = MISSING) -> Any:
        return default if (owner := self.owner()) is None else _table(owner, self.place).get(self.name, default)


class Settling:
    """Numbers that a refused program reads and assigns: counted up by each call, or a size that a cache was made for
    once. have_settled(): whether they are other ones than when it was refused, and those of the last time of asking."""

    def __init__(self, slots: Sequence[_Slot] = ()):
        self._slots = slots
        self._asked = self._refused = self._read()

    def _read(self) -> list[Any]:
        return [slot.get() for slot in self._slots]

    def have_settled(self) -> bool:
        before, self._asked = self._asked, self._read()
        return before == self._asked != self._refused


class Assignments:
    """What a compiled program assigns: `fit` before a call, `put` after it."""

    def __init__(self, slots: Sequence[_Slot], counters: Sequence[_Slot], tensors: Sequence[_Slot]):
        self._slots, self._counters, self._tensors = slots, counters, tensors
        self._expected = self._describe()

    def inputs(self) -> list[Tensor]:
        """The tensors that the program reads out of these attributes, as they are now."""
        return [leaf for slot in self._tensors for leaf in flatten_values(slot.get())[0]]

    def fit(self) -> bool:
        """Whether the attributes hold what the program was compiled for."""
        return all(type(slot.get()) is int for slot in self._counters) and self._describe() == self._expected

    def _describe(self) -> Any:
        if not self._tensors:
            return None
        leaves, tree = flatten_values([slot.get() for slot in self._tensors])
        if any(type(leaf) is not Tensor for leaf in leaves):
            return MISSING
        return tree, list(map(describe, leaves)), alias_pattern(leaves)

    def put(self, out: Any) -> Any:
        """Assign the new values that a call gives beside its result; gives the result."""
        result, values = out
        for slot, value in zip(self._slots, values, strict=True):
            if (owner := slot.owner()) is not None:
                table = _table(owner, slot.place)
                table[slot.name] = table[slot.name] + value if slot.is_step else value
        return result
