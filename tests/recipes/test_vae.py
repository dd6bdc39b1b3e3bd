"""The variational autoencoder: its bound against torch's distributions, and images from files."""

from __future__ import annotations

import torch
from torch.distributions import Normal, kl_divergence

from aottrain.cli import main
from tests.recipes.training import small

vae, OPTIONS, (IMAGES, NOISE) = small("vae")


def test_the_bound_is_that_of_the_paper():
    torch.manual_seed(0)
    model = vae.build(OPTIONS)
    torch.nn.init.constant_(model.log_scale, -0.3)
    mean, log_variance = model.encoder(IMAGES).chunk(2, dim=1)
    codes = Normal(mean, (log_variance / 2).exp())
    images = Normal(model.decoder(mean + codes.stddev * NOISE), model.log_scale.exp())
    likelihood = images.log_prob(IMAGES).flatten(1).sum(dim=1)
    divergence = kl_divergence(codes, Normal(0.0, 1.0)).sum(dim=1)
    torch.testing.assert_close(model(IMAGES, NOISE), divergence - likelihood)
    torch.testing.assert_close(vae.loss(model, (IMAGES, NOISE)), (divergence - likelihood).mean() / 64)


def test_noise_comes_with_images_of_files_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ["recipe=vae", "data=images", "recipe.model.image_size=8", "recipe.model.width=4", "engine=eager"]
    assert main([*line, "debug=fast", "measure.memory=false", "hydra.run.dir=run"]) == 0
