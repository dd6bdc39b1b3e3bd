"""Calls that eager refuses and torch's fakes do not: types without a kernel, dimensions that are not there, views that
leave their memory, tensors too small for what is written to them. The error is eager's, also where kernels of our own
could compute something."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain

INDEX = torch.tensor([0])
HALVES = torch.full((4,), 0.5)
CLASSES = torch.tensor([0, 1, 2, 3])
TYPES = {
    "softmax": lambda x: F.softmax(x.int(), 0),
    "gelu": lambda x: F.gelu(x.int()),
    "gelu, unread": lambda x: (F.gelu(x.int()), x * 2)[1],
    "silu": lambda x: F.silu(x.int()),
    "mish": lambda x: F.mish(x.long()),
    "hardswish": lambda x: F.hardswish(x.byte()),
    "hardsigmoid": lambda x: F.hardsigmoid(x.int()),
    "softplus": lambda x: F.softplus(x.int()),
    "nll_loss": lambda x: F.nll_loss(x.int(), CLASSES),
    "logsigmoid": lambda x: F.logsigmoid(x.short()),
    "glu": lambda x: F.glu(x.int(), 0),
    "prelu": lambda x: F.prelu(x.int(), torch.ones(1).int()),
    "avg_pool2d": lambda x: F.avg_pool2d(x[None].int(), 2),
    "addcdiv in place": lambda x: x.int().addcdiv_(x.int(), x.int()),
    "lerp": lambda x: torch.lerp(x.int(), x.int(), 0.5),
    "lerp by a tensor": lambda x: torch.lerp(x.long(), x.long(), x.long()),
    "lerp in place": lambda x: x.int().lerp_(x.int(), 1),
    "a boolean alpha": lambda x: x.add(x, alpha=True),
    "a boolean alpha, unread": lambda x: (x.add(x, alpha=False), x * 2)[1],
    "a boolean alpha, in place": lambda x: x.long().sub_(x.long(), alpha=True),
    "a boolean alpha of a number": lambda x: torch.sub(x, 1, alpha=True),
    "a boolean alpha of a boolean and a number": lambda x: torch.add(x > 0, 1, alpha=True),
    "relu of booleans": lambda x: (x > 0).relu(),
    "relu of booleans, in place": lambda x: (x > 0).relu_() + 1,
    "abs of booleans": lambda x: (x > 0).abs(),
    "clamp of booleans": lambda x: torch.clamp(x > 0, x > 0, x > 0),
    "floor of booleans": lambda x: (x > 0).floor(),
    "fmod of booleans": lambda x: torch.fmod(x > 0, x > 0),
    "remainder of booleans": lambda x: torch.remainder(x > 0, x > 0),
    "truncated division of booleans": lambda x: torch.div(x > 0, x > 0, rounding_mode="trunc"),
    "addcmul of booleans": lambda x: torch.addcmul(x > 0, x > 0, x > 0),
    "max_pool2d of booleans": lambda x: F.max_pool2d(x[None] > 0, 2),
    "cov of booleans": lambda x: torch.cov(x > 0),
    "cov by weights that are booleans": lambda x: torch.cov(x, aweights=x[0] > 0),
    "cov by weights that are integers": lambda x: torch.cov(x, aweights=torch.arange(x.shape[-1])),
    "bits of floats": lambda x: torch.bitwise_and(x, x),
    "inverted bits of floats": lambda x: ~x,
}
# Of tensors of several types; x is of float32.
MIXED = {
    "nll_loss": lambda x: F.nll_loss(x.double(), CLASSES, weight=HALVES),
    "nll_loss, of images": lambda x: F.nll_loss(x[None].double(), CLASSES[None], weight=HALVES),
    "cross_entropy": lambda x: F.cross_entropy(x.bfloat16(), CLASSES, weight=HALVES),
    "cross_entropy of bytes": lambda x: F.cross_entropy(x, CLASSES.int()),
    "cross_entropy of small numbers": lambda x: F.cross_entropy(x.half(), CLASSES.short()),
    "layer_norm": lambda x: F.layer_norm(x.double(), (4,), HALVES),
    "layer_norm of halves": lambda x: F.layer_norm(x.half(), (4,), HALVES.double()),
    "group_norm": lambda x: F.group_norm(x.double(), 2, HALVES, HALVES),
    "batch_norm": lambda x: F.batch_norm(x.double(), HALVES, HALVES, training=False),
    "batch_norm in training": lambda x: F.batch_norm(x.double(), None, None, HALVES, HALVES, training=True),
    "instance_norm": lambda x: F.instance_norm(x[None].double(), weight=HALVES),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, (x > 0).long()),
    "binary_cross_entropy of doubles": lambda x: F.binary_cross_entropy(x, x.double()),
}
DIMENSIONS = {
    "softmax": lambda x: x.softmax(2),
    "softmax of a negative one": lambda x: x.softmax(-4),
    "select": lambda x: x.select(-4, 0),
    "select of a sum": lambda x: x.sum(0).select(-2, 0),
    "select_scatter": lambda x: x.select_scatter(x[0], 4, 0),
    "slice_scatter": lambda x: x.slice_scatter(x[:1], -4, 0, 1),
    "diagonal_scatter": lambda x: x.diagonal_scatter(x[0], 0, 0, 3),
    "sort": lambda x: x.sort(4)[0],
    "index_select of no dimensions": lambda x: x.sum().index_select(2, INDEX),
    "cummin of no dimensions": lambda x: x.sum().cummin(3)[0],
}
MEMORY = {
    "view of an input": lambda x: x.as_strided((2, 2), (100, 1)),
    "computed from it": lambda x: x.as_strided((2, 2), (100, 1)) + 1,
    "sum of it": lambda x: x.as_strided((2, 2), (100, 1)).sum(),
    "unread": lambda x: (x.as_strided((2, 2), (100, 1)), x * 2)[1],
    "of a view": lambda x: x[1:].flatten().as_strided((13,), (1,)) * 2,
    "by its offset": lambda x: x.as_strided((2,), (1,), 15) * 2,
    "of a computed tensor": lambda x: (x * 2).as_strided((17,), (1,)) + 1,
}
SHAPES = {
    name: lambda x, write=write: (write(torch.stack([x.long(), x.long()], -1)[:, :1, 0], x[0].long()), x * 2)[1]
    for name, write in {
        "compared with more": torch.Tensor.lt_,
        "clamped by more": torch.Tensor.clamp_min_,
        "more bits": torch.Tensor.bitwise_and_,
        "divided by more": torch.Tensor.floor_divide_,
        "divisor of more": torch.Tensor.gcd_,
        "filled where more are": lambda view, row: view.masked_fill_(row > 0, 1),
        "more dimensions": lambda view, row: view[:, 0].remainder_(row + view),
    }.items()
}
CASES = {
    (kind, name): program
    for kind, programs in (
        ("types", TYPES),
        ("mixed", MIXED),
        ("dimensions", DIMENSIONS),
        ("memory", MEMORY),
        ("shapes", SHAPES),
    )
    for name, program in programs.items()
}


def error_of(function):
    try:
        function(torch.ones(4, 4))
    except Exception as error:
        return type(error), str(error).split("\n")[0]
    return None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "options", [{"capture": "trace", "kernel": "cpp"}, {"kernel": "aten"}], ids=["trace", "dynamo"]
)
def test_is_an_error_as_in_eager(case, options):
    torch._dynamo.reset()
    wanted = error_of(CASES[case])
    assert wanted is not None
    compiled = aottrain.compile(CASES[case], **options)
    for _ in range(2):
        assert error_of(compiled) == wanted
    assert compiled.report.graphs == []


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x[:2].as_strided((4, 4), (4, 1)) * 2,
        lambda x: x[1:].as_strided((12,), (1,)) * 2,
        lambda x: x[2:].as_strided((0, 100), (100, 1)) + 1,
        lambda x: F.avg_pool2d(x[None].long(), 2) + x.long().relu().sum(),
        lambda x: torch.add(x > 0, x > 1, alpha=True) + torch.addmm(x, x, x, alpha=True).lerp(x, 0.5),
        lambda x: (x > 0) & (x < 2) | ~(x > 1),
        lambda x: torch.div(x > 0, x > 0) + x.unsqueeze(2).select(-3, 0).unsqueeze(-3).sum(),
        lambda x: x.sum().sort(-1)[0] + x.sum().softmax(0),
        lambda x: F.layer_norm(x.bfloat16(), (4,), HALVES, HALVES) + F.group_norm(x.half(), 2, HALVES.half()),
        lambda x: F.cross_entropy(x, CLASSES, HALVES) + F.huber_loss(x, x * 2),
        lambda x: torch.stack([x, x], -1)[:, :, 0].lt_(x[0]).hypot_(x[:, :1]).clamp_min_(x.sum()) * 2,
    ],
)
def test_what_eager_accepts_is_compiled(program):
    compiled = aottrain.compile(program, capture="trace", kernel="aten")
    assert torch.equal(compiled(torch.ones(4, 4)), program(torch.ones(4, 4)))
    assert compiled.report.fallbacks == []


@pytest.mark.parametrize("function", [F.huber_loss, F.soft_margin_loss, torch.normal])
def test_a_result_of_two_types_has_eagers_type(function):
    def program(x):
        return function(x.bfloat16(), x * 2)

    compiled = aottrain.compile(program, capture="trace", kernel="cpp", rng="eager")
    assert compiled(torch.ones(4, 4)).dtype == program(torch.ones(4, 4)).dtype == torch.bfloat16


def test_an_outer_product_is_added_in_the_type_of_all_three():
    """Eager gives a number of double precision its type; fakes have that of the vectors."""

    def program(x, number):
        return torch.addr(number, x[0], x[1])

    x, number = torch.ones(4, 4), torch.tensor(2.0, dtype=torch.float64)
    got = aottrain.compile(program, capture="trace", kernel="cpp")(x, number)
    assert got.dtype == program(x, number).dtype == torch.float64


def test_logits_and_targets_of_two_types_are_rounded_as_in_eager():
    def program(x, target):
        return F.binary_cross_entropy_with_logits(x, target, reduction="none")

    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(2, 64, 64, generator=generator)
    compiled = aottrain.compile(program, capture="trace", kernel="cpp")
    assert torch.equal(compiled(logits.bfloat16(), target), program(logits.bfloat16(), target))
    assert compiled.report.fallbacks == []


def test_the_first_elements_of_a_tensor_have_all_its_memory():
    def program(x):
        return x.as_strided((10,), (1,)) * 2

    compiled = aottrain.compile(program, capture="trace", kernel="aten")
    memory = torch.arange(16.0)
    for part in (memory[:4], memory[6:10], torch.arange(40.0)[20:24]):
        assert torch.equal(compiled(part), program(part))
    for part in (memory[8:12], torch.ones(4)):
        with pytest.raises(RuntimeError, match="setStorage"):
            compiled(part)
    assert len(compiled.report.graphs) >= 1
