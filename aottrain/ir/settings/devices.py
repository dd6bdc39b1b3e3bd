"""A device as what it can do: specifications of known ones, by name, for machines that are not there.

Peaks are dense ones of the makers' data sheets, which print twice these for sparse matrices; memory is what a process
finds there. What products and attention reach of a peak is no figure of a data sheet: those of A100 and H100 were set
before they were held against published runs (scripts/README.md), the others by likeness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GIB = 1 << 30
HOPPER_WORKSPACE, OTHER_WORKSPACE = 32 << 20, (4096 * 2 + 16 * 8) << 10  # cuBLAS: of a thread, kept from its first call


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device that is planned for."""

    name: str
    source: str
    """Where its figures are from."""
    kind: str = "cuda"
    """"cuda" or "cpu"."""
    memory_bytes: int
    flops: Mapping[str, float]
    """Operations each second at most, by type of number: float32, bfloat16, float16."""
    products: float = 1.0
    """What large matrix products reach of that."""
    attention: float = 1.0
    """What fused attention reaches of it."""
    bytes_per_s: float
    """Of main memory."""
    traffic: float = 1.0
    """What kernels reach of that."""
    gap_s: float = 2e-6
    """Of each call on the device: until the next one begins."""
    launch_s: float = 62e-6
    """Of each call on the host, which runs ahead of the device where that takes longer: what aottrain's programs took
    beside an H100 without CUDA graphs (scripts/README.md, gpu)."""
    link_bytes_per_s: float = 0.0
    """To the other devices of its machine, each way; 0: there are none."""
    network_bytes_per_s: float = 0.0
    """To those of other machines."""
    per_machine: int = 8
    """Devices that one machine has."""
    product_workspace_bytes: int = 0
    """What a library of products keeps for each thread from its first call on."""

    world: int = 1
    """How many of them share parameters, gradients and optimizer state."""

    def flops_per_s(self, dtype: str) -> float:
        """At most; float32's for a type without figures."""
        return self.flops.get(dtype, self.flops["float32"])

    def link(self, world: int) -> float:
        """Bytes each second between so many of them."""
        return self.link_bytes_per_s if world <= self.per_machine else self.network_bytes_per_s


def _card(
    name: str, source: str, gib: float, tflops: tuple[float, float], gb_per_s: float, reached: tuple[float, float],
    links: tuple[float, float], workspace: int = OTHER_WORKSPACE,
) -> Target:  # fmt: skip
    """tflops: of bfloat16 and of float32; reached: by products, by attention; links: GB/s in and between machines."""
    low, single = tflops[0] * 1e12, tflops[1] * 1e12
    flops = {"bfloat16": low, "float16": low, "float32": single}
    return Target(
        name=name, source=source, memory_bytes=int(gib * _GIB), flops=flops, bytes_per_s=gb_per_s * 1e9, traffic=0.85,
        products=reached[0], attention=reached[1], link_bytes_per_s=links[0] * 1e9, network_bytes_per_s=links[1] * 1e9,
        product_workspace_bytes=workspace,
    )  # fmt: skip


_H100 = "NVIDIA, H100 Tensor Core GPU data sheet (2023)"
_A100 = "NVIDIA, A100 Tensor Core GPU data sheet (2022)"
DEVICES = {
    target.name: target
    for target in (
        _card("h100-sxm", _H100, 79.1, (989.4, 67), 3350, (0.70, 0.38), (450, 50), HOPPER_WORKSPACE),
        _card("h100-pcie", _H100, 79.1, (756, 51), 2000, (0.60, 0.33), (64, 25), HOPPER_WORKSPACE),
        _card("h100-hbm2e", "torchtitan benchmarks/llama3_h100_202412_torchtitan.md: H100 of 96 GB, 2.4 TB/s",
              94.9, (989.4, 67), 2400, (0.55, 0.30), (450, 50), HOPPER_WORKSPACE),
        _card("h200", "NVIDIA, H200 Tensor Core GPU data sheet (2024)",
              139.8, (989.4, 67), 4800, (0.70, 0.38), (450, 50), HOPPER_WORKSPACE),
        _card("b200", "NVIDIA, HGX B200 data sheet (2024), an eighth of its figures",
              178, (2250, 75), 7700, (0.65, 0.35), (900, 50), HOPPER_WORKSPACE),
        _card("a100-80", _A100, 79.1, (312, 19.5), 2039, (0.80, 0.55), (300, 25)),
        _card("a100-40", _A100, 39.4, (312, 19.5), 1555, (0.80, 0.55), (300, 25)),
        _card("l40s", "NVIDIA, L40S data sheet (2023)", 44.4, (362, 91.6), 864, (0.70, 0.45), (32, 25)),
        _card("l4", "NVIDIA, L4 Tensor Core GPU data sheet (2023)", 22.0, (121, 30.3), 300, (0.60, 0.45), (32, 12.5)),
        _card("rtx-4090", "NVIDIA, Ada GPU Architecture (2023): with float32 sums",
              23.5, (165.2, 82.6), 1008, (0.85, 0.55), (16, 3)),
    )
}  # fmt: skip


def is_file(device: str) -> bool:
    """Whether the setting `device` is the path of a file of rates."""
    return device.endswith((".yaml", ".yml"))


def is_specified(device: str) -> bool:
    """Whether it is a device that is described, by a name or a file, instead of one at hand."""
    return device in DEVICES or is_file(device)
