"""The CUDA path on devices that are not there: run by test_simulated.py in a process of its own.

What is compared is what a device would compute by the same kernels, run on the host; what is asserted beside it is what
only a device shows: where work is queued, what a graph records, what memory is whose.
"""

from __future__ import annotations

import copy
import ctypes
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compiler.optimizers import SGD, AdamW, Lion
from aottrain.compiler.passes import choose_layouts
from aottrain.compiler.passes import chunk_loss_heads as loss_head
from aottrain.errors import UnsupportedError
from aottrain.measure.rates import Rates
from aottrain.runtime import copies
from aottrain.runtime.cuda import direct, triton_launch
from scripts.bench_kernels import WithLoss
from scripts.bench_models import Gates
from tests.numerics.comparison import assert_same
from tests.numerics.tolerance import assert_close
from tests.runtime.test_on_a_gpu import Block, train
from tests.sampling import WHOLE
from tests.simulated import driver
from tests.simulated.judging import CHIPS, judge

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
WIDTH = 32


@pytest.fixture(autouse=True)
def on_the_first(device):
    """Every test leaves the first device and its default stream current."""
    yield
    assert torch.cuda.current_device() == 0 and torch.cuda.current_stream().cuda_stream == 0


def compiled(target, **options):
    known = {"capture": "trace", "kernel": "triton", "on_unsupported": "error", **options}
    return aottrain.compile(target, **known)


def batch(device="cuda", rows=2):
    return torch.randn(rows, 8, WIDTH, device=device)


def gradients(module):
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    return found


def same_step(model, call, x, dropout=0.0):
    """Loss and gradients of one call are eager's."""
    mine = call(x, dropout)
    mine.backward()
    found = gradients(model)
    wanted = model(x, dropout)
    wanted.backward()
    assert_close(mine, wanted)
    for got, right in zip(found, gradients(model), strict=True):
        assert_close(got, right)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=WHOLE)])
def test_training_by_graphs_is_that_by_the_same_kernels(precision, launches):
    """Bit for bit: eight steps, with micro-batches and two forwards at once."""
    model = Block(WIDTH).cuda()
    plain = compiled(copy.deepcopy(model))
    graphs = compiled(copy.deepcopy(model), cuda_graphs=True)
    wanted = train(plain, 8, precision, WIDTH)
    launches.clear()
    assert_same(train(graphs, 8, precision, WIDTH), wanted)
    counts = graphs.report.graphs[0].cuda_graphs
    assert counts.recordings == 2 and counts.replays > 10
    captured = [launch for launch in launches.launches if launch.captured]
    assert captured and {launch.stream for launch in captured}.isdisjoint({0})
    library = "flash" if precision == "bf16" else "efficient"
    calls = plain.report.graphs[0].library_calls
    assert sum(count for name, count in calls.items() if f"{library}_attention" in name) == 2


@pytest.mark.parametrize(("capture", "graphs"), [("trace", False), ("dynamo", True)])
def test_a_model_on_a_device_that_is_not_the_current_one(capture, graphs, device, launches):
    model = Block(WIDTH).to("cuda:1")
    call = compiled(model, capture=capture, cuda_graphs=graphs)
    for _ in range(4):
        same_step(model, call, batch("cuda:1"))
    assert {launch.device for launch in launches.launches} == {1}
    assert all(done.devices <= {1} for done in device.done)
    if graphs:
        assert call.report.graphs[0].cuda_graphs.replays == 4


def test_the_guard_is_what_makes_that_so(monkeypatch):
    """Without it the simulation refuses the launch, as a device would."""

    def unguarded(steps, tensors):
        for start, places, options in steps:
            start(*[tensors[place] for place in places], **options)

    monkeypatch.setattr(triton_launch, "_launched", unguarded)
    call = compiled(lambda x: x.sin() * 2 + 1)
    with pytest.raises(UnsupportedError, match="LaunchError: .* is on device 1, and 0 is current"):
        call(torch.ones(64, device="cuda:1"))


def test_with_one_device_launches_are_not_guarded(monkeypatch, launches):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    call = compiled(lambda x: x.sin() * 2 + 1)
    for _ in range(3):
        x = batch()
        assert_close(call(x), x.sin() * 2 + 1)
    assert [launch.device for launch in launches.launches] == [0] * 3


