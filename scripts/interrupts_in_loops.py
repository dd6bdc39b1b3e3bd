"""Ctrl-C while `aottrain.compile` compiles in somebody's own loop: does it reach them, and is nothing spoilt?

    python scripts/interrupts_in_loops.py                       # 30 first calls by each front end
    python scripts/interrupts_in_loops.py --calls 200 --seed 2 --capture trace

Each is a fork of a process that has imported all, with Python's own handler of SIGINT, in which a model is compiled,
called, and gone back through. The signal comes at a random moment of that; every other one has an empty cache, so that
C++ compilers are started. KeyboardInterrupt must reach the caller. Then the same compiled module is called again: its
loss and gradients must be eager's, compiled, with nothing counted as run eagerly, no mode of a trace left on, the
collector as it was, no compiler left running. Exit code 1 where it is otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aottrain  # noqa: E402
from aottrain.compat import has_function_modes, operators_are_watched  # noqa: E402
from aottrain.ir.settings.choices import CAPTURES  # noqa: E402
from scripts.forking import forked  # noqa: E402

WORDS = ("terminate called", "Fatal Python error", "Exception ignored", "Segmentation")


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return model, torch.randn(8, 64, 64)


def gone_back(step: nn.Module, model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = step(batch).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]


def state_of_torch() -> list[Any]:
    return [
        operators_are_watched([]), has_function_modes(), torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), gc.isenabled(), torch.get_default_dtype(),
        torch.compiler.is_compiling(), signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    ]  # fmt: skip


def children() -> list[str]:
    tasks = Path(f"/proc/{os.getpid()}/task")
    pids, names = [], []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended since
            pids += (task / "children").read_text().split()
    for pid in pids:
        with contextlib.suppress(OSError):
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return names


def loop(capture: str, result: Path, expected: list[torch.Tensor]) -> int:
    """In the fork: what a user's script does, and what it finds afterwards."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: dict[str, Any] = {"end": "finished", "wrong": []}
    model, batch = model_and_batch()
    before = state_of_torch()
    result.with_suffix(".begun").write_text("")
    try:
        step = aottrain.compile(model, capture=capture, kernel="cpp")
        gone_back(step, model, batch)
        time.sleep(0.0)  # what has come by now is raised here
    except KeyboardInterrupt as error:
        found["end"] = "KeyboardInterrupt"
        found["where"] = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-3:]
    except BaseException as error:
        found["end"] = f"{type(error).__name__}: {error}"[:300]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if found["end"] == "finished":
        result.write_text(json.dumps(found))
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (now := state_of_torch()) != before:
        found["wrong"].append(f"torch's state {now}, it was {before}")
    deadline_s = time.monotonic() + 2.0
    while (left := children()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if left:
        found["wrong"].append(f"left running: {left}")
    try:
        step = aottrain.compile(model, capture=capture, kernel="cpp") if "step" not in locals() else step
        for _ in range(2):
            got = gone_back(step, model, batch)
            worst = max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))
            if worst > 1e-5:
                found["wrong"].append(f"other numbers than eager's, by {worst}")
        if step.report.fallbacks or not step.report.graphs:
            found["wrong"].append(f"ran eagerly: {step.report.fallbacks}, {len(step.report.graphs)} graphs")
    except BaseException as error:
        found["wrong"].append(f"the next call: {type(error).__name__}: {error}"[:500])
    if (now := state_of_torch()) != before:
        found["wrong"].append(f"torch's state after it {now}, it was {before}")
    result.write_text(json.dumps(found))
    return 0


def one(capture: str, is_empty: bool, chance: random.Random, whole_s: float, expected: list[torch.Tensor]) -> dict:
    """What became of one call, in seconds at most."""
    result = Path("result.json")
    for path in (result, result.with_suffix(".begun"), Path("output.txt")):
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as empty:
        kept = os.environ.get("AOTTRAIN_CACHE_DIR")
        os.environ["AOTTRAIN_CACHE_DIR"] = empty if is_empty else str(Path("cache").resolve())
        pid = forked(lambda: loop(capture, result, expected), "output.txt")
        while not result.with_suffix(".begun").exists():
            time.sleep(0.005)
        began_s = time.monotonic()
        if whole_s:
            time.sleep(chance.uniform(0.0, whole_s))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if kept is not None:
            os.environ["AOTTRAIN_CACHE_DIR"] = kept
    printed = Path("output.txt").read_text(encoding="utf-8", errors="replace")
    found = json.loads(result.read_text()) if result.exists() else {"end": f"exit code {code}", "wrong": []}
    if found["end"] not in ("finished", "KeyboardInterrupt"):
        found["wrong"].append(f"{found['end']}: {printed[-1500:]}")
    found["wrong"] += [f"{word}: {printed[-1500:]}" for word in WORDS if word in printed]
    return {**found, "seconds": time.monotonic() - began_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capture", nargs="+", choices=CAPTURES, default=CAPTURES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chance, wrong = random.Random(given.seed), 0
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        model, batch = model_and_batch()
        expected = gone_back(model, model, batch)
        for capture in given.capture:
            ends, lasts = Counter(), {}
            aottrain.compile(nn.Linear(3, 3), capture=capture)(torch.ones(2, 3)).sum().backward()  # all is imported
            for is_empty in (False, False, True):  # the first fills the cache
                lasts[is_empty] = one(capture, is_empty, chance, 0.0, expected)["seconds"]
            hit = 0
            while hit < given.calls:
                is_empty = hit % 2 == 1
                found = one(capture, is_empty, chance, lasts[is_empty], expected)
                if found["end"] == "finished":
                    lasts[is_empty] *= 0.9
                    continue
                lasts[is_empty] *= 1.02
                hit += 1
                ends[found["end"]] += 1
                if found["wrong"]:
                    wrong += 1
                    print(f"{capture}, call {hit}: {found.get('where')}: {'; '.join(found['wrong'])}", flush=True)
            print(f"{capture}: {hit} calls interrupted: {dict(ends)}; wrong so far {wrong}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
