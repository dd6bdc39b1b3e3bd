"""Which release of torch the tests' records are of: what compiles, and which programs seeds stand for, hang on it."""

from __future__ import annotations

import torch

RECORDED_TORCH = "2.13"


def on_recorded_torch() -> bool:
    return torch.__version__.startswith(f"{RECORDED_TORCH}.")
