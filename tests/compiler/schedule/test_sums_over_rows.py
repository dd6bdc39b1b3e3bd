"""Sums over rows that are apart for each sequence of a batch: where they are made, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
from aottrain.compiler.codegen.evaluation import evaluate, memory_of
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.kernels.columns import by_memory, scratch_bytes, steps
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.verify import verify_kernel
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.runtime.launch import Launch, scheduled_runner
from aottrain.toolchain.native import find_compiler
from tests.compiler.lowering.lowering_runs import linked
from tests.compiler.programs import joint_inputs, joint_of, leaf
from tests.compiler.schedule.test_scheduling import library_calls
from tests.numerics.tolerance import RTOL_ATOL


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],)) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _channels_last(*shape: int) -> Tensor:
    return leaf(*shape).detach().contiguous(memory_format=torch.channels_last).requires_grad_()


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "modulated norm": (modulated, (leaf(3, 50, 129), leaf(3, 129), leaf(3, 129))),
    "a run for each thread and less": (modulated, (leaf(2, 101, 96), leaf(2, 96), leaf(2, 96))),
    "short runs": (modulated, (leaf(37, 9, 64), leaf(37, 64), leaf(37, 64))),
    "gate": (lambda x, y, gate: x + gate.unsqueeze(1) * y, (leaf(4, 70, 65), leaf(4, 70, 65), leaf(4, 65))),
    "mean and largest": (lambda x: (x.mean(1), x.amax(1, True), x.sin().sum((1, 2))), (leaf(5, 66, 3, 40),)),
    "two sums": (lambda x, w: ((x * w).sum(1), (x * w).sum((0, 1))), (leaf(6, 80, 48), leaf(48))),
    "pixels": (lambda x: F.adaptive_avg_pool2d(x.relu(), 1), (_channels_last(3, 32, 14, 15),)),
    "low precision": (lambda x: (x.bfloat16() * 3).sum(1), (leaf(3, 200, 33),)),
    "weights of heads": (lambda x, w: F.rms_norm(x, (64,)) * w, (leaf(150, 6, 64), leaf(6, 64))),
    "a bias of pairs": (lambda x, b: torch.softmax(x + b, -1) * x, (leaf(40, 3, 7, 33), leaf(3, 7, 33))),
    "weights of heads and of all": (
        lambda x, v, w: F.rms_norm(x, (48,)) * v * w,
        (leaf(90, 5, 48), leaf(5, 48), leaf(48)),
    ),
    "heads of halves": (lambda x, w: F.rms_norm(x, (32,)) * w, (leaf(70, 5, 32).bfloat16(), leaf(5, 32).bfloat16())),
    "steps": (lambda x: x[:, ::2, 1:].exp().sum(1), (leaf(4, 130, 66),)),
}


def runs_of(plan: Schedule) -> list[KernelIR]:
    return [call.kernel for call in plan.kernels if any(column.kept for column in call.kernel.columns)]


def planned(name: str) -> Iterator[Any]:
    function, given = PROGRAMS[name]
    joint = joint_of(function, *given)
    yield from (joint, joint_inputs(joint, given), schedule(joint.graph, f"{name.replace(' ', '_')}_"))


def check(name: str, launches: Callable[[Schedule], dict[str, Launch]]) -> None:
    joint, given, plan = planned(name)
    assert runs_of(plan) and not [call for call in library_calls(plan) if "sum" in call]
    wanted = torch.fx.Interpreter(torch.fx.GraphModule({}, joint.graph)).run(*given)
    got = scheduled_runner(joint.graph, plan, launches(plan))(list(given))
    for a, b in zip(got, filter(lambda v: v is not None, wanted), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        tolerance, _ = RTOL_ATOL[b.dtype]
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def by_torch(plan: Schedule) -> dict[str, Launch]:
    def launch(call: KernelCall) -> Launch:
        def run(buffers: Any) -> None:
            evaluate(call.kernel, [memory_of(b, p.span) for b, p in zip(buffers, call.kernel.parameters, strict=True)])

        return run

    return {call.kernel.name: launch(call) for call in plan.kernels}


@pytest.mark.parametrize("name", PROGRAMS)
def test_evaluated(name):
    check(name, by_torch)


@pytest.fixture(scope="module")
def library() -> dict[str, Launch]:
    return linked([call for name in PROGRAMS for call in list(planned(name))[2].kernels])


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_cpp_whatever_part_of_a_run_a_thread_has(name, library):
    """With three threads a run is begun by one and ended by another; with seven one may lie between."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 7):
            torch.set_num_threads(threads)
            check(name, lambda plan: library)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name", ["weights of heads", "a bias of pairs", "weights of heads and of all", "heads of halves"]
)
def test_results_of_loops_within_others_are_added_up_as_rows_lie(name):
    """By C++: in the kernel's own order, which Triton takes, they lie across memory."""
    for kernel in runs_of(list(planned(name))[2]):
        changed = by_memory(kernel)
        verify_kernel(changed)
        assert [column.kept for column in changed.columns] == [0] * len(changed.columns)
        assert {column.apart for column in changed.columns if column.apart}
        far = steps(changed)
        assert [far[loop] for loop in range(len(far))] == sorted(far.values(), reverse=True)
        assert sorted(changed.ranges) == sorted(kernel.ranges) and by_memory(changed) == changed
        assert scratch_bytes(kernel) == scratch_bytes(changed)
        parameters = [torch.randn(p.span).to(p.dtype) for p in kernel.parameters]
        given, same = ([parameter.clone() for parameter in parameters] for _ in range(2))
        evaluate(kernel, given)
        evaluate(changed, same)
        for one, other in zip(given, same, strict=True):
            rtol, _ = RTOL_ATOL[one.dtype]
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(one.abs().max()))


