"""Optimizer steps of generated kernels against torch's own, over odd sizes, types, groups, layouts and checkpoints."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import aottrain
from aottrain.compiler.link import multi_tensor
from aottrain.compiler.optimizers import SGD, AdamW, Lion
from aottrain.errors import UnsupportedError
from aottrain.metrics.memory import watch_cpu_peak
from aottrain.toolchain.native import find_compiler, require_all
from tests.compiler.optimizers.optimizing import CASES, FUSED, error, gradients, in_groups, made, train
from tests.numerics.comparison import assert_same
from tests.numerics.tolerance import assert_close

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@needs_compiler
@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_error_is_no_larger_than_torchs(name, dtype, clip):
    """Against float64 with the same values given, at most 1.5 times that of torch's fused step, or Lion's reference."""
    ours, theirs, options = CASES[name]
    exact, _ = train(theirs, F64, clip=clip, given=dtype, **options)
    fused = {"fused": True} if theirs in FUSED else {}
    wanted, _ = train(theirs, dtype, clip=clip, **options, **fused)
    got, _ = train(ours, dtype, **options, clip=None, clip_norm=clip) if clip else train(ours, dtype, **options)
    assert error(got, exact) <= 1.5 * error(wanted, exact) + torch.finfo(F64).eps


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_step_is_the_evaluated_one(name, dtype):
    ours, _, options = CASES[name]
    got = train(ours, dtype, range(3), clip_norm=1.0, kernel="cpp", **options)
    wanted = train(ours, dtype, range(3), clip_norm=1.0, kernel="evaluate", **options)
    for a, b in zip(got[0], wanted[0], strict=True):
        assert_close(a.detach(), b.detach())
    for a, b in zip(got[1].state.values(), wanted[1].state.values(), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key])


@needs_compiler
@pytest.mark.parametrize("kernel", ["cpp", "evaluate"])
@pytest.mark.parametrize("given", [[3.0, -4.0], [1e-3, 0.0], [math.inf, 1.0], [math.nan, 1.0], [-math.inf, math.nan]])
def test_clipping_is_torchs(given, kernel):
    """Also of norms that are not finite: the factor is then 0 or NaN."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    others = copy.deepcopy(parameters)
    for both in (parameters, others):
        both[0].grad, both[1].grad = torch.tensor(given), torch.full((3,), 0.5)
    norm = nn.utils.clip_grad_norm_(others, 1.0)
    torch.optim.SGD(others, lr=0.1).step()
    optimizer = SGD(parameters, lr=0.1, clip_norm=1.0, kernel=kernel)
    optimizer.step()
    assert_close(optimizer.grad_norm.float(), norm)
    assert_close(parameters[0].detach(), others[0].detach())
    assert_close(parameters[1].detach(), others[1].detach())
    assert_same(parameters[0].grad, torch.tensor(given))


@needs_compiler
def test_a_norm_that_float32_cannot_square_is_right():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = SGD([parameter], lr=1.0, clip_norm=1.0)
    for size in (1e25, 1e-25):
        parameter.grad = torch.full((3,), size)
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(size * math.sqrt(3))
    assert torch.isfinite(parameter).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_clipped_gradient_is_rounded_as_if_it_had_been_written(dtype):
    parameter = nn.Parameter(torch.zeros(4097, dtype=dtype))
    parameter.grad = gradients(0, dtype, [(4097,)])[0]
    optimizer = SGD([parameter], lr=3.0, clip_norm=1.0)
    optimizer.step()
    factor = (1.0 / (optimizer.grad_norm + 1e-6)).float()
    clipped = (parameter.grad.float() * factor).to(dtype)
    assert_same(parameter.detach(), (0 - clipped.float() * 3.0).to(dtype))
    assert not torch.equal(parameter.detach(), (0 - parameter.grad.float() * factor * 3.0).to(dtype))


@needs_compiler
@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
@pytest.mark.parametrize("given", [math.nan, math.inf])
def test_a_step_is_left_out_where_it_is_told_to(cls, given):
    options = {"momentum": 0.9} if cls is SGD else {}
    parameters, optimizer = train(cls, F32, range(2), skip_nonfinite=True, **options)
    before = copy.deepcopy((parameters, optimizer.state_dict()["state"]))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, given)
    optimizer.step()
    assert not math.isfinite(optimizer.grad_norm.item())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert_same((parameters, optimizer.state_dict()["state"]), before)
    del optimizer.found_inf
    optimizer.step()
    assert not torch.equal(parameters[0], before[0][0])