def test_forward_and_backward_are_queued_on_the_current_stream(device, launches):
    model = Block(WIDTH).cuda()
    call, x, stream = compiled(model), batch(), torch.cuda.Stream()
    call(x, 0.1).backward()
    gradients(model)  # fresh ones are made on the stream that the backward runs on
    device.clear()
    launches.clear()
    with torch.cuda.stream(stream):
        call(x, 0.1).backward()
    assert len(launches.launches) > 8 and {launch.stream for launch in launches.launches} == {stream.cuda_stream}
    assert {done.stream for done in device.done} == {stream.cuda_stream}
    assert len({done.thread for done in device.done}) == 2  # autograd's own, which gets its stream from the forward


def test_a_recording_is_not_replayed_on_another_stream(device):
    model = Block(WIDTH).cuda()
    call, x = compiled(model, cuda_graphs=True), batch()
    for _ in range(4):
        call(x, 0.0).backward()
    counts = call.report.graphs[0].cuda_graphs
    assert counts.replays == 4
    gradients(model)
    device.clear()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        same_step(model, call, x)
    assert counts.replays == 4 and counts.plain["another stream"] == 2
    assert "replay" not in {done.name for done in device.done}
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(x, 0.0)
    assert counts.plain["a larger CUDA graph is being recorded"] == 1


def test_replays_read_and_write_no_memory_that_was_freed(device):
    """Other models run and memory is freed between them: a replay's is its own, its parameters', or a residual's."""
    calls = []
    for _ in range(2):
        model = Block(WIDTH).cuda()
        calls.append((model, compiled(model, cuda_graphs=True)))
    for turn in range(4):
        for model, call in calls:
            same_step(model, call, batch())
            aottrain.empty_cache()
            held = [torch.full((1 << 12,), float(turn), device="cuda") for _ in range(8)]  # takes what is free
        assert all(bool((value == turn).all()) for value in held)
    for _, call in calls:
        assert call.report.graphs[0].cuda_graphs.replays == 4


def test_what_a_capture_forbids_is_not_recorded(device):
    """A program that asks the device for a value while it is captured runs kernel by kernel, counted."""

    def check(x):
        torch._assert_async((x > -100).all())
        return x.sin() * 2

    call = compiled(lambda x: check(x).sum(), cuda_graphs=True)
    x = torch.randn(64, device="cuda")
    for _ in range(4):
        assert_close(call(x), (x.sin() * 2).sum())
    assert call.report.graphs[0].cuda_graphs.replays == 0


def test_unaligned_memory_gets_a_kernel_of_its_own(launches):
    call = compiled(lambda x: F.layer_norm(x * 2, (64,)))
    memory = torch.randn(64 * 16 + 1, device="cuda")
    for start in (0, 1, 0, 1):
        x = memory[start : start + 64 * 16].view(16, 64)
        assert_close(call(x), F.layer_norm(x * 2, (64,)))
    keys = [launch.kernel for launch in launches.launches]
    assert len(set(keys)) == 2 and keys[0] == keys[2] and keys[1] == keys[3]


@pytest.mark.parametrize("options", [{}, pytest.param({"budget": 0.5}, marks=WHOLE), {"budget": 0.0}], ids=str)
def test_the_predicted_peak_is_what_the_allocator_saw(options, device):
    """At a size that no host would compute: nothing is computed, and every allocation is that of a device."""
    device.compute(False)
    gc.collect()
    others = torch.cuda.memory_allocated()
    model = Block(512).cuda()
    call = compiled(model, workspaces=True, **options)
    x = torch.randn(16, 256, 512, device="cuda")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        call(x).backward()
    predicted, measured = call.report.graphs[0].predicted_peak_bytes, torch.cuda.max_memory_allocated() - others
    print(f"predicted {predicted}, measured {measured}: {measured / predicted:.4f}")
    # The allocator rounds each of some hundred blocks up to 512 bytes.
    assert abs(measured - predicted) < 0.01 * predicted


def test_a_budget_that_fits_the_device(device):
    device.compute(False)
    free, _ = torch.cuda.mem_get_info()
    model = Block(512).cuda()
    call = compiled(model, budget="auto")
    call(torch.randn(16, 256, 512, device="cuda")).backward()
    assert call.report.graphs[0].predicted_peak_bytes < free


