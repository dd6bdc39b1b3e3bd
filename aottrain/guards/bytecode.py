"""What the code of a function names: read from its bytecode, which costs microseconds."""

from __future__ import annotations

import dis
import opcode
import sys
import types
from collections.abc import Iterator, Sequence
from functools import lru_cache

_GLOBAL = {opcode.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL")
           if name in opcode.opmap}  # fmt: skip
# Since Python 3.11 the lowest bit of its argument says something else.
_SHIFTED = opcode.opmap["LOAD_GLOBAL"] if sys.version_info >= (3, 11) else None

# What comes after these does not follow them, or not always.
_ELSEWHERE = {*opcode.hasjrel, *opcode.hasjabs} | {
    number for name, number in opcode.opmap.items() if name.startswith(("RETURN", "RERAISE", "YIELD", "SEND"))
}


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


# Modules whose functions return at once where a value is not true, for their callers to raise an error.
_VALIDATE = {"torch.distributions.constraints"}


def truth_without_error(frame: types.FrameType) -> bool | None:
    """What the value is that a frame has come to ask the truth of, unless all that follows is an error: an `assert`, or
    an `if` with nothing but a `raise`. None where more may follow either way."""
    if frame.f_globals.get("__name__") in _VALIDATE:
        return True
    return _truth_without_error(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _truth_without_error(code: types.CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: i for i, instruction in enumerate(instructions)}
    if (at := places.get(offset)) is None:
        return None
    at += instructions[at].opname == "TO_BOOL"  # since Python 3.13
    jump = instructions[at]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_at = jump.opname.endswith("IF_TRUE")
    if _raises(instructions[at + 1 :]):
        return jumps_at
    return not jumps_at if _raises(instructions[places[jump.argval] :]) else None


def _raises(instructions: Sequence[dis.Instruction]) -> bool:
    """Whether they come to a `raise` one after the other."""
    for instruction in instructions:
        if instruction.opcode in _ELSEWHERE or instruction.opname == "RAISE_VARARGS":
            return instruction.opname == "RAISE_VARARGS"
    return False


@lru_cache(maxsize=4096)
def may_catch(code: types.CodeType) -> bool:
    """Whether it has an `except` or ends a `with` as it likes: then it may go on where a trace raises."""
    for inner in codes_of(code):
        names = [instruction.opname for instruction in dis.get_instructions(inner)]
        handlers = names.count("POP_EXCEPT") > 2 * names.count("WITH_EXCEPT_START")
        if handlers or inner.co_name in ("__exit__", "suppress") or "suppress" in inner.co_names:
            return True
        if any(name.endswith("EXC_MATCH") or name == "CHECK_EG_MATCH" for name in names):
            return True
    return False