@needs_compiler
@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "sgd", "lion"])
@pytest.mark.parametrize("way", ["ours to torch", "torch to ours", "ours to ours"])
def test_a_checkpoint_goes_on(name, way):
    """Of either with either; of ours with ours bit for bit."""
    ours, theirs, options = CASES[name]
    first, second = {"ours": ours, "torch": theirs}[way.split()[0]], {"ours": ours, "torch": theirs}[way.split()[2]]
    wanted, _ = train(second, F32, range(8), **options)
    parameters, optimizer = train(first, F32, range(4), **options)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = second(in_groups(fresh), **options)
    resumed.load_state_dict(saved)
    got, _ = train(second, F32, range(4, 8), parameters=fresh, optimizer=resumed)
    assert resumed.state_dict()["state"].keys() == saved["state"].keys()
    for a, b in zip(got, wanted, strict=True):
        assert_same(a.detach(), b.detach()) if way == "ours to ours" else assert_close(a.detach(), b.detach())


@needs_compiler
def test_parameters_without_gradients_are_left_alone_and_have_no_state():
    parameters, others = made(F32), made(F32)
    optimizer, reference = AdamW(parameters, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    active = [(0, 2), (0, 5), (), (1, 2, 5), (0,)]
    for step, chosen in enumerate(active):
        for both in (parameters, others):
            for i, (parameter, gradient) in enumerate(zip(both, gradients(step, F32), strict=True)):
                parameter.grad = gradient if i in chosen else None
        optimizer.step()
        reference.step()
    assert [p in optimizer.state for p in parameters] == [p in reference.state for p in others]
    for p, q in zip(parameters, others, strict=True):
        assert_close(p.detach(), q.detach())
        if p in optimizer.state:
            assert optimizer.state[p]["step"] == reference.state[q]["step"]


@needs_compiler
def test_types_are_mixed_and_the_norm_is_of_all():
    parameters = [nn.Parameter(torch.full((5000,), 1.0, dtype=dtype)) for dtype in (BF16, F32, F64, F32)]
    others = copy.deepcopy(parameters)
    for both in (parameters, others):
        for parameter in both:
            parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW(parameters, lr=0.1, clip_norm=2.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(20000))
    nn.utils.clip_grad_norm_(others, 2.0)
    torch.optim.AdamW(others, lr=0.1).step()
    for a, b in zip(parameters, others, strict=True):
        a, b = a.detach(), b.detach()  # torch's norm is one of bfloat16, so float64 agrees as far as float32 does
        assert_close(*((a.float(), b.float()) if a.dtype is F64 else (a, b)))


@needs_compiler
def test_parameters_on_several_devices_have_one_norm(monkeypatch):
    """Here "cpu" and "cpu:0" count as two."""
    wanted, reference = train(AdamW, F32, range(3), clip_norm=0.5)
    members = AdamW._members

    def apart(self, takes_part):
        (found,) = members(self, takes_part).values()
        return {torch.device("cpu"): found[:3], torch.device("cpu", 0): found[3:]}

    monkeypatch.setattr(AdamW, "_members", apart)
    got, optimizer = train(AdamW, F32, range(3), clip_norm=0.5)
    assert len(optimizer._plans) == 2
    assert_close(optimizer.grad_norm, reference.grad_norm)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.detach(), b.detach())


@needs_compiler
@pytest.mark.parametrize("layout", ["transposed", "channels_last", "with gaps", "expanded gradient"])
def test_layouts(layout):
    value, gradient = torch.randn(4, 6, 3, 5), torch.randn(4, 6, 3, 5)
    if layout == "transposed":
        value = torch.randn(5, 3, 6, 4).permute(3, 2, 1, 0)
    elif layout == "channels_last":
        value = value.to(memory_format=torch.channels_last)
    elif layout == "with gaps":
        value = torch.randn(4, 12, 3, 5)[:, ::2]
    else:
        gradient = torch.randn(4, 1, 1, 1).expand(4, 6, 3, 5)
    other = nn.Parameter(value.clone())
    parameter = nn.Parameter(value)
    assert parameter.stride() == value.stride()
    optimizer, reference = AdamW([parameter], lr=0.1), torch.optim.AdamW([other], lr=0.1)
    for _ in range(2):
        parameter.grad, other.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    assert_close(parameter.detach(), other.detach())


@needs_compiler
def test_memory_that_is_replaced_is_found_again():
    """`parameter.data`, a state, or all of them, by a checkpoint: what was there before is not written again."""
    parameter = nn.Parameter(torch.ones(100))
    optimizer = SGD([parameter], lr=1.0, momentum=0.5)
    parameter.grad = torch.ones(100)
    optimizer.step()
    kept = parameter.data
    parameter.data = torch.full((100,), 7.0)
    optimizer.step()
    assert torch.equal(kept, torch.zeros(100)) and torch.equal(parameter, torch.full((100,), 5.5))
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(100)
    optimizer.step()
    assert torch.equal(parameter, torch.full((100,), 4.5))
    parameter.data, parameter.grad = parameter.data[:10].clone(), torch.ones(10)
    with pytest.raises(UnsupportedError, match="momentum_buffer of shape"):
        optimizer.step()


