"""Convolutions in channels_last, and batch normalisation in parts: what runs, what escapes, and what is decided."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import aottrain
from aottrain.compiler.capture.fakes import KernelFakes
from aottrain.compiler.graphs.rewriting import add_call
from aottrain.compiler.passes import choose_layouts as layouts
from aottrain.compiler.passes.choose_layouts import _convolutions_of
from aottrain.compiler.passes.layouts.rewriting import Rewriting
from aottrain.compiler.passes.splits.norms import split_norms
from aottrain.ir.graph import required_spec, set_value
from aottrain.ir.settings.decisions import AS_GIVEN, CHANNELS_LAST, Decision, Record, Timing, record_from
from aottrain.measure.decisions import Timed
from aottrain.measure.rates import DEFAULT_RATES
from aottrain.ops.convolutions import can_convolve_into, convolve_into
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import joint_inputs, joint_of, run_joint, targets
from tests.numerics.tolerance import RTOL_ATOL

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
CONVOLUTIONS = "aten.convolution.default", "aten.convolution_backward.default"


class Block(nn.Module):
    def __init__(self, residual: bool):
        super().__init__()
        self.residual = residual
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        hidden = self.norm(self.conv1(x))
        return self.conv2(F.relu(hidden + x if self.residual else hidden))


class Odd(nn.Module):
    """Pooling, a bias, a slice of the image, a view that channels_last forbids, a value that escapes half-way."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1, groups=2)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4 * 32, 5)

    def forward(self, x):
        hidden = self.conv1(x)
        small = F.relu(self.conv2(F.max_pool2d(hidden, 2)))
        small = torch.cat([small, F.avg_pool2d(hidden[:, :4], 2)], 0)
        small = self.norm(self.depthwise(small)) + F.adaptive_avg_pool2d(self.up(small), small.shape[2:])
        return self.head(small[:, :, ::2].flatten(1)), hidden, small.transpose(1, 2)


def both(model: nn.Module, x: torch.Tensor, **options):
    """The results of eager and compiled calls with all gradients and buffers, and the report."""
    model, other = copy.deepcopy(model), copy.deepcopy(model)
    call = aottrain.compile(other, capture="trace", kernel="cpp", on_unsupported="error", **options)
    found = []
    for module, run in ((model, model), (other, call)):
        given = x.detach().clone().requires_grad_(x.requires_grad)
        out = run(given)
        outs = out if isinstance(out, tuple) else (out,)
        sum((value * value).mean() for value in outs).backward()
        extra = [given.grad] if x.requires_grad else []
        found.append([*outs, *extra, *(p.grad for p in module.parameters()), *module.buffers()])
    return *found, call.report.graphs[0]


