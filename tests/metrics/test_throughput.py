"""Step times: what counts, and what is said of them."""

from __future__ import annotations

import pytest
import torch

from aottrain.metrics.throughput import StepTimer, percentile, summarise


def test_percentiles_are_values_that_were_measured():
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    assert percentile(values, 0.5) == 3.0
    assert percentile(values, 0.9) == 5.0
    assert percentile([7.0], 0.9) == 7.0
    assert percentile([], 0.5) is None


def test_the_warm_up_is_left_out_and_rates_are_the_medians():
    figures = summarise(
        [1000.0, 900.0, 10.0, 20.0, 30.0], warmup_steps=2, samples_per_step=4, tokens_per_step=400, flops_per_step=10
    )
    assert figures["step_ms_median"] == 20.0 and figures["step_ms_p90"] == 30.0
    assert figures["num_timed_steps"] == 3
    assert figures["samples_per_s"] == pytest.approx(200)
    assert figures["tokens_per_s"] == pytest.approx(20_000)
    assert figures["model_flops_per_s"] == pytest.approx(500)


def test_a_short_run_leaves_out_at_most_half():
    figures = summarise([50.0, 10.0], warmup_steps=5, samples_per_step=1, tokens_per_step=0)
    assert figures["step_ms_median"] == 10.0 and figures["tokens_per_s"] is None


def test_no_steps_no_figures():
    figures = summarise([], warmup_steps=5, samples_per_step=1, tokens_per_step=1)
    assert figures["step_ms_median"] is figures["tokens_per_s"] is figures["step_ms_p90"] is None


def test_a_step_that_fails_has_no_time():
    timer = StepTimer(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), timer.time(1):
        raise ZeroDivisionError
    with timer.time(2):
        pass
    assert list(timer.read()) == [2] and 0 <= timer.read()[2] < 1000


def test_a_step_that_a_gpu_still_runs_is_waited_for(monkeypatch):
    class Event:
        known = done = False

        def query(self):
            return self.done

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.recorded = True

        def synchronize(self):
            self.known = self.recorded

        def elapsed_time(self, end):
            assert self.recorded and end.known
            return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    with timer.time(3):
        pass
    assert not timer.step_ms and timer.idle_share is None
    for step in (4, 5, 6):
        with timer.time(step):
            pass
        Event.done = step == 5
    assert timer.idle_share == 1 / 3  # the device has done all before step 6 alone
    assert timer.read() == timer.read() == dict.fromkeys((3, 4, 5, 6), 2.5)
    with timer.time(7):
        pass
    assert timer.idle_share == 1 / 3  # reading has waited for it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_timed_by_its_own_clock():
    timer, device = StepTimer(torch.device("cuda")), torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    for step in (1, 2):
        with timer.time(step):
            for _ in range(20):
                x = (x @ x).clamp(-1, 1)
    assert not timer.step_ms
    times = timer.read()
    assert sorted(times) == [1, 2] and times[2] > 0.1
