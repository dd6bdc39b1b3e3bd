"""Generated Triton kernels: interpreted on a CPU, compiled where there is a device.

Triton decides when it is imported whether it interprets, from TRITON_INTERPRET. So that no other test sees the
variable, the tests of triton_*.py run in processes of their own, one with the variable and one without; each of these
files also runs on its own:

    TRITON_INTERPRET=1 python -m pytest tests/compiler/codegen/triton/triton_kernels.py  # no variable where CUDA is
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import aottrain
from aottrain.compiler.codegen.evaluation import _FUNCTIONS, _IN_DOUBLE
from aottrain.compiler.codegen.triton import programs
from aottrain.compiler.codegen.triton.render import render_code, render_triton
from aottrain.compiler.codegen.triton.text import arithmetic, literal
from aottrain.compiler.codegen.triton.tiles import choose_tile
from aottrain.errors import ConfigError
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import (
    Address,
    Column,
    Compute,
    Constant,
    KernelIR,
    Load,
    Parameter,
    Position,
    Reduce,
    Store,
)
from aottrain.ir.schedule import KernelCall
from aottrain.ir.sizes.polynomials import SizeFacts

HERE = Path(__file__).parent
WITHOUT_VARIABLE = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ON_A_CPU = {**WITHOUT_VARIABLE, "TRITON_INTERPRET": "1"}
INTERPRETED = WITHOUT_VARIABLE if torch.cuda.is_available() else ON_A_CPU
FILES = {
    "triton_kernels.py": INTERPRETED,
    "triton_programs.py": INTERPRETED,
    "triton_optimizers.py": INTERPRETED,
    "triton_loss_rows.py": INTERPRETED,
    "triton_open_sizes.py": INTERPRETED,
    "triton_fuzz.py": ON_A_CPU,
    "triton_compiling.py": WITHOUT_VARIABLE,
}
ENVIRONMENTS = {"interpreted": ON_A_CPU, "not interpreted": WITHOUT_VARIABLE}
LOOPS = (  # which have loops whose ends are only known when they run
    "triton_optimizers.py",
    "triton_loss_rows.py",
    "triton_open_sizes.py",
)


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
    left = environment is ON_A_CPU and set(LOOPS) <= set(files) and not loops_are_interpreted(triton)
    paths = [str(HERE / name) for name in files if not (left and name in LOOPS)]
    command = [sys.executable, "-m", "pytest", "--no-header", *paths, *["--whole"] * whole]
    done = subprocess.run(command, cwd=HERE.parents[3], env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert " passed" in done.stdout
    if left:
        versions = f"Triton {triton.__version__}", f"NumPy {numpy.__version__}"
        pytest.skip(
            "{}, all the rest was: {} does not interpret loops of any length with {}".format(
                " and ".join(LOOPS), *versions
            )
        )


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


def launches_of(kernel: KernelIR) -> Any:
    """What a text says of the launches for a call's sizes: (scratch, kernels), with names for kernels."""
    text = render_code(kernel)
    names = re.findall(r"^def (triton_\w+)\(", text, re.MULTILINE)
    namespace: dict[str, Any] = {name: name for name in names}
    exec(text[text.index("def launches(") :], namespace)
    return namespace["launches"]


def test_programs_are_as_many_as_each_size_needs():
    """A copy in tiles of 128 or more: one compile, whose grid and mask follow the call's size."""
    facts = SizeFacts({"s0": 100}, {"s0": (2, None)})
    kernel = copy_kernel(facts.symbol("s0") * 3)
    launches, text = launches_of(kernel), render_code(kernel)
    assert "@triton.jit(do_not_specialize=['size0'])" in text and "index < (3 * size0)" in text
    width = int(re.search(r"tl.arange\(0, (\d+)\)", text)[1])
    for size in (2, 100, 12345):
        scratch, ((_, programs, _, names, numbers),) = launches(size)
        assert scratch == () and names == ("p0", "p1") and numbers == (size,)
        assert programs * width >= size * 3 > (programs - 1) * width


def test_rows_are_shared_by_programs_at_every_size():
    """A sum over rows: about 264 programs, whatever the size, that have all rows between them, and no more room for
    partial sums than they need."""
    facts = SizeFacts({"s0": 20}, {"s0": (2, None)})
    rows = facts.symbol("s0")
    parameters = (Parameter("x", torch.float32, False, rows * 64), Parameter("y", torch.float32, True, 64))
    address = Address(Affine(((0, 64), (1, 1))))
    body = (Load(0, address, torch.float32), Reduce("sum", 0, torch.float32), Compute("mul", (0, 1), torch.float32))
    column = Column("sum", 1, Address(Affine(((1, 1),))), 2, torch.float32)
    kernel = KernelIR("kernel_0", (rows, 64), 1, parameters, body, (), (column,), ("y = aten.sum.default",))
    launches = launches_of(kernel)
    tile = choose_tile(kernel)
    for size in (2, 20, 3000, 100_000):
        ((_, room),), ((_, programs, *_, numbers), _) = launches(size)
        each = numbers[0] * tile.rows
        assert len(numbers) == 2 and numbers[1] == size
        assert programs * each >= size > (programs - 1) * each and programs <= 264 and room == programs * 64


def test_narrow_offsets_are_a_guard_on_the_sizes():
    facts = SizeFacts({"s0": 100}, {"s0": (2, None)})
    assert "tl.int64" not in render_code(copy_kernel(facts.symbol("s0") * 8))
    assert list(facts.conditions({"s0": 1 << 27})) == [True] and list(facts.conditions({"s0": 1 + (1 << 27)})) == [
        False
    ]
    large = SizeFacts({"s0": 1 << 28}, {"s0": (2, None)})
    assert "size0 = size0.to(tl.int64)" in render_code(copy_kernel(large.symbol("s0") * 8))


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


def drawing(number: int) -> KernelIR:
    element = Affine(((0, 1),))
    parameters = (Parameter("state", torch.int64, False, 2), Parameter("y", torch.float32, True, 64))
    body = (
        Load(0, Address(Affine(())), torch.int64), Load(0, Address(Affine((), 1)), torch.int64),
        Constant(number, torch.int64), Compute("add", (1, 2), torch.int64), Position(element),
        Compute("philox", (0, 3, 4), torch.float32),
    )  # fmt: skip
    return KernelIR(f"kernel_{number}", (64,), 0, parameters, body, (Store(1, Address(element), 5),), ())


def test_the_draws_of_repeated_blocks_are_one_module_with_numbers_of_their_own(monkeypatch):
    """Numbers that a text held made a module of each block, and Triton compiled each."""
    started = []

    def load(source):
        return lambda tensors, draws=(): started.append((source, draws))

    monkeypatch.setattr(programs, "triton_launch", load)
    kernels = [drawing(number) for number in (0, 1, 16, 3)]
    launches, count = programs.link_triton([KernelCall(kernel, ()) for kernel in kernels])
    for kernel in kernels:
        launches[kernel.name]([])
    assert count == 1 and len({source for source, _ in started}) == 1
    assert [draws for _, draws in started] == [(0,), (1,), (16,), (3,)]
