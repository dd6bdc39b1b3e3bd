"""The command line, and the only importer of Hydra and OmegaConf: compose, check, build the RunConfig, run the task.

Everything that can be wrong is looked for before anything runs, and all of it is said at once.

Exit codes: 0 success, 1 the run failed, 2 the input is wrong (a recipe is input, too), 128 + n ended by signal n.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from aottrain.cli.ranks import let_first_speak, quiet_but_first
from aottrain.config.launch import end_with_sweep
from aottrain.errors import HANGUP, AottrainError, ConfigError, Interrupted, ending_signals, is_refusal
from aottrain.ir.settings.files import printable
from aottrain.trainer.console import outliving_terminals, say_at_once

# What an installation brings, by the name that is imported.
DEPENDENCIES = ("hydra", "omegaconf", "torch", "numpy", "networkx", "tqdm", "wandb", "yaml", "antlr4")

# What a file system says that takes no more; other errors of the system are shown with their traceback.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

_came: list[Interrupted] = []  # of the command line that runs
_clearing: list[Callable[[], object]] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Mistakes go to stderr, one line each, and nothing is run."""
    end_with_sweep()
    if arguments is None and sys.getfilesystemencoding() == "ascii":
        begin_again_with_utf8()
    try:
        here = os.getcwd()
    except FileNotFoundError:
        _say("the current folder is not there any more; go to another one")
        return 2
    if here not in sys.path:
        sys.path.append(here)  # kernel.target may name a file of the current folder, however we were started
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what a terminal's encoding lacks is shown as an escape, not an error
            stream.reconfigure(errors="backslashreplace")
    quiet_but_first()
    with outliving_terminals():
        return _answered(list(sys.argv[1:] if arguments is None else arguments))


def _answered(arguments: list[str]) -> int:
    """Run it; the exit code of how it ends, after a line that says why."""
    formatted = warnings.formatwarning
    warnings.formatwarning = one_line
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in DEPENDENCIES:
            raise
        _say(not_installed(str(error.name)))
        return 2
    except ConfigError as error:
        let_first_speak()
        if error.steps:
            _say(f"after step {error.steps}: {' '.join(str(error).split())}")
            return 1
        count = len(error.mistakes)
        lines = [f"{count} mistake{'s' if count > 1 else ''} in the configuration"]
        _say("\n  ".join([*lines, *(" ".join(mistake.split()) for mistake in error.mistakes)]))
        return 2
    except AottrainError as error:
        is_refused = is_refusal(error)
        if is_refused:
            let_first_speak()
        _say(f"{type(error).__name__}: {error}")
        return 2 if is_refused else 1
    except BrokenPipeError:  # who reads our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains when it ends
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _say(f"{error.filename or 'output'}: cannot be written: {error.strerror}")
        return 1
    except KeyboardInterrupt as error:
        _say("interrupted")
        return 128 + getattr(error, "signum", signal.SIGINT)
    finally:
        warnings.formatwarning = formatted


def _say(text: str) -> None:
    """On stderr, without what would steer the terminal: files and folders that it names may be called anything."""
    print(printable(f"aottrain: {text}"), file=sys.stderr)


def _run(arguments: list[str]) -> int:
    """Run it. Until a task has handlers of its own, SIGTERM and SIGHUP end the process as Ctrl-C does, so that what is
    underway is ended and cleared away.

    An error that follows a signal is no mistake of the input: OmegaConf undoes its changes where an exception passes,
    and with a node half made that raises an error of its own, which hides the KeyboardInterrupt.
    """
    _came.clear()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == HANGUP and _came:  # of a terminal that is closed, which may come twice
            return
        _came.append(Interrupted(number))
        if _is_within_torch(frame):
            _end_now(number)
        raise _came[-1]

    before = {signum: signal.getsignal(signum) for signum in ending_signals()}
    usual = (signal.default_int_handler, signal.SIG_DFL)
    ours = [signum for signum, handler in before.items() if handler in usual]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    try:
        for signum in ours:
            signal.signal(signum, interrupt)
        from aottrain.cli.command import run  # here, so that what is not installed gets a sentence

        return run(arguments)
    except Exception:
        raise_what_came()
        raise
    finally:
        for signum in ours:
            if signal.getsignal(signum) is interrupt:
                signal.signal(signum, before[signum])


def raise_what_came() -> None:
    """Raises what a signal has raised before, if one came: a library may have dropped the exception. For where the
    next part of the work would begin."""
    if _came:
        raise _came[-1] from None


@contextmanager
def cleared_away(clear: Callable[[], object]) -> Iterator[None]:
    """Inside, `clear` is called where a signal ends the process without an exception."""
    _clearing.append(clear)
    try:
        yield
    finally:
        _clearing.remove(clear)


def _is_within_torch(frame: FrameType | None) -> bool:
    """Where C++ may have called, as it does while torch is imported: an exception there ends the process as a crash,
    or is dropped."""
    place = getattr(sys.modules.get("torch"), "__file__", None)
    while place and frame is not None:
        if frame.f_code.co_filename.startswith(os.path.dirname(place) + os.sep):
            return True
        frame = frame.f_back
    return False


def _end_now(signum: int) -> None:
    say_at_once("aottrain: interrupted")
    for clear in reversed(_clearing):
        with suppress(Exception):
            clear()
    os._exit(128 + signum)


def one_line(message: Warning | str, category: type[Warning], file: str, line: int, source: str | None = None) -> str:
    """A warning of this package as its log has it; of others with the place, which is not ours to explain."""
    ours = Path(file).resolve().is_relative_to(Path(__file__).resolve().parents[1])
    return printable(f"warning: {message}\n") if ours else f"{file}:{line}: {category.__name__}: {message}\n"


def begin_again_with_utf8() -> None:
    """Where the machine is set to ASCII, and Python told not to make up for it, no library that we use can name a
    folder with an accent in it: the same process starts once more, in the mode that Python has for this."""
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, sys.orig_argv)


def not_installed(name: str) -> str:
    """What to do about a package that this Python lacks."""
    problem = f"{sys.executable or 'this Python'} has no {name}"
    return (
        f"{problem}: write `bash scripts/train.sh` for `python -m aottrain`, or `source .venv/bin/activate` before it"
    )
