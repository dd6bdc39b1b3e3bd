"""How fast processes talk to each other: figures from a clock, a record's, the model's, and what a compile notes."""

from __future__ import annotations

import json

import pytest
import torch

from aottrain.ir.settings.decisions import Decision, record_from
from aottrain.measure import links
from aottrain.measure.decisions import deciding
from aottrain.measure.links import Link, decide_link, figures, link, set_link
from tests.measure.clocks import Clock

KEY = "2 processes by gloo"


class Words:
    """As `Talk`, of a process that nobody follows."""

    size, device, taken_in = 2, torch.device("cpu"), 4_000_000

    def __init__(self):
        self.said = []

    def say(self, what):
        self.said.append(what)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def decided(policy, words):
    with deciding(policy):
        return decide_link(words, KEY)


def test_latency_and_bandwidth_follow_from_a_number_and_many_bytes(clock):
    """A number takes 1 ms, many bytes 10 ms more than that and the number before them: 4 MB in 8 ms, half of the
    model's rate; a latency of ten times the model's is three steps of two above it."""
    words = Words()
    clock.seconds = lambda _: 0.001 if words.said[-1] == "one number" else 0.010
    found = decided("measured", words)
    assert found.source == "measured" and found.choice == {"latency_s": 8e-4, "link_bytes_per_s": 5e8}
    assert set(words.said) == {"one number", "many bytes"}
    count = len(words.said)
    again = decided("measured", words)  # kept
    assert (again.choice, again.source) == (found.choice, "cache") and len(words.said) == count
    record = record_from(json.loads(json.dumps({"format": 1, "decisions": [row(found)]})))
    assert decided(record, Words()).choice == found.choice


def row(decision: Decision):
    return {"kind": decision.kind, "key": decision.key, "choice": decision.choice}


@pytest.mark.parametrize("policy", ["default", record_from({"format": 1, "decisions": []})])
def test_without_a_clock_the_model_answers(policy, folder):
    words = Words()
    found = decided(policy, words)
    assert (found.choice, found.source) == (figures(Link()), "model")
    assert not words.said and not list(folder.iterdir())


def test_a_busy_machine_has_the_models_figures(clock):
    clock.load = 10
    assert (decided("measured", Words()).choice, decided("measured", Words()).source) == (figures(Link()), "busy")


@pytest.mark.parametrize("choice", [{"latency_s": 0.0}, {"link_bytes_per_s": -1.0}, {"latency_s": "fast"}, 7.0])
def test_what_is_no_link_is_no_answer(choice):
    with pytest.raises(ValueError, match="is no answer"):
        record_from({"format": 1, "decisions": [{"kind": "link", "key": KEY, "choice": choice}]})


def test_a_compile_that_asks_has_it_among_its_decisions(monkeypatch):
    monkeypatch.setattr(links, "_known", [Link()])
    with deciding("default") as ledger:
        link()
    assert not ledger.decisions
    set_link(Link(1e-3, 1e8, 2, Decision("link", KEY, {"latency_s": 1e-3}, "measured")))
    with deciding("default") as ledger:
        assert link().seconds(1e6) == pytest.approx(0.011)
    (found,) = ledger.record().decisions
    assert str(found) == f"link of {KEY}: a collective 1.00 ms; measured now"


def test_a_message_costs_its_latency_and_its_bytes():
    assert Link(0.5, 1000.0, 2).seconds(2000) == pytest.approx(2.5)
