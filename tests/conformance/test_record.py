"""The record of what compiles: it names cases that there are, explains every reason, and notices each change."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conformance import record
from tests.conformance.record import EAGER, NOTHING, PARTLY, REFUSED, WHOLE, Standing, standing

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    import conformance

    yield conformance
    sys.path.remove(str(SCRIPTS))


def test_the_record_is_of_cases_that_there_are(script):
    known = record.load()
    folder = Path(__file__).parent
    for module, cases in known["falls"].items():
        text = folder.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
        gone = [name for name in cases if f"def {name}(comp)" not in text]
        assert not gone, f"{module} has no such cases: {gone}"
    assert record.PATH.read_text("utf-8") == script.text_of(known)


def test_every_reason_is_explained():
    for reason in record.reasons_of(record.load()["falls"]):
        assert record.why(reason).split(":")[0] in ("by design", "open"), reason


def test_what_a_run_amounts_to():
    assert standing(1, (), None) == Standing(WHOLE)
    assert standing(0, (), None) == Standing(NOTHING)
    assert standing(2, ["why at 0x7f12\nmore", "why at 0x8a34"], None) == Standing(PARTLY, ("why at 0x",))
    assert str(standing(0, ["one; two", "three"], None)) == "eager: one, two; three"
    assert standing(1, (), "ValueError: no").kind == REFUSED


@pytest.mark.parametrize(
    ("name", "now", "said"),
    [
        ("fell", Standing(EAGER, ("why",)), None),
        ("fell", Standing(WHOLE), "farther than recorded"),
        ("fell", Standing(REFUSED, ("why",)), "compiles less"),
        ("compiled", Standing(WHOLE), None),
        ("compiled", Standing(PARTLY, ("why",)), "compiles less"),
        ("compiled", Standing(NOTHING), "compiles less"),
    ],
)
def test_a_change_is_said(monkeypatch, name, now, said):
    falls = {"test_some": {"fell": {"trace cpp": "eager: why"}}}
    monkeypatch.setattr(record, "load", lambda: {"falls": falls, "why": {"wh": "by design: so"}})
    found = record.change(f"{record.PACKAGE}test_some", name, "trace", now)
    assert found is None if said is None else said in found
    assert record.change("test_some", name, "dynamo", Standing(WHOLE)) is None
    assert record.why("why") == "by design: so" and record.why("else") == ""
    assert record.totals(falls, {"trace": 2, "dynamo": 2, "cpp": 1})["trace"] == {WHOLE: 1, EAGER: 1}
    assert record.reasons_of(falls) == {"why": 2}


def test_cases_are_renewed_frontend_by_frontend(script):
    falls = {"test_some": {"fell": {"trace cpp": "eager: why"}}}
    script._write(falls, "test_some", "fell", "cpp", Standing(WHOLE))
    assert falls == {"test_some": {"fell": {"trace": "eager: why"}}}
    script._write(falls, "test_some", "fell", "dynamo", Standing(EAGER, ("why",)))
    assert falls == {"test_some": {"fell": {"trace dynamo": "eager: why"}}}
    assert json.loads(script.text_of({"why": {}, "falls": falls})) == {"why": {}, "falls": falls}
    for frontend in ("trace", "dynamo"):
        script._write(falls, "test_some", "fell", frontend, Standing(WHOLE))
    assert falls == {"test_some": {}}


def test_totals_are_printed(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["conformance.py"])
    assert script.main() == 0
    printed = capsys.readouterr().out
    assert "trace: " in printed and " whole" in printed and "by design: " in printed and "not said" not in printed
    monkeypatch.setattr(sys, "argv", ["conformance.py", "--run", "test_nothing"])
    assert script.main() == 2
