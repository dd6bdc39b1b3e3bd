"""The vision transformer: its patches, and what it learns."""

from __future__ import annotations

import torch

from tests.recipes.training import small

vit, OPTIONS, (IMAGES, LABELS) = small("vit", batch_size=64)


def test_a_patch_is_a_square_of_the_image():
    torch.manual_seed(0)
    model = vit.build(OPTIONS)
    tokens = model.patches(IMAGES).flatten(2).transpose(1, 2)
    square = IMAGES[:, :, 0:4, 4:8].flatten(1)  # the second of two in the first row
    torch.testing.assert_close(tokens[:, 1], square @ model.patches.weight.flatten(1).T + model.patches.bias)


def test_the_class_token_sees_every_patch():
    torch.manual_seed(0)
    model = vit.build(OPTIONS)
    before = model(IMAGES[:1])
    for row in (0, 4):
        for column in (0, 4):
            changed = IMAGES[:1].clone()
            changed[:, :, row, column] += 1
            assert not torch.equal(model(changed), before)
    assert before.shape == (1, 4)
