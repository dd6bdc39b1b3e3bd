"""The llama: its parts against plain references, counts, mistakes, writing, and training by both engines."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aottrain.config.extensions.recipes import load_recipe
from tests.recipes.training import assert_engines_train_alike
from tests.sampling import crossed

llama = load_recipe("llama")
SMALL = llama.Options(num_layers=2, width=24, num_heads=6, num_kv_heads=2, mlp_width=40, context=20)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return llama.build(SMALL)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_an_untrained_model_knows_nothing(model):
    batch = (tokens(4, 20), tokens(4, 20).flip(1))
    assert model(batch[0]).shape == (4, 20, 256)
    assert llama.loss(model, batch).item() == pytest.approx(math.log(256), rel=0.02)


def test_no_position_sees_the_future(model):
    x = tokens(1, 20)
    changed = x.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 256
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])
    torch.testing.assert_close(model(x[:, :7]), before[:, :7])


def test_rotary_is_a_turn_of_complex_numbers():
    rotary = llama.Rotary(head_width=8, context=50, base=100.0)
    x = randn(2, 3, 50, 8)
    pairs = torch.complex(x[..., :4], x[..., 4:]).to(torch.complex128)
    angles = torch.tensor([[t * 100.0 ** (-2 * i / 8) for i in range(4)] for t in range(50)], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(rotary(x), expected)
    assert torch.equal(rotary(x)[:, :, 0], x[:, :, 0])
    assert rotary(x.bfloat16()).dtype == torch.bfloat16


def test_rotated_products_depend_on_the_distance_alone():
    rotary = llama.Rotary(head_width=8, context=50, base=100.0)
    q, k = (randn(2, 8)[row].expand(1, 1, 50, 8) for row in (0, 1))
    products = (rotary(q) @ rotary(k).transpose(-2, -1))[0, 0]
    for distance in (0, 3, 20):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_grouped_queries_are_the_textbooks_with_repeated_heads(num_kv_heads):
    torch.manual_seed(0)
    options = dataclasses.replace(SMALL, num_kv_heads=num_kv_heads)
    attention = llama.Attention(options)
    rotary = llama.Rotary(options.head_width, options.context, options.rope_base)
    x = randn(2, 20, 24)

    def textbook() -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(2, 20, -1, 4).transpose(1, 2)

        group = 6 // num_kv_heads
        q, k = rotary(heads(attention.query(x))), rotary(heads(attention.key(x))).repeat_interleave(group, dim=1)
        v = heads(attention.value(x)).repeat_interleave(group, dim=1)
        future = torch.ones(20, 20, dtype=torch.bool).triu(diagonal=1)
        scores = (q @ k.transpose(-2, -1) / math.sqrt(4)).masked_fill(future, -math.inf)
        return attention.out((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(2, 20, 24))

    found, expected = attention(x, rotary), textbook()
    torch.testing.assert_close(found, expected)
    weights = list(attention.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), weights), torch.autograd.grad(expected.square().sum(), weights)
    )


def test_the_mlp_is_gated_by_silu(model):
    mlp, x = model.blocks[0].mlp, randn(3, 24)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    torch.testing.assert_close(mlp(x), F.linear(gate * torch.sigmoid(gate) * up, mlp.down.weight))


def test_the_norm_divides_by_the_root_mean_square(model):
    x = randn(3, 24)
    torch.testing.assert_close(model.final_norm(x), x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt())


def test_the_initialisation():
    torch.manual_seed(0)
    model = llama.build(llama.Options(num_layers=8, width=96))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (4 if residual else 1), rel=0.05), name


@pytest.mark.parametrize(("tie_head", "expected"), [(True, ["token_embedding.weight"]),
                                                    (False, ["token_embedding.weight", "head.weight"])])  # fmt: skip
def test_the_head_is_tied_where_asked(tie_head, expected):
    model = llama.build(dataclasses.replace(SMALL, tie_head=tie_head))
    assert [name for name, parameter in model.named_parameters() if 256 in parameter.shape] == expected
    assert (model.head.weight is model.token_embedding.weight) == tie_head


def test_no_table_is_saved_in_a_checkpoint(model):
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_flops_are_those_that_are_done(model):
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        llama.loss(model, (tokens(3, 20), tokens(3, 20))).backward()
    assert counter.get_total_flops() == 60 * llama.flops_per_token(SMALL)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 0}, ["num_layers=0"]),
        ({"width": 25}, ["num_heads=6"]),
        ({"width": 18}, ["num_heads=6"]),  # heads of width 3 have no pairs
        ({"num_kv_heads": 4}, ["num_kv_heads=4"]),
        ({"width": 25, "num_kv_heads": 12}, ["num_heads=6", "num_kv_heads=12"]),
        ({"mlp_width": 2.5, "vocab_size": True}, ["mlp_width=2.5", "vocab_size=True"]),
        ({"rope_base": 1.0}, ["rope_base=1.0"]),
        ({"rope_base": float("nan"), "tie_head": 1}, ["rope_base=nan", "tie_head=1"]),
        ({"rope_base": float("inf"), "context": 0}, ["context=0", "rope_base=inf"]),
        ({}, []),
    ],
)
def test_mistakes_are_listed_by_field(changes, named):
    options = llama.Options(**{**SMALL.__dict__, **changes})
    mistakes = options.check()
    assert [mistake.partition(":")[0] for mistake in mistakes] == named
    assert all("\n" not in mistake for mistake in mistakes)
    if named:
        with pytest.raises(ValueError, match=named[0].split("=")[0]):
            llama.build(options)


def test_writing_is_repeatable_and_leaves_the_model_as_it_was(model):
    before = torch.get_rng_state()
    texts = [llama.generate(model, b"ab", 30, 1.0, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 30
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert llama.generate(model, b"ab", 5, 0) == llama.generate(model, b"ab", 5, 0)
    assert llama.generate(model, b"ab", 0) == b""
    with pytest.raises(ValueError, match="prompt"):
        llama.generate(model, b"", 5)


@pytest.mark.parametrize(("precision", "tie_head"), crossed(["fp32", "bf16"], [False, True], one_in=2))
def test_both_engines_train_alike_bit_for_bit(precision, tie_head):
    options = dataclasses.replace(SMALL, tie_head=tie_head)
    batch = (tokens(8, 20), tokens(8, 20, seed=1))
    assert_engines_train_alike(llama, options, batch, precision=precision, falls_by=1.0)
