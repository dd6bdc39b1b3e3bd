"""recipe=hf: packed documents, label smoothing and images of one's own, each for the types that can be told of them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install 'aottrain[hf]')")

from safetensors.torch import load_file  # noqa: E402

import aottrain  # noqa: E402
from aottrain.cli import main  # noqa: E402
from aottrain.data.tokens.packing import IGNORED, packed  # noqa: E402
from aottrain.trainer.engines import LossModule, ModuleStep  # noqa: E402
from recipes import _hf_models as models  # noqa: E402
from recipes import _hf_packing as packing  # noqa: E402
from recipes import hf  # noqa: E402
from tests.recipes.test_hf import OF_TASK, TINY, batch_of  # noqa: E402

CONTEXT = 16
SMALL = {**TINY, "intermediate_size": 48}
# By the way in which each is told.
PACKED = {
    "positions": {"type": "qwen3", "config": {**SMALL, "num_key_value_heads": 1}},
    "mask": {"type": "bert", "config": SMALL},
    "positions behind the padding's": {"type": "roberta", "config": SMALL},
    "a convolution over time that is told, too": {"type": "lfm2", "config": {"num_hidden_layers": 2}},
}


def documents(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(32, 127, length).astype(np.uint8) for length in lengths]


def rows_of(options: hf.Options, given: list[np.ndarray]) -> tuple[torch.Tensor, ...]:
    rows = packed(given, CONTEXT)
    return hf.prepare(options, rows.read(np.arange(len(rows)), None), torch.Generator().manual_seed(0))


def module_of(options: hf.Options) -> LossModule:
    torch.manual_seed(0)
    return LossModule(hf.build(options), hf.loss, weight=hf.weight).train()


def loss_alone(model, inputs: torch.Tensor, labels: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Mean over all labels, of each document of the rows read by itself."""
    total = torch.zeros(())
    for row, begins, wanted in zip(inputs, starts, labels, strict=True):
        for begin in begins.unique():
            own = begins == begin
            logits = model(row[own][None]).logits[0]
            total = total + F.cross_entropy(logits, wanted[own], reduction="sum", ignore_index=IGNORED)
    return total / (labels != IGNORED).sum()


@pytest.mark.parametrize("way", PACKED)
def test_a_packed_loss_is_that_of_the_documents_alone_and_compiled_as_by_eager(way):
    options = hf.Options(**PACKED[way], context=CONTEXT)
    assert options.check() == [] and options.reads_packed is True
    module, given = module_of(options), documents(5, 9, 17, 4, 12)
    batch = rows_of(options, given)
    rows = packed(given, CONTEXT)
    _, targets, starts = rows.read(np.arange(len(rows)), None)
    assert not (batch[-1][targets == IGNORED] != IGNORED).any()
    eager = module(*batch)
    assert torch.allclose(eager, loss_alone(module.model, batch[0], batch[-1], starts), rtol=1e-5)
    gradients = torch.autograd.grad(eager, list(module.parameters()), allow_unused=True)
    step = aottrain.compile(module, capture="trace", kernel="aten", on_unsupported="error", decisions="default")
    loss = step(*batch)
    loss.backward()
    assert torch.equal(loss, eager)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert (gradient is None and parameter.grad is None) or torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("way", ["positions", "mask"])
