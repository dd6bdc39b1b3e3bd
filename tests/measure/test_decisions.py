"""What measuring decides: in turns until two rounds agree, never on a busy machine, kept, contradicted, recorded."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

from aottrain.ir.settings.decisions import ATEN, ONEDNN, Decision, Record, Timing, merged, read_record, record_from
from aottrain.ir.tensor import tensor_spec
from aottrain.measure import rates, stopwatch, timings
from aottrain.measure.calls import OpCall
from aottrain.measure.decisions import deciding
from aottrain.measure.rates import DEFAULT_RATES, rates_for
from aottrain.measure.stopwatch import Run, in_turns
from aottrain.ops.products import libraries
from aottrain.ops.products.libraries import choose_library
from aottrain.toolchain import cache
from tests.measure.clocks import Clock

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(choose_library() is None, reason="this build of torch has no oneDNN")


class Libraries(Clock):
    """Both libraries' products by name, each as long as it is told."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.order = []
        self.times = {ATEN: 0.002, ONEDNN: 0.001}
        runs = {name: Run(lambda name=name: self.order.append(name)) for name in self.times}
        monkeypatch.setattr(libraries, "_runs", lambda: runs)
        monkeypatch.setattr(rates, "_SIDES", {"cpu": {1: 16}})
        monkeypatch.setattr(rates, "_COPIED_BYTES", {"cpu": 1000})
        self.seconds = lambda _: self.times[self.order[-1]] if self.order else 0.001


@pytest.fixture
def clock(monkeypatch):
    return Libraries(monkeypatch)


def library(policy="measured"):
    with deciding(policy):
        return choose_library()


@needs_onednn
def test_candidates_take_turns_until_two_rounds_agree(clock):
    found = library()
    assert (found.choice, found.source) == (ONEDNN, "measured")
    assert found.times == {ATEN: Timing(0.002), ONEDNN: Timing(0.001)}
    # Two runs each that do not count, then two rounds of two.
    assert clock.order == [ATEN] * 2 + [ONEDNN] * 2 + [ATEN, ONEDNN] * (2 * 2)


@needs_onednn
def test_rounds_that_do_not_agree_are_repeated(clock):
    first = [0.002] * 6 + [0.001] * 100
    clock.seconds = lambda n: first[n - 1] * (2 if clock.order[-1] == ATEN else 1)
    found = library()
    assert found.times == {ATEN: Timing(0.002), ONEDNN: Timing(0.001)} and clock.num_runs == 2 + 3 * 4


