"""trainer.deterministic: what a run needs so that another machine computes the same bits, and what keeps it from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from aottrain.config.run import RunConfig
from aottrain.errors import UnsupportedError
from aottrain.explain.report import GraphReport
from aottrain.ir.settings.decisions import DEFAULT, MEASURED

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # without which cuBLAS may sum in another order from run to run
_REFUSAL = "does not have a deterministic implementation"


def decisions_asked(config: RunConfig) -> str:
    """`decisions`, of which the clock is no part where every machine shall decide alike."""
    return DEFAULT if config.trainer.deterministic and config.decisions == MEASURED else config.decisions


def num_threads(config: RunConfig) -> int | None:
    """Sums are shared out among threads, and machines have different numbers of them: one, unless it is given."""
    return 1 if config.trainer.deterministic and config.trainer.num_threads is None else config.trainer.num_threads


@contextmanager
def as_deterministic_as_asked(config: RunConfig) -> Iterator[None]:
    """Inside, torch takes operators that sum in a fixed order alone, where `trainer.deterministic` says so.

    UnsupportedError: there is an operator without such an implementation.
    """
    if not config.trainer.deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills, threads = torch.utils.deterministic.fill_uninitialized_memory, torch.get_num_threads()
    workspace, cudnn = os.environ.get(_CUBLAS), torch.backends.cudnn
    os.environ.setdefault(_CUBLAS, ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # which costs time, and nothing here reads it
        # As a context, which torch's testing tools allow that forbid to set the flag.
        with cudnn.flags(cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32):
            yield
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
        raise UnsupportedError(f"trainer.deterministic=true: {str(error).partition(', but you set')[0]}") from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.set_num_threads(threads)
        if workspace is None:
            del os.environ[_CUBLAS]


def what_hangs_on_the_model(config: RunConfig, graph: GraphReport | None) -> list[str]:
    """A line about operators whose bits another model of processor or device may give otherwise."""
    if not config.trainer.deterministic or graph is None:
        return []
    where = "the same instructions, versions and number of threads"
    if not graph.tuned_calls:
        return [f"deterministic: the same bits on every machine with {where}"]
    names = ", ".join(f"{count} {name.removeprefix('aten.')}" for name, count in graph.tuned_calls.items())
    return [
        f"deterministic: the same bits in each run on this model of processor; on another one with {where} these may "
        f"differ, for libraries and compilers choose their code by the model: {names}"
    ]