def test_many_results_or_few_rows_are_added_up_in_another_order():
    """What a thread would have to have all of leaves its cache; of four rows more would be begun than added."""
    for shape, apart in (((40, 600, 64), False), ((40, 60, 64), True), ((8, 60, 64), False), ((40, 60, 20), False)):
        x, w = leaf(*shape), leaf(*shape[1:])
        plan = schedule(joint_of(lambda x, w: F.rms_norm(x, (x.shape[-1],)) * w, x, w).graph)
        assert bool(runs_of(plan)) == apart, shape


def test_a_gradient_of_scale_and_shift_is_made_where_the_norms_is():
    """Of which one reads what the tangent's reader reads, and nothing else ties it to that."""
    _, _, plan = planned("modulated norm")
    (kernel,) = [k for k in runs_of(plan) if "native_layer_norm_backward" in str(k.sources)]
    assert [column.kept for column in kernel.columns] == [1, 1]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((4, 4, 64), "four vectors for each result"),
        ((4, 64, 3), "three neighbours"),
        ((2, 16, 70000), "rows that leave a cache"),
    ],
)
def test_what_the_libraries_add_up(shape, why):
    plan = schedule(joint_of(lambda x: x.sin().sum(1), leaf(*shape)).graph)
    assert not runs_of(plan), why


class Head(nn.Module):
    """The end of an image net: what each pixel gets of a mean's gradient is not laid out as the images are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).relu().mean((2, 3)).square().sum()


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")
def test_sums_over_images_go_along_memory():
    torch.manual_seed(0)
    model = Head()
    images = torch.randn(32, 64, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    compiled = aottrain.compile(model, capture="trace", kernel="cpp", on_unsupported="error")
    kernels = [record.formula for record in compiled.prepare(images).kernel_records]
    kernels = [text for text in kernels if "batch_norm_sums" in text]
    assert kernels and all("sum over rows" in text and "sum over the row " not in text for text in kernels)
    compiled(images).backward()
    ours, images.grad = images.grad, None
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(images).backward()
    expected = [images.grad, *(parameter.grad for parameter in model.parameters())]
    for value, right in zip([ours, *gradients], expected, strict=True):
        torch.testing.assert_close(value, right, rtol=0.0, atol=1e-5 * float(right.abs().max()))  # sums
        assert value.stride() == right.stride()


def test_the_loops_that_parts_of_a_row_are_added_up_over_come_last():
    """In whatever order they lie in memory."""

    def groups(gradient, x, mean, rstd):
        total = gradient.sum((2, 3), keepdim=True)
        return gradient.exp() - total, torch.ops.aottrain.group_norm_sums_in_rows(gradient, x, mean, rstd)

    across = (torch.randn(2, 3, 40, 20).transpose(2, 3) for _ in range(2))
    joint = joint_of(groups, *across, *(torch.ones(2, 3, 1, 1) for _ in range(2)))
    (kernel,) = [call.kernel for call in schedule(joint.graph).kernels if call.kernel.parts]
    assert kernel.ranges == (6, 20, 40)
    assert (kernel.num_outer, kernel.num_kept) == (1, 2)
