"""One of several processes that plan alike, of which none talks to another: what it would say to them, and its program.

    python tests/parallel/imagined.py record.json free_bytes

The first process makes the record of what it decided, each other one reads it, as the trainer does. Prints a line of
JSON for each case: its name, hashes of both halves of its program and of the order of its collectives.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

import aottrain
from aottrain.compat_distributed import imagined_processes
from aottrain.compiler.partition.budget import strategy
from aottrain.ir.settings.decisions import record_from
from aottrain.trainer.engines import LossModule
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.world import World
from scripts.bench_models import GPT

CASES = {
    "ddp, C++, budget": ("ddp", {"kernel": "cpp", "budget": 0.5}),
    "shard, C++": ("shard", {"kernel": "cpp", "partition": "min_cut"}),
    "shard, what is free": ("shard", {"kernel": "aten", "budget": "auto"}),
}


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main(path: Path, free_bytes: int) -> None:
    torch.set_num_threads(1)
    strategy.free_bytes = lambda device: free_bytes
    is_first = not path.exists()
    records = {} if is_first else json.loads(path.read_text())
    for case, (mode, options) in CASES.items():
        with imagined_processes(4):
            world = World(0, 4, mode)
            torch.manual_seed(0)
            module = LossModule(GPT(2, 48, 4, 64, 32), lambda call, batch: call(*batch), world=world)
            if mode == "shard":
                module.shards = Shards(module.model, world)
            over = world.group if mode == "ddp" else None
            decisions = "measured" if is_first else record_from(records[case])
            call = aottrain.compile(
                module, reduce_over=over, capture="trace", on_unsupported="error", decisions=decisions, **options
            )
            report = call.prepare(*(torch.zeros(2, 32, dtype=torch.int64) for _ in range(2)))
        if is_first:
            records[case] = report.decisions.to_dict()
        texts = [report.forward_text, report.backward_text]
        order = "\n".join(map(str, report.collectives))
        print(json.dumps((case, *map(hashed, (*texts, order)), report.kernel)), flush=True)
    path.write_text(json.dumps(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
