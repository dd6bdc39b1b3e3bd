"""What the code of a function names: read from its bytecode, which costs microseconds."""

from __future__ import annotations

import opcode
import sys
import types
from collections.abc import Iterator
from functools import lru_cache

_GLOBAL = {opcode.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL")
           if name in opcode.opmap}  # fmt: skip
# Since Python 3.11 the lowest bit of its argument says something else.
_SHIFTED = opcode.opmap["LOAD_GLOBAL"] if sys.version_info >= (3, 11) else None


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of all functions and comprehensions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def names_of(code: types.CodeType) -> set[str]:
    """All names in it: of globals, attributes, and imports."""
    return {name for inner in codes_of(code) for name in inner.co_names}


# With these a function can reach its own module as an object, whose attributes are its globals.
_WAYS_ROUND = {"modules", "globals", "vars", "eval", "exec", "getmodule", "import_module", "__import__", "__globals__",
               "__dict__"}  # fmt: skip


@lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """The names that it may read or write as globals: an attribute may have the name of one that it does not touch."""
    if _WAYS_ROUND & (names := names_of(code)):
        return frozenset(names)
    global_names: set[str] = set()
    for inner in codes_of(code):
        extended = 0
        for op, low in zip(inner.co_code[::2], inner.co_code[1::2], strict=True):
            argument = extended | low
            extended = argument << 8 if op == opcode.EXTENDED_ARG else 0
            if op in _GLOBAL:
                global_names.add(inner.co_names[argument >> 1 if op == _SHIFTED else argument])
    return frozenset(global_names)


@lru_cache(maxsize=4096)
def calls_global(code: types.CodeType, name: str) -> bool:
    """Whether it calls a global of this name; not where it is but handed on, or compared."""
    if all(name not in inner.co_names for inner in codes_of(code)):
        return False
    called = False
    for inner in codes_of(code):
        extended = 0
        for op, low in zip(inner.co_code[::2], inner.co_code[1::2], strict=True):
            argument = extended | low
            extended = argument << 8 if op == opcode.EXTENDED_ARG else 0
            if op in _GLOBAL and inner.co_names[argument >> 1 if op == _SHIFTED else argument] == name:
                if op == _SHIFTED and not argument & 1:
                    return False
                called = True
    return called
