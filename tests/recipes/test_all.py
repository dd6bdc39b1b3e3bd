"""What holds of every recipe: what it imports, counts and refuses, what its sizes come to, and how it trains."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aottrain.config.extensions.recipes import load_recipe, recipe_names
from tests.recipes.training import SMALL, assert_engines_train_alike, small, trained

SIZES = Path(__file__).resolve().parents[2] / "conf" / "size"
# Parameters as published, where the model is the same to the last number; else what ours come to.
PUBLISHED = {
    "gpt2_124m": 124_439_808, "gpt2_350m": 354_823_168, "gpt2_1b5": 1_557_611_200, "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248, "vit_base": 86_567_656, "resnet50": 25_557_032,
}  # fmt: skip
NEARLY = {
    "bert_base": 109.5e6, "t5_base": 222.8e6, "dit_xl": 674.8e6, "mamba2_130m": 129.0e6, "lstm_large": 66.0e6,
    "moe_8x124m": 549e6, "dlrm_criteo": 167e6, "gcn_4096": 0.542e6, "vae_64": 26.3e6,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*recipe_names()} - {"hf"}))
def test_a_recipe_imports_torch_alone(name):
    tree = ast.parse(Path(str(load_recipe(name).__file__)).read_text(encoding="utf-8"))
    outside = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    outside |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    python = {"__future__", "math", "dataclasses", "functools", "collections.abc"}
    assert outside <= {*python, "torch", "torch.nn.functional"}


@pytest.mark.parametrize("name", SMALL)
def test_flops_are_those_that_are_done(name):
    recipe, options, batch = small(name, batch_size=2)
    model = recipe.build(options)
    # A fused kernel is counted otherwise than its products, or not at all.
    plain = torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH)
    with plain[0], plain[1], FlopCounterMode(display=False) as counter:
        recipe.loss(model, batch).backward()
    per_token = getattr(recipe, "flops_per_token", None)
    expected = 2 * (per_token(options) * options.context if per_token else recipe.flops_per_sample(options))
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("name", SMALL)
def test_each_wrong_size_is_a_line(name):
    recipe, options, _ = small(name)
    for field in dataclasses.fields(options):
        for value in (-1, "many", float("nan"), True):
            if not (isinstance(value, bool) and field.type == "bool"):
                wrong = dataclasses.replace(options, **{field.name: value})
                mistakes = wrong.check()
                assert [line.split("=")[0] for line in mistakes] == [field.name], (field.name, value, mistakes)
                assert "\n" not in mistakes[0]
    with pytest.raises(ValueError, match=field.name):
        recipe.build(wrong)
    assert options.check() == []


@pytest.mark.parametrize(("name", "changes", "expected"), [
    ("bert", {"num_heads": 3}, "num_heads=3: must divide width=16"),
    ("vit", {"patch_size": 3}, "patch_size=3: must divide image_size=8"),
    ("dit", {"width": 18}, "width=18: must be a multiple of 4"),
    ("moe", {"num_chosen": 5}, "num_chosen=5: must be at most num_experts=4"),
    ("moe", {"capacity_factor": 0}, "capacity_factor=0: must be above 0"),
    ("mamba", {"head_width": 7}, "head_width=7: must divide 2 * width=32"),
    ("dlrm", {"num_rows": 1 << 25}, "num_rows=33554432: must be at most 2^24, up to which float32 counts"),
    ("gcn", {"num_known": 20}, "num_known=20: must be below num_nodes=20"),
    ("vae", {"image_size": 10}, "image_size=10: must be a multiple of 4, because it is halved twice"),
])  # fmt: skip
def test_sizes_that_do_not_fit_together(name, changes, expected):
    recipe, options, _ = small(name)
    assert dataclasses.replace(options, **changes).check() == [expected]


@pytest.mark.parametrize("name", sorted({*SMALL} - {"lstm"}))
def test_it_trains_compiled_as_by_eager_bit_for_bit(name):
    recipe, options, batch = small(name)
    assert_engines_train_alike(recipe, options, batch, precision="fp32", falls_by=0.01)


def test_an_lstm_trains_compiled_as_by_eager():
    """Up to rounding: eager's is a call of oneDNN, in which sums are taken in another order."""
    recipe, options, batch = small("lstm")
    losses, state = trained(recipe, options, batch)
    compiled_losses, compiled_state = trained(recipe, options, batch, budget=0.3)
    assert compiled_losses == pytest.approx(losses, rel=1e-4) and losses[-1] < losses[0] - 0.01
    torch.testing.assert_close(compiled_state, state, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("path", sorted(SIZES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_size_has_the_parameters_that_it_says(path):
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe = load_recipe(next(entry["override /recipe"] for entry in values["defaults"]))
    with torch.device("meta"):
        model = recipe.build(recipe.Options(**values["recipe"]["model"]))
    count = sum(parameter.numel() for parameter in model.parameters())
    if path.stem in PUBLISHED:
        assert count == PUBLISHED[path.stem]
    else:
        assert count == pytest.approx(NEARLY[path.stem], rel=0.005)
