"""Which release of torch the tests' records are of: what compiles, and which programs seeds stand for, hang on it.

Another release decomposes some operators into others, which is neither wrong nor of ours. By one nothing is compared
with the records: texts of whole programs (golden) and bytes that their kernels move (traffic), which are skipped, and
which calls ran eagerly (conformance, fuzz), whose values are compared with that release's eager mode all the same.
Devices are simulated to a build for CPUs alone, of whatever release (simulated/device.py).
"""

from __future__ import annotations

import torch

RECORDED_TORCH = "2.13"


def on_recorded_torch() -> bool:
    return torch.__version__.startswith(f"{RECORDED_TORCH}.")