@pytest.mark.parametrize("wide", [True, False])
def test_what_autocast_rounds_on_the_way_to_a_gradient_is_not_rounded(wide, monkeypatch, device):
    """Products write gradients in float32, and the loss head adds in it, by the library where that does it; they are
    nearer to those of float32 than eager's are."""
    monkeypatch.setitem(loss_head._CHUNKS, "cuda", (4096, 16))
    if not wide:
        monkeypatch.setattr("aottrain.ops.losses.loss_head.adds_wide", lambda *_: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4096)).cuda()
    call = compiled(lambda x, t: F.cross_entropy(model(x), t), loss_head="chunked")
    x, target = torch.randn(64, 64, device="cuda"), torch.randint(4096, (64,), device="cuda")

    def step(function, autocast):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = function(x, target)
        loss.backward()
        return gradients(model)

    def eager(x, t):
        return F.cross_entropy(model(x), t)

    mine, rounded, wanted = step(call, True), step(eager, True), step(eager, False)
    report = call.report.graphs[0]
    assert report.library_calls["aten.mm.dtype"] == 1 and report.loss_heads

    def error(found):
        return [float((each - right).norm() / right.norm()) for each, right in zip(found, wanted, strict=True)]

    weights = [number for number, right in enumerate(wanted) if right.dim() == 2]
    for number in weights:
        assert error(mine)[number] < (1.0 if wide else 1.3) * error(rounded)[number] < 0.02
    for each, right in zip(mine, rounded, strict=True):
        assert (each.dtype, each.stride()) == (right.dtype, right.stride())


@pytest.mark.parametrize("place", [pytest.param("cuda:0", marks=WHOLE), "cuda:1"])
def test_the_loss_head_in_chunks(place, monkeypatch, launches):
    monkeypatch.setitem(loss_head._CHUNKS, "cuda", (4096, 16))
    head = nn.Linear(64, 40).to(place)
    call = compiled(lambda x, t: F.cross_entropy(head(x), t), loss_head="chunked")
    x, target = torch.randn(100, 64, device=place), torch.randint(40, (100,), device=place)
    target[3] = -100
    mine = call(x, target)
    mine.backward()
    found = gradients(head)
    wanted = F.cross_entropy(head(x), target)
    wanted.backward()
    assert_close(mine, wanted)
    for got, right in zip(found, gradients(head), strict=True):
        assert_close(got, right)
    rows = [launch for launch in launches.launches if launch.name == "triton_loss_rows"]
    assert [launch.programs for launch in rows] == [25] * 4
    assert {launch.device for launch in rows} == {torch.device(place).index}


@pytest.mark.parametrize("make", [AdamW, pytest.param(SGD, marks=WHOLE), pytest.param(Lion, marks=WHOLE)])
def test_an_optimizers_step_is_the_evaluated_one(make, launches):
    """On both devices at once: the norm is of all gradients."""
    found = []
    for kernel in ("evaluate", "triton"):
        torch.manual_seed(1)
        sizes = (5, 5000, 4096)
        parameters = [nn.Parameter(torch.randn(n, device=f"cuda:{i % 2}")) for i, n in enumerate(sizes)]
        optimizer = make(parameters, lr=0.1, clip_norm=1.0, kernel=kernel)
        optimizer.prepare()
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        found.append([parameter.detach() for parameter in parameters])
    for mine, wanted in zip(*found, strict=True):
        assert_close(mine, wanted)
    assert {launch.device for launch in launches.launches} == {0, 1} and not launches.skipped


class Convolved(nn.Sequential):
    """Two convolutions with a batch norm between them, whose buffers are three."""

    def __init__(self, groups: int = 1):
        first = nn.Conv2d(8, 16, 3, padding=1, bias=False, groups=groups)
        super().__init__(first, nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1, groups=groups))


