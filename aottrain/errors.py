"""Every error that aottrain raises on purpose. Each message names the thing, its value and what is allowed."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class AottrainError(Exception):
    """Base of all errors of this package."""


class ConfigError(AottrainError):
    """The person's input is wrong: configuration, paths, data. Holds every mistake found, one line each.

    The command line prints them without a traceback and exits with code 2.
    """

    steps: int = 0
    """How many had been taken, where data became wrong under a run: that run has failed."""

    def __init__(self, mistakes: str | Sequence[str]):
        self.mistakes = [mistakes] if isinstance(mistakes, str) else list(mistakes)
        super().__init__("\n".join(self.mistakes))


class Interrupted(KeyboardInterrupt):
    """A signal ended what ran, where it was. The exit code is that of a process that the signal ended: 128 + signum."""

    def __init__(self, signum: int):
        super().__init__(f"by {signal.Signals(signum).name}")
        self.signum = signum


HANGUP = getattr(signal, "SIGHUP", None)
"""What a terminal sends that is closed; Windows has none."""


def ending_signals() -> tuple[int, ...]:
    """Those that end what runs: SIGINT, SIGTERM, and SIGHUP where it is not ignored, as `nohup` has it."""
    if HANGUP is None or signal.getsignal(HANGUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, HANGUP


class Refusals:
    """What a thread's traces have refused: how often, and why the last time."""

    count = 0
    last = ""

    def note(self, reason: str) -> None:
        self.count += 1
        self.last = reason


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.refusals = Refusals()


_of_thread = _OfThread()


def refusals_here() -> Refusals:
    """Of this thread: for what it starts in others."""
    return _of_thread.refusals


def note_refusal(reason: str) -> None:
    """Known though the program that is traced catches the error, as `except Exception` does."""
    refusals_here().note(reason)


@contextmanager
def none_caught() -> Iterator[None]:
    """Raises UnsupportedError at its end where something was refused inside, and the program went on."""
    refusals = refusals_here()
    before = refusals.count
    yield
    if refusals.count != before:
        raise UnsupportedError(f"the program catches an error that its trace raises: {refusals.last}")


class UnsupportedError(AottrainError):
    """The compiler cannot prove that it would give eager's answer for this program.

    Under `on_unsupported="eager"` the call runs eagerly and is counted in the report; under `"error"` this is raised.
    reason: one line; source: the line of the program that it is about, "file.py:line", "" where there is none.
    """

    def __init__(self, reason: str = "", source: str = ""):
        super().__init__(reason)
        self.source = source
        note_refusal(self.reason)

    @property
    def reason(self) -> str:
        return str(self.args[0]).partition("\n")[0] if self.args else ""  # torch.fx appends where it was in a graph

    def __str__(self) -> str:
        return f"{self.reason} ({self.source})" if self.source else self.reason


class CompilerError(UnsupportedError):
    """The machine's C++ compiler cannot be had, failed or did not answer; the message has its own words."""


class PythonOnlyError(UnsupportedError):
    """TorchDynamo's graph does not do what the program does: Python is to run the call."""


class OverlapError(PythonOnlyError):
    """The program writes memory that it also reads, or writes twice: where eager raises, the program may catch it."""


class VerificationError(AottrainError):
    """A law of the compiler (compiler/README.md) does not hold for a graph: a bug of ours, never the user's."""


class BudgetError(AottrainError):
    """A memory budget cannot be met; the message names the smallest that can."""

    budget: float | int | str = 0
    lowest_bytes: int | None = None
    """That smallest, in bytes; None where the message alone says it."""
    lowest_of_kernels: int | None = None
    """Of generated kernels alone; None where there are none."""
    sizes: str = ""
    """What it is for, where sizes are symbolic."""


class NumericsError(AottrainError):
    """A compiled step differs from eager by more than the tolerance; the message names the loss or the parameter."""

    micro_batch: int | None = None
    """The number, from 1, of the one whose numbers are wrong; None where that is not known."""


class CheckpointError(AottrainError):
    """A checkpoint cannot be written, or, as ResumeError, not be used."""


class ResumeError(CheckpointError):
    """What a run shall go on from is missing, damaged, or of another run; the message says in which settings."""


class BusyError(AottrainError):
    """Another run writes to the output folder; the message names the folder and the process."""


class ParallelError(AottrainError):
    """The processes of one run differ, or one of them has ended; the message names them."""


class RecipeError(AottrainError):
    """A recipe's own code raised, or gave what a recipe must not; the message has the line."""

    steps: int = 0
    """How many had been taken; with any, the command line ends as it does for a run that failed."""


SMALLER = "a smaller model, batch or partition.budget is needed"


class CapacityError(AottrainError):
    """A step needs more memory than the machine has, which is known before one is tried."""


class OutOfMemoryError(AottrainError):
    """An allocator had no more memory; the message says what was being done."""


class LibraryError(AottrainError):
    """A library failed without saying why: for lack of memory, or because it has no such call."""


# How allocators of the CPU say that they have no more, and torch that no machine has as much; CUDA's has a class of its
# own.
ALLOCATOR_TEXTS = (
    "can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc", "can't start new thread",
    "Storage size calculation overflowed", "integer multiplication overflow",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised this, of the CPU or of a device."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATOR_TEXTS)


# oneDNN does not say why it fails: for lack of memory, or because it has no such call.
LIBRARY_TEXTS = ("could not create a primitive", "could not execute a primitive", "could not create a memory object")


def is_likely_out_of_memory(error: BaseException) -> bool:
    """The same, and what a library raises for that without saying so. For those who then try with less, or say that it
    may be another thing, as `lack_text` does."""
    if is_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LIBRARY_TEXTS)


def allocator_text(error: BaseException) -> str:
    """The line in which the allocator says it."""
    lines = str(error).strip().splitlines() or ["no memory"]
    line = next((line for line in lines if any(text in line for text in ALLOCATOR_TEXTS)), lines[0])
    return re.sub(r"^\[enforce fail at [^]]*\] (err == 0\. )?", "", line)[:160]


def lack_text(error: BaseException, what: str) -> str:
    """That `what` did not run, and no more about the reason than is known. error: see `is_likely_out_of_memory`."""
    if is_out_of_memory(error):
        return f"{what} does not fit into memory"
    return f"{what} does not fit into memory, or a library has no such call ({allocator_text(error)})"


class OutputError(AottrainError):
    """A file of results cannot be written (disk full, no permission); the message names it and the reason."""


_REFUSALS = (BudgetError, BusyError, CapacityError, ConfigError, RecipeError, ResumeError)


def is_refusal(error: BaseException) -> bool:
    """Whether this is about what was asked for, and was found before any step."""
    return isinstance(error, _REFUSALS) and not getattr(error, "steps", 0)
