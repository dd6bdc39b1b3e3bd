"""How long planning takes, and what it finds: pre-norm transformer blocks of width 128 on 4 x 256 tokens.

    python scripts/bench_planning.py                       # planning times for 12, 48 and 192 blocks; the curve of 12
    python scripts/bench_planning.py --depths 12 48 --peaks 16.9MB 25.5MB

Tracing is not counted. Recompute is priced by AOTTRAIN_RATES=default unless it is set otherwise, so that the curve is
the same on every machine. Exit code 2 where the input is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("AOTTRAIN_RATES", "default")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
from aottrain.compiler.partition.budget.bound import least_added_seconds
from aottrain.compiler.partition.budget.simulation import Emitter
from aottrain.compiler.partition.strategies import plan_family
from aottrain.compiler.pipeline import functional_joint
from aottrain.compiler.stages import collection_paused
from aottrain.errors import BudgetError
from aottrain.ir.graph import JointGraph
from aottrain.ir.settings.budget import parse_budget

WIDTH, HEADS, BATCH, LENGTH = 128, 4, 4, 256
DEPTHS = (12, 48, 192)
PEAKS = ("16MB", "16.4MB", "16.9MB", "19.5MB", "22.9MB", "25.5MB", "34MB", "43MB", "60MB", "103.5MB")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        mixed = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4).unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Trunk(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def joint_of(depth: int) -> JointGraph:
    torch.manual_seed(0)
    trunk = Trunk(depth)
    step = aottrain.capture(trunk, trunk, (torch.randn(BATCH, LENGTH, WIDTH),), {})
    return functional_joint(step, aottrain.analyse(step))


def seconds_to_plan(joint: JointGraph, repeats: int) -> tuple[float, float]:
    """By the clock and of processor time, each the best of a few: other processes only ever add to them."""
    times = []
    for _ in range(repeats):
        with collection_paused():  # as a compile does
            start, start_cpu = time.perf_counter(), time.process_time()
            aottrain.plan_partition(joint, "budget", 0.3)
        times.append((time.perf_counter() - start, time.process_time() - start_cpu))
    return min(wall for wall, _ in times), min(cpu for _, cpu in times)


def print_curve(joint: JointGraph, peaks: list[str]) -> None:
    """For each peak, in which parameters and batch do not count, the cheapest plan within it; and a lower bound."""
    frontier = plan_family(joint).frontier
    graph, always = frontier.graph, Emitter(frontier.graph).always
    whole = sum(graph.costs)
    print(f"{'peak <=':>10} {'peak':>10} {'added':>8} {'at least':>8}    (of {1e3 * whole:.1f} ms by the cost model)")
    for text in peaks:
        limit = parse_budget(text)
        assert isinstance(limit, int)
        point = frontier.within(limit)
        if point is not None:
            least = least_added_seconds(graph, always, limit)
            shares = f"{100 * point.seconds / whole:6.1f} % {100 * least / whole:6.1f} %"
            print(f"{text:>10} {point.peak_bytes / 1e6:7.2f} MB {shares}")
        else:
            print(f"{text:>10} {'none':>10}    the lowest is {frontier.lowest.peak_bytes / 1e6:.2f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS), help="numbers of blocks to time")
    parser.add_argument(
        "--peaks", nargs="*", default=list(PEAKS), help="of the curve of 12 blocks; bytes as for budgets"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of which the fastest counts")
    options = parser.parse_args()
    if options.repeats < 1 or any(depth < 1 for depth in options.depths):
        parser.error("--depths and --repeats: allowed are 1 and above")
    try:
        for text in options.peaks:
            if not isinstance(parse_budget(text), int):
                parser.error(f"--peaks {text}: allowed are bytes, such as 25.5MB")
    except (BudgetError, ValueError) as error:
        parser.error(f"--peaks: {error}")
    for depth in options.depths:
        joint = joint_of(depth)
        wall, cpu = seconds_to_plan(joint, options.repeats)
        nodes = len(joint.graph.nodes)
        print(f"{depth:4d} blocks, {nodes:6d} nodes: planned in {wall:.2f} s ({cpu:.2f} s of processor)", flush=True)
    if options.peaks:
        print_curve(joint_of(12), options.peaks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