def convolved(model, target, x):
    x = x.detach().requires_grad_()
    out = target(x)
    out.square().mean().backward()
    return [out, x.grad, *gradients(model), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_images_are_in_channels_last_between_convolutions(form, device):
    """Results, gradients and buffers are laid out as eager's; nothing is copied for cuDNN."""
    model = Convolved().cuda()
    call, x = compiled(copy.deepcopy(model)), torch.randn(4, 8, 16, 16, device="cuda").contiguous(memory_format=form)
    wanted = convolved(model, model, x)
    device.clear()
    found = convolved(call, call, x)
    # The buffers' new values; autograd lays out a result's gradient as the result, and those of weights as weights.
    assert [done.name for done in device.done].count("copy_") == 3 + 3 * (form is torch.channels_last)
    for mine, eager in zip(found, wanted, strict=True):
        assert mine.stride() == eager.stride()
        assert_close(mine, eager)
    (graph,) = call.report.graphs
    assert graph.layouts == "4 convolutions, forward and backward, in channels_last: by the fixed model"
    assert set(graph.library_calls) == {"aten.convolution.default", "aten.convolution_backward.default"}


def test_grouped_convolutions_stay_as_they_are_given():
    """cuDNN takes many times as long for them in channels_last."""
    model = Convolved(groups=2).cuda()
    call = compiled(model)
    convolved(call, call, torch.randn(4, 8, 16, 16, device="cuda"))
    assert call.report.graphs[0].layouts.endswith("as the program has them: by the fixed model")


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_the_launches_of_a_norm_in_channels_last_count(seconds, monkeypatch, launches):
    """Where they take longer than two copies do, its images are as given, and each channel is a row."""
    monkeypatch.setattr(choose_layouts, "rates_for", lambda device: Rates(op_overhead_s=seconds))
    call = compiled(Convolved().cuda())
    call(torch.randn(4, 8, 32, 32, device="cuda"))
    assert "4 convolutions, forward and backward, in channels_last" in call.report.graphs[0].layouts
    names = {launch.name for launch in launches.launches}
    assert ("triton_batch_spread_columns" in names) == (seconds == 0.0)


def test_buffers_take_their_new_values_at_once(device, monkeypatch):
    """One launch for all of one type, where each took one of its own."""
    counts = []
    monkeypatch.setattr(copies, "copy_all", lambda to, given: counts.append(len(to)) or torch._foreach_copy_(to, given))
    model = Convolved().cuda().append(nn.BatchNorm2d(8).cuda())
    other, x = copy.deepcopy(model), torch.randn(4, 8, 16, 16, device="cuda")
    call = compiled(other)
    versions = [buffer._version for buffer in other.buffers()]
    for turn in range(1, 3):
        call(x), model(x)
        assert counts == [4, 2] * turn
        # Of statistics ATen says nowhere that it writes them.
        assert [buffer._version for buffer in other.buffers()] == [
            v + turn * (i % 3 == 2) for i, v in enumerate(versions)
        ]
        for mine, eager in zip(other.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(mine, eager)


def test_buffers_that_share_memory_take_their_values_in_turn():
    first = torch.arange(6.0, device="cuda")
    copies.copy_each([first[:3], first[2:5]], [torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")])
    assert first.tolist() == [1, 1, 0, 0, 0, 5]
    copies.copy_each([first[:3], first[3:]], [first[3:], first[:3]])
    assert first.tolist() == [0, 0, 5, 0, 0, 5]


@pytest.mark.parametrize("arch", CHIPS)
def test_kernels_become_machine_code(arch, launches):
    """Of a block's step the kernels with most arguments, for each architecture; scripts/judge_kernels.py does all."""
    x = batch()
    compiled(Block(WIDTH).cuda())(x, 0.1).backward()
    known = {launch.kernel: launches.compiled[launch.kernel] for launch in launches.launches}
    largest = sorted(known.values(), key=lambda kernel: -len(kernel.source.signature))[:4]
    for kernel in largest:
        found = judge(kernel.source, kernel.metadata, arch)
        assert not found.spilled and found.shared <= CHIPS[arch].most_shared and found.resident > 0
        # What the batch norm reads lies in two layouts, so that rows of one of them have steps.
        name = kernel.source.fn.__name__
        assert found.loads[1] == 16 or name.startswith(("triton_batch_normalize", "triton_add_mean_batch_spread"))
        assert 0 < found.registers <= 255


def test_no_kernel_keeps_more_of_a_row_than_registers_hold(launches):
    """Norms, gates and softmaxes in a chain fit into one loop nest: of long rows it is cut between blocks, and neither
    all sums over rows nor all weights are in registers."""

    def step(width):
        torch.manual_seed(0)
        model, x = Gates(width, num_blocks=3).cuda(), torch.randn(24, width, device="cuda")
        call = compiled(WithLoss(model, lambda each, value: each(value)))
        launches.clear()
        call(x).backward()
        found = gradients(model)
        model(x).backward()
        for mine, wanted in zip(found, gradients(model), strict=True):
            assert_close(mine, wanted)
        names = {launch.kernel: launches.compiled[launch.kernel] for launch in launches.launches}
        rows = [one for one in names.values() if "_column_" not in one.source.fn.__name__]
        return len(call.report.graphs[0].kernels), [judge(one.source, one.metadata, 90).spilled for one in rows]

    short, spilled = step(256)
    assert short == 2 and not any(spilled)
    long, spilled = step(4096)
    assert 4 <= long <= 5 and max(spilled) < 200  # bytes of a thread; as one kernel they were 980


def test_what_triton_is_launched_through_is_its_own(launches):
    """With machine code, as on a device: Triton loads it, checks it against the device's limits, and launches it."""
    launches.compiles = True
    try:
        call = compiled(lambda x: x.softmax(-1) * 3 + 1)
        x = torch.randn(24, 48, device="cuda")
        for _ in range(3):
            assert_close(call(x), x.softmax(-1) * 3 + 1)
    finally:
        launches.compiles = False
    assert len(launches.launches) == 3 and not launches.skipped


def test_the_script_that_judges_kernels(launches):
    from scripts.judge_kernels import KERNEL, MODEL, Verdicts, kernel_rows, model_row

    compiled(lambda x: x.softmax(-1) * 3 + 1)(torch.randn(256, 512, device="cuda"))
    verdicts = Verdicts()
    (line,) = kernel_rows(launches.launches, 90, verdicts)
    row = dict(zip(KERNEL, line, strict=True))
    assert row["launches"] == "1" and row["spilled"] == "0" and 8 <= int(row["registers"]) <= 255
    assert row["load"] == row["store"] == "16" and float(row["waves"]) < 1
    row = dict(zip(MODEL, model_row("softmax", 0, launches.launches, 90, verdicts), strict=True))
    assert row["launches"] == row["kernels"] == row["launches under a wave"] == "1" and row["spilling"] == "0"


def test_a_kernel_for_all_sizes_is_compiled_once_and_launched_on_as_many_programs_as_a_size_needs(launches):
    call = compiled(lambda x, w: torch.softmax(F.layer_norm(x, (64,), w).sum(-1), -1), dynamic=True)
    lengths = (30, 41, 128, 30)
    for length in lengths:
        x = torch.randn(4, length, 64, device="cuda", requires_grad=True)
        call(x, torch.randn(64, device="cuda", requires_grad=True)).sum().backward()
    (graph,) = call.report.graphs
    assert graph.kernel == "triton"
    forward = [launch for launch in launches.launches if launch.name == "triton_native_layer_norm_sum"]
    assert len({launch.kernel for launch in forward}) == 1
    assert [launch.programs for launch in forward] == [4 * length for length in lengths]


@pytest.fixture
def by_the_driver(monkeypatch):
    """Kernels are started by the driver's own function, which is the simulation's."""
    address = ctypes.cast(driver.launch_kernel, ctypes.c_void_p).value
    monkeypatch.setattr(direct, "driver_function", lambda: address)
    driver.failures.clear()
    started = []
    original = direct.Direct.__call__

    def counted(self, *arguments):
        started.append(original(self, *arguments))
        return started[-1]

    monkeypatch.setattr(direct.Direct, "__call__", counted)
    yield started
    assert not driver.failures


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernels_started_by_the_driver_compute_the_same(dropout, by_the_driver, launches):
    model = Block(WIDTH).cuda()
    mine, other = compiled(model), compiled(copy.deepcopy(model))
    x = batch()
    for _ in range(3):
        torch.manual_seed(1)
        launches.clear()
        mine(x, dropout).backward()
        found, names = gradients(model), [launch.name for launch in launches.launches]
    assert sum(by_the_driver) == 2 * len(names) > 16  # all but those of the first call
    torch.manual_seed(1)
    plain = other
    plain(x, dropout).backward()
    for got, right in zip(found, gradients(plain), strict=True):
        assert torch.equal(got.cpu(), right.cpu())


def test_where_an_address_is_odd_or_the_driver_refuses_triton_starts_it(by_the_driver, launches):
    call, whole = compiled(lambda x: x.sin() * 2 + 1), batch().flatten()
    for x in (whole[:64], whole[:64]):
        assert_close(call(x), x.sin() * 2 + 1)
    assert by_the_driver == [1]
    (known,) = [each for each in gc.get_objects() if isinstance(each, direct.Direct)][-1:]
    assert known([whole[1:65], whole[:64]], 0) == 0
    refusing = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 11)(lambda *_: 1)
    address = ctypes.cast(refusing, ctypes.c_void_p).value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "driver_function", lambda: address)
        call = compiled(lambda x: x.cos() * 3 + 1)
        for _ in range(2):
            assert_close(call(whole), whole.cos() * 3 + 1)
    assert by_the_driver == [1, 0, 0]


def test_a_kernel_of_other_arguments_is_left_to_triton():
    def made(text, **metadata):
        plain = {"num_ctas": 1, "num_warps": 4, "shared": 0, **metadata}
        return SimpleNamespace(function=1, asm={"ptx": text}, metadata=SimpleNamespace(**plain))

    text = ".visible .entry k(\n.param .u64 .ptr .global .align 1 k_0,\n.param .u64 k_1\n)\n.reqntid 128"
    assert direct._is_plain(made(text), 2) and direct._is_plain(made(text), 1)
    assert not direct._is_plain(made(text), 3)
    assert not direct._is_plain(made(text.replace("u64 k_1", "u32 k_1")), 2)
    assert not direct._is_plain(made(text + text), 2) and not direct._is_plain(made(""), 0)
    for other in ({"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 64}):
        assert not direct._is_plain(made(text, **other), 2)


WITH_NUMBERS = {
    "multiplied": lambda x, s: F.gelu(x * s),
    "computed on the host": lambda x, s: F.gelu(x) * (s.exp() + 1),
    "chosen": lambda x, s: torch.where(x > 0, x.exp(), s),
    "in float64": lambda x, s: torch.softmax(x * s.double(), -1),
    "brought to the device": lambda x, s: x.exp() * (x.sum().cpu() * s).cuda(),
    "beside draws": lambda x, s: F.dropout(x.sin() * s, 0.3),
    "not read": lambda x, s: x.sin().exp(),
}


@pytest.mark.parametrize("is_first", [False, pytest.param(True, marks=WHOLE)])
@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_numbers_of_the_host_beside_a_device_s_tensors(name, frontend, is_first, launches):
    """As eager takes them: kernels compute the rest, and are of no use for what reads a number."""
    function = WITH_NUMBERS[name]
    call = (lambda s, x: function(x, s)) if is_first else function
    step = compiled(call, capture=frontend)
    found = []
    for each, draws in ((step, nullcontext), (call, aottrain.philox_eager)):
        torch.manual_seed(0)
        x, s = torch.randn(6, 40, device="cuda", requires_grad=True), torch.tensor(1.5, requires_grad=True)
        with draws():
            y = each(s, x) if is_first else each(x, s)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, s], allow_unused=True)])
    for got, wanted in zip(*found, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert got.device == wanted.device
            assert_close(got, wanted)
    assert [graph.kernel for graph in step.report.graphs] == ["triton"] and launches.launches


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_a_backward_of_numbers_of_the_host_alone(frontend):
    """Of a result the gradient does not come: what is left has no values on the device."""
    step = compiled(lambda x, s: (x.sin() * s, x.sum().cpu() * s, s + 1), capture=frontend)
    x, s = torch.randn(6, 40, device="cuda"), torch.tensor(1.5, requires_grad=True)
    step(x, s)[1].backward()
    assert_close(s.grad, x.sum().cpu())
    step(x, s)[0].sum().backward()
    assert_close(s.grad, x.sum().cpu() + x.sin().sum().cpu())
    assert [graph.kernel for graph in step.report.graphs] == ["triton"]


def test_a_number_that_dynamo_made_of_a_float_is_no_device():
    """With symbolic sizes it hands in the eps of a norm, which nothing reads."""
    step = compiled(nn.LayerNorm(WIDTH).cuda(), capture="dynamo", dynamic=True)
    step(batch().requires_grad_()).sum().backward()
    assert [graph.kernel for graph in step.report.graphs] == ["triton"]
