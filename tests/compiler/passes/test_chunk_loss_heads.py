"""The loss head: which linear layers with cross-entropy are computed in chunks, that answers stay, what is saved."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import aottrain
from aottrain.compiler.graphs.measured_calls import workspaces_of
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.passes.chunk_loss_heads import chunk_loss_heads, find_loss_heads
from aottrain.errors import ConfigError
from aottrain.ir.verify import verify_functional, verify_joint, verify_partition
from tests.compiler.programs import joint_inputs, joint_of, run_joint, run_parts, targets
from tests.numerics.comparison import PLANS, assert_same, compiled
from tests.numerics.tolerance import assert_close
from tests.sampling import crossed

ROWS, WIDTH, CLASSES = 1040, 16, 4096
FUSED = "aottrain.linear_cross_entropy.default"
MANY_ROWS = 4 * ROWS


class Model(nn.Module):
    """Embedding, one op, head, loss: `change` maps (logits, target) to the loss."""

    def __init__(self, change=None, bias=False, tied=False, autocast=False, product=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.change, self.autocast, self.product = change or cross_entropy, autocast, product

    def forward(self, tokens, target):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            hidden = self.embedding(tokens).sin()
            return self.change(hidden @ self.head.weight.t() if self.product else self.head(hidden), target)


def cross_entropy(logits, target, **options):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def low_log_softmax(logits, target):
    """A log-softmax in the logits' type, a loss in float32."""
    with torch.autocast("cpu", enabled=False):
        return F.nll_loss(F.log_softmax(logits.flatten(0, -2), -1).float(), target.flatten())


def of_sequences(logits, target):
    """As who has no flattened logits writes it."""
    return F.cross_entropy(logits.transpose(1, 2), target)


