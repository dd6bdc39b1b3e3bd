"""What a step's products, convolutions and attention take on this machine at least: each by the fastest library.

    python scripts/bench_limit.py                # the models of bench_kernels.py; a minute
    python scripts/bench_limit.py --model gpt

Each distinct call of a step, forward and backward, is timed alone by the libraries that can make it; the best run
counts. Beside it stands how fast memory of several sizes is copied.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aottrain.compat import TorchDispatchMode  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.ir.ops import OpKind, op_info  # noqa: E402
from aottrain.ir.schedule import OWN_BIASED_PRODUCT, OWN_PRODUCT  # noqa: E402
from aottrain.ir.units import format_bytes  # noqa: E402
from aottrain.ops.attention import attention, attention_backward  # noqa: E402
from aottrain.ops.products.libraries import PRODUCTS  # noqa: E402
from aottrain.ops.products.onednn import has_onednn  # noqa: E402
from aottrain.ops.products.pieces import has_tiles  # noqa: E402
from scripts.bench_models import MODELS  # noqa: E402

ATEN, CHANNELS_LAST, OURS = "ATen", "ATen, channels_last", "aottrain"
_NUM_RUNS, _MOST_SHOWN = 5, 12
_COPIED_BYTES = tuple(1 << power for power in (16, 19, 22, 25, 28))


@dataclass(frozen=True)
class Call:
    """One call of a step that is bound by arithmetic, with tensors of its own."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Equal for calls that take the same time."""
        return f"{self.name}({', '.join(map(_described, [*self.args, *self.kwargs.values()]))})"

    @property
    def name(self) -> str:
        return str(self.target).removeprefix("aten.").removesuffix(".default")

    def candidates(self) -> dict[str, Callable[[], Any]]:
        """By the library's name."""
        return {ATEN: partial(self.target, *self.args, **self.kwargs), **dict(self._others())}

    def _others(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        tensors = [x for x in self.args if isinstance(x, Tensor)]
        single = all(x.dtype == torch.float32 for x in tensors)
        if self.name == "mm" and single:
            names = ("onednn", "onednn transposed") * has_onednn() + (OWN_PRODUCT,) * has_tiles()
            yield from ((name, partial(PRODUCTS[name], *self.args)) for name in names)
        elif self.name == "addmm" and single and self.args[0].dim() == 1:
            names = ("onednn with bias",) * has_onednn() + (OWN_BIASED_PRODUCT,) * has_tiles()
            yield from ((name.removesuffix(" with bias"), partial(PRODUCTS[name], *self.args[:3])) for name in names)
        elif self.name.startswith("convolution") and tensors[0].dim() == 4:
            last = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
            args = [last(x) if isinstance(x, Tensor) and x.dim() == 4 else x for x in self.args]
            yield CHANNELS_LAST, partial(self.target, *args, **self.kwargs)
        elif "flash_attention_for_cpu" in self.name:
            mine = attention_backward if "backward" in self.name else attention
            yield OURS, partial(mine, *self.args, **self.kwargs)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{value.stride()}"
    return str(value)


class Recorder(TorchDispatchMode):
    """Keeps the products, convolutions and attention that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op_info(func).kind is OpKind.COMPUTE or "scaled_dot_product" in str(func):
            self.calls.append(Call(func, args, kwargs))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Timed:
    """Calls of one kind, shape and layout."""

    call: Call
    count: int
    """How often a step makes it."""
    seconds: Mapping[str, float]
    """The best run of each library."""

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)


def recorded(step: Callable[[], None]) -> list[Call]:
    with Recorder() as recorder:
        step()
    return recorder.calls


@torch.no_grad()
def timed(calls: Sequence[Call]) -> dict[str, Timed]:
    """Each distinct call by each library, by its key."""
    counts = Counter(call.key for call in calls)
    return {
        call.key: Timed(call, counts[call.key], {name: _best(run) for name, run in call.candidates().items()})
        for call in {call.key: call for call in calls}.values()
    }


def copy_rates(sizes: Sequence[int]) -> dict[int, float]:
    """Bytes per second, read and written ones counted, of a copy of so many bytes, again and again in one place."""
    rates = {}
    for size in sizes:
        source, target = torch.ones(2, size // 4).unbind()
        repeats = max(1, (1 << 27) // size)

        def run(source: Tensor = source, target: Tensor = target, repeats: int = repeats) -> None:
            for _ in range(repeats):
                target.copy_(source)

        rates[size] = 2 * size * repeats / _best(run)
    return rates


def _best(run: Callable[[], Any]) -> float:
    run()
    seconds = []
    for _ in range(_NUM_RUNS):
        start_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="may be given several times; all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.model or tuple(MODELS):
        print(f"\n=== {name}, torch {torch.__version__}, {options.threads} threads", flush=True)
        _print(timed(recorded(_step(name))))
    print("\ncopied, read and written bytes counted")
    rates = copy_rates(_COPIED_BYTES)
    print(table(("bytes", "GB/s"), [(format_bytes(n), f"{rate / 1e9:.1f}") for n, rate in rates.items()], right=(0, 1)))
    return 0


def _step(name: str) -> Callable[[], None]:
    torch.manual_seed(0)
    network, loss, batch = MODELS[name]()

    def step() -> None:
        loss(network, *batch).backward()
        network.zero_grad(set_to_none=True)

    return step


def _print(times: Mapping[str, Timed]) -> None:
    """The calls that take longest first, and what all of a step's take by ATen and by the fastest."""
    ordered = sorted(times.values(), key=lambda each: -each.count * min(each.seconds.values()))
    rows = [
        (
            str(each.count),
            each.call.name,
            each.fastest,
            ", ".join(f"{n} {s * 1e3:.2f}" for n, s in each.seconds.items()),
        )
        for each in ordered[:_MOST_SHOWN]
    ]
    print(table(("calls", "operator", "fastest", "ms of one call"), rows, right=(0,)))
    sums = [sum(each.count * pick(each) for each in ordered) for pick in (_by_aten, _by_fastest)]
    print(
        f"{len(ordered)} kinds of calls; all of a step's: {sums[0] * 1e3:.1f} ms by ATen, {sums[1] * 1e3:.1f} at least"
    )


def _by_aten(each: Timed) -> float:
    return each.seconds[ATEN]


def _by_fastest(each: Timed) -> float:
    return min(each.seconds.values())


if __name__ == "__main__":
    sys.exit(main())
