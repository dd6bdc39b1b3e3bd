"""Faults for `scripts/chaos.py`, planted in the process of a run or in its files."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aottrain.trainer import engines, loop  # noqa: E402
from scripts.chaos_points import POINTS, any_point  # noqa: E402

_FULL = "DefaultCPUAllocator: can't allocate memory: planted"


def plant_kill_in_save(chance: random.Random) -> None:
    """The process ends itself before or after the n-th call by which a file gets to the disk."""
    left, is_before = [chance.randrange(1, 40)], chance.random() < 0.5

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and is_before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*given, **more)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counting

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    torch.save = counted(torch.save)


def plant_full_disk(chance: random.Random) -> None:
    """A limit on the size of a file, below that of a checkpoint or above it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = chance.choice([1 << 10, 1 << 14, 1 << 16, 100_000])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def plant_out_of_memory(chance: random.Random) -> None:
    """At one place of one step, an allocator has no more."""
    place, left = chance.choice(["forward", "backward", "optimizer"]), [chance.randrange(2, 20)]
    call, update, backward = engines.ModuleStep.__call__, loop.clip_and_update, torch.Tensor.backward

    def fail(here: str) -> None:
        left[0] -= here == place
        if here == place and left[0] == 0:
            raise RuntimeError(_FULL)

    def going_back(*given: Any, **more: Any) -> None:
        backward(*given, **more)
        fail("backward")

    def calling(step: Any, batches: Any) -> Any:
        fail("forward")
        return call(step, batches)

    def updating(*given: Any) -> Any:
        fail("optimizer")
        return update(*given)

    engines.ModuleStep.__call__ = calling
    loop.clip_and_update, torch.Tensor.backward = updating, going_back


def plant_nan(chance: random.Random) -> None:
    """The loss of one step and all its gradients, or one gradient alone, are not numbers: as of a bad batch, or of a
    bad bit."""
    is_loss, left = chance.random() < 0.5, [chance.randrange(1, 30)]
    call = engines.ModuleStep.__call__

    def calling(step: Any, batches: Any) -> Any:
        result = call(step, batches)
        left[0] -= 1
        if left[0] == 0:
            gradients = [one.grad for one in step.module.parameters() if one.grad is not None]
            for gradient in gradients if is_loss else [chance.choice(gradients)]:
                gradient.view(-1)[0] = torch.nan
            if is_loss:
                result.loss.fill_(torch.nan)
        return result

    engines.ModuleStep.__call__ = calling


def damage(folder: Path, chance: random.Random) -> bool:
    """Of at least two checkpoints one of the newest's two files is cut or changed; whether there were."""
    files = sorted((folder / "checkpoints").glob("step_*.pt"))
    if len(files) < 2:
        return False
    weights = [path for path in files[-1].parent.glob(f"{files[-1].stem}*.safetensors")]
    files[-1] = chance.choice([files[-1], *weights])
    content = bytearray(files[-1].read_bytes())
    if chance.random() < 0.5:
        del content[chance.randrange(len(content)) :]
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    files[-1].write_bytes(content)
    return True


def planter(fault: str, chance: random.Random, num_saves: int, point: str | None = None) -> Callable[[], None]:
    """What is called in the process that the fault is for."""
    if fault == "points":
        return any_point(chance, point or chance.choice(list(POINTS)), num_saves)
    plants = {"save": plant_kill_in_save, "disk": plant_full_disk, "oom": plant_out_of_memory, "nan": plant_nan}
    return lambda: plants[fault](chance) if fault in plants else None


if __name__ == "__main__":
    print("A part of another command: python scripts/chaos.py --help")
