"""How numbers are written for people, once, so that the page, the terminal and the README agree."""

from __future__ import annotations

import math
from collections.abc import Sequence


def format_bytes(num_bytes: float) -> str:
    """Binary units, three significant digits: `format_bytes(12_900_000) == "12.3 MiB"`."""
    return _scale(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def exact_bytes(num_bytes: float) -> str:
    """Every digit, for where a rounded figure is looked at closely: `exact_bytes(12_900_000) == "12,900,000 bytes"`."""
    return f"{num_bytes:,.0f} byte{'' if abs(num_bytes) == 1 else 's'}"


def format_flops(num_flops: float) -> str:
    """Floating-point operations (not a rate): `format_flops(2.5e9) == "2.50 GFLOP"`."""
    return _scale(num_flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def format_count(count: float) -> str:
    """Plain counts, whole below ten thousand: `format_count(9876) == "9,876"`, `format_count(1.5e6) == "1.50 M"`."""
    if abs(count) < 10_000 and float(count).is_integer():
        return f"{int(count):,}"
    return _scale(count, 1000, ("", "k", "M", "G", "T"))


def format_seconds(seconds: float) -> str:
    """`412 us`, `12.3 ms`, `1.23 s`, `2 min 05 s`."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds >= 100:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{seconds * 1e6:.0f} us"


def format_percent(ratio: float, *, signed: bool = False) -> str:
    """A ratio as percent: 0.123 is `12.3 %`, signed `+12.3 %`. None at all is `0 %`, signed `none`, and what would
    be rounded to that is `<0.01 %`."""
    if ratio == 0:
        return "none" if signed else "0 %"
    if abs(ratio) < 0.5e-4:
        return "<0.01 %"
    digits = 0 if abs(ratio) >= 1 else 1 if abs(ratio) >= 0.0995 else 2
    return f"{ratio * 100:{'+' if signed else ''}.{digits}f} %"


def format_shape(shape: Sequence[int]) -> str:
    """`16 x 128 x 64`; a tensor without dimensions is a scalar."""
    return " x ".join(str(size) for size in shape) or "scalar"


def _scale(value: float, base: int, units: Sequence[str]) -> str:
    """`value` in the largest unit that keeps it at or above one. Below the first step the number is whole."""
    power = 0
    scaled = float(value)
    # 999.95 would print as "1000": round up into the next unit first.
    while abs(scaled) >= min(base, 999.5) and power < len(units) - 1:
        scaled /= base
        power += 1
    number = _three_digits(scaled) if power else f"{scaled:.0f}"
    return f"{number} {units[power]}".rstrip()


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}"