@needs_onednn
def test_the_two_best_rounds_of_each_candidate_agree_whenever_they_were(clock):
    """No round agrees with the next one for both: rates are five candidates, which are seldom all quiet at once."""
    slower = {ATEN: (1.0, 1.5, 1.05, 2.0), ONEDNN: (1.4, 1.0, 1.3, 1.02)}
    clock.seconds = lambda n: clock.times[clock.order[-1]] * slower[clock.order[-1]][max(n - 3, 0) // 4]
    found = library()
    assert (found.choice, found.source) == (ONEDNN, "measured") and clock.num_runs == 2 + 4 * 4
    assert found.times[ATEN].seconds == 0.002 and found.times[ATEN].spread == pytest.approx(0.05)
    assert found.times[ONEDNN].seconds == 0.001 and found.times[ONEDNN].spread == pytest.approx(0.02)


@needs_onednn
@pytest.mark.parametrize("how", ["a look", "switches", "times that never agree"])
def test_a_busy_machine_decides_nothing_and_keeps_nothing(clock, folder, how):
    if how == "a look":
        clock.load = 10
    elif how == "switches":
        clock.switches = 1
    else:
        clock.seconds = lambda n: 0.001 * 1.5 ** (n // 4)
    found = library()
    assert (found.choice, found.source) == (ATEN, "busy") and bool(found.times) == bool(clock.num_runs)
    assert not list(folder.glob("*.json")) and bool(clock.num_runs) == (how != "a look")
    count = clock.num_runs
    assert library() == found and clock.num_runs == count  # asked again at once, it is not measured again
    clock.load = 0
    clock.switches, clock.seconds = 0, lambda _: clock.times[clock.order[-1]]
    clock.later(stopwatch.BUSY_SECONDS)
    assert library().source == "measured"


class Threads:
    """Of a process that has so many, of which the first few are left alone."""

    def __init__(self, monkeypatch, clock, count, alone):
        self.count, self.tried = count, []
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.count)
        monkeypatch.setattr(torch, "set_num_threads", self.set)
        run = clock.seconds

        def seconds(num_runs):
            self.tried += [self.count] * (self.tried[-1:] != [self.count])
            clock.switches = 1 if self.count > alone else 0
            return run(num_runs)

        clock.seconds = seconds

    def set(self, count):
        self.count = count


@needs_onednn
def test_beside_other_work_fewer_threads_tell_which_library_is_the_faster(clock, folder, monkeypatch):
    threads = Threads(monkeypatch, clock, 8, alone=2)
    found = library()
    assert (found.choice, found.source) == (ONEDNN, "shared")
    assert found.times == {ATEN: Timing(0.002), ONEDNN: Timing(0.001)}
    assert threads.tried == [8, 4, 2] and threads.count == 8
    # Another day may have all threads, and its times are kept.
    assert not list(folder.glob("*.json"))
    assert "measured by fewer threads, for the machine was busy" in str(found)
    timings._busy.clear()
    assert library().choice == ONEDNN and threads.tried == [8, 4, 2]  # known for a while


@needs_onednn
def test_where_not_one_thread_is_left_alone_the_fixed_model_answers(clock, monkeypatch):
    threads = Threads(monkeypatch, clock, 8, alone=0)
    found = library()
    assert (found.choice, found.source, threads.count) == (ATEN, "busy", 8)
    assert threads.tried == [8, 4, 2, 1]


def test_times_that_are_figures_are_of_all_threads_alone(clock, monkeypatch):
    """A rate by one thread is not that of two."""
    threads = Threads(monkeypatch, clock, 8, alone=1)
    with deciding("measured"):
        assert rates_for(CPU) == DEFAULT_RATES
    assert threads.tried == [8]


def hour_later(clock, monkeypatch):
    """As a process begins that nobody's runs of today save a look."""
    clock.later(stopwatch.HELD_SECONDS)
    clock.forget(monkeypatch)
    cache.forget_tables()


@needs_onednn
def test_what_was_held_against_a_run_is_believed_for_an_hour(clock, monkeypatch):
    known = library()
    for boot, seconds, runs in (
        ("this", 0, True),  # another machine's measurement
        ("this", stopwatch.HELD_SECONDS - 1, False),
        ("this", 1, True),
        ("another", 1, True),
        ("another", -5, True),  # the clock was set back
        ("another", 1, False),
    ):
        clock.later(seconds)
        clock.forget(monkeypatch)
        cache.forget_tables()
        monkeypatch.setattr(timings, "boot", lambda boot=boot: boot)
        count = clock.num_runs
        assert library().times == known.times
        assert (clock.num_runs > count) == runs


@needs_onednn
def test_what_a_run_contradicts_is_measured_again(clock, monkeypatch):
    library()
    hour_later(clock, monkeypatch)
    assert library().source == "cache"
    hour_later(clock, monkeypatch)
    clock.times = {ATEN: 0.002 * 1.01 * stopwatch.CONTRADICTION, ONEDNN: 0.1}
    found = library()
    assert (found.choice, found.source, found.times[ONEDNN]) == (ATEN, "measured", Timing(0.1))
    cache.forget_tables()
    assert library().times == found.times  # and kept in the place of what was


@needs_onednn
def test_what_a_run_agrees_with_needs_no_look_at_the_machine(clock, monkeypatch):
    known = library()
    hour_later(clock, monkeypatch)
    looks: list[float] = []
    monkeypatch.setattr(stopwatch, "_work", looks.append)
    assert library().choice == known.choice and library().source == "cache"
    assert not looks


@needs_onednn
def test_a_busy_machine_contradicts_nothing(clock, monkeypatch):
    known = library()
    hour_later(clock, monkeypatch)
    clock.times, clock.switches = {ATEN: 1.0, ONEDNN: 2.0}, 10
    assert library().choice == known.choice and library().source == "cache"


@needs_onednn
def test_ten_fresh_caches_under_load_give_one_record(clock, folder, monkeypatch):
    """Times that differ each time, and a processor that is taken away all the time."""
    found = set()
    for i in range(10):
        clock.switches, clock.load = (1, 0) if i % 2 else (0, 10)
        monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(folder / str(i)))
        clock.forget(monkeypatch)
        clock.seconds = lambda n, i=i: 0.001 * (1 + (7 * n + 3 * i) % 10)
        with deciding("measured") as ledger:
            choose_library()
            assert rates_for(CPU) is DEFAULT_RATES
            found.add(ledger.record().fingerprint)
    assert len(found) == 1


