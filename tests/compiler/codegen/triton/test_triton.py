"""Generated Triton kernels: interpreted on a CPU, compiled where there is a device.

Triton decides when it is imported whether it interprets, from TRITON_INTERPRET. So that no other test sees the
variable, the tests of triton_*.py run in processes of their own, one with the variable and one without; each of these
files also runs on its own:

    TRITON_INTERPRET=1 python -m pytest tests/compiler/codegen/triton/triton_kernels.py  # no variable where CUDA is
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import aottrain
from aottrain.compiler.codegen.evaluation import _FUNCTIONS, _IN_DOUBLE
from aottrain.compiler.codegen.triton.render import render_code, render_triton
from aottrain.compiler.codegen.triton.text import arithmetic, literal
from aottrain.errors import ConfigError
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Address, Compute, KernelIR, Load, Parameter, Store

HERE = Path(__file__).parent
WITHOUT_VARIABLE = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ON_A_CPU = {**WITHOUT_VARIABLE, "TRITON_INTERPRET": "1"}
INTERPRETED = WITHOUT_VARIABLE if torch.cuda.is_available() else ON_A_CPU
FILES = {
    "triton_kernels.py": INTERPRETED,
    "triton_programs.py": INTERPRETED,
    "triton_optimizers.py": INTERPRETED,
    "triton_loss_rows.py": INTERPRETED,
    "triton_fuzz.py": ON_A_CPU,
    "triton_compiling.py": WITHOUT_VARIABLE,
}
ENVIRONMENTS = {"interpreted": ON_A_CPU, "not interpreted": WITHOUT_VARIABLE}
LOOPS = "triton_optimizers.py"  # which has loops whose ends are only known when they run


def loops_are_interpreted(triton: Any) -> bool:
    """Triton 3.6 takes a loop's end from an array of one element, which NumPy 2.4 refuses."""
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return not old or tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 4)


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_in_a_process_of_its_own(kind, whole):
    triton = pytest.importorskip(
        "triton", reason="the package triton is not installed: there is none for this platform"
    )
    environment = ENVIRONMENTS[kind]
    files = [name for name, wanted in FILES.items() if wanted is environment]
    left = environment is ON_A_CPU and LOOPS in files and not loops_are_interpreted(triton)
    paths = [str(HERE / name) for name in files if not (left and name == LOOPS)]
    command = [sys.executable, "-m", "pytest", "--no-header", *paths, *["--whole"] * whole]
    done = subprocess.run(command, cwd=HERE.parents[3], env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert " passed" in done.stdout
    if left:
        versions = f"Triton {triton.__version__}", f"NumPy {numpy.__version__}"
        pytest.skip("{}, all the rest was: {} does not interpret loops of any length with {}".format(LOOPS, *versions))


def copy_kernel(count: int, name: str = "kernel_0", source: str = "y = aten.alias.default") -> KernelIR:
    address = Address(Affine(((0, 1),)))
    parameters = (
        Parameter("x", torch.float32, False, count),
        Parameter("y", torch.float32, True, count),
    )
    body = (Load(0, address, torch.float32),)
    return KernelIR(name, (count,), 0, parameters, body, (Store(1, address, 0),), (), (source,))


def test_the_text_depends_on_the_kernel_alone():
    assert render_triton(copy_kernel(100)) == render_triton(copy_kernel(100))
    assert render_code(copy_kernel(100)) == render_code(copy_kernel(100, "kernel_7"))
    text = render_triton(copy_kernel(100))
    for part in ("# y = aten.alias.default", "in float32[100] x", "def triton_alias(p0, p1):", "LAUNCHES"):
        assert part in text


@pytest.mark.parametrize(("count", "wide"), [(2**20, False), (2**31 - 1, True), (2**31 + 8, True)])
def test_offsets_are_wide_where_they_may_pass_32_bits(count, wide):
    assert ("program_id(0).to(tl.int64)" in render_code(copy_kernel(count))) == wide


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA is there, and nothing is refused")
def test_on_a_cpu_it_is_refused_in_one_line():
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    call = aottrain.compile(lambda x: x.sin() + 1, kernel="triton")
    with pytest.raises(ConfigError, match=r"needs a CUDA device; .* TRITON_INTERPRET=1") as caught:
        call(torch.ones(3))
    assert "\n" not in str(caught.value)


def test_negative_numbers_wrap_beside_unsigned_values():
    assert literal(-1, torch.uint8) == "tl.full((), 255, tl.uint8)"
    assert literal(-1, torch.int8) == "tl.full((), -1, tl.int8)"


def test_every_operation_has_a_rendering():
    """What `evaluate` defines, Triton can say."""
    for op in (*_FUNCTIONS, *_IN_DOUBLE, "fma", "cast"):
        assert arithmetic(Compute(op, (0, 1, 2), torch.float32), [torch.float32] * 3)
