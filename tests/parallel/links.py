"""One process of a group that finds out how fast they talk to each other. Prints a line of JSON for each question."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from aottrain.config.parallel import ParallelConfig
from aottrain.config.run import EngineConfig, RunConfig
from aottrain.ir.settings.decisions import Record
from aottrain.measure import stopwatch
from aottrain.measure.links import link
from aottrain.trainer.parallel.link import take_link
from aottrain.trainer.parallel.world import joined


def main() -> None:
    torch.set_num_threads(1)
    stopwatch.is_busy = lambda: False  # others use the machine
    config = RunConfig(parallel=ParallelConfig(name="ddp", timeout=30.0), output_dir="out")
    with joined(config) as (world, _):
        half = replace(config, parallel=replace(config.parallel, latency=0.25))
        both = replace(config, parallel=replace(half.parallel, bandwidth=1e6))
        cases = [(config, "measured"), (config, "default"), (config, Record()), (half, "default"), (both, "measured"),
                 (replace(config, engine=EngineConfig(name="eager")), "measured")]  # fmt: skip
        for each, policy in cases:
            line = take_link(world, each, policy, torch.device("cpu"))
            decision = link().decision
            told = None if decision is None else (decision.key, decision.choice, decision.source, len(decision.times))
            print(json.dumps((link().latency_s, link().bytes_per_s, told, line)), flush=True)


if __name__ == "__main__":
    main()
