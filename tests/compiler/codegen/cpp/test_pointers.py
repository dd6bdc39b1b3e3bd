"""Neighbours of which the next pair lies far away: g++ may not read all that is between."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from aottrain.compiler.codegen.cpp.library import LIBRARY
from aottrain.compiler.codegen.cpp.pragmas import pointers_of
from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.link.programs import FLAGS
from aottrain.toolchain.native import _FLAGS
from tests.compiler.programs import leaf
from tests.compiler.schedule.test_scheduling import schedules

GPP = shutil.which("g++")


def turned(x):
    """The conjugate transpose of a matrix of complex numbers, as pairs."""
    return torch.stack([x[..., 0].t() * 2, -x[..., 1].t()], -1)


def copied(x):
    """The transpose of such a matrix: too little to copy its elements beside the loop."""
    return torch.stack([x[..., 0].t() * 2, x[..., 1].t()], -1)


def kernel_of(function, x):
    (call,) = schedules(function, x)[0].kernels
    return call.kernel


@pytest.mark.parametrize(("pairs", "is_far"), [(1024, True), (9, True), (8, False), (2, False)])
def test_each_of_two_neighbours_has_a_pointer_where_the_next_two_are_far(pairs, is_far):
    kernel = kernel_of(turned, leaf(64, pairs, 2))
    assert set(pointers_of(kernel).values()) == ({"p0", "p0_1"} if is_far else {"p0"})


def test_what_is_written_has_its_own_pointer():
    text = render_cpp(kernel_of(turned, leaf(64, 1024, 2)))
    assert text.count("= apart_(p0);") == 1 and "apart_(p1)" not in text


@pytest.mark.skipif(GPP is None, reason="no g++, which the simulated devices are compiled by")
def test_what_lies_between_is_not_read():
    """The loop read and shuffled 2,048 vectors for 16 pairs, by as many instructions."""
    text = LIBRARY + render_cpp(kernel_of(copied, leaf(16, 1024, 2))).replace("static int", 'extern "C" int', 1)
    command = [GPP, "-x", "c++", "-", *(flag for flag in _FLAGS if flag != "-shared"), *FLAGS, "-S", "-o", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len([line for line in done.stdout.splitlines() if line.startswith("\tv")]) < 1000
