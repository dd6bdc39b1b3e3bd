"""A user's profiler goes on after a trace, which puts it aside."""

from __future__ import annotations

import cProfile
import sys

from aottrain.compat_dispatch import profile_again


def test_what_is_put_aside_is_given_back():
    """cProfile's of Python 3.11 cannot be called: given to sys.setprofile, the next call raised a TypeError."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        before = sys.getprofile()
        sys.setprofile(None)
        profile_again(before)
        sorted([2, 1])
        assert sys.getprofile() is before
    finally:
        profiler.disable()
    assert any("sorted" in str(each.code) for each in profiler.getstats())


def test_a_function_that_is_called_is_given_back():
    heard = []
    profile_again(lambda frame, event, called: heard.append(event))
    try:
        sorted([2, 1])
    finally:
        profile_again(None)
    assert "c_call" in heard and sys.getprofile() is None