@needs_compiler
@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_of_another_shape_is_found_with_as_many_elements(elsewhere):
    """The strides of both are (6, 1): rows of six, and four columns of rows of six."""
    memory = torch.zeros(36)
    parameter = nn.Parameter(memory[:24].view(4, 6))
    optimizer = SGD([parameter], lr=1.0)
    parameter.grad = torch.zeros(4, 6)
    optimizer.step()
    wide = (memory.clone() if elsewhere else memory).view(6, 6)
    parameter.data, parameter.grad = wide[:, :4], torch.ones(6, 4)
    optimizer.step()
    assert torch.equal(wide, torch.tensor([[-1.0] * 4 + [0.0] * 2] * 6))


@needs_compiler
def test_a_parameter_that_is_turned_is_seen_beside_one_with_gaps():
    gaps, parameter = nn.Parameter(torch.zeros(4, 12)[:, ::2]), nn.Parameter(torch.zeros(4, 6))
    optimizer = SGD([gaps, parameter], lr=1.0)
    numbers = torch.arange(24.0).view(4, 6)
    for turned in (False, True):
        parameter.data = parameter.data.t() if turned else parameter.data
        parameter.grad, gaps.grad = (numbers.t() if turned else numbers).clone(), torch.ones(4, 6)
        optimizer.step()
    assert torch.equal(parameter.detach(), -2 * numbers.t()) and torch.equal(gaps.detach(), torch.full((4, 6), -2.0))


@needs_compiler
@pytest.mark.parametrize("change", [Tensor.double, lambda state: state.t().contiguous().t()], ids=["type", "layout"])
def test_states_of_another_type_or_layout_keep_their_values(change):
    parameter = nn.Parameter(torch.zeros(4, 6))
    optimizer = SGD([parameter], lr=1.0, momentum=0.5)
    optimizer.state[parameter]["momentum_buffer"] = change(torch.arange(24.0).view(4, 6))
    parameter.grad = torch.ones(4, 6)
    optimizer.step()
    assert torch.equal(parameter.detach(), -(torch.arange(24.0).view(4, 6) / 2 + 1))


@needs_compiler
def test_autograd_hears_of_the_update():
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    SGD([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_compiler
def test_schedules_hooks_closures_and_copies():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = SGD([parameter], lr=1.0, momentum=0.9, clip_norm=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(parameter[0].item()))

    def closure():
        optimizer.zero_grad()
        loss = (parameter * 0.1).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(0.3)
    schedule.step()
    optimizer.step()
    assert seen == pytest.approx([0.9, 0.9 - 0.5 * 0.19])
    twin = copy.deepcopy(optimizer)
    assert twin.clip_norm == 1.0
    twin.param_groups[0]["params"][0].grad = torch.ones(3)
    twin.step()
    assert twin.grad_norm.item() == pytest.approx(math.sqrt(3)) and len(seen) == 2


@needs_compiler
def test_a_steady_step_compiles_and_allocates_nothing(monkeypatch):
    loads = []
    monkeypatch.setattr(multi_tensor, "require_all", lambda given: loads.append(given) or require_all(given))
    _, optimizer = train(AdamW, F32, range(2), clip_norm=1.0)
    first = len(loads)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    with watch_cpu_peak() as peak:
        optimizer.step()
    assert peak.num_bytes == 0
    # Other tensors of other sizes, in other groups: the same text, which is loaded already.
    more = [nn.Parameter(torch.ones(size)) for size in (5, 300, 9000)]
    for parameter in more:
        parameter.grad = torch.ones_like(parameter)
    AdamW(more, lr=3.0).step()
    assert len(loads) == first <= 1


@needs_compiler
def test_threads_change_nothing():
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append([p.detach() for p in train(AdamW, F32, range(3), clip_norm=0.5)[0]])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (lambda p: SGD(p, lr=1.0, momentum=0.9, dampening=0.1, skip_nonfinite=True), "dampening"),
        (lambda p: AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "complex64"),
        (lambda p: AdamW([nn.Parameter(torch.ones(2, device="meta"))]), "meta"),
    ],
)
def test_what_has_no_kernel_is_refused(make, message):
    optimizer = make([nn.Parameter(torch.ones(2))])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(UnsupportedError, match=message):
        optimizer.step()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        SGD(table.parameters(), lr=0.1, kernel="evaluate").step()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="clip_norm=0"):
        aottrain.AdamW([nn.Parameter(torch.ones(2))], clip_norm=0)
    with pytest.raises(ValueError, match="kernel='cuda'"):
        aottrain.Lion([nn.Parameter(torch.ones(2))], kernel="cuda")


def test_nothing_to_do():
    optimizer = AdamW([nn.Parameter(torch.ones(2))])
    optimizer.step()
    assert optimizer.grad_norm == 0 and not optimizer.state
