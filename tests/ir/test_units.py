import math

import pytest

from aottrain.ir.units import (
    exact_bytes,
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
    format_shape,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (12_900_000, "12.3 MiB"),
        (1024**2 - 1, "1.00 MiB"),
        (6 * 1024**3, "6.00 GiB"),
        (5000 * 1024**4, "5000 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_are_binary_and_have_three_digits(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (9876, "9,876"), (1_500_000, "1.50 M"), (999_950, "1.00 M")])
def test_counts_are_whole_while_they_are_short(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 FLOP"), (2.5e9, "2.50 GFLOP"), (16_800_000, "16.8 MFLOP")])
def test_flops(value, text):
    assert format_flops(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 us"),
        (412e-6, "412 us"),
        (0.0123, "12.3 ms"),
        (1.234, "1.23 s"),
        (1.0, "1.00 s"),
        (1e-3, "1.00 ms"),
        (125, "2 min 05 s"),
        (math.inf, "inf s"),
        (math.nan, "nan s"),
    ],
)
def test_seconds(value, text):
    assert format_seconds(value) == text


def test_percent_and_shape():
    assert [format_percent(0.0045), format_percent(0.123), format_percent(2.5)] == ["0.45 %", "12.3 %", "250 %"]
    assert format_percent(-0.1, signed=True) == "-10.0 %"
    assert [format_percent(ratio, signed=True) for ratio in (0.0, -1e-9, 4e-5, 6e-5)] == [
        "none",
        "<0.01 %",
        "<0.01 %",
        "+0.01 %",
    ]
    assert [format_percent(0.0), format_percent(1e-9)] == ["0 %", "<0.01 %"]
    assert [format_shape((16, 128)), format_shape(())] == ["16 x 128", "scalar"]


def test_every_digit_is_there_where_it_is_asked_for():
    texts = [exact_bytes(num_bytes) for num_bytes in (12_900_000, 1, -2048)]
    assert texts == ["12,900,000 bytes", "1 byte", "-2,048 bytes"]
