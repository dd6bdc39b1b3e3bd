"""Which machine figures come from, as the one line that stands beside them."""

from __future__ import annotations

import platform
from datetime import date
from functools import cache
from pathlib import Path

import torch

from aottrain.measure.calls import own_code


def describe_machine(device: torch.device | None = None) -> str:
    """`AMD EPYC (AVX2), 2 threads, torch 2.13.0+cpu, 2026-11-22`; of a GPU its name goes before."""
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    parts = [f"{_processor_name()} ({capability})", f"{threads} thread{'' if threads == 1 else 's'}"]
    if device is not None and device.type == "cuda":
        parts.insert(0, torch.cuda.get_device_name(device))
    return ", ".join([*parts, f"torch {torch.__version__}", date.today().isoformat()])


def machine_description(device: torch.device | None = None) -> dict[str, str]:
    """What measured figures hang on, by name, and the day."""
    description = {"processor": _processor_name(), "instruction set": torch.backends.cpu.get_cpu_capability()}
    if device is not None and device.type == "cuda":
        description["device"] = torch.cuda.get_device_name(device)
    versions = {"threads": str(torch.get_num_threads()), "torch": str(torch.__version__), "code": own_code()}
    return {**description, **versions, "python": platform.python_version(), "date": date.today().isoformat()}


@cache
def boot() -> str:
    """Which machine this is, and since when it runs; "" where the system has no name for that."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@cache
def _processor_name() -> str:
    """As it calls itself; its architecture where it has no name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            line = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        line = ""
    return line.partition(":")[2].strip() or platform.processor() or platform.machine()
