"""The op table against the ops themselves: what it says of views, writes and purity is tried on real tensors."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from aottrain.ir.ops import HIDDEN_MUTATIONS, OpKind, flop_formula, hidden_mutation, is_pure, op_info

aten = torch.ops.aten


def x():
    return torch.arange(24, dtype=torch.float32).view(4, 6)


CALLS = [
    (aten.view.default, ([6, 4],)),
    (aten._unsafe_view.default, ([6, 4],)),
    (aten._reshape_alias.default, ([6, 4], [4, 1])),
    (aten.t.default, ()),
    (aten.transpose.int, (0, 1)),
    (aten.permute.default, ([1, 0],)),
    (aten.slice.Tensor, (0, 1, 3)),
    (aten.select.int, (0, 1)),
    (aten.expand.default, ([2, 4, 6],)),
    (aten.unsqueeze.default, (0,)),
    (aten.squeeze.dim, (0,)),
    (aten.as_strided.default, ([2, 2], [1, 2])),
    (aten.diagonal.default, ()),
    (aten.unfold.default, (0, 2, 1)),
    (aten.split.Tensor, (2,)),
    (aten.unbind.int, ()),
    (aten.detach.default, ()),
    (aten.alias.default, ()),
    (aten.lift_fresh.default, ()),
    (aten.narrow.default, (0, 0, 2)),
    (aten.movedim.int, (0, 1)),
    (aten.view.dtype, (torch.int32,)),
    (aten.add.Tensor, (1.0,)),
    (aten.mul.Tensor, (1.0,)),
    (aten.clone.default, ()),
    (aten._to_copy.default, ()),
    (aten.neg.default, ()),
    (aten.sum.dim_IntList, ([0],)),
    (aten.cumsum.default, (0,)),
    (aten.flip.default, ([0],)),
    (aten.index_select.default, (0, torch.tensor([1]))),
    (aten.sort.default, ()),
    (aten.new_zeros.default, ([2],)),
    (aten.empty_like.default, ()),
    (aten.slice_scatter.default, (torch.zeros(2, 6), 0, 0, 2)),
    (aten.repeat.default, ([1, 1],)),
    (aten.copy.default, (torch.zeros(4, 6),)),
    (aten.constant_pad_nd.default, ([0, 0],)),
    (aten.native_dropout.default, (0.5, False)),
]


@pytest.mark.parametrize("target, args", CALLS, ids=lambda v: str(v) if hasattr(v, "_schema") else "")
def test_views_share_their_inputs_storage_and_nothing_else_does(target, args):
    source = x()
    out = target(source, *args)
    first = out[0] if isinstance(out, (tuple, list)) else out
    shares = first.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    assert (op_info(target).view_of == 0) is shares
    assert (op_info(target).kind is OpKind.VIEW) is shares


WRITES = [
    (aten.add_.Tensor, (1.0,)),
    (aten.copy_.default, (torch.zeros(4, 6),)),
    (aten.zero_.default, ()),
    (aten.fill_.Scalar, (3.0,)),
    (aten.index_put_.default, ([torch.tensor([0])], torch.full((6,), -1.0))),
    (aten.masked_fill_.Scalar, (torch.ones(4, 6, dtype=torch.bool), 9.0)),
    (aten.scatter_.value, (0, torch.zeros(1, 6, dtype=torch.int64), 7.0)),
    (aten.relu_.default, ()),
    (aten.mul_.Tensor, (2.0,)),
]


@pytest.mark.parametrize("target, args", WRITES, ids=lambda v: str(v) if hasattr(v, "_schema") else "")
def test_writes_are_known(target, args):
    source = x() - 5
    before = source.clone()
    target(source, *args)
    assert not torch.equal(source, before)
    assert op_info(target).writes == (0,) and not is_pure(target)


def test_out_variants_write():
    assert op_info(aten.add.out).writes == (3,) and not is_pure(aten.add.out)


@pytest.mark.parametrize("target", [aten.native_batch_norm.default, aten._native_batch_norm_legit.default], ids=str)
def test_hidden_mutations_do_mutate(target):
    mean, var = torch.zeros(6), torch.ones(6)
    target(x(), None, None, mean, var, True, 0.1, 1e-5)
    assert not torch.equal(mean, torch.zeros(6)) and not torch.equal(var, torch.ones(6))
    assert hidden_mutation(target) == (3, 4)


def test_hidden_updates_of_statistics_alone():
    mean, var = torch.zeros(6), torch.ones(6)
    aten.batch_norm_update_stats(x(), mean, var, 0.1)
    assert not torch.equal(mean, torch.zeros(6))
    assert hidden_mutation(aten.batch_norm_update_stats.default) == (1, 2)


@pytest.mark.parametrize("name", HIDDEN_MUTATIONS)
def test_hidden_mutations_name_statistics_of_real_ops(name):
    packet = getattr(aten, name, None)
    if packet is None:
        assert name in ("cudnn_batch_norm", "miopen_batch_norm")
        return
    arguments = packet.overloads()
    schema = getattr(packet, "default" if "default" in arguments else arguments[0])._schema
    for position in HIDDEN_MUTATIONS[name]:
        assert "running" in schema.arguments[position].name


def test_pure_ops_give_the_same_again():
    for target in dict(CALLS):
        assert is_pure(target) or "dropout" in str(target), target
    assert is_pure(operator.getitem)
    assert is_pure(aten._scaled_dot_product_flash_attention_for_cpu.default)
    for target in (aten.rand.default, aten.bernoulli.p, aten.native_dropout.default, aten.randperm.default):
        assert not is_pure(target)


def test_kinds():
    assert op_info(aten.mm.default).kind is OpKind.COMPUTE and op_info(aten.mm.default).label == "matrix product"
    assert op_info(aten.convolution.default).label == "convolution"
    assert op_info(aten._scaled_dot_product_flash_attention_for_cpu.default).label == "attention"
    assert op_info(aten.add.Tensor).kind is OpKind.CHEAP
    assert op_info(operator.getitem).kind is OpKind.STRUCTURE and op_info(operator.getitem).view_of == 0


def test_formulas_of_the_arithmetic_ops():
    a, b = torch.zeros(3, 4), torch.zeros(4, 5)
    assert flop_formula(aten.mm.default)(a, b, out_val=a @ b) == 2 * 3 * 4 * 5
    assert flop_formula(aten.add.Tensor) is None and flop_formula(operator.getitem) is None


@pytest.mark.parametrize("packet", [aten.mm, aten.bmm, aten.addmm, aten.baddbmm])
def test_a_product_whose_result_has_another_type_counts_as_any(packet):
    """torch's own formulas take the type for the shape of the result, and raise."""
    batch = (2,) * ("b" in packet.__name__)
    added = [torch.zeros(*batch, 3, 5)] * ("add" in packet.__name__)
    operands = [*added, torch.zeros(*batch, 3, 4), torch.zeros(*batch, 4, 5)]
    count = 2 * 3 * 4 * 5 * (2 if batch else 1)
    out = packet.default(*operands)
    assert (
        flop_formula(packet.default)(*operands, out_val=out) == flop_registry[packet](*operands, out_val=out) == count
    )
    assert flop_formula(packet.dtype)(*operands, torch.float32, out_val=out) == count


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_attention_is_counted_as_torch_counts_it_and_on_a_cpu_too(kernel):
    forward, backward = (getattr(aten, f"_scaled_dot_product_{kernel}{end}") for end in ("", "_backward"))
    q, k, v = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 7, 8), torch.zeros(2, 4, 7, 6)
    out = torch.zeros(2, 4, 5, 6)
    assert flop_formula(forward.default)(q, k, v) == flop_registry[forward](q, k, v, out_val=out)
    assert flop_formula(backward.default)(out, q, k, v) == flop_registry[backward](out, q, k, v, out_val=q)
    on_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
    shared = k[:, :2], v[:, :2]
    assert flop_formula(on_cpu)(q, *shared) == flop_formula(forward.default)(q, k, v) == 2 * 2 * 4 * 5 * 7 * (8 + 6)
