"""Time of one optimizer step with clipping, over the parameters of a GPT: torch's loop, foreach and fused, and ours.

    python scripts/bench_optimizer.py                               # AdamW, fp32, 34 M parameters
    python scripts/bench_optimizer.py --layers 12 --width 768 --vocab 50257 --optimizer sgd --dtype bfloat16
    python scripts/bench_optimizer.py --device cuda

The sides share parameters and gradients, take turns, and every figure is the median over the rounds; "ours / theirs" is
the median of each round's ratio, its range in brackets. Torch's sides clip by torch.nn.utils.clip_grad_norm_. "limit":
what must be moved (gradients twice, parameters and state read and written) at the speed at which the same memory is
copied, or scaled in place, whichever was faster in that round: a CPU that copies reads the target, too. The second
table has the same tensors with 16 elements each: what a call costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aottrain  # noqa: E402
from aottrain.ir.units import format_count  # noqa: E402
from aottrain.ops.optimizers.lion import Lion  # noqa: E402
from scripts.figures import record  # noqa: E402

CLIP_NORM = 1.0
RECORDED = ("", "ours, ms", "loop", "foreach", "fused", "limit")  # times of ours in units of theirs
GROUPS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
    "lion": {"lr": 1e-4, "weight_decay": 0.1},
}
NUM_STATES = {"adamw": 2, "sgd": 1, "lion": 1}
TORCH = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": Lion}


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = gpt_shapes(options.layers, options.width, options.vocab)
    print(f"{options.optimizer}, {options.dtype}, {options.device}, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} threads")
    title = f"{format_count(sum(map(numel, shapes)))} parameters in {len(shapes)} tensors"
    compare(options, shapes, title, with_limit=True)
    compare(options, [(16,)] * len(shapes), f"16 parameters in each of {len(shapes)} tensors", with_limit=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("width", 512), ("vocab", 16384), ("rounds", 15), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("--optimizer", choices=tuple(GROUPS), default="adamw")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def gpt_shapes(layers: int, width: int, vocab: int) -> list[tuple[int, ...]]:
    """Of a GPT-2: embeddings, and for each block attention, MLP and two norms, with biases."""
    block: list[tuple[int, ...]] = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(vocab, width), (1024, width), *(shape for _ in range(layers) for shape in block), (width,), (width,)]


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def compare(options: argparse.Namespace, shapes: list[tuple[int, ...]], title: str, with_limit: bool) -> None:
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype, device=options.device) * 0.02) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    copied = [torch.empty_like(parameter) for parameter in parameters]
    steps = {**sides(options.optimizer, parameters), "copy": lambda: copy(parameters, copied)}
    steps["scale"] = lambda: [tensor.mul_(1.0) for tensor in copied]
    for _ in range(2):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(timed(step, options.device))
    # Copying moves two tensors' bytes for each parameter; a step moves two gradients, and all else twice.
    moves = zip(times.pop("copy"), times.pop("scale"), strict=True)
    if with_limit:
        streams = 2 + 2 * (1 + NUM_STATES[options.optimizer])
        times["limit"] = [min(seconds) / 2 * streams for seconds in moves]
    show(times, title)
    if options.record:
        record("optimizers", RECORDED, recorded(f"{options.optimizer}, {options.dtype}, {title}", times))


def sides(name: str, parameters: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    ways: dict[str, dict[str, Any]] = {"loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True}}
    ways["fused"] = {"fused": True}
    if name == "lion":
        ways = {"loop": {}}
    steps: dict[str, Callable[[], Any]] = {}
    for side, more in ways.items():
        steps[side] = clipped(TORCH[name](parameters, **GROUPS[name], **more), parameters, more.get("foreach"))
    ours = {"adamw": aottrain.AdamW, "sgd": aottrain.SGD, "lion": aottrain.Lion}[name]
    return {**steps, "ours": ours(parameters, **GROUPS[name], clip_norm=CLIP_NORM).step}


def clipped(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], foreach: bool | None
) -> Callable[[], Any]:
    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM, foreach=foreach)
        optimizer.step()

    return step


@torch.no_grad()
def copy(sources: list[Any], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def timed(step: Callable[[], Any], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def show(times: dict[str, list[float]], title: str) -> None:
    print(f"\n{title}\n{'':8}  {'ms':>9}  ours / theirs")
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(times["ours"], seconds, strict=True)]
        ratio = "" if name == "ours" else f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{name:8}  {statistics.median(seconds) * 1e3:9.3f}  {ratio}")


def recorded(title: str, times: dict[str, list[float]]) -> list[list[str]]:
    """The row of the table in the texts."""
    cells = [title, f"{statistics.median(times['ours']) * 1e3:.3f}"]
    for name in RECORDED[2:]:
        ratios = [a / b for a, b in zip(times["ours"], times.get(name, ()), strict=False)]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-")
    return [cells]


if __name__ == "__main__":
    main()
