"""Plans for devices that are not there, held against runs that others, or we, have measured on them.

    python scripts/published_points.py                   # all points, ten minutes on two cores; nothing is run
    python scripts/published_points.py --point "8B, 64"  # those whose name has this in it
    python scripts/published_points.py --record          # and keep the table

A published run is of another program than ours: eager PyTorch, or Inductor's kernels, with its own checkpointing. It is
planned as near to that as the compiler can: operator by operator, or fused by Triton, with a policy that saves what
was saved there. Networks were not published: they are taken to be what the makers of the machines build in. That, and
what devices reach of their peaks, was written down before (aottrain/ir/settings/devices.py).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aottrain.compiler.absent.planning import TracedStep, plan_step, trace_step  # noqa: E402
from aottrain.compiler.options import check_options  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.ir.plan import ForwardValue  # noqa: E402
from aottrain.ir.settings.devices import DEVICES  # noqa: E402
from aottrain.tasks.planning.sharing import State, state_of, whole_step  # noqa: E402
from aottrain.trainer.engines import LossModule  # noqa: E402
from recipes import llama  # noqa: E402
from scripts.bench_models import GPT, Gates  # noqa: E402
from scripts.figures import record  # noqa: E402

HEADER = ("run", "published: speed, memory", "planned", "speed", "memory", "what explains the rest")
_GIB = 1 << 30
Batch = tuple[torch.Tensor, ...]


class SavesEverySecond:
    """torchtitan's selective checkpointing by operators: of each block its input, attention and every second product
    are saved. Each block is checkpointed by itself: what one computes again is gone before the block below begins."""

    __name__ = "every_second_product"

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """Of each block its calls of an operator, up to now."""

    def __call__(self, value: ForwardValue) -> str:
        if "attention" in value.op:
            return "save"
        _, inside, below = value.module.partition(".blocks.")
        block, _, layer = below.partition(".")
        if not inside:
            return "free"
        self.counts[block, value.op] += 1
        if value.op == "aten.add.Tensor" and not layer:  # the second one is the next block's input
            return "recompute" if self.counts[block, value.op] % 2 else "save"
        is_product = value.op.startswith(("aten.mm", "aten.addmm"))
        return "save" if is_product and self.counts[block, value.op] % 2 else "recompute"


@dataclass(frozen=True)
class Point:
    """A run that somebody measured."""

    name: str
    make: Callable[[], tuple[nn.Module, Batch]]
    precision: str
    device: str
    seconds: float
    """Of a step."""
    num_bytes: float
    """Allocated at its peak, or reserved; 0: not said."""
    source: str
    explained: str
    world: int = 1
    kernel: str = "aten"
    partition: Any = "min_cut"
    loss_head: str = "whole"
    optimizer: int = 2
    """Numbers that the optimizer keeps for each parameter, of the parameter's type; 0: none runs."""
    masters: bool = False
    """Whether parameters, gradients and the optimizer's state are float32 where the model computes in bfloat16, as
    FSDP's mixed precision has them."""
    beside: bool = False
    """Whether its memory was said without weights and batch."""
    tokens: int = 0
    """Of a step of one device, where the speed was published as tokens a second."""


def _llama(batch: int, context: int, dtype: torch.dtype = torch.float32, **sizes: int) -> tuple[nn.Module, Batch]:
    tokens = torch.zeros(batch, context, dtype=torch.int64)
    return llama.build(llama.Options(context=context, **sizes)).to(dtype), (tokens, tokens.clone())


@cache
def _of_8b(batch: int) -> Callable[[], tuple[nn.Module, Batch]]:
    sizes = {"num_heads": 32, "num_kv_heads": 8, "mlp_width": 14336, "vocab_size": 128256}
    return lambda: _llama(batch, 8192, torch.bfloat16, num_layers=32, width=4096, **sizes)


def _of_13b() -> tuple[nn.Module, Batch]:
    sizes = {"num_heads": 40, "num_kv_heads": 40, "mlp_width": 13824, "vocab_size": 32000}
    return _llama(2, 4096, torch.bfloat16, num_layers=40, width=5120, **sizes)


