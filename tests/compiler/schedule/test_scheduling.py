"""What becomes one kernel, what does not, and how many bytes it moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.link.room import fusion_model
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.pipeline import apply_partition, plan_partition
from aottrain.compiler.schedule.grouping.fusion import fuse
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.graph import calls, info
from aottrain.ir.kernels.traffic import moved_bytes
from aottrain.ir.ops import OpKind
from aottrain.ir.schedule import KernelCall, Schedule
from tests.compiler.programs import joint_of, leaf
from tests.numerics.tolerance import assert_close


def schedules(function: Callable[..., Any], *args: Any) -> tuple[Schedule, Schedule, int]:
    """Of the forward and of the backward; and the number of residuals that are no inputs."""
    joint = joint_of(function, *args)
    parts = apply_partition(
        joint, plan_partition(joint, "min_cut", fusion=fusion_model(joint, CompileOptions(kernel="cpp")))
    )
    assert parts.backward is not None
    return schedule(parts.forward), schedule(parts.backward), len(parts.residuals)


def library_calls(planned: Schedule) -> list[str]:
    """Work that is in no kernel."""
    free = (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE)
    return [info(c).name for c in planned.calls if not isinstance(c, KernelCall) and info(c).kind not in free]


def test_a_chain_is_one_kernel_each_way_and_saves_one_tensor():
    forward, backward, residuals = schedules(lambda x: x.sin().sin().sin(), leaf(1000))
    assert (len(forward.kernels), len(backward.kernels), residuals) == (1, 1, 1)
    assert library_calls(forward) == library_calls(backward) == []


def test_a_backward_moves_what_it_reads_and_writes():
    n = 4096
    _, backward, _ = schedules(lambda x: x.sin() + x.cos(), leaf(n))
    (call,) = backward.kernels
    assert moved_bytes(call.kernel) == 3 * n * 4  # the tangent, the input, its gradient


def test_blocks_of_norms_are_few_kernels_and_move_what_they_must():
    """Each reads its input and its gradient, and writes another: what is multiplied for two readers is not written."""

    def blocks(x, *weights):
        for weight in weights:
            x = x + F.rms_norm(x, (64,), weight) * F.softmax(x, dim=-1)
        return x

    n = 128
    forward, backward, _ = schedules(blocks, leaf(n, 64), *(leaf(64) for _ in range(4)))
    large = [call.kernel for call in backward.kernels if moved_bytes(call.kernel) >= n * 64 * 4]
    assert len(forward.kernels) == 1 and len(large) == 1
    assert all(moved_bytes(kernel) < 4.1 * n * 64 * 4 for kernel in large)  # and what the forward has saved


def test_a_value_made_from_two_groups_is_written_by_neither():
    """What a norm's backward makes of the tangent and what it makes of the input begin apart, as do the two casts of a
    softmax in float32: calls that nothing ties to each other before their last reader."""

    def rms_norm(x, weight):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def softmax(x):
        return torch.softmax(x, -1, dtype=torch.float32).to(x.dtype)

    n = 128
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = (torch.zeros(*shape, dtype=dtype, requires_grad=True) for shape in ((n, 64), (64,)))
        for function, arguments in ((rms_norm, (x, weight)), (softmax, (x,))):
            _, backward, _ = schedules(function, *arguments)
            (kernel,) = (call.kernel for call in backward.kernels)
            assert moved_bytes(kernel) < 3.1 * n * 64 * dtype.itemsize


def test_a_sum_over_everything_and_a_run_of_draws_have_rows():
    """Threads share them; a row of draws is made at once."""
    forward, _, _ = schedules(lambda x: F.dropout(x, 0.1).square().mean(), leaf(96, 1024))
    kernel = next(call.kernel for call in forward.kernels if moved_bytes(call.kernel) > 96 * 1024)
    assert kernel.ranges == (24, 4096) and kernel.num_outer == 1


def test_long_reductions_across_memory_are_the_librarys():
    """Short ones are done side by side."""
    forward, backward, _ = schedules(lambda x: x.softmax(1).exp(), leaf(8, 256, 32))
    assert library_calls(forward) == library_calls(backward) == []
    forward, backward, _ = schedules(lambda x: x.softmax(1).exp(), leaf(8, 768, 32))
    assert library_calls(forward) == ["aten._softmax.default"]
    assert library_calls(backward) == ["aten._softmax_backward_data.default"]


def test_bytes_of_a_part_are_those_of_the_part():
    """A slice is read, not the buffer that it lies in."""
    n = 64
    forward, _, _ = schedules(lambda x: x[:, :n].exp(), leaf(32, 4 * n))
    (call,) = forward.kernels
    assert moved_bytes(call.kernel) == 2 * 32 * n * 4


def test_a_pooling_is_a_kernel_that_runs_once():
    """Its places are saved: nine reads for each would be done again."""
    forward, backward, _ = schedules(lambda x: F.max_pool2d(x * 2, 3, 2, 1), leaf(2, 3, 16, 16))
    assert library_calls(forward) == []
    assert library_calls(backward) == ["aten.max_pool2d_with_indices_backward.default"]
    members = [source for call in backward.kernels for source in call.kernel.sources]
    assert not any("max_pool2d_with_indices.default" in source for source in members)


def test_a_softmax_is_one_kernel():
    forward, backward, _ = schedules(lambda x: F.softmax(x * 0.5, dim=-1), leaf(30, 77))
    assert (len(forward.kernels), len(backward.kernels)) == (1, 1)


class Block(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, x):
        return F.dropout(F.gelu(self.norm(x)), 0.1)


def test_the_gates_of_a_recurrent_step_are_one_kernel():
    """They read four parts of one buffer, each at other places."""

    def step(gates, cell):
        i, f, g, o = gates.chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell

    x, c = leaf(16, 256), leaf(16, 64)
    forward, backward, _ = schedules(step, x, c)
    assert len(forward.kernels) == 1
    assert len(backward.kernels) <= 2  # the gradients of the gates, and their concatenation
    call = aottrain.compile(step, capture="trace", kernel="cpp")
    for got, wanted in zip(call(x, c), step(x, c), strict=True):
        assert_close(got, wanted)


def test_a_norm_an_activation_and_a_dropout_are_one_kernel_each_way():
    """The mask is drawn where it is read, and written nowhere."""
    forward, backward, _ = schedules(Block(96), leaf(64, 96))
    assert (len(forward.kernels), library_calls(forward)) == (1, [])
    assert (len(backward.kernels), library_calls(backward)) == (1, [])
    (kernel,) = (call.kernel for call in forward.kernels)
    assert "philox" in str(kernel) and moved_bytes(kernel) < 2.1 * 64 * 96 * 4
    (kernel,) = (call.kernel for call in backward.kernels)
    assert "philox" in str(kernel) and moved_bytes(kernel) < 3.2 * 64 * 96 * 4


def test_parts_of_a_concatenation_that_one_loop_nest_makes_are_written_by_it():
    """Though one of them is so cheap that the concatenation could compute it, the other would be stored for that."""

    def divergence(x):
        mean, log_variance = x.chunk(2, -1)
        return (mean.square() + log_variance.exp() - log_variance).sum(-1)

    x = leaf(256, 512)
    _, backward, _ = schedules(divergence, x)
    (kernel,) = (call.kernel for call in backward.kernels if moved_bytes(call.kernel) > 1 << 16)
    assert moved_bytes(kernel) < 2.1 * x.nbytes
    call = aottrain.compile(divergence, capture="trace", kernel="cpp")
    (got,), (wanted,) = (torch.autograd.grad(f(x).sum(), x) for f in (call, divergence))
    assert_close(got, wanted)


@pytest.mark.parametrize(
    ("step", "shape", "calls"),
    [
        (lambda x: x + torch.randn_like(x), (64, 96), 0),
        (lambda x: x * x[:, :1, :1] + torch.randn_like(x), (4, 160, 1024), 0),  # rows too long to be held
        (lambda x: torch.softmax(x + torch.randn_like(x), -1), (64, 256), 0),
        (lambda x: torch.softmax(x + torch.randn_like(x), -1), (64, 77), 1),
        (lambda x: (x + torch.randn_like(x)).transpose(1, 2).contiguous(), (4, 64, 65), 1),
    ],
    ids=["elementwise", "cut", "rows", "short rows", "across memory"],
)
def test_normal_draws_are_made_in_kernels_whose_rows_make_many_at_once(step, shape, calls):
    """Elsewhere each would be made by itself, which takes longer than to write and read them."""
    forward, _, _ = schedules(step, leaf(*shape))
    assert library_calls(forward) == ["aottrain.philox_normal.default"] * calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1000), (2, 3, 4099), (5, 16384), (7,)])
def test_normal_draws_of_kernels_are_eagers_bit_for_bit(shape, dtype):
    def step(x):
        noise = torch.randn_like(x)
        return x * noise, torch.randn(x.shape, dtype=x.dtype) + x.mean(-1, True), torch.randn_like(x).sum(0) * 0 + noise

    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    call = aottrain.compile(step, capture="trace", kernel="cpp", on_unsupported="error")
    torch.manual_seed(5)
    got = call(x)
    (grad,) = torch.autograd.grad(got[0].sum(), x)
    torch.manual_seed(5)
    with aottrain.philox_eager():
        wanted = step(x)
    assert call.report.graphs[0].library_calls == {}
    assert all(map(torch.equal, got, wanted)) and torch.equal(grad, torch.autograd.grad(wanted[0].sum(), x)[0])


def test_draws_join_a_chain_of_norms_and_dropouts():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(Block(96) for _ in range(3)))

        def forward(self, x):
            return self.blocks(x)

    forward, _, _ = schedules(Chain(), leaf(64, 96))
    assert len(forward.kernels) == 1 and str(forward.kernels[0].kernel).count("philox(") == 3


def graph_of(function: Callable[..., Any], *args: Any) -> Any:
    return joint_of(function, *args).graph


def test_what_depends_on_a_product_of_its_own_group_is_another_kernel():
    """x.sin() and the sum that reads (x.sin() @ w) cannot be one kernel: the product would wait for itself."""
    w = torch.randn(8, 8)
    planned = schedule(graph_of(lambda x, w: (x.sin() @ w) + x.sin(), torch.randn(8, 8), w))
    names = [call.kernel.name if isinstance(call, KernelCall) else info(call).name for call in planned.calls]
    assert len(planned.kernels) == 2
    assert names.index("aten.mm.default") == 1


def test_a_group_that_moves_brings_what_all_its_calls_need():
    """A gradient of slices begins with one that reads no other kernel, and goes on with one that does: moved into the
    kernel that x * x is made by, it would wait for a kernel that waits for this one."""

    def function(x):
        made = x * x
        return made[2:] * 5 + made[:2].square() + made[2:] * 5

    _, backward, _ = schedules(function, leaf(4))
    assert len(backward.kernels) == 3 and library_calls(backward) == []


VIEWS = {"part": lambda value: value[1:].t(), "larger": lambda value: value.t()[None, None]}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_views_move_with_what_they_view(name):
    """What is padded is made where it is added to z.sin(); the sums of its views need that kernel from then on."""

    def function(x, z):
        padded = F.pad(x, (1, 0))
        seen = VIEWS[name](padded)
        return (padded + z.sin()) * seen.cumsum(-1).sum()

    planned = schedule(graph_of(function, torch.randn(4, 4), torch.randn(4, 5)))
    assert len(planned.kernels) == 3 and library_calls(planned) == ["aten.cumsum.default"]


def test_effects_keep_their_order_whatever_is_fused_around_them():
    """The second draw waits for the first, which reads what a kernel computes: that kernel may not need the second."""

    def function(x):
        y = F.rrelu(x.exp().clone(), training=True)
        return F.dropout1d(x, 0.3), y

    x = torch.randn(2, 3, 4)
    torch.manual_seed(3)
    wanted = function(x)
    compiled = aottrain.compile(function, capture="trace", rng="eager", kernel="cpp")
    torch.manual_seed(3)
    for got, known in zip(compiled(x), wanted, strict=True):
        assert_close(got, known)


def test_every_order_is_a_topological_one():
    w = torch.randn(16, 16)

    def program(x, w):
        a = x.sin()
        b = a @ w
        c = (a + b).softmax(-1)
        d = (c @ w).relu() + x.mean(0)
        return d * a.exp(), b.t().contiguous()

    planned = schedule(graph_of(program, torch.randn(16, 16), w))
    known = {node for node in graph_inputs(planned)}
    for call in planned.calls:
        reads = call.reads if isinstance(call, KernelCall) else tuple(call.all_input_nodes)
        assert all(node in known for node in reads if node.op == "call_function")
        known |= set(call.writes) if isinstance(call, KernelCall) else {call}


def graph_inputs(planned: Schedule) -> list[Any]:
    node = next(c.buffers[0] if isinstance(c, KernelCall) else c for c in planned.calls)
    return [n for n in node.graph.nodes if n.op != "call_function"]


def test_a_reader_of_a_sum_over_rows_is_in_another_kernel():
    fusion = fuse(graph_of(lambda x: x.exp() + x.exp().sum(0), torch.randn(500, 40)))
    assert len(fusion.groups) == 2
    assert any("a sum over the group's rows" in reason for reason in fusion.reasons.values())


def test_another_element_of_the_groups_value_is_refused():
    fusion = fuse(graph_of(lambda x: x.exp() + x.exp().t(), torch.randn(40, 40)))
    assert len(fusion.groups) == 2
    assert any("another element" in reason for reason in fusion.reasons.values())
    assert len(fuse(graph_of(lambda x: x.exp() + x.exp().t().cos().t(), torch.randn(40, 40))).groups) == 1


def test_views_between_members_need_no_kernel():
    def heads(x):
        return (x.sin().view(6, 7, 4, 8).transpose(1, 2) * 2).transpose(1, 2).reshape(6, 7, 32).cos()

    planned = schedule(graph_of(heads, torch.randn(6, 7, 32)))
    assert len(planned.kernels) == 1


def test_kernels_are_few_in_deep_programs():
    def deep(x):
        for _ in range(30):
            x = F.gelu(F.layer_norm(x, (64,))) + x
        return x

    planned = schedule(graph_of(deep, torch.randn(32, 64)))
    assert len(planned.kernels) <= 31
    assert math.prod(planned.kernels[0].kernel.ranges) == 32 * 64
    assert not [node for node in calls(planned.kernels[0].buffers[0].graph) if info(node).kind is OpKind.COMPUTE]


def test_counts_of_batches_are_one_kernel():
    """Each norm's is one number of its own: one launch for all of them."""
    norms = [nn.BatchNorm2d(4) for _ in range(4)]
    layers = [layer for norm in norms for layer in (nn.Conv2d(4, 4, 3), norm)]
    model = aottrain.compile(nn.Sequential(*layers), capture="trace", kernel="cpp", on_unsupported="error")
    model(torch.randn(2, 4, 16, 16))
    forward = [name for name in model.report.graphs[0].kernels if name.startswith("forward")]
    layouts, counts, each = 1, 1, 4  # statistics in three kernels, and what uses them
    assert len(forward) == layouts + counts + each * len(norms)
    assert all(norm.num_batches_tracked == 1 for norm in norms)


