"""A group of which one process is killed, started again with a fixed folder, with the store that torchrun keeps."""

from __future__ import annotations

import csv
import time

import pytest
import torch.distributed as dist

from scripts.chaos import same, state_of
from tests.parallel.groups import ended, run_together, started
from tests.sampling import WHOLE

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch is without gloo")

STEPS = 30
LINE = ["-m", "aottrain", "debug=fast", "engine=eager", "decisions=default", "trainer.num_threads=1", "logger=csv",
        "measure.memory=false", "data.batch_size=4", "trainer.sample_bytes=0", f"trainer.steps={STEPS}",
        "trainer.save_every=2", "trainer.eval_every=0", "trainer.log_every=1", "recipe.model.num_layers=1",
        "recipe.model.width=16", "recipe.model.num_heads=2", "recipe.model.context=16", "resume=auto",
        "hydra.run.dir=out"]  # fmt: skip


def losses(folder) -> list[str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [row["train/loss"] for row in csv.DictReader(file)]


@WHOLE  # test_runs has the kill, test_meeting has the store
@pytest.mark.parametrize(("mode", "victim"), [("ddp", 1), ("shard", 0)])
def test_a_group_goes_on_after_a_kill_as_if_nothing_had_happened(mode, victim, tmp_path):
    line = [*LINE, f"parallel={mode}"]
    folders = {name: tmp_path / name for name in ("unbroken", "killed", "again")}
    for folder in folders.values():
        folder.mkdir()
    assert [each.code for each in run_together(line, folders["unbroken"])] == [0, 0]
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # torchrun's, which it outlives
    kept = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    with started(line, folders["killed"], **kept) as processes:
        until = time.monotonic() + 90
        while "step  5/" not in (folders["killed"] / "0.out").read_text():
            assert time.monotonic() < until and all(each.poll() is None for each in processes)
            time.sleep(0.01)
        processes[victim].kill()
        survivor = ended(processes, folders["killed"])[1 - victim]
    assert survivor.code == 1 and "ParallelError: " in survivor.err and "Traceback" not in survivor.err
    (folders["killed"] / "out").rename(folders["again"] / "out")
    assert [each.code for each in run_together(line, folders["again"], **kept)] == [0, 0]
    whole, again = (folders[name] / "out" for name in ("unbroken", "again"))
    assert losses(again) == losses(whole) and same(state_of(again, STEPS), state_of(whole, STEPS))
    assert "going on after step" in (folders["again"] / "0.out").read_text()
