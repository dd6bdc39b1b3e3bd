"""Bugs in what decides whether a program serves a call."""

from __future__ import annotations

from typing import Any

from aottrain.compiler.frontends import api, entry
from aottrain.guards import containers as tables
from aottrain.guards import guards, state
from tests.planted_bugs.planting import Area, TestsOf

HERE = Area("guards")
SERVED = TestsOf("tests/guards/test_served_calls.py")


def without_part(i: int) -> Any:
    original = guards.call_key

    def call_key(*given: Any) -> Any:
        key, tensors = original(*given)
        return key[:i] + key[i + 1 :], tensors

    return call_key


def without_fact(i: int) -> Any:
    original = guards.describe
    return lambda *given: (*original(*given)[:i], *original(*given)[i + 1 :])


HERE.attribute(
    "written inputs may overlap", SERVED.overlapping_inputs, entry, "is_disjoint", lambda primals, written: True
)
HERE.attribute(
    "alias pattern ignored", SERVED.same_tensor_twice, guards, "alias_pattern", lambda tensors: (), quick=True
)
HERE.attribute("grad mode unguarded", SERVED.changed_grad_mode, api, "call_key", without_part(1))
HERE.attribute("autocast unguarded", SERVED.changed_autocast, api, "call_key", without_part(3))
HERE.attribute("default type unguarded", SERVED.changed_default_type, api, "call_key", without_part(4))
HERE.attribute("shapes unguarded", SERVED.changed_shape, guards, "describe", without_fact(1), quick=True)
HERE.attribute("strides unguarded", SERVED.changed_strides, guards, "describe", without_fact(2))
HERE.attribute("types unguarded", SERVED.changed_type, guards, "describe", without_fact(3), quick=True)
HERE.attribute("requires_grad unguarded", SERVED.changed_requires_grad, guards, "describe", without_fact(5))
HERE.attribute("numbers unguarded by type", SERVED.changed_number_type, guards, "_constant", lambda value: value)
HERE.attribute(
    "training flag and attributes unguarded", SERVED.changed_training_flag, state.StateGuard, "holds", lambda self: True
)
HERE.attribute("closures unguarded", SERVED.changed_closure, state.StateGuard, "_visit_function", lambda *_: None)
HERE.attribute("globals unguarded", SERVED.changed_global, state, "globals_of", lambda code: frozenset())
HERE.attribute("replaced buffers unguarded", SERVED.replaced_buffer, tables._Alive, "holds", lambda self: True)
HERE.attribute("refusals do not count", SERVED.state_that_changes, api.CompiledCall, "_refuse", lambda *_: None)
HERE.attribute(
    "fallbacks uncounted", SERVED.counted_fallback, api.CompiledCall, "_count", lambda self, error: None, quick=True
)
