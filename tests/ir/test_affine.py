"""Addresses as affine functions: composing, splitting, and finding an index again from a place in memory."""

from __future__ import annotations

import itertools

import pytest

from aottrain.ir.kernels.affine import Affine, Straddles, delinearize, offset_of, row_major

LAYOUTS = [
    ((4, 6), (6, 1)), ((4, 6), (1, 4)), ((2, 3, 5), (15, 5, 1)), ((2, 3, 5), (100, 20, 3)), ((2, 1, 5), (5, 0, 1)),
    ((2, 3, 5), (1, 10, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS)
def test_delinearize_inverts_offset_of(shape, strides):
    index = [Affine(((d, 1),)) if size > 1 else Affine() for d, size in enumerate(shape)]
    sizes = dict(enumerate(shape))
    for start in (0, 7):
        found = delinearize(offset_of(index, strides, start), sizes, shape, strides, start)
        assert found == tuple(index)


def test_a_merged_loop_is_split_where_a_dimension_ends():
    """One loop over 24 elements read through a view of 4 x 6."""
    with pytest.raises(Straddles) as caught:
        delinearize(Affine(((0, 1),)), {0: 24}, (4, 6), (6, 1))
    assert (caught.value.loop, caught.value.inner) == (0, 6)
    split = Affine(((0, 1),)).split(0, 1, 2, 6)
    found = delinearize(split, {1: 4, 2: 6}, (4, 6), (6, 1))
    assert found == (Affine(((1, 1),)), Affine(((2, 1),)))


@pytest.mark.parametrize(
    ("offset", "sizes", "shape", "strides", "start"),
    [
        (Affine(((0, 3),)), {0: 4}, (4, 6), (6, 2), 0),  # no multiple of a stride
        (Affine(((0, -1),)), {0: 4}, (4,), (1,), 0),  # backwards
        (Affine(((0, 1),), 1), {0: 3}, (4,), (1,), 0),  # begins elsewhere
        (Affine(((0, 1),)), {0: 10}, (2, 3), (5, 1), 0),  # runs through a gap
        (Affine(((0, 1), (1, 1))), {0: 5, 1: 2}, (5, 2), (1, 1), 0),  # a window over a sequence: rows overlap
    ],
)
def test_what_no_index_reaches(offset, sizes, shape, strides, start):
    try:
        assert delinearize(offset, sizes, shape, strides, start) is None
    except Straddles as border:  # then the split finds it
        split = offset.split(border.loop, 8, 9, border.inner)
        sizes = {8: sizes[border.loop] // border.inner, 9: border.inner}
        assert delinearize(split, sizes, shape, strides, start) is None


def test_splitting_keeps_every_place():
    whole = Affine(((0, 5), (1, 2)), 3)
    split = whole.split(0, 7, 8, 4)
    for i, j in itertools.product(range(12), range(3)):
        assert whole.at({0: i, 1: j}) == split.at({7: i // 4, 8: i % 4, 1: j})


def test_row_major_counts_iterations():
    number = row_major([(3, 2), (5, 4), (1, 3)])
    order = [number.at({3: a, 5: b, 1: c}) for a in range(2) for b in range(4) for c in range(3)]
    assert order == list(range(24))


def test_equal_functions_are_equal_values():
    assert Affine(((0, 2),)) + Affine(((0, -2), (1, 1))) == Affine(((1, 1),))
    assert Affine.of({1: 3, 0: 0}, 2) * 2 == Affine(((1, 6),), 4)
    assert str(Affine(((0, 1), (2, 5)), 7)) == "i0 + 5*i2 + 7"