@pytest.mark.parametrize("engine", ["eager", "aot"])
def test_four_micro_batches_with_places_that_are_no_label_are_one_batch(way, engine):
    """Rows are filled unevenly, and of `masked` few places have a label: means of micro-batches would be another."""
    options = hf.Options(**PACKED[way], context=CONTEXT)
    batch = rows_of(options, documents(*[17, 15] * 8, *[3, 5, 7, 9, 11] * 4))
    size = len(batch[0]) // 4
    parts = [tuple(value[k * size : (k + 1) * size] for value in batch) for k in range(4)]
    batch = tuple(value[: 4 * size] for value in batch)
    assert len({int(hf.weight(part)) for part in parts}) > 1
    found = []
    for batches in ([batch], parts):
        module = module_of(options)
        called = module
        if engine == "aot":
            called = aottrain.compile(module, capture="trace", kernel="aten", decisions="default")
        result = ModuleStep(engine, called, tokens_per_batch=1, shares=module.shares, module=module)(batches)
        found.append((result.loss, [p.grad for p in module.parameters() if p.grad is not None]))
    (whole, gradients), (sum_of_parts, others) = found
    assert torch.allclose(whole, sum_of_parts, rtol=1e-5)
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6 * one.abs().max().item() + 1e-8)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mamba", "data.packing=true: mamba of transformers .* neither by positions nor by a mask"),
        ("bloom", "data.packing=true: bloom of transformers .* neither by positions nor by a mask"),
        ("t5", "data.packing=true: t5 of transformers .*has a source and a target"),
    ],
    ids=["mamba", "bloom", "t5"],
)
def test_what_keeps_no_documents_apart_is_one_line(name, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": f"{i} is {i}."}) + "\n" for i in range(40)))
    line = [
        "recipe=hf",
        f"recipe.model.type={name}",
        "recipe.model.context=16",
        "data.path=data.jsonl",
        "data.packing=true",
        "debug=fast",
    ]
    assert main(line) == 2
    (told,) = [each for each in capsys.readouterr().err.splitlines() if "data.packing" in each]
    assert re.search(text, told), told


def test_a_large_model_is_tried_by_a_small_one_of_its_type(monkeypatch):
    monkeypatch.setattr(packing, "MOST_PARAMETERS_TRIED", 1)
    falcon = {"type": "falcon", "context": 24}
    # Before 5.24 it takes a mask, but not beside alibi; since then it makes its own of positions.
    needs_mask = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
    assert packing.way_of(hf.Options(**falcon)) == packing.Way(has_mask=needs_mask)
    assert isinstance(packing.way_of(hf.Options(**falcon, config={"alibi": True})), str if needs_mask else packing.Way)
    assert packing.way_of(hf.Options(type="opt", context=24)) == packing.Way(has_mask=True)  # positions mix documents
    assert packing.way_of(hf.Options(type="mistral", context=24, config={"sliding_window": 4})) == packing.Way()


def test_a_packed_run_goes_on_bitwise(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [f"{i} and {i * i}. " * (1 + i % 4) for i in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    line = ["recipe=hf", "recipe.model.type=bert", "data.path=data.jsonl", "data.packing=true", "debug=fast"]
    line += [f"recipe.model.config.{key}={value}" for key, value in SMALL.items()]
    line += ["recipe.model.context=16", "recipe.model.label_smoothing=0.1", "recipe.model.dropout=0.1"]
    line += ["engine=eager", "data.order=epochs", "trainer.accumulate=2", "lr_schedule.total_steps=4"]
    assert main([*line, "trainer.steps=4", "hydra.run.dir=whole"]) == 0
    assert main([*line, "trainer.steps=2", "hydra.run.dir=part"]) == 0
    assert main(["resume=part", "trainer.steps=4", "hydra.run.dir=rest"]) == 0
    whole, rest = (
        load_file(tmp_path / name / "checkpoints" / "step_00000004.safetensors") for name in ("whole", "rest")
    )
    assert all(torch.equal(value, rest[key]) for key, value in whole.items())


@pytest.mark.parametrize("task", OF_TASK)
def test_labels_are_smoothed_in_training_alone(task):
    options = hf.Options(**OF_TASK[task], label_smoothing=0.2)
    assert options.check() == []
    model, batch = hf.build(options).eval(), batch_of(options)
    inputs, labels = batch[0], batch[-1]
    own = model(**{model.main_input_name: inputs}, labels=labels)
    assert torch.equal(hf.loss(model, batch), own.loss)
    logits, wanted = (own.logits[:, :-1], labels[:, 1:]) if task == "causal" else (own.logits, labels)
    logits, wanted = logits.flatten(0, -2), wanted.flatten()
    logs = logits[wanted != IGNORED].log_softmax(-1)
    expected = -0.8 * logs.gather(1, wanted[wanted != IGNORED][:, None]).mean() - 0.2 * logs.mean()
    assert torch.allclose(hf.loss(model.train(), batch), expected, rtol=1e-5)


def test_a_loss_that_is_more_than_an_entropy_is_not_smoothed():
    options = hf.Options(type="mixtral", context=8, config={"output_router_logits": True}, label_smoothing=0.1)
    text = "label_smoothing=0.1: of type mixtral, its own loss is more than a cross-entropy of its logits; use 0.0"
    assert options.check() == [text]
    assert "more than a cross-entropy" in str(hf.Options(**{**vars(options), "label_smoothing": 0.0}).reads_packed)


def test_images_of_ones_own_are_read_and_augmented(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (40, 8, 8, 3)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=images, y=np.arange(40) % 4)
    keys = [f"recipe.model.config.{key}={value}" for key, value in {**SMALL, "patch_size": 4}.items()]
    line = ["recipe=hf", "recipe.model.type=vit", "recipe.model.num_classes=4", *keys, "data=images"]
    line += ["data.path=images.npz", "data.pad=1", "data.flip=true", "debug=fast", "engine=eager"]
    assert main(line) == 2
    assert "recipe.model.config.image_size=8 recipe.model.config.num_channels=3 would fit" in capsys.readouterr().err
    assert main([*line, "recipe.model.config.image_size=8", "hydra.run.dir=run"]) == 0
    assert main(["task=eval", "eval.run=run", "hydra.run.dir=eval"]) == 0
    assert main([*line[:2], "data=images", "recipe.model.type=bert", "data.path=images.npz"]) == 2
    assert "data=images: the recipe takes data=text or data=tokens" in capsys.readouterr().err
    assert hf.Options(type="vit").image_size == 32 and hf.Options(type="bert").image_size is None
    assert models.task_of(hf.Options(type="vit")) == "image"
