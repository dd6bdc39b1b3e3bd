"""`sweep.executor=submitit`: each job of a sweep is submitted by the package submitit, to Slurm where that is there,
else to processes of this machine. Its pickles and logs lie in the sweep's folder, in a folder of `submitit`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from aottrain.cli.jobs import Running, SweepJob
from aottrain.config.schema import Mistake, show

FOLDER = "submitit"
_LOOK_S = 0.2


class Submitted:
    """A job, as far as a sweep knows the processes that it starts."""

    def __init__(self, job: Any):
        self.job, self.returncode = job, None

    def poll(self) -> int | None:
        if self.returncode is None and self.job.done():
            try:
                self.returncode = int(self.job.result())
            except Exception:  # submitit's own, of a job that ended without a result, and what a job raised
                print(f"what submitit's job {self.job.job_id} printed: {self.job.paths.stderr}", flush=True)
                self.returncode = 1
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_LOOK_S)
        return code

    def send_signal(self, signum: int) -> None:
        """Of whatever signal: submitit cancels a job."""
        self.job.cancel(check=False)


def run_job(arguments: Sequence[str], directory: str) -> int:
    """A job in a process of submitit's; its exit code. What cancels it ends it as it would a run of its own."""
    from aottrain.cli import main

    os.chdir(directory)
    return main(list(arguments))


def mistakes(options: Mapping[str, Any] | None) -> list[Mistake]:
    """What keeps jobs from being submitted: the package is not there, or takes no such option."""
    if find_spec("submitit") is None:
        text = "needs the package submitit, which is not installed: pip install 'aottrain[search]'"
        return [Mistake("sweep.executor", text, FOLDER)]
    try:
        with TemporaryDirectory() as folder:
            _executor(Path(folder), options or {})
    except Exception as error:  # as NameError, of an option that no cluster has
        return [Mistake("sweep.options", " ".join(str(error).split()), show(dict(options or {})))]
    return []


def _executor(folder: Path, options: Mapping[str, Any]) -> Any:
    import submitit

    executor = submitit.AutoExecutor(folder=folder, cluster=options.get("cluster"))
    executor.update_parameters(**{key: value for key, value in options.items() if key != "cluster"})
    return executor


def submitting(folder: Path, options: Mapping[str, Any] | None) -> Callable[[SweepJob, Running, bool], Submitted]:
    """What starts a job of the sweep in this folder."""
    (folder / FOLDER).mkdir(exist_ok=True)
    # A folder of its own each time: a pickle that lies there already would be taken for a job's result.
    executor = _executor(Path(mkdtemp(prefix="", dir=folder / FOLDER)), options or {})

    def start(job: SweepJob, running: Running, is_quiet: bool) -> Submitted:
        again = ["resume=auto"] if job.goes_on else []
        submitted = Submitted(executor.submit(run_job, [*job.arguments, *again], os.getcwd()))
        running.processes.append(submitted)  # type: ignore[arg-type]
        if running.signum is not None:  # it came while the job was being submitted
            submitted.send_signal(running.signum)
        return submitted

    return start
