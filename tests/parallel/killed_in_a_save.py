"""One process of a group, which writes checkpoints of two steps in pieces; the one that is named is killed at a point
of the second save.

    python tests/parallel/killed_in_a_save.py 1 "piece half written" now
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from aottrain.config.parallel import ParallelConfig
from aottrain.config.run import RunConfig, TrainerConfig
from aottrain.errors import ParallelError
from aottrain.trainer import checkpoint
from aottrain.trainer.parallel import pieces
from aottrain.trainer.parallel.pieces import FolderOfPieces, state_in_pieces
from aottrain.trainer.parallel.world import joined
from aottrain.trainer.reliability.saving import Saving
from tests.parallel.in_threads import part_job

POINTS = ("folder made", "piece half written", "piece flushed", "piece renamed", "piece told")
OF_THE_FIRST = (*POINTS, "rest renamed", "list flushed", "list renamed", "an old one half removed")


def end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plant(point: str) -> None:
    """In this process: the end at that point of the next save."""
    write, replace, tell, unlink = checkpoint._Watched.write, os.replace, FolderOfPieces._tell, Path.unlink

    def half(self, data):
        write(self, data[: len(data) // 2])
        self.file.flush()
        end_now()

    def replacing(source, target):
        kind = {".safetensors": "piece", ".pt": "rest", ".json": "list"}[Path(target).suffix]
        if point == f"{kind} flushed":
            end_now()
        replace(source, target)
        if point == f"{kind} renamed":
            end_now()

    def telling(self, own):
        result = tell(self, own)
        if point == "piece told":
            end_now()
        return result

    def removing(self, missing_ok=False):
        unlink(self, missing_ok)
        if point == "an old one half removed" and self.suffix == ".pt":
            end_now()

    if point == "folder made":
        pieces.write_pieces = lambda *given: end_now()
    if point == "piece half written":
        checkpoint._Watched.write = half
    os.replace, FolderOfPieces._tell, Path.unlink = replacing, telling, removing


def main(victim: int, point: str, way: str) -> None:
    torch.set_num_threads(1)
    config = RunConfig(parallel=ParallelConfig(name="shard", timeout=20.0), output_dir="out")
    try:
        with joined(config) as (world, _):
            folder = FolderOfPieces(Path("checkpoints").absolute(), TrainerConfig(keep_last=1), world)
            with Saving(folder, way == "background", print) as saving:
                for step in (10, 20):
                    if step == 20 and world.rank == victim:
                        plant(point)
                    state = state_in_pieces(part_job(step, world))
                    saving.save(step, state, None, lambda path: None, must=False)
                    if step == 10:
                        saving.wait()
                for _ in range(1000):  # the steps that follow
                    world.total(1.0)
                    time.sleep(0.005)
    except ParallelError as error:
        print(f"ParallelError: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