@needs_onednn
def test_fresh_caches_of_a_quiet_machine_give_one_record(clock, folder, monkeypatch):
    found = set()
    for i in range(10):
        monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(folder / str(i)))
        clock.forget(monkeypatch)
        clock.times = {ATEN: 0.002 * (1 + 0.01 * i), ONEDNN: 0.001 * (1.05 - 0.01 * i)}
        with deciding("measured") as ledger:
            choose_library()
            rates_for(CPU)
            found.add(ledger.record().fingerprint)
    assert len(found) == 1


@needs_onednn
def test_a_record_is_taken_before_the_cache_and_the_clock(clock, folder):
    with deciding("measured") as ledger:
        choose_library(), rates_for(CPU)
    (folder / "record.json").write_text(json.dumps(ledger.record(CPU).to_dict()))
    record = read_record(folder / "record.json")
    assert record == ledger.record() and record.machine["threads"] == str(torch.get_num_threads())
    count, clock.times = clock.num_runs, {ATEN: 1.0, ONEDNN: 2.0}
    cache.forget_tables()
    with deciding(record) as again:
        assert choose_library().choice == ONEDNN and rates_for(CPU) is not DEFAULT_RATES
    assert clock.num_runs == count and {d.source for d in again.decisions.values()} == {"record"}
    assert again.record() == record
    assert again.decisions["products", "float32"].times == ledger.decisions["products", "float32"].times


@needs_onednn
@pytest.mark.parametrize("policy", ["default", Record()])
def test_without_the_clock_the_fixed_model_decides(clock, folder, policy):
    with deciding(policy) as ledger:
        assert choose_library().choice == ATEN and rates_for(CPU) is DEFAULT_RATES
    assert (
        {d.source for d in ledger.decisions.values()} == {"model"} and not clock.num_runs and not list(folder.iterdir())
    )


def row(**values):
    return {"format": 1, "decisions": [values]}


