"""The reports' colours: text can be read on what it stands on, and no two colours of a picture look alike, in either
scheme, also to people who do not see red, green or blue."""

import itertools
import math
import re
from collections import Counter

import pytest

from aottrain.report.style import CSS, DARK, LIGHT, MEMORY, SERIES

# Machado, Oliveira and Fernandes 2009, severity 1: what is seen of linear red, green and blue.
VISION = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)


def linear(colour: str) -> list[float]:
    values = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def times(matrix, vector) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    seen = [min(max(value, 0.0), 1.0) for value in times(VISION[vision], linear(colour))]
    x, y, z = (value / white for value, white in zip(times(TO_XYZ, seen), WHITE, strict=True))
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: str, other: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    light, dark = sorted((times(TO_XYZ, linear(colour))[1] for colour in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(scheme):
    for ground in ("page", "card"):
        for ink in ("ink", "dim", "good"):
            assert contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
    assert contrast(scheme["alarm"], scheme["alarm-page"]) >= 4.5
    assert contrast(scheme["strong"], scheme["weak"]) >= 1.5


@pytest.mark.parametrize("index", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", ["memory", "series"])
def test_colours_can_be_told_apart(palette, vision, index):
    colours = MEMORY if palette == "memory" else dict(enumerate(SERIES))
    seen = {name: lab(pair[index], vision) for name, pair in colours.items()}
    least, *pair = min((math.dist(seen[a], seen[b]), a, b) for a, b in itertools.combinations(seen, 2))
    assert least >= 10, pair  # about four just noticeable differences


@pytest.mark.parametrize(("scheme", "index"), [(LIGHT, 0), (DARK, 1)], ids=["light", "dark"])
def test_marks_stand_out_from_the_card(scheme, index):
    assert all(contrast(pair[index], scheme["card"]) >= 3 for pair in SERIES)


def test_no_box_cuts_off_rows():
    assert "max-height" not in CSS and "overflow-y" not in CSS


def test_every_colour_that_is_used_is_there_in_both_schemes():
    defined = Counter(re.findall(r"--([\w-]+):", CSS))
    used = set(re.findall(r"var\(--([\w-]+)\)", CSS))
    assert used and {name: defined[name] for name in used if defined[name] != 2} == {}
