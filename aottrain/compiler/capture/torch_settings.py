"""Torch's settings for all code that follows: what a program must leave as it was, and what a trace needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aottrain.compat import autocast_state


def global_settings() -> tuple[Any, ...]:
    """What a program can set for all code after it, beside the grad mode."""
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_default_dtype(), deterministic, torch.get_num_threads(), autocast_state()


def op_settings() -> tuple[Any, ...]:
    """Those that one operator reads, and a program can set for a part of itself."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def restore_settings(settings: tuple[Any, ...]) -> None:
    dtype, deterministic, num_threads, _ = settings
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


@contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Autocast keeps (or not) the low-precision copy of a weight for its second use, as it does around eager code.

    Tracers switch it off; but then the gradient of a weight that is used twice is summed in another precision.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)
