"""Loops over elements are made of vectors: g++ says of each whether it is."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F

from aottrain.compiler.codegen.cpp.library import LIBRARY
from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.link.programs import FLAGS
from aottrain.toolchain.native import _FLAGS, _TOLD
from tests.compiler.programs import leaf
from tests.compiler.schedule.test_scheduling import schedules

GPP = shutil.which("g++")


def probability(x, y):
    return F.binary_cross_entropy(x.sigmoid(), y.sigmoid())


FUNCTIONS = {
    "exp": lambda x, y: x.exp(),
    "exp2": lambda x, y: x.exp2(),
    "expm1": lambda x, y: x.expm1(),
    "log": lambda x, y: x.log(),
    "log1p": lambda x, y: x.log1p(),
    "log2": lambda x, y: x.log2(),
    "log10": lambda x, y: x.log10(),
    "pow": lambda x, y: x**y,
    "power": lambda x, y: x**0.75,
    "power of a number": lambda x, y: 1.5**x,
    "tanh": lambda x, y: x.tanh(),
    "erf": lambda x, y: x.erf(),
    "sin": lambda x, y: x.sin(),
    "cos": lambda x, y: x.cos(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "maximum": lambda x, y: torch.maximum(x, y),
    "clamp": lambda x, y: x.clamp(-1, 1),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "mish": lambda x, y: F.mish(x),
    "softplus": lambda x, y: F.softplus(x),
    "elu": lambda x, y: F.elu(x),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    "probability": probability,
    "focal": lambda x, y: (probability(x, y) * (1 - y.sigmoid()) ** 1.7).mean(),
    "normalised": lambda x, y: x / (1 + 1e-4 * y.square()) ** 0.75,
    "stacked": lambda x, y: torch.stack([x, y, x * y], 1).relu(),
    "by rows": lambda x, y: torch.where(x[:, :1] > 0, torch.where(y[:, :1] > 0, x, y.exp()), y).cos(),
    "softmax": lambda x, y: (x * y).softmax(-1),
    "norm": lambda x, y: F.layer_norm(x, (1024,)) * y,
    "clamp in bfloat16": lambda x, y: (x.bfloat16() + y.bfloat16()).clamp(0, 6).square(),
    "clamp in float16": lambda x, y: (x.half() + y.half()).clamp(0, 6).square(),
    "silu in float16": lambda x, y: F.silu(x.half() * y.half()),
    "across": lambda x, y: F.layer_norm(x + y.view(1024, 64).t(), (1024,)),
}


@pytest.fixture(scope="module")
def loops():
    """By function, each of its loops that is to be made of vectors, with what g++ says."""
    if GPP is None:
        pytest.skip("no g++, which the simulated devices are compiled by")
    text, owners = LIBRARY, {}
    for name, function in FUNCTIONS.items():
        forward, backward, _ = schedules(function, leaf(64, 1024), leaf(64, 1024, seed=1))
        for call in (*forward.kernels, *backward.kernels):
            if call.kernel.num_rows * call.kernel.row_size < 1024:
                continue
            first = text.count("\n")
            code = render_cpp(call.kernel).replace(f" {call.kernel.name}(", f" {call.kernel.name}_{first}(", 1)
            text += code.replace("static int", 'extern "C" int', 1) + "\n"
            lines = code.split("\n")
            owners |= {first + 1 + i: name for i, line in enumerate(lines) if is_asked(line, lines[i + 1 :])}
    command = [GPP, "-x", "c++", "-", *_FLAGS, *_TOLD, *FLAGS, "-fopt-info-vec-optimized", "-o", "/dev/null"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    vectors = {int(line) for line in re.findall(r"<stdin>:(\d+):\d+: optimized: loop vectorized", done.stderr)}
    found: dict[str, list[bool]] = {}
    for line, name in owners.items():
        found.setdefault(name, []).append(not vectors.isdisjoint(range(line + 1, line + 6)))
    return found


def is_asked(line, after):
    """Whether a loop begins here that each processor has vectors for. That of angles which are too large for the
    usual one reads a table at numbers of its own: whether that pays hangs on the processor, and few angles are."""
    body = after[: next((i for i, line in enumerate(after) if line.strip() == "}"), 0)]
    return "#pragma omp simd" in line and not any("far_" in line for line in body)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_loop_is_made_of_vectors(loops, name):
    assert loops[name] and all(loops[name])
