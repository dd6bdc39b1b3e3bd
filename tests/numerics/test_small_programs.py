"""Small programs, one for each thing that could go wrong: everything that shows is as in eager."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aottrain.compiler.graphs.algorithms.min_cut import min_vertex_cut
from aottrain.compiler.link.timeline import trace_memory
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.errors import UnsupportedError, VerificationError
from aottrain.ir.verify import verify_functional, verify_partition
from aottrain.ops.random.philox import _philox_uniform, reference_uniform
from tests.compiler.programs import joint_of
from tests.numerics.comparison import assert_same, compiled
from tests.numerics.fuzz_checking import EAGER, EQUAL, check
from tests.numerics.fuzzing import Program, values

SQUARE = "x0 = values((4, 4), torch.float32, 1).requires_grad_()"
PLAIN = "x{} = values((4, 4), torch.float32, {})"


def runs(*body: str, setup: tuple[str, ...] = (SQUARE,), wanted: str = EQUAL, **settings: Any) -> Callable[[], None]:
    """A check that one program is eager's in everything that shows; the last statement is what it returns, by `;`."""
    outputs = tuple(body[-1].split("; "))
    raises, kernel = settings.pop("raises", False), settings.pop("kernel", "aten")
    settings = {"tangents": ("own",) * len(outputs), **settings}
    program = Program(0, setup=setup, body=tuple(("", text) for text in body[:-1]), outputs=outputs, **settings)

    def run() -> None:
        verdict = check(program, kernel=kernel)
        assert verdict.kind == wanted, f"{verdict.kind}: {verdict.detail}"
        assert wanted != EQUAL or bool(verdict.detail) == raises, verdict.detail

    return run


ONE, TWO = values((4, 4), torch.float32, 1), values((4, 4), torch.float32, 2)
STATE = {
    "state": (
        "self.register_buffer('b0', values((4,), torch.float32, 3))",
        "self.p0 = nn.Parameter(values((4,), torch.float32, 4))",
    )
}
NORM = {"state": ("self.layer0 = nn.BatchNorm1d(4)",)}

