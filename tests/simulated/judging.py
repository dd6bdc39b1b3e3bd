"""What a Triton kernel takes of a GPU, read from its machine code, without a device."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

compile_whole = triton.compile  # before a simulated driver takes its place
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Resources:
    """registers: of a thread; spilled: bytes of a thread's stack, which registers spill to; shared: of a program."""

    registers: int
    spilled: int
    shared: int


def resources(binary: bytes) -> Resources:
    """Of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return Resources(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], numbers["SHARED"])


@dataclass(frozen=True)
class Chip:
    """What a multiprocessor has: registers, bytes of shared memory, warps, programs; and how many of them."""

    multiprocessors: int
    shared: int
    most_shared: int  # of one program
    warps: int = 64
    programs: int = 32
    registers: int = 65536


CHIPS = {
    80: Chip(108, 164 << 10, 163 << 10),  # A100
    90: Chip(132, 228 << 10, 227 << 10),  # H100 SXM
    100: Chip(148, 228 << 10, 227 << 10),  # B200
}


@dataclass(frozen=True)
class Judged:
    """One kernel for one architecture."""

    registers: int
    spilled: int
    shared: int
    loads: tuple[int, int]  # bytes, narrowest and widest
    stores: tuple[int, int]
    resident: int  # programs on a multiprocessor

    def waves(self, programs: int, chip: Chip) -> float:
        return programs / max(1, self.resident * chip.multiprocessors)


def judge(source: Any, metadata: Any, arch: int) -> Judged:
    """Compile a kernel with the types, alignments and options of a launch. Raises what Triton and ptxas raise."""
    chip = CHIPS[arch]
    names = ("num_warps", "enable_fp_fusion", "debug", "sanitize_overflow")
    options = {name: getattr(metadata, name) for name in names}
    made = compile_whole(source, target=GPUTarget("cuda", arch, 32), options=options)
    found, text = resources(made.asm["cubin"]), made.asm["ptx"]
    warps = metadata.num_warps
    # Registers are given to a warp by 256, shared memory with 1 KiB of the driver's.
    by_registers = chip.registers // (-(-found.registers * 32 // 256) * 256 * warps)
    by_shared = chip.shared // (made.metadata.shared + 1024)
    resident = min(by_registers, by_shared, chip.warps // warps, chip.programs)
    moved = widths(text, "ld"), widths(text, "st")
    return Judged(found.registers, found.spilled, made.metadata.shared, *moved, resident)


def widths(text: str, kind: str) -> tuple[int, int]:
    """Bytes that one thread moves with one instruction to or from global memory; (0, 0) where it has none."""
    found = []
    for match in re.finditer(rf"\b{kind}\.global([.\w]*)", text):
        vector, bits = re.search(r"\.v(\d)", match[1]), re.search(r"\.[bfsu](\d+)", match[1])
        if bits:
            found.append(int(bits[1]) // 8 * (int(vector[1]) if vector else 1))
    return (min(found), max(found)) if found else (0, 0)