def batch(rows=ROWS):
    made = torch.Generator().manual_seed(1)
    tokens, target = (torch.randint(0, CLASSES, (2, rows // 2), generator=made) for _ in range(2))
    target[0, ::7] = -100
    return tokens, target


def heads_of(model, rows=None, given=None):
    return find_loss_heads(joint_of(model, *(given or batch())), rows)


def gradients(model, call, given, scale=1.0):
    model.zero_grad()
    loss = call(*given)
    (loss * scale).backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


VARIANTS = {
    "plain": {},
    "bias": {"bias": True},
    "tied": {"tied": True},
    "tied with bias": {"tied": True, "bias": True},
    "sum": {"change": lambda logits, target: cross_entropy(logits, target, reduction="sum")},
    "ignored": {"change": lambda logits, target: cross_entropy(logits, target.clamp_min(0), ignore_index=3)},
    "converted": {"change": lambda logits, target: cross_entropy(logits.double(), target)},
    "classes second": {"change": of_sequences, "bias": True},
    "classes second, autocast": {"change": of_sequences, "autocast": True},
    "upstream": {"change": lambda logits, target: cross_entropy(logits, target).square() / 3},
    "autocast": {"autocast": True, "bias": True},
    "autocast as CUDA does it": {"autocast": True, "change": lambda logits, target: low_log_softmax(logits, target)},
    "a product": {"product": True, "tied": True},
    "a product, autocast": {"product": True, "tied": True, "autocast": True},
}


@pytest.mark.parametrize(("scale", "name"), crossed([1.0, -0.3], VARIANTS, one_in=2))
def test_the_answer_is_eagers_within_rounding(scale, name):
    model = Model(**VARIANTS[name])
    call = compiled(model, kernel="aten", loss_head="chunked")
    got, wanted = (gradients(model, run, batch(), scale) for run in (call, model))
    exact_model = copy.deepcopy(model).double()
    exact_model.autocast = False
    exact = gradients(exact_model, exact_model, batch(), scale)
    (graph,) = call.report.graphs
    chunks = "2 chunks of 528" if "autocast" in name else "3 chunks of 352"
    assert f"in {chunks} of 1040 rows" in graph.loss_heads[0]
    assert FUSED.removesuffix(".default") in graph.forward_text and "log_softmax" not in graph.forward_text
    assert graph.stages[5].name == "chunk_loss_heads"
    for ours, theirs, true in zip(got, wanted, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        errors = [((v.double() - true).norm() / true.norm()).item() for v in (ours, theirs)]
        assert errors[0] <= 1.5 * errors[1] + 2 * torch.finfo(ours.dtype).eps


def test_two_heads_of_one_program():
    class Both(Model):
        def __init__(self):
            super().__init__(bias=True)
            self.second = nn.Linear(WIDTH, CLASSES)

        def forward(self, tokens, target):
            hidden = self.embedding(tokens).cos()
            return self.change(self.head(hidden), target) + 0.3 * self.change(self.second(hidden), target)

    model = Both()
    call = compiled(model, loss_head="chunked")
    for ours, theirs in zip(gradients(model, call, batch()), gradients(model, model, batch()), strict=True):
        assert_close(ours, theirs)
    assert ["in 3 chunks" in line for line in call.report.graphs[0].loss_heads] == [True, True]


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_both_frontends_with_generated_kernels(capture):
    model = Model(bias=True)
    call = compiled(model, capture=capture, kernel="cpp")
    for ours, theirs in zip(gradients(model, call, batch()), gradients(model, model, batch()), strict=True):
        assert_close(ours, theirs)
    assert "in 3 chunks" in call.report.graphs[0].loss_heads[0]


def test_through_torch_compile():
    model = Model()
    options = {"loss_head": "chunked", "on_unsupported": "error"}
    call = torch.compile(model, backend="aottrain", options=options)
    for ours, theirs in zip(gradients(model, call, batch()), gradients(model, model, batch()), strict=True):
        assert_close(ours, theirs)


def smoothed(logits, target):
    return cross_entropy(logits, target, label_smoothing=0.1)


def capped(logits, target):
    return cross_entropy(30 * torch.tanh(logits / 30), target)


def also_returned(logits, target):
    return cross_entropy(logits, target), logits


def also_read(logits, target):
    return cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def weighted(logits, target):
    return cross_entropy(logits, target, weight=torch.linspace(1, 2, CLASSES))


def unreduced(logits, target):
    return cross_entropy(logits, target, reduction="none").mean()


def shifted(logits, target):
    return cross_entropy(logits[:, :-1], target[:, 1:])


def spatial(logits, target):
    return F.cross_entropy(logits.transpose(1, 2), target)


def rounded_twice(logits, target):
    return cross_entropy(logits.bfloat16().float(), target)


NOT_TAKEN = {
    also_returned: "its logits are also read by the caller",
    also_read: "its logits are also read by logsumexp",
    smoothed: "its log-probabilities are also read by sum.dim_IntList",
    capped: "its logits are those of mul.Tensor",
    weighted: "its classes are weighted",
    unreduced: "its losses are not reduced",
    shifted: "its logits are those of clone",
    spatial: "its classes are not the last dimension",
    rounded_twice: "its logits are rounded twice",
}


@pytest.mark.parametrize("change", NOT_TAKEN, ids=lambda change: change.__name__)
def test_what_is_not_taken_and_why(change):
    (head,) = heads_of(Model(change), rows=64)
    assert head.layer is None and NOT_TAKEN[change] in head.reason
    joint = joint_of(Model(change), *batch())
    assert chunk_loss_heads(joint, [head]) is joint


def test_reasons_that_depend_on_the_layer():
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, CLASSES, requires_grad=True)
    target = batch()[1].flatten()
    assert "rounded" in heads_of(Model().half(), rows=64)[0].reason
    (head,) = heads_of(lambda h, w, t: F.cross_entropy(h @ w, t), given=(hidden, weight, target))
    assert head.reason == "the gradient of its logits is also read by mm.default"  # for a weight laid out by columns
    (head,) = heads_of(lambda h, t: F.cross_entropy(h, t), given=(hidden, target % WIDTH))
    assert head.reason == "its logits are those of the input input0"


def test_regions_of_checkpoint_are_left_to_the_user():
    class Checkpointed(Model):
        def forward(self, tokens, target):
            return checkpoint(super().forward, tokens, target, use_reentrant=False)

    call = compiled(Checkpointed(), capture="dynamo", loss_head="chunked")
    call(*batch()).backward()
    assert call.report.graphs[0].loss_heads[0].endswith("whole: it is inside torch.utils.checkpoint")


def test_it_is_done_where_it_saves_memory():
    assert "no more than one chunk" in heads_of(Model(), given=batch(400))[0].reason
    weight = torch.empty(CLASSES, 1024, requires_grad=True)
    hidden, target = torch.empty(600, 1024, requires_grad=True), torch.zeros(600, dtype=torch.int64)
    (head,) = heads_of(lambda h, t, w: F.cross_entropy(F.linear(h, w), t), given=(hidden, target, weight))
    assert head.reason == "the gradients to keep are larger than the logits"


@pytest.mark.parametrize("classes, rows", [(8192, 256), (32768, 256), (2048, 832), (5000, 416)])
def test_logits_of_a_chunk_stay_in_the_cache(classes, rows):
    def loss(hidden, weight, target):
        return F.cross_entropy(F.linear(hidden, weight), target)

    hidden, weight = torch.empty(MANY_ROWS, 8), torch.empty(classes, 8)
    (head,) = heads_of(loss, given=(hidden, weight, torch.zeros(MANY_ROWS, dtype=torch.int64)))
    assert head.chunk == rows


def test_symbolic_sizes_are_left_whole():
    model = Model()
    call = compiled(model, loss_head="chunked", dynamic=True)
    for ours, theirs in zip(gradients(model, call, batch()), gradients(model, model, batch()), strict=True):
        assert_close(ours, theirs)
    assert call.report.graphs[0].loss_heads[0].endswith("whole: its sizes are symbolic")


@pytest.mark.parametrize("frozen", ["head", "embedding"])
def test_only_the_gradients_that_are_asked_for(frozen):
    model = Model()
    getattr(model, frozen).requires_grad_(False)
    call = compiled(model, loss_head="chunked")
    loss = call(*batch())
    loss.backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(*batch()).backward()
    for ours, theirs in zip(got, (p.grad for p in model.parameters()), strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert_close(ours, theirs)
    wanted = "[True, False, False]" if frozen == "head" else "[False, True, False]"
    assert wanted in call.report.graphs[0].forward_text


def test_the_laws_hold_and_every_plan_gives_the_same_bits():
    model = Model(tied=True, bias=True)
    before = joint_of(model, *batch())
    joint = chunk_loss_heads(before, find_loss_heads(before))
    verify_joint(joint)
    verify_functional(joint)
    assert targets(joint.graph).count(FUSED) == 1 and "aten.mm.default" not in targets(joint.graph)
    given = joint_inputs(joint, [*model.parameters(), *batch()])
    wanted = run_joint(joint, given)
    for plan in PLANS:
        strategy = ("budget", plan) if isinstance(plan, float) else (plan,)
        parts = apply_partition(joint, plan_partition(joint, *strategy))
        verify_partition(joint, parts)
        assert_same(run_parts(parts, given), wanted, str(plan))


def test_twice_from_one_graph_and_in_halves():
    model = Model(tied=True)
    call = compiled(model, loss_head="chunked")
    wanted = gradients(model, call, batch())[1]
    model.zero_grad()
    loss = call(*batch())
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same(model.embedding.weight.grad, 2 * wanted)


def test_what_is_saved_and_the_peak():
    reports = {}
    for choice in ("whole", "chunked"):
        call = compiled(Model(), 1.0, loss_head=choice)
        reports[choice] = call.prepare(*batch(MANY_ROWS))
    logits = MANY_ROWS * CLASSES * 4
    whole, chunked = reports["whole"], reports["chunked"]
    assert max(record.num_bytes for record in whole.saved) == logits
    assert max(record.num_bytes for record in chunked.saved) == MANY_ROWS * WIDTH * 4
    assert chunked.saved_bytes <= whole.saved_bytes - logits + (MANY_ROWS + CLASSES) * WIDTH * 4
    assert chunked.predicted_peak_bytes < whole.predicted_peak_bytes - 1.5 * logits
    assert chunked.forward_flops + chunked.backward_flops == pytest.approx(
        whole.forward_flops + whole.backward_flops, rel=0.2
    )


def test_the_workspace_is_one_chunk_of_logits():
    joint = joint_of(Model(), *batch())
    heads = find_loss_heads(joint)
    graph = chunk_loss_heads(joint, heads).graph
    (node,) = (node for node in graph.nodes if str(node.target) == FUSED)
    chunk = heads[0].chunk * CLASSES * 4
    assert chunk <= workspaces_of(graph)(node) <= chunk + 16 * ROWS + 4096


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
def test_second_derivatives_are_eagers(kernel):
    model = Model(bias=True)
    call = compiled(model, kernel=kernel, loss_head="chunked")
    given, found = batch(), []
    for run in (call, model):
        first = torch.autograd.grad(run(*given), list(model.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        found.append(torch.autograd.grad(penalty, list(model.parameters())))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def test_inference_computes_no_gradients():
    model = Model(bias=True)
    call = compiled(model, loss_head="chunked")
    with torch.no_grad():
        assert_close(call(*batch()), model(*batch()))
    (graph,) = call.report.graphs
    assert graph.mode == "inference" and "[False, False, False]" in graph.forward_text


def test_a_loss_that_is_not_used_leaves_no_gradient():
    class Two(Model):
        def forward(self, tokens, target):
            return super().forward(tokens, target), self.embedding(tokens).sum()

    model = Two()
    call = compiled(model, loss_head="chunked")
    call(*batch())[1].backward()
    assert model.head.weight.grad is None and model.embedding.weight.grad is not None


def test_the_oracle_and_foreign_backends_compute_it_whole_unless_told():
    def backend(module, examples):
        return module

    for kernel in ("aten", backend):
        assert compiled(Model(), kernel=kernel).prepare(*batch()).loss_heads == ()
    assert compiled(Model(), kernel="cpp", loss_head="whole").prepare(*batch()).loss_heads == ()
    assert "chunks" in compiled(Model(), kernel=backend, loss_head="chunked").prepare(*batch()).loss_heads[0]
    with pytest.raises(ConfigError, match="loss_head='half' is not known; allowed: auto, chunked, whole"):
        aottrain.compile(Model(), loss_head="half")


def test_a_wrong_target_raises_as_in_eager():
    call = compiled(Model(), loss_head="chunked")
    tokens, target = batch()
    target[1, 5] = CLASSES
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        call(tokens, target)


def test_bisection_climbs_over_it():
    found = aottrain.bisect(Model(bias=True), batch(), loss_head="chunked")
    assert str(found) == "every stage agrees with eager"
