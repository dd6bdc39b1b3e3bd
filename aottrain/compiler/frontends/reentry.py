"""Code that TorchDynamo has compiled, run by Python after all: where its graph raises, or is not for these inputs.

A graph holds the operators of a `try` without its `except`, and Python's own effects (a `finally`, an append to a list)
come after it: where the graph raises, neither is as in eager. But a graph runs before all else of its code, and writes
nothing before everything is computed, so Python can begin anew. TorchDynamo's code is called by code of the same layout
that does so; TorchDynamo runs that one in place of its own.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from aottrain.compat_dynamo import compiling, leave_out, on_new_code

# Calls its argument: the program's code, or what stands for it.
Wrapper = Callable[[Callable[[], Any]], Any]


class _LeftToPython(Exception):
    """Signal, not an error: nothing of the code has happened yet, and Python is to run it."""

    def __init__(self, host: HostCode, wrapper: Wrapper):
        super().__init__("TorchDynamo's code is called by other code than was put around it")
        self.host, self.wrapper = host, wrapper


class HostCode:
    """The code that holds one graph. It does not keep the program's code alive, which keeps this."""

    draws = False
    """Whether TorchDynamo draws Python's random numbers before it runs the graph."""
    num_plain = 0
    """How many arguments it takes by position."""
    names: tuple[str, ...] = ()
    """Of the arguments that it takes by keyword alone."""
    has_more = False
    """Whether it takes a tuple of more arguments."""
    has_more_names = False
    """Whether it takes a dict of more arguments."""

    def __init__(self) -> None:
        self.num_graphs = 1
        self._written: Callable[[], types.CodeType | None] | None = None

    def leave(self, wrapper: Wrapper, otherwise: Callable[[], Any]) -> Any:
        """From within the graph, before anything is written: leave the call to Python. otherwise: runs the graph alone,
        where Python cannot run the code that it is in."""
        if self._written is None:
            return wrapper(otherwise)
        raise _LeftToPython(self, wrapper)

    def wrap(self, written: types.CodeType, compiled: types.CodeType) -> types.CodeType:
        self._written = weakref.ref(written)
        self.draws = any(name.startswith("__gen_rand_values") for name in compiled.co_names)
        self.num_plain = written.co_argcount
        self.names = written.co_varnames[self.num_plain :][: written.co_kwonlyargcount]
        self.has_more = bool(written.co_flags & inspect.CO_VARARGS)
        self.has_more_names = bool(written.co_flags & inspect.CO_VARKEYWORDS)
        for code in (compiled, _run.__code__):
            leave_out(code)
        return _of_its_layout(written, partial(_run, self, compiled, _in_python()))

    @property
    def written(self) -> types.CodeType:
        code = self._written and self._written()
        assert code is not None  # it is being called
        return code


class _LastGraph(threading.local):
    """The last graph that this thread's TorchDynamo gave to the backend."""

    host: HostCode | None = None
    """The code that it is in."""
    number: Any = None
    """Of the compilation."""
    attempt: Callable[[], Any] | None = None
    """A weak reference; a compilation may make several attempts."""


_last = _LastGraph()


def host_of_graph() -> HostCode:
    """From a backend: the code that its graph will be in."""
    number, attempt = compiling()
    if number is None or attempt is None:
        return HostCode()
    _watch()
    if _last.host is not None and _last.number == number and _last.attempt is not None and _last.attempt() is attempt:
        _last.host.num_graphs += 1
    else:
        _last.host, _last.number, _last.attempt = HostCode(), number, weakref.ref(attempt)
    return _last.host


@cache
def _watch() -> None:
    on_new_code(_wrap)


def _wrap(written: types.CodeType, compiled: types.CodeType) -> types.CodeType | None:
    """Not where one code holds several graphs of ours: another may have written before this one raises."""
    host, _last.host = _last.host, None
    if host is None or host.num_graphs > 1 or _last.number != compiling()[0]:
        return None
    return host.wrap(written, compiled)


def _of_its_layout(code: types.CodeType, run: Callable[..., Any]) -> types.CodeType:
    """Code with the arguments, cells and free variables of this one that gives `run` its free variables' cells and its
    arguments, in the order in which code names them."""
    num_arguments = code.co_argcount + code.co_kwonlyargcount
    num_arguments += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    # Python orders cells and free variables by name.
    cells = {name: f"c{i:06}" for i, name in enumerate(code.co_cellvars)}
    free = [f"f{i:06}" for i in range(len(code.co_freevars))]
    names = [cells.get(name, f"argument{i}") for i, name in enumerate(code.co_varnames[:num_arguments])]
    own = [name for name in cells.values() if name not in names]
    unused = f"0 and ({''.join(f'{name} := None, ' for name in own)} lambda: ({', '.join(cells.values())}));"
    closure = f"(lambda: ({', '.join(free)})).__closure__ or ()"
    call = f"run = 'run'; return run({closure}, ({''.join(f'{name}, ' for name in names)}))"
    text = f"""
def outer():
    {" = ".join([*free, "free"])} = None
    def code({", ".join(names)}): {unused} {call}
    return code.__code__
"""
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    new_code: types.CodeType = namespace["outer"]()
    variables = (*code.co_varnames[:num_arguments], *(f"<{name}>" for name in new_code.co_varnames[num_arguments:]))
    return new_code.replace(
        co_consts=tuple(run if value == "run" else value for value in new_code.co_consts),
        co_varnames=variables,
        co_cellvars=code.co_cellvars,
        co_freevars=code.co_freevars,
        co_name=code.co_name,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )


def _run(
    host: HostCode,
    compiled: types.CodeType,
    in_python: Callable[..., Any],
    cells: tuple[types.CellType, ...],
    arguments: Sequence[Any],
) -> Any:
    """It calls no other function of ours: TorchDynamo would look at that."""
    namespace = sys._getframe(1).f_globals
    state = random.getstate() if host.draws else None
    if len(arguments) == host.num_plain:
        args, kwargs = arguments, {}
    else:
        end = host.num_plain + len(host.names)
        args, kwargs = arguments[: host.num_plain], dict(zip(host.names, arguments[host.num_plain : end], strict=True))
        if host.has_more:
            args = (*args, *arguments[end])
        if host.has_more_names:
            kwargs.update(arguments[-1])
    try:
        return types.FunctionType(compiled, namespace, None, None, cells)(*args, **kwargs)
    except _LeftToPython as signal:
        if signal.host is not host:
            raise
        wrapper = signal.wrapper
    if state is not None:
        random.setstate(state)
    return in_python(wrapper, types.FunctionType(host.written, namespace, None, None, cells), args, kwargs)


@cache
def _in_python() -> Callable[..., Any]:
    """To import TorchDynamo takes a second that most programs need not spend."""
    return torch.compiler.disable(_call)


def _call(wrapper: Wrapper, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return wrapper(partial(function, *args, **kwargs))
