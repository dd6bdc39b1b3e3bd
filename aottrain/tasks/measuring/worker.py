"""A run in a process of its own: `python -m aottrain.tasks.measuring.worker config.json`.

Memory peaks, compile caches and threads of one engine must not reach the next, and a crash must not end the comparison.
The configuration travels as it was resolved, not as overrides that would be resolved again.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from aottrain.config.launch import end_with_parent
from aottrain.config.reading import read_config, read_model
from aottrain.config.run import RunConfig
from aottrain.errors import AottrainError, ConfigError
from aottrain.ir.settings.files import write_text_whole

CONFIG_FILE = "run_config.json"
LOG_FILE = "log.txt"
GRACE_S = 10
_LAST_BYTES = 2000


def run_apart(config: RunConfig) -> str:
    """Run the task of `config` in a new process; "" if it went well, else the last line of its error.

    Everything that the process prints is in log.txt in its output directory.
    """
    directory = Path(config.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    dump(config, directory / CONFIG_FILE)
    command = [sys.executable, "-m", "aottrain.tasks.measuring.worker", str(directory / CONFIG_FILE)]
    with (directory / LOG_FILE).open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            end(process)
    return "" if code == 0 else last_words(directory / LOG_FILE, code)


def last_line(log: Path) -> str:
    """What a process that writes there said last; "" where that is nothing yet."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def end(process: subprocess.Popen[Any]) -> None:
    """End a process, if it still runs: a signal, which it may answer by a last step and a checkpoint; then by force."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def dump(config: RunConfig, path: Path) -> None:
    """Write `config` so that `load` gives it back, equal."""
    write_text_whole(path, json.dumps(dataclasses.asdict(config), indent=2))


def load(path: Path) -> RunConfig:
    """The RunConfig that `dump` wrote, checked as one from the command line is."""
    values = json.loads(path.read_text(encoding="utf-8"))
    output_dir = values.pop("output_dir")
    config, mistakes = read_config(values)
    if not mistakes:
        config, mistakes = read_model(config)
    if mistakes:
        raise ConfigError([str(mistake) for mistake in mistakes])
    return dataclasses.replace(config, output_dir=output_dir)


def main(arguments: list[str]) -> int:
    # `-m` puts the working directory on the path, as `python -m aottrain` does: kernel.target may live there.
    end_with_parent()
    try:
        config = load(Path(arguments[0]))
        return importlib.import_module(f"aottrain.tasks.{config.task}").run(config)
    except AottrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        return 128 + getattr(error, "signum", signal.SIGINT)


def last_words(log: Path, code: int) -> str:
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    messages = [line for line in lines if line]
    return messages[-1] if messages else f"exit code {code}, and no output"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
