"""What is planned for a GPU alone: biases of convolutions, layouts, rows that are added up in any order, tiles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aottrain.compiler.codegen.triton import tiles
from aottrain.compiler.schedule import layouts
from tests.numerics.tolerance import assert_close
from tests.simulated.on_devices import compiled

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")


def step(target, *inputs, autocast=False):
    """The result and all gradients, those of a module's parameters too."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = target(*leaves)
    out.float().square().sum().backward()
    own = list(target.parameters()) if isinstance(target, nn.Module) else []
    found = [out, *(leaf.grad for leaf in leaves if leaf.requires_grad), *(p.grad for p in own)]
    for parameter in own:
        parameter.grad = None
    return found


def same(target, *inputs, autocast=False, **options):
    """Beside eager. Returns the report."""
    call = compiled(target, **options)
    for mine, eager in zip(
        step(call, *inputs, autocast=autocast), step(target, *inputs, autocast=autocast), strict=True
    ):
        assert (mine.dtype, mine.shape, mine.stride()) == (eager.dtype, eager.shape, eager.stride())
        scale, low = eager.float().abs().max(), torch.bfloat16 if autocast else eager.dtype  # sums whose terms cancel
        assert_close((mine / scale).to(low), (eager / scale).to(low))
    return call.report.graphs[0]


CONVOLUTIONS = {
    "images": (lambda: nn.Conv2d(8, 12, 3, padding=1), (4, 8, 10, 12)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), (4, 8, 10, 12)),
    "one image": (lambda: nn.Conv2d(8, 12, 3, stride=2), (8, 10, 12)),
    "rows": (lambda: nn.Conv1d(8, 12, 3, dilation=2), (4, 8, 30)),
    "volumes": (lambda: nn.Conv3d(4, 6, 3), (2, 4, 6, 7, 8)),
    "turned around": (lambda: nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1, groups=2), (4, 8, 10, 12)),
    "bfloat16": (lambda: nn.Conv2d(8, 12, 3).bfloat16(), (4, 8, 10, 12)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_bias_is_added_by_kernels(name, device):
    """Its gradient, too: the library gives neither."""
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    layer = make().cuda()
    x = torch.randn(shape, device="cuda", dtype=layer.weight.dtype)
    device.clear()
    report = same(layer, x)
    assert report.library_calls == {"aten.convolution.default": 1, "aten.convolution_backward.default": 1}
    assert "split_biases" in [stage.name for stage in report.stages]


def test_a_bias_s_gradient_that_autocast_casts_is_not_rounded_before():
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 12, 3).cuda()
    x = torch.randn(8, 8, 12, 12, device="cuda")
    mine = step(compiled(layer), x, autocast=True)[-1]
    exact = step(layer, x)[-1]
    rounded = step(layer, x, autocast=True)[-1]
    assert mine.dtype is torch.float32
    assert torch.equal(rounded, rounded.bfloat16().float()) and not torch.equal(mine, mine.bfloat16().float())
    assert (mine - exact).norm() <= 0.01 * exact.norm()


def test_a_bias_alone_that_wants_a_gradient():
    layer = nn.Conv2d(8, 12, 3).cuda()
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 8, 10, 12, device="cuda")

    def call(x):
        return layer(x.detach())

    mine, eager = compiled(call), call
    for target in (mine, eager):
        target(x).square().sum().backward()
    first = layer.bias.grad.clone()
    layer.bias.grad = None
    eager(x).square().sum().backward()
    assert_close(first, 2 * layer.bias.grad)
    assert "aten.convolution_backward.default" not in mine.report.graphs[0].library_calls


def looked_up(dtype, padding=None):
    table = nn.Embedding(50, 16, padding_idx=padding).cuda().to(dtype)
    return table, torch.randint(0, 50, (6, 40)).cuda()


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_embeddings_are_added_where_they_belong(dtype, padding):
    table, index = looked_up(dtype, padding)
    report = same(table, index)
    assert report.library_calls == {"aten.index_add.default": 1}


