"""torch's own databases of operators and modules: every entry, compiled, must give what eager gives.

    python scripts/databases.py                                      # op_db in float32 by a direct trace
    python scripts/databases.py --frontend dynamo --part 1/4             # the second quarter of it, through TorchDynamo
    python scripts/databases.py --dtype bfloat16 --samples 1
    python scripts/databases.py --database module_db                 # training, then evaluation mode
    python scripts/databases.py --kernel cpp                         # by generated kernels however small
    python scripts/databases.py --dynamic --kernel aten              # with sizes that are symbols
    python scripts/databases.py --device cuda --kernel triton        # and on a GPU

An entry's verdict is the worst of its samples'; all but the equal ones are named with the reason. Samples are below the
size from which kernels pay, so --kernel auto is mostly eager's operators; the last line says how many had kernels.
Random entries run under rng="eager", bit for bit. Exit code 1 where anything is WRONG, 2 where the input is. It needs
`expecttest`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aottrain.config.choices import GENERATING  # noqa: E402
from aottrain.ir.settings.choices import CAPTURES  # noqa: E402
from scripts.figures import record  # noqa: E402

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
          "complex64", "complex128")  # fmt: skip

DATABASES = ("op_db", "module_db", "autograd_function_db", "custom_op_db", "hop_db")
RECORDED = ("", "equal", "of them with gradients", "equal, but ran eagerly", "wrong")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--database", choices=DATABASES, default="op_db")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--frontend", choices=CAPTURES, default="trace")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernel", choices=("aten", *GENERATING), default="auto")
    parser.add_argument("--dynamic", action="store_true", help="every size of the inputs is a symbol")
    parser.add_argument("--samples", type=int, default=2, help="how many samples of each entry")
    parser.add_argument("--part", type=_part, default=(0, 1), help="i/n: the i-th of n parts, counted from 0")
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("names", nargs="*", help="only entries of these names")
    options = parser.parse_args()
    try:
        import tests.numerics.database_checking as checking
    except ImportError as error:
        parser.error(f"torch's databases need {error.name}: pip install {error.name}")
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    start = time.perf_counter()
    counts: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    generated = 0
    for name, verdict in _verdicts(checking, options):
        counts[verdict.kind] += 1
        gradients[verdict.kind] += verdict.differentiable
        generated += verdict.num_kernels > 0
        if verdict.kind not in (checking.EQUAL, checking.NOTHING):
            print(f"{name}: {verdict.kind}: {verdict.why}", flush=True)
    part = "" if options.part == (0, 1) else f", part {options.part[0]}/{options.part[1]}"
    sizes = ", open sizes" if options.dynamic else ""
    setting = f"{options.dtype}, {options.frontend}, {options.device}, kernel={options.kernel}{sizes}"
    print(f"\n{options.database}, {setting}{part}, {time.perf_counter() - start:.0f} s")
    for kind in checking.KINDS:
        if counts[kind]:
            print(f"{counts[kind]:5} {kind}, {gradients[kind]} of them with gradients")
    print(f"{generated:5} by generated kernels, in part or whole")
    if options.record and options.part == (0, 1) and not options.names:
        record("operators", RECORDED, [_recorded(checking, options, counts, gradients)])
    return 1 if counts[checking.WRONG] else 0


def _recorded(checking: Any, options: argparse.Namespace, counts: Counter[str], gradients: Counter[str]) -> list[str]:
    """The row of the table in the texts."""
    frontend = {"trace": "direct trace", "dynamo": "TorchDynamo"}[options.frontend]
    sizes = ", open sizes" if options.dynamic else ""
    setting = f"{options.database}, {options.dtype}, {frontend}, kernel={options.kernel}, {options.device}{sizes}"
    wholly, eagerly = counts[checking.EQUAL], counts[checking.EAGER]
    of = f"{gradients[checking.EQUAL]} of {sum(gradients.values())}"
    return [setting, str(wholly), of, str(eagerly), str(counts[checking.WRONG])]


def _verdicts(checking: Any, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    dtype = getattr(torch, options.dtype)
    index, count = options.part
    how = dtype, options.frontend, options.samples, options.device, options.kernel, options.dynamic
    if options.database != "module_db":
        for op in checking.operators(dtype, options.device, options.database)[index::count]:
            if not options.names or op.name in options.names or op.formatted_name in options.names:
                yield op.formatted_name, checking.check_operator(op, *how)
        return
    for training in (True, False):
        for entry in checking.modules(dtype)[index::count]:
            if not options.names or entry.name in options.names:
                mode = "training" if training else "evaluation"
                yield f"{entry.name} ({mode})", checking.check_module(entry, *how, training=training)


def _part(text: str) -> tuple[int, int]:
    try:
        index, count = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form i/n") from None
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"{text!r}: i must be at least 0 and less than n")
    return index, count


if __name__ == "__main__":
    sys.exit(main())