def test_a_chain_of_norms_holds_its_row_in_few_buffers():
    """What is read for the last time makes place; what is cheap to compute of what is held is computed again."""

    def chain(x, *weights):
        for weight in weights:
            x = x + F.gelu(F.layer_norm(x, (1024,), weight)) * torch.softmax(x, dim=-1)
        return x

    forward, _, _ = schedules(chain, leaf(32, 1024), *(leaf(1024) for _ in range(6)))
    (call,) = forward.kernels
    assert render_cpp(call.kernel).count("alignas(64) float r") <= 3


def test_long_rows_are_held_where_little_of_them_is():
    """A group norm's row of 160 kilobytes: its chain computes each exponential once."""

    def chain(x, weight):
        for _ in range(2):
            x = x + F.silu(F.group_norm(x, 2, weight))
        return x

    forward, _, _ = schedules(chain, leaf(4, 16, 70, 70), leaf(16))
    texts = [render_cpp(call.kernel) for call in forward.kernels]
    assert sum(text.count("exp_(") for text in texts) == 2


def tied(count: int, distance: int) -> Callable[..., Any]:
    """A weight that is used `count` times as a table, with `distance` products between one use and the next."""

    def program(table: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = table[rows]
        for _ in range(count - 1):
            for _ in range(distance):
                hidden = (hidden @ weight).sin()
            hidden = hidden + table[rows]
        return hidden.sum()

    return program


def test_the_gradients_of_a_weight_that_is_used_far_apart_are_added_as_they_come():
    """Else all of them were held until the last one is there: of BART's embedding, which three layers share, a third
    tensor of 147 MiB at the peak of the step, above eager's."""
    args = torch.randn(4096, 128, requires_grad=True), leaf(128, 128), torch.randint(0, 4096, (4,))
    far, near = (schedules(tied(4, distance), *args)[1] for distance in (6, 1))
    assert [_terms_at_once(planned, args[0]) for planned in (far, near)] == [[2, 2, 2], [4]]


def _terms_at_once(planned: Schedule, table: torch.Tensor) -> list[int]:
    """Of each kernel that adds tensors of the table's shape, how many it reads."""
    counts = [sum(node.meta["val"].shape == table.shape for node in call.reads) for call in planned.kernels]
    return [count for count in counts if count > 1]


def test_what_nothing_reads_runs_only_where_it_may_raise():
    def overwritten(x, y):
        total = x.sum(0)
        return total.copy_(y.sin())

    def looked_up(x, y, index):
        rows = x[index]
        return rows.copy_(y.sin())

    x, y = leaf(64, 4), leaf(4, 4)
    assert len(schedules(overwritten, x, y[0])[0].kernels) == 1
    forward, _, _ = schedules(looked_up, x, y, torch.arange(4))
    assert sum("aten.index.Tensor" in str(call.kernel) for call in forward.kernels) == 1
    call = aottrain.compile(looked_up, capture="trace", kernel="cpp")
    with pytest.raises(IndexError):
        call(x, y, torch.tensor([0, 1, 2, 99]))
