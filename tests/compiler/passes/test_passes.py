"""The table of rewrites: each keeps what it says, the documentation has them in order, and one more is one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
import aottrain.compiler.passes.fuse_attention as attention
import aottrain.compiler.pipeline as pipeline
from aottrain.compiler.joint.analysis import analyse
from aottrain.compiler.joint.functional import functionalize
from aottrain.compiler.joint.joint import trace_joint
from aottrain.ir.graph import JointGraph, calls
from aottrain.ir.settings.choices import GENERATED
from aottrain.ir.settings.decisions import DEFAULT
from aottrain.measure.decisions import deciding
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import captured, joint_inputs, joint_of, leaf, run_joint
from tests.numerics.tolerance import assert_close

aten = torch.ops.aten
# Those that change nothing on a CPU are tried on simulated devices (tests/simulated).
OF_A_GPU = ("widen_products", "split_biases")
NAMES = [each.name for each in pipeline.PASSES if each.name not in OF_A_GPU]
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def twice_the_same(x: Tensor) -> Tensor:
    return x.sin() * x.sin() + x.clone()


def head(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w.t(), torch.arange(1024) % 4096)


def sequence_loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x.transpose(1, 2), torch.arange(12).view(2, 6) % 8, ignore_index=3)


def rotated(x: Tensor) -> Tensor:
    table = torch.polar(torch.ones(16, 8), torch.linspace(0, 3, 128).view(16, 8))
    return torch.view_as_real(torch.view_as_complex(x.view(3, 16, 8, 2)) * table).flatten(2).sin()


def small_head(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(12) % 8, ignore_index=3)


def steps(x: Tensor) -> Tensor:
    return torch.stack([x[:, t].sin() * x[:, t - 1] for t in range(1, 6)]).sum()


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (each[:, :, None].expand(1, 2, 3, 16, 8).reshape(1, 6, 16, 8) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.125
    return scores.softmax(-1) @ v


def gathered(x: Tensor, w: Tensor) -> Tensor:
    return (w[torch.arange(9000) % 7] * x).sum()


def weighted_frequencies(x: Tensor, w: Tensor) -> Tensor:
    return torch.fft.irfft(F.pad(torch.fft.rfft(x)[..., :6] * w[:, :6], (0, 3)) * 2)


def sent(x: Tensor, w: Tensor) -> Tensor:
    edges = torch.arange(9000)
    return torch.zeros_like(x).index_add(0, edges * 5 % 900, x[edges * 7 % 900] * w[:, None])


def normalised(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, training=True))


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, w, padding=1).relu(), w, padding=1)


def weighed(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("enw,ne->nw", x, w)


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 3, 2, 1) + F.max_pool2d(x, 3, 2, 1, ceil_mode=True)[:, :, :8, :9]


def along_rows(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(F.conv1d(x, w, padding=1).relu(), w, stride=2, dilation=2)


def shuffled(x: Tensor) -> Tensor:
    return F.pixel_shuffle(x.sin(), 2).exp()


def gated(x: Tensor, b: Tensor) -> Tensor:
    left, right = (x + b).chunk(2, -1)
    return left.sin() * right.exp()


# One program for each rewrite, which that rewrite changes.
PROGRAMS: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "simplify": (twice_the_same, (leaf(6, 4),)),
    "classes_last": (sequence_loss, (leaf(2, 6, 8),)),
    "chunk_loss_heads": (head, (leaf(1024, 16), leaf(4096, 16, seed=1))),
    "join_sums": (steps, (leaf(4, 6, 8),)),
    "share_heads": (shared_heads, (leaf(1, 6, 16, 8), leaf(1, 2, 16, 8, seed=1), leaf(1, 2, 16, 8, seed=2))),
    "fuse_attention": (written_out, tuple(leaf(2, 4, 128, 32, seed=i) for i in range(3))),
    "order_scatters": (gathered, (leaf(9000, 8), leaf(7, 8, seed=1))),
    "sum_messages": (sent, (leaf(900, 8), leaf(9000, seed=1))),
    "pair_complex": (weighted_frequencies, (leaf(3, 4, 16), leaf(4, 9, seed=1))),
    "write_out": (shuffled, (leaf(2, 8, 3, 5),)),
    "views_first": (gated, (leaf(256, 64), leaf(64, seed=1))),
    "split_products": (weighed, (leaf(3, 5, 7), leaf(5, 3, seed=1))),
    "split_complex": (rotated, (leaf(3, 16, 16),)),
    "split_losses": (small_head, (leaf(12, 8),)),
    "split_softmaxes": (lambda x: x.softmax(0), (leaf(600, 32),)),
    "split_norms": (normalised, (leaf(4, 3, 8, 8), leaf(3, seed=1), leaf(3, seed=2))),
    "split_pools": (pooled, (leaf(4, 8, 16, 17),)),
    "scatter_pools": (pooled, (leaf(4, 8, 16, 17),)),
    "widen_convolutions": (along_rows, (leaf(4, 8, 64), leaf(8, 8, 3, seed=1))),
    "choose_layouts": (convolved, (leaf(4, 8, 16, 16), leaf(8, 8, 3, 3, seed=1))),
}


def functional(function: Any, *inputs: Tensor) -> JointGraph:
    step = captured(function, *inputs)
    return functionalize(trace_joint(step, analyse(step)))


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_a_rewrite_keeps_what_it_says(name, monkeypatch):
    monkeypatch.setattr(attention, "_is_faster", lambda ours, theirs: True)  # it is chosen by the clock
    each = next(each for each in pipeline.PASSES if each.name == name)
    program, inputs = PROGRAMS[name]
    joint = (functional if name == "simplify" else joint_of)(program, *inputs)
    joint = pipeline.split_pools(joint) if name == "scatter_pools" else joint  # which follows it
    with deciding(DEFAULT):
        rewritten = each(joint).joint
    given = joint_inputs(joint, inputs)
    assert [str(n.target) for n in calls(rewritten.graph)] != [str(n.target) for n in calls(joint.graph)]
    for kept, value in zip(sum(run_joint(joint, given), []), sum(run_joint(rewritten, given), []), strict=True):
        if each.keeps == pipeline.BITWISE:
            assert torch.equal(kept, value)
        else:
            assert_close(value / kept.abs().max(), kept / kept.abs().max())  # sums whose terms cancel


def test_what_is_kept_is_one_of_two_things():
    assert {each.keeps for each in pipeline.PASSES} == {pipeline.BITWISE, pipeline.ROUNDING}
    # What runs op by op is eager's to the last bit, but where the caller wants a loss head in chunks.
    assert all(
        each.keeps == pipeline.BITWISE or each.kernels or each.name == "chunk_loss_heads" for each in pipeline.PASSES
    )


def test_the_ways_to_run_a_program():
    for kernel in GENERATED:
        rewritten, plain, by_operators = pipeline.targets_for(kernel)
        assert [each.name for each in rewritten.passes] == [e.name for e in pipeline.PASSES if kernel in e.kernels]
        assert (plain.kernel, plain.passes) == (kernel, ()) and by_operators == pipeline.Target("aten")
    assert pipeline.targets_for("aten") == (pipeline.Target("aten"),)


@needs_compiler
def test_the_documentation_has_the_stages_in_their_order():
    """As a compile runs them: `make_kernels` renders what was scheduled."""
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    call = aottrain.compile(module, capture="trace", kernel="cpp", loss_head="chunked")
    ran = [stage.name for stage in call.prepare(torch.randn(4, 8)).stages]
    text = (Path(pipeline.__file__).parent / "README.md").read_text(encoding="utf-8")
    table = text.split("| stage | does |")[1].split("\n\n")[0]
    told = re.findall(r"^\| `(\w+)` \|", table, re.M)
    told.remove("place_collectives")  # where several processes run it
    for name in ("join_casts", *OF_A_GPU):  # of Triton alone
        told.remove(name)
    assert told == ran


@needs_compiler
def test_one_more_rewrite_is_one_line(monkeypatch):
    def untouched(joint: JointGraph) -> pipeline.Rewritten:
        return pipeline.Rewritten(joint, ("nothing to do",))

    def negated(joint: JointGraph) -> JointGraph:
        graph = joint.with_graph(joint.graph)
        next(node for node in graph.graph.nodes if node.target is aten.sin.default).target = aten.cos.default
        return graph

    def net(x: Tensor) -> Tensor:
        return x.sin().sum()

    x = leaf(4, 4)
    one = pipeline.Pass("look_around", "looked at", untouched, pipeline.BITWISE)
    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES, one))
    report = aottrain.compile(net, capture="trace", kernel="aten").prepare(x)
    assert "look_around" in [stage.name for stage in report.stages]
    assert aottrain.bisect(net, x).stage is None
    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES[:-1], replace(one, run=negated)))
    assert aottrain.bisect(net, x).stage == "looked at"
