"""One compile for many lengths: a small transformer block at random batches and lengths, each compared with eager.

    python scripts/lengths.py                                                  # C++ kernels, 200 lengths
    TRITON_INTERPRET=1 python scripts/lengths.py --kernel triton --longest 40  # Triton's, interpreted on the CPU

Results, gradients and random draws are compared. Exit code 1: a value differs, or anything but one forward and one
backward was compiled.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aottrain  # noqa: E402
from aottrain.errors import ConfigError  # noqa: E402
from aottrain.ir.settings.choices import CAPTURES, GENERATED  # noqa: E402
from aottrain.runtime.cuda.triton_launch import check_device  # noqa: E402

WIDTH, HEADS, TRACED = 16, 2, (3, 9)


class Block(nn.Module):
    """Norm, attention that is written out, dropout, GELU, cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = self.mix(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e9)
        mixed = (F.dropout(torch.softmax(scores, -1), 0.25) @ v).transpose(1, 2).reshape(b, t, WIDTH)
        return F.cross_entropy((F.gelu(self.out(mixed)) + F.dropout(x, 0.5)).flatten(0, 1), targets.flatten())


def observe(call: Any, shape: tuple[int, int], seed: int, eager: bool) -> list[Tensor]:
    """The loss and the gradients of a call."""
    torch.manual_seed(seed)
    x = torch.randn(*shape, WIDTH, requires_grad=True)
    targets = torch.randint(0, WIDTH, shape)
    with aottrain.philox_eager() if eager else nullcontext():
        loss = call(x, targets)
    return [loss, *torch.autograd.grad(loss, [x, *call.parameters()])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", choices=GENERATED, default="cpp")
    parser.add_argument("--frontend", choices=CAPTURES, default="trace")
    options = parser.parse_args()
    if options.kernel == "triton":
        try:
            check_device(torch.device("cpu"))
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    model = Block()
    step = aottrain.compile(
        copy.deepcopy(model), capture=options.frontend, dynamic=True, kernel=options.kernel, partition="min_cut"
    )
    worst, seen = 0.0, set()
    for number in range(options.count):
        shape = (rng.randint(2, 6), rng.randint(2, options.longest)) if number else TRACED
        seen.add(shape)
        wanted = observe(model, shape, number, True)
        for eager, got in zip(wanted, observe(step, shape, number, False), strict=True):
            worst = max(worst, ((got - eager).abs().max() / eager.abs().max().clamp(min=1e-3)).item())
    graphs = step.report.graphs
    ran = [graph.kernel for graph in graphs]
    print(f"{options.count} calls, {len(seen)} shapes, {len(graphs)} compiled as {', '.join(map(str, ran))}, ", end="")
    print(f"{len(graphs[0].kernels)} kernels, {len(step.report.fallbacks)} eagerly; largest difference {worst:.1e}")
    return 0 if worst < 1e-4 and ran == [options.kernel] and not step.report.fallbacks else 1


if __name__ == "__main__":
    sys.exit(main())
