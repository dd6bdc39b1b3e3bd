"""Runs stopped anywhere, amid an epoch, in steps of two micro-batches: bitwise the one that was not stopped."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from aottrain.cli import main
from aottrain.trainer.checkpoint import load
from tests.sampling import WHOLE

STEPS = 24
POSITIONS = random.Random(0).sample(range(1, STEPS), 20)
COMMON = [
    "debug=fast", "engine=eager", "data.order=epochs", "data.batch_size=3", "trainer.accumulate=2",
    f"lr_schedule.total_steps={STEPS}", "trainer.sample_bytes=0", "trainer.eval_every=0", "trainer.save_every=1",
    "trainer.keep_last=24", "measure.memory=false",
]  # fmt: skip
TEXT = ["data.path=data.jsonl", "data.packing=true", "recipe.model.context=16"]
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
KINDS = {
    "packed text": [*TEXT, *(f"recipe.model.{key}" for key in ("num_layers=1", "width=16", "num_heads=2"))],
    "images": ["recipe=resnet", "data=images", "data.path=images.npz", "data.pad=1", "data.flip=true",
               *(f"recipe.model.{key}" for key in ("width=4", "num_blocks=1", "num_classes=3", "image_size=8"))],
    "hf": ["recipe=hf", "recipe.model.type=bert", "recipe.model.dropout=0.1", *TEXT,
           *(f"recipe.model.config.{key}={value}" for key, value in TINY.items())],
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def unbroken(request, tmp_path_factory):
    """(Folder with the data and `run`, what the kind adds to the command line)."""
    if request.param == "hf":
        pytest.importorskip("transformers", reason="transformers is not installed (pip install 'aottrain[hf]')")
    folder = tmp_path_factory.mktemp("going_on")
    texts = [f"{i} and {i * i}. " * (1 + i % 4) for i in range(60)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pixels = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 3)).astype(np.uint8)
    np.savez(folder / "images.npz", x=pixels, y=np.arange(60) % 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*COMMON, *KINDS[request.param], f"trainer.steps={STEPS}", "hydra.run.dir=run"]) == 0
    return folder


@pytest.mark.parametrize(
    "number", [pytest.param(k, marks=() if k in (5, 13) else WHOLE) for k in range(len(POSITIONS))]
)
def test_from_any_position_a_run_goes_on_bitwise(unbroken, number, monkeypatch, capsys):
    monkeypatch.chdir(unbroken)
    position = POSITIONS[number]
    part, rest = Path(f"part{number}"), Path(f"rest{number}")
    shutil.copytree("run", part)
    for file in (part / "checkpoints").glob("step_*"):
        if int(file.stem.removeprefix("step_")) > position:
            file.unlink()
    assert main([f"resume={part}", f"hydra.run.dir={rest}", f"trainer.steps={STEPS}"]) == 0
    assert f"going on after step {position}" in capsys.readouterr().out
    last = f"checkpoints/step_{STEPS:08d}.pt"
    states = [load(folder / last).state for folder in (Path("run"), rest)]
    for kind in ("model", "optimizer", "random"):
        values, others = ([v for v in tree_leaves(state[kind]) if isinstance(v, torch.Tensor)] for state in states)
        assert values and all(torch.equal(one, other) for one, other in zip(values, others, strict=True))
