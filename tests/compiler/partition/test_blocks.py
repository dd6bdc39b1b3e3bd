"""The checkpoint strategy: which modules are blocks, and that a block's input is all that is saved of it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aottrain
from aottrain.compiler.partition.blocks import find_blocks
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.errors import ConfigError
from aottrain.ir.analysis.reach import descendants
from aottrain.ir.graph import InputKind, calls
from aottrain.ir.verify import verify_partition
from tests.compiler.programs import joint_inputs, joint_of, leaf, run_joint, run_parts
from tests.numerics.comparison import assert_same, assert_trains_like_eager
from tests.zoo import FeedForward, WrappedBlocks

WIDTH, ROWS = 16, 8
ROW_BYTES = ROWS * WIDTH * 4
FRONTENDS = ("dynamo", "trace")


class Block(FeedForward):
    def __init__(self) -> None:
        super().__init__(WIDTH, activation=torch.tanh)


class Stack(WrappedBlocks):
    def __init__(self, depth: int = 3, wrap=None) -> None:
        super().__init__(Block, depth, wrap)


class Shared(nn.Module):
    """One block that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(x))).sum()


class Helped(Stack):
    """Each block calls a module that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Tanh(), nn.Tanh())
        for block in self.blocks:
            block.forward = functools.partial(self._forward, block)  # type: ignore[method-assign]

    def _forward(self, block: Block, x: Tensor) -> Tensor:
        return x + block.down(self.act(block.up(block.norm(x))))


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage1, self.stage2, self.head = Block(), Block(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.stage1(x)))


class Stages(nn.Module):
    """Blocks in lists of their own beside a stem, as in a residual network."""

    def __init__(self) -> None:
        super().__init__()
        stages = (nn.Sequential(Block(), Block()) for _ in range(2))
        self.stem, (self.layer1, self.layer2) = nn.Linear(WIDTH, WIDTH), stages

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.layer1(self.stem(x)))


def blocks_of(model, *patterns: str) -> list[str]:
    joint = joint_of(model, torch.randn(ROWS, WIDTH))
    late = descendants(joint.inputs_of(InputKind.TANGENT))
    early = [node for node in calls(joint.graph) if node not in late]
    return [str(block) for block in sorted(set(find_blocks(early, patterns).values()))]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (Stack, ["blocks.0", "blocks.1", "blocks.2"]),
        (Helped, ["blocks.0", "blocks.1", "blocks.2"]),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block()), nn.ReLU()), ["1.0", "1.1"]),
        (Stages, ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
        (Numbered, ["stage1", "stage2"]),
        (Shared, ["block", "block (run 2)", "block (run 3)"]),
        (lambda: nn.Sequential(Stack(), nn.Linear(4, WIDTH), Block()), ["0.blocks.0", "0.blocks.1", "0.blocks.2"]),
    ],
)
def test_repeated_modules_are_blocks(make, wanted) -> None:
    assert blocks_of(make()) == wanted


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (["blocks.*"], ["0.blocks.0", "0.blocks.1", "0.blocks.2", "1.blocks.0"]),
        (["0.blocks.[12]"], ["0.blocks.1", "0.blocks.2"]),
        (["1", "up"], ["0.blocks.0.up", "0.blocks.1", "0.blocks.2.up", "1"]),
    ],
)
def test_blocks_by_name(patterns, wanted) -> None:
    model = nn.Sequential(Stack(), nn.Linear(4, WIDTH))
    model[1] = nn.Sequential(nn.Linear(4, WIDTH))
    model[1].blocks = nn.ModuleList([Block()])
    model[1].forward = lambda x: model[1].blocks[0](model[1][0](x))  # type: ignore[method-assign]
    assert blocks_of(model, *patterns) == wanted


@pytest.mark.parametrize("make", [lambda: Stack(1), lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())])
def test_without_a_repeated_block_it_is_refused_in_one_line(make) -> None:
    with pytest.raises(ConfigError, match="no repeated block") as caught:
        plan_partition(joint_of(make(), torch.randn(ROWS, WIDTH)), "checkpoint")
    assert "\n" not in str(caught.value) and "partition.modules" in str(caught.value)


def test_a_name_that_matches_nothing_is_refused_with_the_names_that_there_are() -> None:
    joint = joint_of(Stack(), torch.randn(ROWS, WIDTH))
    with pytest.raises(ConfigError, match=r"partition.modules=\[blcks.\*\].*blocks.\*"):
        plan_partition(joint, "checkpoint", modules=["blocks.*", "blcks.*"])


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("modules", [(), ("blocks.*",)])
def test_it_saves_what_enters_a_block_and_nothing_within(frontend, modules) -> None:
    torch._dynamo.reset()
    step = aottrain.compile(Stack(), partition="checkpoint", modules=modules, capture=frontend, on_unsupported="error")
    step(leaf(ROWS, WIDTH)).sum().backward()
    (graph,) = step.report.graphs
    assert graph.partition == "checkpoint" and graph.saved_bytes == 3 * ROW_BYTES  # the first block reads the batch
    assert [value.reason for value in graph.saved] == ["enters blocks.1", "enters blocks.2", "leaves blocks.2"]
    assert {value.module.split(".")[0] for value in graph.recomputed if "view" not in value.reason} == {"blocks"}


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_function_that_calls_a_module_has_blocks_too(frontend) -> None:
    torch._dynamo.reset()
    model = Stack()
    step = aottrain.compile(lambda x: model(x).sum(), partition="checkpoint", capture=frontend, on_unsupported="error")
    step(leaf(ROWS, WIDTH)).backward()
    assert step.report.graphs[0].saved_bytes == 3 * ROW_BYTES


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_where_a_compile_is_refused_the_caller_sees_the_line(frontend) -> None:
    torch._dynamo.reset()
    step = aottrain.compile(Stack(1), partition="checkpoint", capture=frontend)
    with pytest.raises(Exception, match="no repeated block"):
        step(leaf(ROWS, WIDTH))


def test_it_saves_what_torchs_own_checkpoint_of_each_block_saves() -> None:
    wrapped = Stack(wrap=functools.partial(checkpoint, use_reentrant=False))
    x = torch.randn(ROWS, WIDTH)
    by_hand = plan_partition(joint_of(wrapped, x), "min_cut")
    found = plan_partition(joint_of(Stack(), x), "checkpoint")
    assert (found.saved, found.recomputed) == (by_hand.saved, by_hand.recomputed)


def test_runs_of_one_module_are_blocks_of_their_own() -> None:
    plan = plan_partition(joint_of(Shared(), torch.randn(ROWS, WIDTH)), "checkpoint")
    assert plan.saved_bytes == 2 * ROW_BYTES
    assert [plan.reasons[name] for name in plan.saved] == ["enters block (run 2)", "enters block (run 3)"]


def test_checkpoints_of_the_user_inside_a_block_keep_what_they_must_save() -> None:
    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            policy = torch.utils.checkpoint.create_selective_checkpoint_contexts
            contexts = functools.partial(policy, [torch.ops.aten.addmm.default])
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    model = Stack()
    model.blocks = nn.ModuleList(Inner() for _ in range(3))
    plan = plan_partition(joint_of(model, torch.randn(ROWS, WIDTH)), "checkpoint")
    assert list(plan.reasons.values()).count("marked by torch.utils.checkpoint") >= 6
    assert plan.saved_bytes >= 3 * 5 * ROW_BYTES


@pytest.mark.parametrize("make", [Stack, Shared, Stages])
def test_halves_are_the_whole(make) -> None:
    model, x = make(), torch.randn(ROWS, WIDTH)
    joint = joint_of(model, x)
    parts = apply_partition(joint, plan_partition(joint, "checkpoint"))
    verify_partition(joint, parts)
    inputs = joint_inputs(joint, [*model.parameters(), x])
    assert_same(run_parts(parts, inputs), run_joint(joint, inputs))


class Counting(Stack):
    """Blocks that update state and read it: what they read of it is saved, not computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.blocks)
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.steps
        self.steps += 1
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = block(norm(x)) * scale
        return self.head(x)


@pytest.mark.parametrize("make", [Stack, Shared, Counting])
def test_three_steps_train_as_eager_does(make) -> None:
    data = [(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)),) for i in range(3)]
    assert_trains_like_eager(make, lambda: data, "checkpoint")


def test_draws_of_eagers_stream_are_saved_though_they_are_in_a_block() -> None:
    model, x = Stack(), torch.randn(ROWS, WIDTH)
    step = aottrain.compile(model, partition="checkpoint", rng="eager", capture="trace", on_unsupported="error")
    found = []
    for call in (model, step):
        torch.manual_seed(3)
        model.zero_grad(set_to_none=True)
        call(x).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert_same(*found)
    reasons = {value.reason for value in step.report.graphs[0].saved}
    assert "must: not repeatable, though within blocks.0" in reasons
