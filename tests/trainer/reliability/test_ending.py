"""A signal is raised where Python alone is underway: never in what C++ or the collector has called."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from aottrain.compiler.capture.recording import Recorder
from aottrain.errors import Interrupted
from aottrain.tasks import train
from aottrain.toolchain import ending
from aottrain.toolchain.ending import LOOK, deferred
from aottrain.trainer.reliability import signals
from aottrain.trainer.reliability.signals import graceful_stop, interruptible
from scripts.forking import forked


def spin(seconds: float = 5.0) -> None:
    """Python alone, until a signal ends it."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def in_a_dispatch(call) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            call()
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1


def in_a_backward(call) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            call()
            return gradient * 2

    Own.apply(torch.ones(2, requires_grad=True)).sum().backward()


def in_a_hook(call) -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: call())
    x.sum().backward()


def in_a_weak_reference(call) -> None:
    x = torch.ones(2)
    table = torch.utils.weak.WeakIdKeyDictionary()
    remove = table._remove
    table._remove = lambda key: (call(), remove(key))
    reference = weakref.finalize(x, call)
    del x
    assert not reference.alive


def in_a_finalizer(call) -> None:
    class Own:
        def __del__(self):
            call()

    Own()


def in_a_symbolic_size(call) -> None:
    """There a KeyboardInterrupt becomes a TypeError."""
    from torch.fx.experimental.sym_node import SymNode

    size = ShapeEnv().create_unbacked_symint()

    def read(node):
        call()
        return vars(node)["pytype"]

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(SymNode, "pytype", property(read), raising=False)  # which is_int reads, that C++ calls
        torch.empty_strided((2, 2), (size, 1), device="meta")


def in_the_start_of_a_process(call) -> None:
    """Its number is not known yet, and nothing could end it."""
    fork = subprocess._fork_exec

    def forked(*arguments):
        number = fork(*arguments)
        call()
        return number

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(subprocess, "_fork_exec", forked)
        process = subprocess.Popen([sys.executable, "--version"], stdout=subprocess.DEVNULL)
    assert process.wait() == 0


PLACES = [
    in_a_dispatch, in_a_backward, in_a_hook, in_a_weak_reference, in_a_finalizer, in_a_symbolic_size,
    in_the_start_of_a_process,
]  # fmt: skip


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_raised_when_what_was_called_from_below_has_ended(place, signum):
    went_on, lost = [], []

    def call():
        if not went_on:
            signal.raise_signal(signum)
        went_on.append(True)

    with pytest.raises(Interrupted) as caught, interruptible():
        place(call)
        spin()
        lost.append(True)
    assert went_on and not lost and caught.value.signum == signum


def test_while_steps_are_taken_the_second_one_waits_so_too(capfd):
    went_on, lost = [], []

    def call():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        went_on.append(True)

    with pytest.raises(Interrupted), graceful_stop():
        in_a_backward(call)
        spin()
        lost.append(True)
    assert went_on and not lost


def test_one_that_somebody_has_dropped_is_raised_again():
    lost = []
    with pytest.raises(Interrupted), interruptible():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        spin()
        lost.append(True)
    assert not lost


def test_at_the_latest_it_is_raised_where_the_block_ends():
    at_end = []
    with pytest.raises(Interrupted), interruptible():
        in_a_dispatch(lambda: at_end or (signal.raise_signal(signal.SIGTERM), at_end.append(True)))


def test_what_ends_a_run_is_not_interrupted_by_its_own_signal():
    ended = []
    with pytest.raises(Interrupted), interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            spin(0.3)  # several looks long
            ended.append(True)
            raise
    assert ended
    spin(0.1)  # and nobody looks any more


def test_a_run_that_is_traced_ends_by_it(tiny, left_by, monkeypatch):
    call, calls = Recorder.__torch_dispatch__, []

    def dispatching(self, *given):
        calls.append(True)
        if len(calls) == 20:
            signal.raise_signal(signal.SIGINT)
            assert len(calls) == 20  # and the line behind it is reached
            calls.append("went on")
        return call(self, *given)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", dispatching)
    config = tiny("aot")
    with pytest.raises(Interrupted):
        train.run(config)
    assert "went on" in calls
    assert left_by(config).summary["status"] == "interrupted"


def ends(config, signums: list[int], output: Path) -> int:
    """The exit code of a run that is stuck in a dispatch, and hears these."""

    def stuck(self, *given):
        for signum in signums:
            signal.raise_signal(signum)
        spin(60)
        raise AssertionError("it went on")

    def run() -> int:
        Recorder.__torch_dispatch__ = stuck
        return train.run(config)

    return os.waitstatus_to_exitcode(os.waitpid(forked(run, str(output)), 0)[1])


def test_a_second_one_ends_the_process_where_the_first_still_waits(tiny, tmp_path, capfd):
    config = tiny("aot")
    assert ends(config, [signal.SIGINT, signal.SIGTERM], tmp_path / "log") == 143
    printed = "".join(capfd.readouterr())
    assert "aottrain: interrupted" in printed and "nothing to go on with" in printed and "Traceback" not in printed
    summary = json.loads(Path(config.output_dir, "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("interrupted", "Interrupted: by SIGTERM")


def test_the_first_waits_so_long_and_no_longer(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_S", 0.3)
    config = tiny("aot")
    assert ends(config, [signal.SIGINT], tmp_path / "log") == 130
    assert json.loads(Path(config.output_dir, "summary.json").read_text())["status"] == "interrupted"


def at_once(call) -> None:
    call()


@pytest.mark.parametrize("where", [in_a_dispatch, in_a_backward, in_a_hook, at_once])
def test_python_s_own_ctrl_c_is_raised_where_it_can_be(where, monkeypatch):
    """As `aottrain.compile` compiles in somebody's loop: in what C++ has called it ended the process, or was lost."""
    before, ends, below = signal.getsignal(signal.SIGINT), [], []
    first = signal.getsignal(LOOK)

    def call() -> None:
        if not below:
            below.append("heard")
            signal.raise_signal(signal.SIGINT)
            below.append("went on")

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), deferred():
            where(call)
            spin()
            ends.append("went on")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not ends
        assert signal.getsignal(LOOK) is first and ("went on" in below) == (where is not at_once)
        monkeypatch.setattr(ending, "_LOOK_S", 0.5)  # nobody looks before
        below.clear()
        with pytest.raises(KeyboardInterrupt), deferred():  # at the latest where the block ends
            where(call)
        spin(0.1)  # and nothing comes later
        mine = signal.signal(signal.SIGINT, lambda *_: ends.append("heard"))
        with suppress(KeyboardInterrupt), deferred():
            signal.raise_signal(signal.SIGINT)
        assert ends == ["heard"] and mine is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
