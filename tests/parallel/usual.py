"""One process of a group: what training scripts have already, DDP and FSDP2 with their options, each trained for three
steps by eager PyTorch and with its modules compiled. Prints a line of JSON for each case: its name, the largest
relative difference from eager's of a loss, parameter or buffer, how many calls ran eagerly, and why.

    python tests/parallel/usual.py case/door/kernel...      # a case of CASES, trace or dynamo, aten or cpp
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import aottrain

WIDTH = 16
Compile = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self, shared: nn.Linear | None = None):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH) if shared is None else shared

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x)))


class Model(nn.Module):
    def __init__(self, shared: bool = False):
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Linear(WIDTH, WIDTH) if shared else None
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(3))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Branching(Model):
    """The last block is used by some steps alone, as the caller says."""

    skips = False

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks[:2] if self.skips else self.blocks:
            x = block(x)
        return self.last(x)


class Normed(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(()) * (1 + dist.get_rank()))  # the first process's holds

    def forward(self, x):
        return super().forward(self.norm(x) * self.scale)


def batch_of(step: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 8, generator=generator)


def loss_of(model, x):
    return model(x).square().mean()


def trained(model, loss=loss_of, before=None, optimizer=None, contexts=(nullcontext,)) -> list[torch.Tensor]:
    """Losses of three steps, with what the model holds after each. `contexts`: of a step's micro-batches."""
    optimizer = optimizer or torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1, momentum=0.9)
    found = []
    for step in range(3):
        if before is not None:
            before(step)
        for part, context in enumerate(contexts):
            with context():
                value = loss(model, batch_of(step, part))
                value.backward()
            found.append(value.detach().clone())
        found += [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [whole(tensor).clone() for tensor in (*model.parameters(), *model.buffers())]
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ddp(call: nn.Module, **options) -> DistributedDataParallel:
    return DistributedDataParallel(call, **options)


def fsdp_by_block(compiled: Compile, model: nn.Module, **options) -> nn.Module:
    for block in model.blocks:
        block.forward = compiled(block.forward)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def mixed_precision(compiled):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(fsdp_by_block(compiled, Model(), mp_policy=policy))


def kept_after_forward(compiled):
    return trained(fsdp_by_block(compiled, Model(), reshard_after_forward=False))


def static_graph(compiled):
    return trained(ddp(compiled(Model()), static_graph=True))


def no_sync(compiled):
    model = ddp(compiled(Model()))
    return trained(model, contexts=(model.no_sync, nullcontext))


def no_sync_of_parts(compiled):
    model = fsdp_by_block(compiled, Model())

    def loss(model, x):
        model.set_requires_gradient_sync(bool(len(seen) % 2))
        seen.append(1)
        return loss_of(model, x)

    seen: list[int] = []
    return trained(model, loss, contexts=(nullcontext, nullcontext))


def views_of_buckets(compiled):
    return trained(ddp(compiled(Model()), gradient_as_bucket_view=True, bucket_cap_mb=0.001))


def unused(compiled):
    """Another block each second step, which all processes leave out together."""
    inner = Branching()
    model = ddp(compiled(inner), find_unused_parameters=True)
    return trained(model, before=lambda step: setattr(inner, "skips", bool(step % 2)))


def comm_hook(compiled):
    def halved(_, bucket):
        sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: done.value()[0].float())

    model = ddp(compiled(Model()))
    model.register_comm_hook(None, halved)
    return trained(model)


def frozen(compiled):
    inner = Model()
    inner.blocks[1].requires_grad_(False)
    inner.first.weight.requires_grad_(False)
    return trained(ddp(compiled(inner)))


def frozen_parts(compiled):
    inner = Model()
    inner.blocks[1].requires_grad_(False)
    return trained(fsdp_by_block(compiled, inner))


def tied(compiled):
    return trained(ddp(compiled(Model(shared=True))))


def tied_by_block(compiled):
    """Each block is compiled by itself: what each sends to the one weight is added up outside."""
    model = Model(shared=True)
    for block in model.blocks:
        block.forward = compiled(block.forward)
    return trained(ddp(model))


def tied_parts(compiled):
    model = Model(shared=True)
    for block in model.blocks:
        block.forward = compiled(block.forward)
    return trained(fully_shard(model))


def buffers(compiled):
    return trained(ddp(compiled(Normed())))


def buffers_of_each(compiled):
    return trained(ddp(compiled(Normed()), broadcast_buffers=False))


def two_models(compiled):
    """One makes what the other judges, each with an optimizer of its own."""
    maker, judge = ddp(compiled(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)))), ddp(compiled(Model()))
    both = nn.ModuleList([maker, judge])

    def loss(both, x):
        made = both[0](x)
        judged = both[1](torch.cat([x, made]))  # one call: DDP allows one forward before each backward
        return F.softplus(judged[:4]).mean() + F.softplus(-judged[4:]).mean()

    return trained(both, loss)


def checkpointed_blocks(compiled):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = Model()
    for block in model.blocks:
        block.forward = compiled(block.forward)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for block in model.blocks:
        fully_shard(block)
    return trained(fully_shard(model))


def clipped_parts(compiled):
    model = fsdp_by_block(compiled, Model())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.05) and None)
    return trained(model, optimizer=optimizer)


def parts_given(compiled):
    """Tensors that are spread over the processes are the inputs themselves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(dist.tensor.distribute_tensor(torch.ones(8, 4) / 3, mesh, [Replicate()]))
    x = dist.tensor.distribute_tensor(torch.arange(32.0).view(4, 8) / 16, mesh, [Shard(0)])
    call = compiled(lambda x, weight: torch.tanh(x @ weight).sum())
    value = call(x, weight)
    value.backward()
    return [whole(value), whole(weight.grad)]


PARTS_GIVEN, SMALL_BUCKETS = "DTensors", "DDP, gradients are views of buckets"
CASES = {
    "FSDP2, bfloat16 and sums in float32": mixed_precision,
    "FSDP2, kept after the forward": kept_after_forward,
    "FSDP2, two micro-batches": no_sync_of_parts,
    "FSDP2, a frozen block": frozen_parts,
    "FSDP2, tied blocks": tied_parts,
    "FSDP2, checkpointed blocks": checkpointed_blocks,
    "FSDP2, clipped": clipped_parts,
    "DDP, static graph": static_graph,
    "DDP, no_sync": no_sync,
    SMALL_BUCKETS: views_of_buckets,
    "DDP, unused parameters": unused,
    "DDP, a hook that compresses": comm_hook,
    "DDP, frozen": frozen,
    "DDP, tied": tied,
    "DDP, tied blocks": tied_by_block,
    "DDP, buffers": buffers,
    "DDP, buffers of each": buffers_of_each,
    "two DDP": two_models,
    PARTS_GIVEN: parts_given,
}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm().clamp(1e-6)).item()


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in cases:
        case, door, kernel = name.split("/")
        calls = []

        def compiled(target, door=door, kernel=kernel, calls=calls):
            torch.manual_seed(1)
            calls.append(aottrain.compile(target, capture=door, kernel=kernel))
            return calls[-1]

        torch.manual_seed(1)
        wanted = CASES[case](lambda target: target)
        torch.manual_seed(1)
        found = CASES[case](compiled)
        assert len(found) == len(wanted)
        pairs = zip(found, wanted, strict=True)
        error = max(difference(one.double(), other.double()) for one, other in pairs)
        reasons = [fallback.reason for call in calls for fallback in call.report.fallbacks]
        print(json.dumps((name, error, sum(call.report.num_fallbacks for call in calls), reasons)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
