"""The resnet: its shape against the paper's, its images, counts, mistakes, and training by both engines."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from aottrain.config.extensions.recipes import load_recipe
from tests.recipes.training import assert_engines_train_alike

resnet = load_recipe("resnet")
SMALL = resnet.Options(width=4, num_blocks=1, num_classes=4, image_size=12)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return resnet.build(SMALL)


def batch(options=SMALL, size: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return resnet.make_batch(options, size, torch.Generator().manual_seed(seed))


def test_the_default_is_resnet_20():
    model = resnet.build(resnet.Options())
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    weights = [module for module in convolutions if module.kernel_size == (3, 3)]
    assert len(weights) + 1 == 20 and sum(parameter.numel() for parameter in model.parameters()) == 272_474
    with torch.no_grad():
        stages = [model.blocks[: 3 * n](torch.zeros(2, 16, 32, 32)).shape for n in (1, 2, 3)]
    assert stages == [(2, 16, 32, 32), (2, 32, 16, 16), (2, 64, 8, 8)]


@pytest.mark.parametrize("changes", [{}, {"image_size": 13}, {"width": 1}, {"num_blocks": 3}, {"image_size": 8}])
def test_shapes(changes):
    options = dataclasses.replace(SMALL, **changes)
    images, labels = batch(options, size=1)  # a batch of one has a variance too
    logits = resnet.build(options)(images)
    assert images.shape == (1, 3, options.image_size, options.image_size) and logits.shape == (1, 4)
    assert resnet.loss(resnet.build(options), (images, labels)).shape == ()


def test_a_block_is_the_papers():
    torch.manual_seed(0)
    block = resnet.Block(3, 5, stride=2)
    x = torch.randn(4, 3, 9, 9)

    def normed(y: torch.Tensor) -> torch.Tensor:
        mean, variance = y.mean(dim=(0, 2, 3), keepdim=True), y.var(dim=(0, 2, 3), keepdim=True, correction=0)
        return (y - mean) / (variance + 1e-5).sqrt()

    def convolved(y: torch.Tensor, module: nn.Conv2d, stride: int, padding: int) -> torch.Tensor:
        return nn.functional.conv2d(y, module.weight, stride=stride, padding=padding)

    hidden = normed(convolved(x, block.conv1, 2, 1)).relu()
    shortcut = normed(convolved(x, block.shortcut[0], 2, 0))
    expected = (shortcut + normed(convolved(hidden, block.conv2, 1, 1))).relu()
    torch.testing.assert_close(block(x), expected)
    assert len(resnet.Block(5, 5, stride=1).shortcut) == 0


def test_statistics_are_learnt_in_training_and_used_in_evaluation(model):
    images, _ = batch()
    before = model.stem_norm.running_mean.clone()
    model(images)
    assert not torch.equal(model.stem_norm.running_mean, before) and model.stem_norm.num_batches_tracked == 1
    model.eval()
    together, alone = model(images), torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone)


def test_images_follow_from_the_generator_alone():
    first, again, other = batch(), batch(), batch(seed=1)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    images, labels = first
    assert images.dtype == torch.float32 and labels.dtype == torch.int64 and images.is_contiguous()


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_a_pattern_has_the_standard_deviation_one_and_the_noise_its_own(noise):
    images, labels = batch(resnet.Options(noise=noise), size=4000)
    assert images.mean().item() == pytest.approx(0, abs=0.03)
    assert images.std().item() == pytest.approx(math.sqrt(1 + noise**2), rel=0.03)
    assert labels.bincount(minlength=10).min() > 300 and labels.max() == 9


def test_an_image_shows_its_class_by_direction_alone():
    images, labels = batch(resnet.Options(noise=0.0, num_classes=4), size=200)
    # Spectra forget the phase; half of the plane is the other half's mirror image.
    spectra = torch.fft.rfft2(images[:, 0]).abs().flatten(1)
    peaks = spectra.argmax(dim=1)
    rows, columns = peaks // 17, peaks % 17
    angles = torch.atan2(torch.where(rows > 16, rows - 32, rows).float(), columns.float()) % math.pi
    found = (angles / (math.pi / 4)).round().long() % 4
    assert torch.equal(found, labels)
    means = torch.stack([images[labels == label].mean(dim=0) for label in range(4)])
    assert means.abs().mean() < 0.2  # no average image tells the class


def test_flops_are_those_that_are_done():
    for options in (SMALL, resnet.Options(width=3, num_blocks=2, image_size=13)):
        model = resnet.build(options)
        with FlopCounterMode(display=False) as counter:
            resnet.loss(model, batch(options, size=2)).backward()
        assert counter.get_total_flops() == 2 * resnet.flops_per_sample(options)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"width": 0}, ["width=0"]),
        ({"num_classes": 1, "image_size": 7}, ["num_classes=1", "image_size=7"]),
        ({"num_blocks": 2.0, "width": True}, ["width=True", "num_blocks=2.0"]),
        ({"noise": -0.1}, ["noise=-0.1"]),
        ({"noise": float("nan")}, ["noise=nan"]),
        ({"noise": "loud"}, ["noise='loud'"]),
        ({"noise": 0}, []),
    ],
)
def test_mistakes_are_listed_by_field(changes, named):
    options = resnet.Options(**{**SMALL.__dict__, **changes})
    assert [mistake.partition(":")[0] for mistake in options.check()] == named
    if named:
        with pytest.raises(ValueError, match=named[0].split("=")[0]):
            resnet.build(options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_engines_train_alike_bit_for_bit(precision):
    assert_engines_train_alike(resnet, SMALL, batch(size=16), precision=precision, falls_by=0.5)


def test_what_it_learns_holds_for_other_images():
    torch.manual_seed(0)
    options = dataclasses.replace(SMALL, width=8, noise=0.5)
    model = resnet.build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(60):
        resnet.loss(model, batch(options, size=32, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    images, labels = batch(options, size=200, seed=1000)
    right = (model.eval()(images).argmax(dim=1) == labels).float().mean().item()
    assert right > 0.7