class _OfTransformers(nn.Module):
    """Llama-3-8B as transformers has it, with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
        config = LlamaConfig(**sizes, **heads, max_position_embeddings=8192, use_cache=False)
        self.model = LlamaForCausalLM(config).to(torch.bfloat16)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=targets).loss


def _of_transformers() -> tuple[nn.Module, Batch]:
    tokens = torch.zeros(2, 8192, dtype=torch.int64)
    return _OfTransformers(), (tokens, tokens.clone())


def _gpt2() -> tuple[nn.Module, Batch]:
    tokens = torch.zeros(8, 1024, dtype=torch.int64)
    return GPT(num_layers=12, width=768, num_heads=12, vocabulary=50304, context=1024), (tokens, tokens.clone())


def _small() -> tuple[nn.Module, Batch]:
    tokens = torch.zeros(16, 128, dtype=torch.int64)
    return GPT(num_layers=4, width=192, num_heads=6, vocabulary=256, context=128), (tokens, tokens.clone())


def _gates() -> tuple[nn.Module, Batch]:
    return Gates(4096), (torch.zeros(16384, 4096),)


_TITAN = "torchtitan docs/performance.md (2024)"
_HBM2E = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
_OURS = "scripts/bench_gpu.py on an H100 80GB HBM3"
_RESERVED = "reserved, not allocated"
POINTS = (
    Point("Llama-3-8B, 64 A100, batch 1 x 8192, selective", _of_8b(1), "fp32", "a100-80", 8192 / 2973, 0, _TITAN,
          "", world=64, partition=SavesEverySecond, masters=True, tokens=8192),
    Point("Llama-2-13B, 64 A100, batch 2 x 4096, no checkpointing", _of_13b, "fp32", "a100-80", 8192 / 2162, 0, _TITAN,
          "it ran on 80 GB; in the plan exchanges take longest", world=64, partition="save_all",
          masters=True, tokens=8192),
    Point("Llama-2-13B, 64 A100, batch 2 x 4096, selective", _of_13b, "fp32", "a100-80", 8192 / 1904, 0, _TITAN,
          "in the plan exchanges take longest", world=64, partition=SavesEverySecond, masters=True, tokens=8192),
    Point("Llama-3.1-8B, 8 H100 HBM2e, batch 2 x 8192, selective", _of_8b(2), "fp32", "h100-hbm2e", 16384 / 5762,
          82.4 * _GIB, _HBM2E, _RESERVED,
          world=8, partition=SavesEverySecond, masters=True, tokens=16384),
    Point("the same, torch.compile", _of_8b(2), "fp32", "h100-hbm2e", 16384 / 6667, 77.0 * _GIB, _HBM2E,
          "there the loss runs in eager PyTorch, whose three float32 tables, 23.5 GiB, our kernels do not make; "
          + _RESERVED,
          world=8, kernel="triton", partition=SavesEverySecond, masters=True, tokens=16384),
    Point("Llama-3-8B, 8 GPUs, batch 1 x 8192, selective", _of_8b(1), "fp32", "h100-sxm", 0, 49.58 * _GIB,
          "torchtitan pull request 996", "", world=8, partition=SavesEverySecond, masters=True),
    Point("Llama-3-8B in bf16, one H100, batch 2 x 8192, checkpointing", _of_transformers, "fp32", "h100-sxm",
          4.7, 78 * _GIB, "ljm565/universal-llm-trainer docs/gpu_test.md",
          "transformers' model with its own attention; what its training loop does beside the step is not in the plan, "
          "and how much of the time that took is not known", partition="checkpoint"),
    Point("ours: GPT-2 124M, one H100, batch 8 x 1024", _gpt2, "bf16", "h100-sxm", 21.7e-3, 2.22 * _GIB, _OURS,
          "the step waited for the host; with CUDA graphs it took 18.5 ms, and 2.94 GiB",
          kernel="triton", loss_head="auto", optimizer=0, beside=True),
    Point("ours: norms and gates, 16384 x 4096, fp32", _gates, "fp32", "h100-sxm", 9.83e-3, 1.52 * _GIB, _OURS,
          "in the plan arithmetic takes longest: each of some 900 operations on an element counts as 20 FLOPs",
          kernel="triton", optimizer=0, beside=True),
    Point("ours: GPT of width 192, 16 x 128, fp32", _small, "fp32", "h100-sxm", 6.89e-3, 145 * 2**20, _OURS,
          "the step waited for the host; with CUDA graphs it took 3.3 ms",
          kernel="triton", loss_head="auto", optimizer=0, beside=True),
)  # fmt: skip
_traced: dict[Any, tuple[TracedStep, State, int]] = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--point", default="", help="a part of the names of those to plan; all")
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    options = parser.parse_args()
    rows = []
    for point in POINTS:
        if options.point in point.name:
            rows.append(row_of(point))
            print(table(HEADER, rows[-1:]), flush=True)
            if options.record:
                record("published", HEADER, rows[-1:])
    return 0


def row_of(point: Point) -> tuple[str, ...]:
    """As HEADER says."""
    seconds, num_bytes = plan(point)
    published = ", ".join(part for part in (_speed(point, point.seconds), _memory(point.num_bytes)) if part)
    planned = ", ".join((_speed(point, seconds) or f"{seconds:.3g} s", _memory(num_bytes)))
    # A speed that is too high is a time that is too short.
    speed = _difference(point.seconds, seconds) if point.seconds else "-"
    memory = _difference(num_bytes, point.num_bytes) if point.num_bytes else "-"
    text = "; ".join(part for part in (point.explained, point.source) if part)
    return point.name, published, planned, speed, memory, text


def plan(point: Point) -> tuple[float, int]:
    """Seconds of a step, and allocated bytes at its peak, of each device."""
    target = replace(DEVICES[point.device], world=point.world)
    # A policy counts what it is asked: a new one for each plan.
    partition = point.partition() if isinstance(point.partition, type) else point.partition
    options = check_options(
        partition=partition, kernel=point.kernel, loss_head=point.loss_head, capture="trace", workspaces=True
    )
    traced, state, own = _trace(point, options)
    reserved = sum(state.held(point.world).values()) - own
    planned = plan_step(replace(traced, target=target), replace(options, reserved_bytes=reserved))
    assert planned.time is not None
    seconds, memory = planned.time.seconds, planned.report.memory
    if point.optimizer:
        seconds = whole_step(planned.time, state, target)[2]
    outside = memory["parameters"] + memory["buffers"] + memory["batch"] if point.beside else 0
    return seconds, planned.report.predicted_peak_bytes - outside


def _trace(point: Point, options: Any) -> tuple[TracedStep, State, int]:
    """With what a training step keeps, and bytes of the parameters that it computes with."""
    key = point.make, point.precision, point.loss_head, point.kernel
    if key not in _traced:
        _traced.clear()  # of the largest ones a graph is 300 MB
        with torch.device("meta"):
            model, batch = point.make()
        loss = llama.loss if isinstance(model, llama.Llama) else lambda call, values: call(*values)
        loss = _loss_of_titan if point.masters else loss
        module = LossModule(model, loss, point.precision).train()
        own = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        state = state_of(module, point.optimizer * own, 0, point.precision)
        if point.masters:
            twice = {name: 2 * getattr(state, name) for name in ("parameters", "trained", "optimizer", "root", "block")}
            state = replace(state, **twice, width=0.5)
        _traced[key] = trace_step(module, batch, options, DEVICES[point.device]), state, own
    return _traced[key]


def _loss_of_titan(call: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> torch.Tensor:
    """Of logits in float32, whatever the model computes in."""
    tokens, targets = batch
    return F.cross_entropy(call(tokens).flatten(0, 1).float(), targets.flatten())


def _speed(point: Point, seconds: float) -> str:
    if not seconds:
        return ""
    return f"{point.tokens / seconds:,.0f} tokens/s" if point.tokens else f"{seconds:.3g} s"


def _memory(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.3g} GiB" if num_bytes else ""


def _difference(value: float, reference: float) -> str:
    return f"{(value / reference - 1) * 100:+.0f} %"


if __name__ == "__main__":
    sys.exit(main())