test_batch_norm = runs("v0 = self.layer0(x0)", "v0", **NORM)
test_batch_norm_in_eval = runs(
    "F.batch_norm(x0, x1[0], x2[0].abs())", setup=(SQUARE, PLAIN.format(1, 2), PLAIN.format(2, 3))
)
test_batch_norm_of_shared_memory = runs(
    "self.layer0(x0) + self.b0",
    wanted=EAGER,
    state=(*NORM["state"], "self.register_buffer('b0', self.layer0.running_mean[:])"),
)
test_written_shared_memory = runs("x1.mul_(2)", "x1[0] * x2", setup=(PLAIN.format(1, 2), "x2 = x1[:2]"), wanted=EAGER)
test_view_under_no_grad = runs("with torch.no_grad(): v0 = x0.view(-1)", "v0; x0 * 2", wanted=EAGER)
test_leaf_that_is_a_view = runs(
    "with torch.no_grad(): v0 = x0[::2]",
    "v0.sin(); x0 * 2",
    setup=("x0 = values((4, 4), torch.float32, 1).t().requires_grad_()",),
)
test_mutated_differentiable_input = runs(
    "x1.mul_(x0)", "x1.sin()", setup=(SQUARE, "l1 = values((4, 4), torch.float32, 3).requires_grad_()", "x1 = l1 * 1")
)
test_strides_of_fakes = runs(
    "v0 = x0.t()",
    "torch.einsum('ij,kj->ik', v0, v0.clamp(-0.5, 2))[1:]",
    setup=("x0 = values((1, 4), torch.float32, 2).requires_grad_()",),
    wanted="equal but for strides",
)
test_stale_unused_output = runs(
    "v0 = x0.cumprod(-1)[1:]",
    "x1 * 2; v0",
    setup=(SQUARE, SQUARE.replace("x0", "x1")),
    after=("out[1].detach().mul_(3)",),
    tangents=("own", ""),
)
test_strides_of_kernels = runs(
    "v0 = F.logsigmoid(x0)",
    "F.scaled_dot_product_attention(v0, v0, v0.sin())",
    setup=("x0 = values((2, 3, 4, 4), torch.float32, 6256).contiguous(memory_format=torch.channels_last)",),
)
test_two_outputs = runs("v0 = x0.argmax(1)", "x0.sin(); v0; (x0 > 0).float()")
test_written_layout = runs(
    "v0 = x0.t() * 1",
    "v0.masked_fill_(x1 > 0, 0.5)",
    "v0",
    setup=(SQUARE.replace("4, 4", "4, 6"), PLAIN.format(1, 2).replace("4, 4", "6, 4")),
)
test_written_expand = runs("v0 = x0 * 1", "v0.expand_as(x0).mul_(1e-3)", "v0")
test_written_broadcast = runs("v0 = x0[:1] * 1", "v0.t().expand(4, 4)[:, 0].mul_(1e-3)", "v0", wanted=EAGER)
test_buffer = runs(
    "v0 = (x0 * self.b0.clone()).sin()",
    "with torch.no_grad(): self.b0.mul_(0.5).add_(v0.detach().mean(0))",
    "v0 * self.p0 * self.b0",
    plan="recompute_all",
    **STATE,
)
test_cast_by_copy = runs("v0 = torch.empty(4, 4, dtype=torch.bfloat16)", "v0.copy_(x0)", "v0.float() * 3")
test_equal_outputs = runs(
    "v0 = x0.detach().sin()",
    "v1 = x0.detach().sin()",
    "v0; v1; x0 * 2",
    after=("out[0].zero_()",),
    tangents=("own", "own", "own"),
)
test_two_draws = runs("F.dropout(x0, 0.5) + F.dropout(x0, 0.5)")
test_keywords = runs("torch.add(x0, x0, alpha=2) * torch.add(x0, x0, alpha=3)")
test_number_types = runs("v0 = x0.detach() > 0", "(v0 + 1).float() * (v0 + True).float() * (v0 + 1.0) * x0")
test_unread_eager_draw = runs("v0 = torch.rand(3)", "x0 * torch.rand(4)", rng="eager")
test_residuals = runs(
    "v0 = x0.sin()",
    "v1 = x1.exp()",
    "v2 = v0 * v1",
    "v2 * v2.tanh()",
    setup=(SQUARE, PLAIN.format(1, 2) + ".requires_grad_()"),
    plan="save_all",
)
test_stale_output = runs("v0 = x0.sigmoid()", "v0", after=("out[0].detach().mul_(2)",), raises=True)
test_unused_output = runs(
    "x0 * 2; x1.sqrt() * 0.0", setup=(SQUARE, PLAIN.format(1, 2) + ".abs().requires_grad_()"), tangents=("own", "")
)
test_surviving_strides = runs(
    "F.cross_entropy(x0, x0.argmax(1)); x0.std()",
    setup=("x0 = values((4, 2), torch.float32, 1).t().requires_grad_()",),
    tangents=("", "own"),
)
test_sliced_output = runs("v0 = x0.sin()", "v0[1:]; v0")
test_view_of_input = runs("x0[1:]; x0 * 2", after=("out[0].detach().mul_(3)",), tangents=("own", "own"))
test_odd_tangent = runs("x0.sin().view(2, 8).clone()", tangents=("transposed",))
test_group_norm = runs(
    "v0 = F.group_norm(x0, 1)",
    "F.mse_loss(v0, x0)",
    setup=(
        "x0 = values((2, 3, 4, 4), torch.bfloat16, 7).contiguous(memory_format=torch.channels_last).requires_grad_()",
    ),
    plan="save_all",
    wanted=EQUAL,
)
DETACHED = {
    "setup": (SQUARE, "l1 = values((4, 4), torch.float32, 3).requires_grad_()", "x1 = l1.sin()"),
    "after": ("args[1].register_hook(seen('0 of args[1]'))",),
}
test_unread_check = runs("torch.linalg.cholesky(-torch.eye(2))", "x0 * 2", raises=True)
test_number_for_a_tensor = runs("x0 * torch.vmap(lambda t: t * 2)(x0[0])", kernel="cpp")
test_detached_input = runs("v0 = x1.detach().sin()", "v0 * x0", **DETACHED)
test_sparse_and_dense = runs("x0.gather(0, x0.argsort(0), sparse_grad=True) * x0")
test_between_results = runs("v0 = x0.sin()", "v0; v0 * v0", tangents=("", "own"), backward="between")
test_hook_between_results = runs(
    "v0 = x0.sin()", "v0; v0 * v0", tangents=("", "own"), after=("out[0].register_hook(seen('0 of out[0]', 2))",)
)
test_branch_on_a_value = runs("torch.cond(x0.sum() > 0, torch.sin, torch.cos, (x0,))", wanted=EAGER)
test_generator_state = runs("x0 + torch.randn(4)")
test_full_extremum = runs("(x0 * 1).max() * float('inf')")
test_view_of_overlapping_leaf = runs(
    "x0.t(); x0 * 2",
    setup=("x0 = values((4,), torch.float32, 1).expand(4, 4).detach().requires_grad_()",),
    tangents=("own", "own"),
    wanted=EAGER,
)
test_infinity = runs("v0 = x0.masked_fill(x0 > 0, float('-inf'))", "v0.softmax(1)")