def test_rows_are_added_to_the_other_gradient_of_a_table():
    """Of a table so large that another pass over it is worth saving: no zeros are made to add them to."""
    weight, index = torch.randn(3000, 16, device="cuda"), torch.randint(0, 3000, (6, 4)).cuda()
    call = compiled(lambda w, i: F.embedding(i, w) @ w.t())
    found = step(call, weight, index)
    report = call.report.graphs[0]
    assert report.library_calls["aten.index_add.default"] == 1
    assert "aten.embedding_dense_backward.default" not in report.library_calls
    assert not [kernel for kernel in report.kernels if "zeros" in str(kernel)]
    for mine, eager in zip(found, step(lambda w, i: F.embedding(i, w) @ w.t(), weight, index), strict=True):
        assert_close(mine / eager.abs().max(), eager / eager.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_an_index_took_are_added_where_they_belong(dtype):
    x, index = torch.randn(30, 16, device="cuda", dtype=dtype), torch.randint(-30, 30, (200,)).cuda()
    report = same(lambda x, i: x[i].sin(), x, index)
    assert report.library_calls == {"aten.index_add.default": 1}


def test_the_same_sum_each_time_where_that_is_asked_for():
    table, index = looked_up(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        report = same(table, index)
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.library_calls == {"aten.embedding_dense_backward.default": 1}


class Separable(nn.Module):
    """A depthwise convolution, a batch norm, one across channels, and a residual in float32 around all."""

    def __init__(self, channels=16):
        super().__init__()
        self.each = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm, self.across = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return x + self.across(F.relu6(self.norm(self.each(x))))


def test_depthwise_convolutions_of_halves_are_in_channels_last():
    """For cuDNN has kernels for them there alone."""
    torch.manual_seed(0)
    model, x = Separable().cuda(), torch.randn(4, 16, 12, 12, device="cuda")
    report = same(model, x, autocast=True)
    assert report.layouts == "4 convolutions, forward and backward, in channels_last: by the fixed model"


def large_turn(x, w):
    return (F.conv2d(x, w, padding=1) + 1).mean((2, 3))


def test_a_large_copy_into_another_order_is_a_kernel_of_its_own(monkeypatch, launches):
    """What else a kernel did would lie across memory."""
    for threshold in (1 << 30, 1 << 8):
        monkeypatch.setattr(layouts, "_LARGE_TURN", threshold)
        launches.clear()
        x = torch.randn(4, 16, 12, 12, device="cuda").requires_grad_()
        w = torch.randn(16, 16, 3, 3, device="cuda").requires_grad_()
        call = compiled(large_turn)
        out = call(x, w)
        out.sin().sum().backward()
        assert_close(out, large_turn(x, w))
        names = [launch.name for launch in launches.launches]
        alone = [name for name in names if name == "triton_clone"]
        mixed = [name for name in names if "clone" in name and name != "triton_clone"]
        assert bool(mixed) == (threshold == 1 << 30) and alone


def test_the_gradient_of_a_pool_is_a_kernel_of_its_own(launches):
    """In one that also adds up a row it was wrong on a device."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8).cuda()
    x = torch.randn(4, 8, 10, 10, device="cuda").requires_grad_()
    out = compiled(lambda x: F.max_pool2d(F.relu(norm(x)), 3, 2, 1))(x)
    launches.clear()
    out.square().sum().backward()
    names = [launch.name for launch in launches.launches]
    assert "triton_max_pool_gradient" in names
    assert [name for name in names if "max_pool_gradient" in name] == ["triton_max_pool_gradient"]
    first = x.grad.clone()
    x.grad = None
    F.max_pool2d(F.relu(norm(x)), 3, 2, 1).square().sum().backward()
    assert_close(first, x.grad)


@pytest.mark.parametrize(("rows", "width", "expected"), [(2048, 2048, 16), (2048, 512, 16), (512, 2048, 1)])
def test_rows_across_memory_share_what_is_read_at_once(rows, width, expected, monkeypatch, launches):
    """Where there are enough of them: a row alone would read 32 bytes for each of its elements."""
    tile = tiles.choose_tile
    found = []
    monkeypatch.setattr(
        "aottrain.compiler.codegen.triton.render.choose_tile", lambda kernel: found.append(tile(kernel)) or found[-1]
    )
    x = torch.randn(width, rows, device="cuda")
    call = compiled(lambda x: x.t().log_softmax(-1))
    assert_close(call(x), x.t().log_softmax(-1))
    assert expected in {each.rows for each in found}
    assert all(each.swept == (width > 512) for each in found if each.rows == 16)


@pytest.mark.parametrize("width", [300, 512, 1000])
def test_rows_across_memory_that_are_summed_up_have_the_threads_of_a_program(width, launches):
    """A norm's gradients: so many rows at once are more than are measured for rows along it."""
    x = torch.randn(width, 2048, device="cuda").requires_grad_()
    w, b = (torch.randn(width, device="cuda").requires_grad_() for _ in range(2))

    def norm(x, w, b):
        return F.layer_norm(x.t(), (width,), w, b)

    launches.clear()
    for mine, eager in zip(step(compiled(norm), x, w, b), step(norm, x, w, b), strict=True):
        assert_close(mine / eager.abs().max(), eager / eager.abs().max())
    assert launches.launches and max(launch.warps for launch in launches.launches) <= 16


def test_few_rows_are_added_up_by_one_program(launches):
    x = torch.randn(64, 128, device="cuda")
    call = compiled(lambda x: x.sum(0))
    launches.clear()
    assert_close(call(x), x.sum(0))
    assert [launch.programs for launch in launches.launches] == [1]


@pytest.mark.parametrize("name", ["view", "transpose", "split"])
def test_views_alone_on_a_device(name):
    """Nothing is computed, and so nothing needs the device that a kernel would need."""
    function = {
        "view": lambda x: x.view(4, 6),
        "transpose": lambda x: x.t(),
        "split": lambda x: tuple(x.split(1)),
    }[name]
    x = torch.randn(2, 12, device="cuda", requires_grad=True)
    mine, eager = compiled(function)(x), function(x)
    for got, wanted in zip(*(each if isinstance(each, tuple) else (each,) for each in (mine, eager)), strict=True):
        assert_close(got, wanted)
        assert got.stride() == wanted.stride()
