"""The diffusion transformer: how it begins, what it is told, and the noise that it is given."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.training import small

dit, OPTIONS, BATCH = small("dit", batch_size=400)


def test_it_begins_by_finding_no_noise():
    torch.manual_seed(0)
    model = dit.build(OPTIONS)
    images, steps, classes, noise = (each[:5] for each in BATCH)
    assert not model(images, steps, classes).any() and model(images, steps, classes).shape == images.shape
    assert dit.loss(model, (images, steps, classes, noise)).item() == pytest.approx(noise.square().mean().item())


def test_patches_come_back_where_they_were():
    torch.manual_seed(0)
    model = dit.build(OPTIONS)
    torch.nn.init.normal_(model.head.weight)
    image = torch.zeros(1, 3 - 2, 8, 8)
    changed = image.clone()
    changed[0, 0, 2, 5] = 1.0  # the gates are closed: a patch changes its own pixels alone
    label = torch.zeros(1, dtype=torch.int64)
    differs = (model(image, label, label) != model(changed, label, label))[0, 0].nonzero()
    assert {tuple(place) for place in differs.tolist()} == {(2, 4), (2, 5), (3, 4), (3, 5)}


def test_noise_grows_with_the_step_and_the_schedule_is_the_papers():
    remaining = dit.build(OPTIONS).remaining
    assert remaining[0].item() == pytest.approx(1 - 1e-4) and (remaining.diff() < 0).all()
    assert remaining[-1].item() == pytest.approx(4.04e-5, rel=0.01)  # what the paper's 1,000 steps leave


def test_one_class_in_ten_is_not_told():
    _, steps, classes, noise = BATCH
    assert (classes == OPTIONS.num_classes).float().mean().item() == pytest.approx(0.1, abs=0.05)
    assert 0 <= steps.min() < 20 and 980 < steps.max() < 1000
    assert noise.std().item() == pytest.approx(1.0, abs=0.02)