def test_written_unbound() -> None:
    def write(call: Any) -> Any:
        first, _ = call(values((2, 3), torch.float32, 0).requires_grad_())
        with torch.enable_grad():
            first.mul_(2)

    function = lambda x: (x * 1).unbind(0)  # noqa: E731
    assert _raises(lambda: write(function)) == _raises(lambda: write(compiled(function))) == "RuntimeError"


def _raises(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return ""


def test_autocast_backward() -> None:
    """A product outside autocast has a backward outside it, too."""

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ x

    def gradient(call: Any) -> Tensor:
        x = ONE.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
        return torch.autograd.grad(out.exp().sum(), x)[0]

    assert_same(gradient(compiled(function)), gradient(function))


def test_stale_input() -> None:
    """The caller has saved what the call then writes: its backward raises, as after an eager call."""

    def write(call: Any) -> None:
        x, factor = ONE.clone().requires_grad_(), TWO.clone()
        product = x * factor
        call(factor)
        product.sum().backward()

    def function(y: Tensor) -> Tensor:
        return y.mul_(2) + 1

    assert _raises(lambda: write(function)) == _raises(lambda: write(compiled(function))) == "RuntimeError"


def test_gradient_elsewhere() -> None:
    def function(x: Tensor) -> Tensor:
        inside = torch.ones(3, requires_grad=True)
        inside.register_hook(lambda gradient: None)  # so that its gradient is of use to someone
        return x + inside

    try:
        compiled(function)(values((3,), torch.float32, 0).requires_grad_())
    except UnsupportedError:
        return
    raise AssertionError("a gradient to a tensor inside is lost")


def test_budget_bytes() -> None:
    """Two small values are fewer bytes than the one large value that both are made from."""
    x = values((8, 8), torch.float32, 0).requires_grad_()
    joint = joint_of(lambda x: (x @ x).sum(0).sin() + (x @ x).mean(1).sin(), x)
    assert plan_partition(joint, "min_cut").saved_bytes == 2 * 8 * 4


def test_cheapest_cut() -> None:
    assert min_vertex_cut({0: 5, 1: 2, 2: 9}, [(0, 1), (1, 2)], [0], [2]) == (2, {1})


def test_peak_of_unread_items() -> None:
    with torch.no_grad():
        joint = joint_of(lambda x: x.sort(0).values, torch.ones(16, 16))
    assert trace_memory(apply_partition(joint, plan_partition(joint))).peak_bytes == 4 * 16 * 16 * 4


def test_peak_of_views() -> None:
    with torch.no_grad():
        joint = joint_of(lambda x: x.t().t().sin(), torch.ones(16, 16))
    assert trace_memory(apply_partition(joint, plan_partition(joint))).peak_bytes == 2 * 16 * 16 * 4


def test_native_draw() -> None:
    state = torch.tensor([5, 0])
    for draw in (0, 3):
        options = {"dtype": torch.float32, "device": torch.device("cpu")}
        assert_same(_philox_uniform(state, draw, [9], **options), reference_uniform(state, draw, [9], **options))


@torch.library.custom_op("aottrain_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.exp().t().contiguous().t()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape)  # the strides are not so


def test_strides_of_custom_ops() -> None:
    x = values((3, 4), torch.float32, 0)
    with torch.no_grad():
        assert_same(compiled(lambda x: turned(x).reshape(-1).exp())(x), turned(x).reshape(-1).exp())


def test_residual_lifetimes() -> None:
    x = values((4, 4), torch.float32, 0).requires_grad_()
    out = compiled(lambda x: x.sin().exp().tanh(), "save_all")(x)
    references = [weakref.ref(value) for value in out.grad_fn.saved_tensors if value is not x and value is not out]
    out.sum().backward()
    del out
    gc.collect()
    assert references and all(reference() is None for reference in references)


def test_second_derivative() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.exp()
        return x**3 * scale

    def second(call: Any) -> Tensor:
        x = values((3,), torch.float64, 0).requires_grad_()
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert torch.allclose(second(compiled(function)), second(function))


# -- the laws ---------------------------------------------------------------------------------------------------------


def test_law_of_partition() -> None:
    joint = joint_of(lambda x: x.sin().exp() * x, ONE.clone().requires_grad_())
    parts = apply_partition(joint, plan_partition(joint, "save_all"))
    node = next(node for node in parts.forward.nodes if "sin" in str(node.target))
    node.target = torch.ops.aten.cos.default
    _breaks(lambda: verify_partition(joint, parts))


def test_law_of_mutation() -> None:
    joint = joint_of(lambda x: x.sin() * 2, ONE.clone().requires_grad_())
    node = next(node for node in joint.graph.nodes if "sin" in str(node.target))
    node.target = torch.ops.aten.sin_.default
    _breaks(lambda: verify_functional(joint))


def _breaks(action: Callable[[], None]) -> None:
    try:
        action()
    except VerificationError:
        return
    raise AssertionError("a broken law goes unseen")