def check_equal(wanted, got):
    for a, b in zip(wanted, got, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        if not a.is_floating_point():
            assert torch.equal(a, b)
            continue
        rtol, atol = RTOL_ATOL[a.dtype]
        scale = max(float(a.detach().abs().max()), 1.0)
        torch.testing.assert_close(b, a, rtol=20 * rtol, atol=20 * atol * scale)


@pytest.mark.parametrize("residual", (False, True))
def test_a_block_is_a_few_kernels_and_no_change_of_layout_between_convolutions(residual):
    wanted, got, report = both(Block(residual), torch.randn(4, 8, 16, 16))
    check_equal(wanted, got)
    assert "4 convolutions, forward and backward, in channels_last" in report.layouts
    assert {name: report.library_calls[name] for name in CONVOLUTIONS} == dict.fromkeys(CONVOLUTIONS, 2)
    assert set(report.library_calls) == set(CONVOLUTIONS)
    forward = [name for name in report.kernels if name.startswith("forward")]
    backward = [name for name in report.kernels if name.startswith("backward")]
    # The images into channels_last; of the norm the number of batches, the mean, the spread, what follows from them for
    # each channel, and all that is pointwise; the result into eager's layout.
    assert len(forward) == 7
    # What is pointwise, again; of the norm both sums, and the gradient of its input; both tensors that enter into
    # channels_last (of which one may go with the first), and both weights' gradients into eager's layout.
    assert len(backward) == 7 - residual


def _copies(activation: nn.Module) -> int:
    """Copies between layouts of a program in channels_last."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), activation, nn.Conv2d(4, 4, 3, bias=False))
    joint = joint_of(model, torch.randn(2, 3, 8, 8))
    return len(Rewriting(joint.graph).run().copies)


@pytest.mark.parametrize(
    "activation",
    (nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus, nn.SiLU, nn.GELU, nn.Tanh),
)
def test_activations_take_any_layout(activation):
    """Torch tags some as pointwise, and others, as the gradient of ReLU6, not."""
    assert _copies(activation()) == _copies(nn.ReLU())


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().double().float()


def test_casts_take_any_layout():
    """Else each cast of autocast would have a copy before and after it; torch does not tag them as pointwise."""
    assert _copies(Cast()) == _copies(nn.ReLU())


@pytest.mark.parametrize("mode", ("nearest", "nearest-exact"))
def test_upsampling_takes_any_layout(mode):
    """Its gradient was a sum over windows of an image in another layout, each element a line of the cache."""
    larger = nn.Upsample(scale_factor=2, mode=mode)
    assert _copies(larger) == _copies(nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), larger, nn.Conv2d(8, 4, 3))
    wanted, got, report = both(model, torch.randn(4, 3, 8, 8, requires_grad=True))
    check_equal(wanted, got)
    assert "in channels_last" in report.layouts and set(report.library_calls) == set(CONVOLUTIONS)


class ConvNeXtBlock(nn.Module):
    """A layer norm over channels: permuted, an image in channels_last is rows, and so is what is added to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.norms, self.linears = (nn.ModuleList(make(8) for _ in range(2)) for make in (nn.LayerNorm, _square))

    def forward(self, x):
        for convolution, norm, linear in zip(self.convolutions, self.norms, self.linears, strict=True):
            x = x + F.gelu(linear(norm(convolution(x).permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        return x.square().mean()


def _square(width: int) -> nn.Module:
    return nn.Linear(width, width)


def test_residuals_of_permuted_rows_and_norms_over_channels_stay_in_channels_last():
    """What is given is copied: each sum was in eager's layout, and each norm read its channels across memory. The
    weights have one channel: their gradients are laid out as eager's."""
    model, x = ConvNeXtBlock(), torch.randn(4, 8, 16, 16)
    joint = joint_of(model, x)
    assert len(Rewriting(joint.graph).run().copies) == 1
    wanted, got, report = both(model, x)
    check_equal(wanted, got)
    assert {name for name in report.library_calls if "norm" in name or "copy" in name} == set()


def test_the_gradient_of_a_mean_is_one_number_in_no_layout():
    """In eager's layout it was written for each element, and read across memory by what is in channels_last."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    joint = joint_of(_Mean(model), torch.randn(4, 3, 16, 16, requires_grad=True))
    graph = Rewriting(joint.graph).run().graph
    quotients = [node for node in graph.nodes if node.target is torch.ops.aten.div.Scalar]
    assert [node.meta["val"].numel() for node in quotients] == [1]
    wanted, got, _ = both(_Mean(model), torch.randn(4, 3, 16, 16, requires_grad=True))
    check_equal(wanted, got)


class _Mean(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


class Segmented(nn.Module):
    """A probability for each class at each place."""

    def __init__(self, function):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))
        self.function = function

    def forward(self, x):
        return self.function(self.layers(x), dim=1)


@pytest.mark.parametrize("function", (F.softmax, F.log_softmax, torch.amax))
def test_what_is_reduced_over_channels_is_a_row(function):
    wanted, got, report = both(Segmented(function), torch.randn(4, 3, 40, 40))
    check_equal(wanted, got)
    assert set(report.library_calls) == set(CONVOLUTIONS)


def test_results_and_gradients_have_eagers_strides_and_values():
    wanted, got, report = both(Odd(), torch.randn(2, 3, 16, 16, requires_grad=True))
    check_equal(wanted, got)
    assert "in channels_last" in report.layouts


def test_inputs_that_are_channels_last_stay_so():
    x = torch.randn(4, 8, 16, 16).contiguous(memory_format=torch.channels_last).requires_grad_()
    wanted, got, report = both(Block(True), x)
    check_equal(wanted, got)


@pytest.mark.parametrize("training", (True, False))
def test_batch_norm_in_eval_mode_and_bfloat16(training):
    model = Block(True).train(training)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, got, _ = both(model, torch.randn(4, 8, 16, 16))
    for a, b in zip(wanted, got, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert float((a.float() - b.float()).norm().detach() / a.float().norm().detach().clamp(min=1e-3)) < 0.03
    wanted, got, _ = both(model, torch.randn(4, 8, 16, 16))
    check_equal(wanted, got)


def test_the_oracle_keeps_the_programs_own_layouts():
    model = Block(True)
    call = aottrain.compile(model, capture="trace", kernel="aten")
    call(torch.randn(4, 8, 16, 16))
    assert call.report.graphs[0].layouts == ""


def times(monkeypatch, given, laid, copy, source="measured"):
    """Seconds of each convolution in either layout, and of each copy; None: it cannot be timed."""

    def calls_timed(calls):
        found = {"copy": copy} if "copy" in calls else {AS_GIVEN: given, CHANNELS_LAST: laid}
        known = {name: Timing(seconds, 0.1) for name, seconds in found.items() if seconds is not None}
        return Timed(known, source) if known else Timed()

    monkeypatch.delenv("AOTTRAIN_RATES")
    monkeypatch.setattr(layouts, "calls_timed", calls_timed)
    monkeypatch.setattr(layouts, "rates_for", lambda device: DEFAULT_RATES)


@pytest.mark.parametrize(("slower", "words"), ((0.5, "in channels_last: "), (2.0, "as the program has them: ")))
def test_the_decision_is_by_measured_times(monkeypatch, slower, words):
    times(monkeypatch, 0.1, 0.1 * slower, 0.0)
    call = aottrain.compile(Block(True), capture="trace", kernel="cpp")
    assert words in call.prepare(torch.randn(4, 8, 16, 16)).layouts


@pytest.mark.parametrize(("seconds", "words"), ((0.06, "in channels_last: "), (None, "in channels_last: "),
                                                (1.2, "as the program has them: ")))  # fmt: skip
def test_what_copies_between_layouts_take_counts(monkeypatch, seconds, words):
    """A group norm works on contiguous images: with convolutions in channels_last each one is copied twice."""
    times(monkeypatch, 1.0, 0.2, seconds)
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3))
    call = aottrain.compile(model, capture="trace", kernel="cpp")
    assert words in call.prepare(torch.randn(4, 8, 16, 16, requires_grad=True)).layouts


@pytest.mark.parametrize("source", ("busy", "model"))
def test_where_nothing_can_be_measured_the_fixed_model_decides(monkeypatch, source):
    times(monkeypatch, None if source == "model" else 0.1, 0.3, 0.0, source)
    report = aottrain.compile(Block(True), capture="trace", kernel="cpp").prepare(torch.randn(4, 8, 16, 16))
    (decision,) = (found for found in report.decisions.decisions if found.kind == "layouts")
    assert (decision.choice, decision.source) == (CHANNELS_LAST, source)
    assert "by the fixed model" in report.layouts and bool(decision.times) == (source == "busy")


@pytest.mark.parametrize("depth, words", ((1, "as the program has them"), (6, "in channels_last")))
def test_without_a_clock_few_convolutions_are_not_worth_their_borders(depth, words):
    """Of a single one all that it reads and gives would be turned around."""
    parts = [part for _ in range(depth) for part in (nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU())]
    call = aottrain.compile(nn.Sequential(*parts), capture="trace", kernel="cpp")
    assert words in call.prepare(torch.randn(4, 16, 32, 32, requires_grad=True)).layouts


def test_what_is_read_beside_images_in_another_layout_costs_a_copy(monkeypatch):
    """A product with it reads one of both across memory."""
    first, second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    image, seconds = torch.randn(4, 8, 16, 16), []
    for factor in (image, image.to(memory_format=torch.channels_last)):
        times(monkeypatch, 1.0, 0.5, 0.01)
        call = aottrain.compile(lambda x, y: second(first(x) * y).mean((2, 3)), capture="trace", kernel="cpp")
        report = call.prepare(image, factor)
        (decision,) = (found for found in report.decisions.decisions if found.kind == "layouts")
        seconds.append(decision.times[CHANNELS_LAST].seconds)
        monkeypatch.undo()
    assert seconds[0] > seconds[1] > 0


def test_a_machine_that_is_found_busy_before_anything_is_timed(monkeypatch):
    """The program was left without kernels: there was no time of a copy."""
    monkeypatch.delenv("AOTTRAIN_RATES")
    monkeypatch.setattr(layouts, "calls_timed", lambda calls: Timed(source="busy"))
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3))
    call = aottrain.compile(model, capture="trace", kernel="cpp")
    report = call.prepare(torch.randn(4, 8, 16, 16, requires_grad=True))
    (decision,) = (found for found in report.decisions.decisions if found.kind == "layouts")
    assert (decision.choice, decision.source, dict(decision.times)) == (AS_GIVEN, "busy", {})
    assert "the machine was busy" in report.layouts and not call.report.fallbacks


def test_a_budget_may_leave_no_room_for_another_layout():
    model, x = Block(True), torch.randn(4, 8, 16, 16)
    for budget in (0.0, 0.3, 1.0):
        wanted, got, report = both(model, x, budget=budget)
        if report.kernel == "aten":
            assert all(map(torch.equal, wanted, got))
        else:
            check_equal(wanted, got)


@pytest.mark.parametrize("groups", (1, 2))
@pytest.mark.parametrize(("kernel", "stride", "padding"), ((3, 1, 1), (1, 2, 0), (5, 2, 2)))
@pytest.mark.parametrize("biased", (False, True))
def test_a_convolution_into_given_memory_is_atens(groups, kernel, stride, padding, biased):
    if not can_convolve_into():
        pytest.skip("this build of torch has no oneDNN")
    x = torch.randn(3, 6, 9, 11).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(10, 6 // groups, kernel, kernel), torch.randn(10) if biased else None
    rest = weight, bias, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups
    wanted = torch.ops.aten.convolution.default(x, *rest)
    out = torch.full_like(wanted, float("nan"))
    convolve_into(x, *rest, out=out)
    assert torch.equal(out, wanted) and out.stride() == wanted.stride()


@pytest.mark.skipif(not can_convolve_into(), reason="this build of torch has no oneDNN")
def test_a_steady_step_allocates_no_result_of_a_convolution():
    call, x = aottrain.compile(Block(True), capture="trace", kernel="cpp"), torch.randn(4, 8, 16, 16)
    call(x).mean().backward()
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as record:
        call(x)
    allocated = [event.nbytes() for event in record.kineto_results.events() if event.name() == "[memory]"]
    # The result alone, in eager's layout.
    assert sum(count >= x.numel() * x.element_size() for count in allocated) == 1


def on_a_gpu(channels: int, groups: int, dtype: torch.dtype) -> tuple[tuple[int | None, int | None], tuple[int, ...]]:
    """The prices without a clock of a convolution to 16 channels; twice the bytes of images, result and weight."""
    graph, values = fx.Graph(), list[fx.Node]()
    with KernelFakes():
        for name, shape in (("x", (2, channels, 8, 8)), ("weight", (16, channels // groups, 3, 3))):
            values.append(graph.placeholder(name))
            set_value(values[-1], torch.empty(shape, dtype=dtype, device="cuda"))
    arguments = (*values, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    with graph.inserting_after(values[-1]):
        node = add_call(values[-1], torch.ops.aten.convolution.default, arguments)
    x, weight = (required_spec(value).nbytes for value in values)
    return layouts._model_prices(node), (2 * x, 2 * required_spec(node).nbytes, 2 * weight)


def test_without_a_clock_cudnn_turns_around_what_is_for_tensor_cores():
    """Images of whole groups of 16 bytes; the others, as of three colours, it would have to turn back."""
    prices, (x, out, weight) = on_a_gpu(8, 1, torch.float32)
    assert prices == (x + out, weight)
    prices, (x, out, weight) = on_a_gpu(3, 1, torch.float32)
    assert prices == (out, x + weight)
    prices, (x, out, weight) = on_a_gpu(4, 1, torch.bfloat16)
    assert prices == (out, x + weight)


@pytest.mark.parametrize("is_old", (True, False))
def test_float32_that_may_not_be_rounded_is_not_for_tensor_cores(is_old):
    """By the old setting or by the new one, after which the old one cannot be read."""
    cudnn = torch.backends.cudnn
    if is_old:  # as a context, for torch's testing tools forbid to set the flag
        with cudnn.flags(enabled=cudnn.enabled, allow_tf32=False):
            prices, (x, out, weight) = on_a_gpu(8, 1, torch.float32)
    else:
        cudnn.conv.fp32_precision, before = "ieee", cudnn.conv.fp32_precision
        try:
            prices, (x, out, weight) = on_a_gpu(8, 1, torch.float32)
        finally:
            cudnn.conv.fp32_precision = before
    assert prices == (0, x + out + weight) and cudnn.conv.fp32_precision == "tf32"


def test_without_a_clock_grouped_convolutions_stay_as_they_are_on_a_gpu():
    """But those of one channel each, which go with their neighbours; of halves they are slow as given."""
    assert on_a_gpu(16, 2, torch.float32)[0] == (0, None)
    prices, (*_, weight) = on_a_gpu(16, 16, torch.float32)
    assert prices == (0, weight)
    (given, laid), (x, out, weight) = on_a_gpu(16, 16, torch.bfloat16)
    assert given is not None and given > x + out and laid == weight


class Grouped(nn.Module):
    def __init__(self, affine: bool):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm = nn.GroupNorm(2, 8, affine=affine)

    def forward(self, x):
        return self.conv2(F.silu(self.norm(self.conv1(x))))


@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_group_norms_are_kernels(affine, dtype):
    norm = nn.GroupNorm(3, 9, affine=affine).to(dtype)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    model = nn.Sequential(norm, nn.SiLU())
    wanted, got, report = both(model, torch.randn(4, 9, 5, 7, dtype=dtype, requires_grad=True))
    check_equal(wanted, got)
    assert report.library_calls == {}
    # The sums for the channels are over other rows than those for the groups.
    assert len(report.kernels) == (3 if affine else 2)
    large = torch.randn(8, 9, 32, 32, dtype=dtype, requires_grad=True)
    wanted, got, report = both(model, large)
    check_equal(wanted, got)
    assert any("var_mean: few bytes" in one.reason for one in report.saved)
    # Of many elements each example's channels are summed up, once, which gives the groups' sums, too.
    for sums_in_rows, sums in ((False, "example_sums"), (True, "sums_in_rows")):
        both_parameters = [torch.rand(9, dtype=dtype, requires_grad=True) for _ in range(2)]
        joint = joint_of(lambda x, w, b: F.group_norm(x, 3, w, b), large, *both_parameters)
        split = split_norms(joint, sums_in_rows)
        names = targets(split.graph)
        inputs = joint_inputs(joint, [large, *both_parameters])
        for mine, whole in zip(run_joint(split, inputs)[1], run_joint(joint, inputs)[1], strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
        assert f"aottrain.group_norm_{sums}.default" in names and "aottrain.group_norm_sums.default" not in names
    # In C++ the rows of the groups have them: gradient and x are read once.
    backward = [name for name in report.kernels if name.startswith("backward")]
    assert len(backward) == (3 if affine else 1)
    check_equal(*both(Grouped(affine), torch.randn(4, 8, 16, 16, requires_grad=True))[:2])


@pytest.mark.parametrize(
    ("batch", "dtype", "split"),
    [(2, torch.float32, True), (2, torch.bfloat16, True), (0, torch.float32, False)],
)
def test_group_norms_of_nothing_stay(batch, dtype, split):
    joint = joint_of(nn.GroupNorm(3, 9).to(dtype), torch.randn(batch, 9, 5, dtype=dtype, requires_grad=True))
    stays = "aten.native_group_norm.default", "aten.native_group_norm_backward.default"
    assert [name in targets(split_norms(joint).graph) for name in stays] == [not split] * 2


@pytest.mark.parametrize("affine", (True, False))
def test_instance_norms_are_kernels(affine):
    model = nn.Sequential(nn.InstanceNorm2d(9, affine=affine), nn.SiLU())
    wanted, got, report = both(model, torch.randn(4, 9, 13, 17, requires_grad=True))
    check_equal(wanted, got)
    assert report.library_calls == {}
    model = nn.Sequential(nn.BatchNorm2d(9, affine=affine, track_running_stats=False), nn.SiLU())
    wanted, got, report = both(model, torch.randn(4, 9, 13, 17, requires_grad=True))
    check_equal(wanted, got)
    assert report.library_calls == {}


def test_the_gradient_of_a_weight_of_one_pixel_is_not_copied():
    """It is laid out as eager's but in dimensions of size 1, and each was copied for the strides of these."""
    model, x = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 1)), torch.randn(4, 4, 16, 16)
    rewritten = Rewriting(joint_of(model, x).graph).run()
    # The images and the gradient of the result into channels_last, and the result back.
    assert len(rewritten.copies) == 3
    wanted, got, report = both(model, x)
    check_equal(wanted, got)
    assert "in channels_last" in report.layouts


class Gated(nn.Module):
    """WaveNet's gates: each convolution's channels in two halves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 8, 3, padding=1) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            gate, value = layer(x).chunk(2, dim=1)
            x = x + torch.sigmoid(gate) * torch.tanh(value)
        return x


def test_parts_of_a_value_are_in_its_layout():
    """Each was copied before it was split."""
    model, x = Gated(), torch.randn(4, 4, 16, 16)
    # The images into channels_last, the result and the weights' gradients back; a gradient of the result is one number.
    assert len(Rewriting(joint_of(model, x).graph).run().copies) == 2 + 3
    wanted, got, report = both(model, x)
    check_equal(wanted, got)
    assert "in channels_last" in report.layouts


def in_parts(monkeypatch, copy: float, slower: float) -> None:
    """Convolutions that read 8 channels take half of their time in channels_last, those that read 16 more."""

    def calls_timed(calls):
        if "copy" in calls:
            return Timed({"copy": Timing(copy)}, "measured")
        wide = calls[AS_GIVEN].args[0].shape[1] == 16
        return Timed({AS_GIVEN: Timing(1.0), CHANNELS_LAST: Timing(slower if wide else 0.5)}, "measured")

    monkeypatch.delenv("AOTTRAIN_RATES")
    monkeypatch.setattr(layouts, "calls_timed", calls_timed)
    monkeypatch.setattr(layouts, "rates_for", lambda device: DEFAULT_RATES)


@pytest.mark.parametrize(
    ("copy", "slower", "words", "choice"),
    (
        (0.01, 2.0, "3 of 6 convolutions", "channels_last: 0-1, 5"),
        (10.0, 2.0, "6 convolutions", AS_GIVEN),
    ),
)
def test_a_region_is_worth_its_borders(monkeypatch, copy, slower, words, choice):
    """All or nothing, as it was before, left either half of this network in the slower layout."""
    in_parts(monkeypatch, copy, slower)
    # Forward the first two read 8 channels, backward the last call alone is given a gradient of 8.
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3))
    wanted, got, report = both(model, torch.randn(4, 8, 16, 16, requires_grad=True))
    check_equal(wanted, got)
    (decision,) = (found for found in report.decisions.decisions if found.kind == "layouts")
    assert report.layouts.startswith(words)
    assert decision.choice == choice


def test_what_is_a_little_slower_between_two_others_stays_with_them(monkeypatch):
    """The copies before and after it would take longer."""
    in_parts(monkeypatch, 0.1, 1.01)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3))
    _, _, report = both(model, torch.randn(4, 8, 16, 16))
    (decision,) = (found for found in report.decisions.decisions if found.kind == "layouts")
    assert _convolutions_of(str(decision.choice), range(6))[:3] == [0, 1, 2]


def test_a_record_keeps_regions():
    for choice in (AS_GIVEN, CHANNELS_LAST, "channels_last: 0-3, 7, 9-10"):
        decision = Decision("layouts", "key", choice, "measured")
        assert record_from(Record((decision,)).to_dict()).decisions[0].choice == choice
    with pytest.raises(ValueError, match="is no answer"):
        record_from(Record((Decision("layouts", "key", "channels_last: -", "measured"),)).to_dict())
