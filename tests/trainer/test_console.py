"""What a person sees of a run: in a terminal, in the log, and from the moment that a signal comes."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from aottrain.config.extensions.recipes import load_recipe
from aottrain.errors import Interrupted
from aottrain.ir.settings.files import printable
from aottrain.tasks import train
from aottrain.tasks.notes import resume_command
from aottrain.trainer import console, loop
from aottrain.trainer.console import copied_to, say_at_once
from aottrain.trainer.progress import Progress, Status
from aottrain.trainer.reliability.signals import STOPPING


class Terminal:
    """A pseudo-terminal as stdout and stderr; `text` is all that was sent to it."""

    def __init__(self):
        master, slave = pty.openpty()
        self.text = ""
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self._reader = threading.Thread(target=self._read, args=(master,))
        self._reader.start()

    def _read(self, master: int) -> None:
        try:
            while chunk := os.read(master, 65536):
                self.text += chunk.decode()
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(master)

    def close(self) -> list[str]:
        """The lines as the terminal shows them in the end."""
        self.file.close()
        self._reader.join()
        return screen_of(self.text)


def screen_of(text: str) -> list[str]:
    """Enough of a terminal: carriage returns, line feeds, erasing to the end of a line, the cursor going up."""
    lines, row, column = [""], 0, 0
    for part in text.replace("\x1b[K", "\x01").replace("\x1b[A", "\x02"):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x01":
            lines[row] = lines[row][:column]
        elif part == "\x02":
            row -= 1
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch):
    """terminal() -> one that is stdout and stderr from then on."""
    made = []

    def begin() -> Terminal:
        made.append(Terminal())
        monkeypatch.setattr(sys, "stdout", made[-1].file)
        monkeypatch.setattr(sys, "stderr", made[-1].file)
        return made[-1]

    yield begin
    for each in made:
        if not each.file.closed:
            each.close()


def test_in_a_terminal_every_step_line_stands_whole_above_the_bar(tiny, terminal, tmp_path):
    seen = terminal()
    with copied_to(tmp_path / "aottrain.log", ["the first line"]):
        assert train.run(tiny(trainer={"steps": 6, "log_every": 2, "eval_every": 3})) == 0
    lines = seen.close()
    logged = (tmp_path / "aottrain.log").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("transformer:")] == [
        line for line in logged[1:] if not line.startswith("transformer:")
    ]
    assert [line.split("  ")[0] for line in logged if line.startswith("step")] == [
        "step 1/6", "step 2/6", "step 3/6", "step 4/6", "step 6/6",
    ]  # fmt: skip
    bar = next(i for i, line in enumerate(lines) if "6/6" in line and "step/s" in line)
    assert all(i < bar for i, line in enumerate(lines) if line.startswith("step "))
    assert logged[0] == "the first line" and "step/s" not in "".join(logged) and "\r" not in "".join(logged)


def test_what_is_being_done_stands_on_the_last_line_and_goes_again(terminal, monkeypatch):
    monkeypatch.setattr(Status, "PERIOD_S", 0.01)
    seen = terminal()
    with Status("compiling") as status:
        status.tell("trace_joint")
        while "compiling: trace_joint, 0 s" not in seen.text:
            time.sleep(0.01)
        fcntl.ioctl(seen.file.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, 12, 0, 0))
        while not re.search(r"\x1b\[K[-|/\\] compiling$", seen.text):
            time.sleep(0.01)
    assert seen.close() == [""]


def test_nothing_moves_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(Status, "PERIOD_S", 0.001)
    with Status("compiling") as status, Progress(total=2, initial=0, name="x") as progress:
        status.tell("trace_joint")
        progress.advance()
        progress.say("a line")
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out == "a line\n"


def interrupting(monkeypatch, signum: int, *steps: int) -> None:
    rate = loop.learning_rate

    def at(step, *arguments):
        for _ in range(steps.count(step)):
            signal.raise_signal(signum)
        return rate(step, *arguments)

    monkeypatch.setattr(loop, "learning_rate", at)


def test_a_signal_is_answered_at_once_and_the_run_ends_with_the_command_to_go_on(tiny, terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AOTTRAIN_COMMAND", raising=False)
    interrupting(monkeypatch, signal.SIGINT, 2)
    seen = terminal()
    with copied_to(tmp_path / "aottrain.log"):
        assert train.run(tiny(trainer={"steps": 6, "log_every": 1})) == 130
    lines = seen.close()
    assert lines.index(STOPPING) < next(i for i, line in enumerate(lines) if line.startswith("step 2/6"))
    assert [line for line in lines if line][-1] == "go on with: python -m aottrain resume=run"
    assert STOPPING in (tmp_path / "aottrain.log").read_text().splitlines()


def test_a_second_signal_ends_it_at_once_and_names_the_last_checkpoint(tiny, left_by, capfd, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_COMMAND", "bash scripts/train.sh")
    config = tiny(trainer={"steps": 6, "save_every": 2})
    interrupting(monkeypatch, signal.SIGTERM, 4, 4)
    with pytest.raises(Interrupted) as caught:
        train.run(config)
    assert caught.value.signum == signal.SIGTERM
    summary = left_by(config).summary
    assert summary["status"] == "interrupted" and summary["steps"] == 3 and "step_00000002" in summary["checkpoint"]
    assert capfd.readouterr().out.splitlines()[-1] == f"go on with: bash scripts/train.sh resume={config.output_dir}"


def test_a_second_signal_before_any_checkpoint_says_that_there_is_none(tiny, capfd, monkeypatch):
    """It said that no step was finished, after three of them."""
    interrupting(monkeypatch, signal.SIGTERM, 4, 4)
    with pytest.raises(Interrupted):
        train.run(tiny(trainer={"steps": 6}))
    last = capfd.readouterr().out.splitlines()[-1]
    assert last == "no checkpoint was written: there is nothing to go on with"


@pytest.mark.parametrize("where", ["build_job", "prepare"])
def test_a_signal_while_it_is_built_or_compiled_leaves_a_true_summary(tiny, left_by, capfd, monkeypatch, where):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train, where, lambda *_: signal.raise_signal(signal.SIGTERM))
    config = tiny("aot")
    with pytest.raises(Interrupted):
        train.run(config)
    summary = left_by(config).summary
    assert (summary["status"], summary["steps"]) == ("interrupted", 0) and "SIGTERM" in summary["error"]
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "nothing to go on with" in capfd.readouterr().out


def test_a_run_that_goes_on_and_is_stopped_before_a_step_leaves_what_it_came_from(tiny, left_by, capfd, monkeypatch):
    first = tiny(trainer={"steps": 2})
    assert train.run(first) == 0
    with monkeypatch.context() as patch:
        patch.setattr(train, "build_job", lambda *_: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted):
            train.run(tiny(trainer={"steps": 4}, resume="auto"))
    assert left_by(first).summary["status"] == "finished" and left_by(first).summary["steps"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(train, "prepare", lambda *_: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted):
            train.run(tiny(trainer={"steps": 4}, resume=first.output_dir, output_dir=first.output_dir + "2"))
    assert capfd.readouterr().out.splitlines()[-1].endswith(f"resume={first.output_dir}")


def test_the_command_to_go_on_with_is_quoted_for_hydra_and_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AOTTRAIN_COMMAND", raising=False)
    assert resume_command("outputs/a-b/1") == "python -m aottrain resume=outputs/a-b/1"
    assert resume_command("my runs, 2") == "python -m aottrain 'resume=\"my runs, 2\"'"
    assert resume_command("a\\b") == "python -m aottrain 'resume=\"a\\b\"'"


def test_what_a_model_writes_cannot_steer_a_terminal(tiny, left_by, capsys, monkeypatch):
    written = b"\x1b[2Jred\x07\xff\r\n\ttab \xe2\x80\xae caf\xc3\xa9 \x00"
    monkeypatch.setattr(load_recipe("transformer"), "generate", lambda *_: written)
    config = tiny(trainer={"sample_bytes": 5})
    assert train.run(config) == 0
    text = "The \\x1b[2Jred\\x07\\xff\\r\n\ttab \\u202e café \\x00"
    assert Path(config.output_dir, "sample.txt").read_text(encoding="utf-8") == text + "\n"
    assert f"\n{text}\n---\n" in capsys.readouterr().out
    assert printable("plain\n") == "plain\n"


def test_a_log_that_cannot_be_written_ends_with_one_line(tmp_path, capsys):
    (tmp_path / "full.log").symlink_to("/dev/full")
    with copied_to(tmp_path / "full.log"):
        print("one")
        print("two")
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\n"
    reason = "cannot be written (No space left on device): the log ends here"
    assert captured.err == f"aottrain: {tmp_path / 'full.log'}: {reason}\n"


def test_a_line_said_at_once_needs_no_descriptor(monkeypatch, tmp_path):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with copied_to(tmp_path / "log"):
        say_at_once("now")
    assert stream.getvalue() == (tmp_path / "log").read_text() == "now\n"


def test_a_stream_that_was_closed_from_the_start_takes_what_is_printed(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    before = sys.stdout
    with console.outliving_terminals():
        print("lost", flush=True)
        sys.stdout.write("lost")
    assert sys.stdout is before
