"""Small runs that have been trained, for tasks that are about one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from aottrain.cli import main

TEXT = ("num_layers=1", "width=16", "num_heads=2", "context=16")
IMAGES = ("width=4", "num_blocks=1", "image_size=8")


def train(folder: Path, recipe: str, options: Sequence[str], *more: str) -> Path:
    """The output directory, `recipe` in the folder, of a run of three steps by eager PyTorch."""
    line = ["debug=fast", "engine=eager", "trainer.steps=3", "trainer.sample_bytes=0", "measure.memory=false", *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        keys = [f"recipe.model.{option}" for option in options]
        assert main([f"recipe={recipe}", *line, *keys, f"hydra.run.dir={recipe}"]) == 0
    return folder / recipe