@pytest.mark.parametrize(("values", "words"), [
    ("{", "record.json: "),
    ([], "no record of decisions"),
    (row(kind="products", key="float32", choice="MKL"), "'MKL' is no answer; allowed"),
    (row(kind="weather", key="", choice=1), "nothing is decided about 'weather'"),
    (row(kind="rates", key="cpu", choice={"bytes_per_s": -1}), "is no answer"),
    ({"format": 1, "decisions": [{"kind": "products"}]}, "a damaged record"),
    ({"format": 1, "decisions": [7]}, "a damaged record"),
    ({"format": 2, "decisions": []}, "no record of decisions .format 1."),
    (None, "cannot be read: No such file"),
])  # fmt: skip
def test_what_is_no_record_is_said_in_a_line(tmp_path, values, words):
    path = tmp_path / "record.json"
    if values is not None:
        path.write_text(values if isinstance(values, str) else json.dumps(values))
    with pytest.raises(ValueError, match=words) as error:
        read_record(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_records_together_answer_each_question_once():
    first, second = (Record((Decision("products", "float32", name, "measured"),)) for name in (ATEN, ONEDNN))
    assert merged([first, second]) == first and merged([second, first]) == second
    assert record_from(first.to_dict()) == first and hash(record_from(first.to_dict())) == hash(first)


@pytest.mark.parametrize(("share", "is_busy"), [(0.5, True), (0.02, False)])
def test_a_look_at_the_machine_sees_what_others_take(clock, monkeypatch, share, is_busy):
    """Also where they take it in few long slices."""
    lost = []
    monkeypatch.setattr(stopwatch, "_work", time.sleep)
    monkeypatch.setattr(stopwatch, "_lost_seconds", lambda: lost.append(0) or share * 0.1 * (len(lost) - 1))
    assert stopwatch.is_busy() == is_busy == stopwatch.is_busy() and len(lost) == 2


@pytest.mark.parametrize(("share", "is_busy"), [(0.5, True), (0.02, False)])
def test_threads_that_wait_tell_a_busy_machine_from_many_wake_ups(clock, monkeypatch, share, is_busy):
    """A logger's threads and a display take the processor a hundred times a second, for almost nothing."""
    waited = iter((0.0, share * 0.1))
    monkeypatch.setattr(stopwatch, "_waited_seconds", lambda: next(waited))
    clock.load = 1000
    monkeypatch.setattr(stopwatch, "_work", lambda seconds: time.sleep(seconds) or clock._look(seconds))
    assert stopwatch.is_busy() == is_busy


@pytest.mark.parametrize(("share", "is_busy"), [(0.5, True), (0.02, False)])
def test_work_that_was_watched_is_as_good_as_a_look(clock, monkeypatch, share, is_busy):
    waited, looks = iter((0.0, share * 0.1, 0.0, 0.0)), []
    monkeypatch.setattr(stopwatch, "_waited_seconds", lambda: next(waited))
    monkeypatch.setattr(stopwatch, "_work", looks.append)
    with stopwatch.work_watched():
        time.sleep(0.101)
        with stopwatch.work_watched():
            assert stopwatch.is_busy() == is_busy and not looks
    clock.later(stopwatch.BUSY_SECONDS)
    assert not stopwatch.is_busy() and looks  # what came before says nothing of now


@pytest.mark.parametrize(("seconds", "waited"), [(0.0, 0.0), (0.101, None)])
def test_too_little_work_or_waits_that_nobody_counts_are_no_look(clock, monkeypatch, seconds, waited):
    looks = []
    monkeypatch.setattr(stopwatch, "_waited_seconds", lambda: waited)
    monkeypatch.setattr(stopwatch, "_work", looks.append)
    with stopwatch.work_watched():
        time.sleep(seconds)
        assert not stopwatch.is_busy() and looks


def test_the_wait_of_all_threads_is_read_from_the_system(tmp_path, monkeypatch):
    assert stopwatch._waited_seconds() is None or stopwatch._waited_seconds() >= 0
    monkeypatch.setattr(stopwatch, "_TASKS", tmp_path)
    assert stopwatch._waited_seconds() is None
    for name, text in {"1": "5000 250000000 3\n", "2": "7 250000000 1\n", "3": "", "4": "none\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "5").mkdir()  # it has ended
    assert stopwatch._waited_seconds() == 0.5
    for name in ("1", "2"):  # a system that keeps no account
        (tmp_path / name / "schedstat").write_text("0 0 0\n")
    assert stopwatch._waited_seconds() is None


def test_the_real_clock_tells_a_long_run_from_a_short_one():
    runs = {"short": Run(lambda: time.sleep(0.001)), "long": Run(lambda: time.sleep(0.02), units=2)}
    times, _ = in_turns(runs, CPU)
    assert times["short"].seconds < times["long"].seconds and times["long"].seconds >= 0.01


def test_short_calls_are_timed_many_at_once(monkeypatch):
    monkeypatch.setattr(stopwatch, "_seconds", lambda run, num_calls, device: 0.0001 * num_calls)
    monkeypatch.setattr(stopwatch._Watch, "is_disturbed", lambda *_: False)
    found, is_busy = in_turns({"short": Run(lambda: None, units=4.0)}, CPU)
    assert not is_busy and found["short"].seconds == pytest.approx(0.000025)


def test_whatever_takes_the_processor_from_a_thread_is_a_switch(monkeypatch):
    used = SimpleNamespace(ru_nivcsw=3, ru_nvcsw=4)
    monkeypatch.setattr(stopwatch, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: used))
    assert stopwatch._switches() == 7


def test_inputs_are_made_when_they_are_asked_for_and_once_for_calls_with_the_same(monkeypatch):
    """What is kept is held against the first candidate alone."""
    made: list[OpCall] = []
    make = OpCall.arguments
    monkeypatch.setattr(OpCall, "arguments", lambda call: made.append(call) or make(call))
    x, y = tensor_spec(torch.empty(4, 8)), tensor_spec(torch.empty(8, 4))
    targets = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
    same = {str(target): OpCall(target, (x, x), {}, 128) for target in targets}
    runs = timings._runs({**same, "other": OpCall(torch.ops.aten.add.Tensor, (y, y), {}, 128)})
    assert not made
    for _ in range(2):
        assert all(tuple(runs[name].call().shape) == (4, 8) for name in same) and len(made) == 1
    runs["other"].call()
    assert len(made) == 2
