"""scripts/endurance.py: it passes, and what grows or stays alive is seen."""

from __future__ import annotations

import pytest

import aottrain
from scripts import endurance
from tests.sampling import WHOLE


@pytest.mark.parametrize(
    "kind",
    [
        "Appends",
        pytest.param("ReplacesParameter", marks=WHOLE),
        pytest.param("ReplacesBuffer", marks=WHOLE),
        "ReplacesModule",
    ],
)
def test_nothing_grows(kind, capsys):
    assert endurance.main(["--calls", "300", kind]) == 0
    text = capsys.readouterr().out
    assert f"{kind} " in text and ": ok\n" in text and "0 kinds grow" in text
    if kind.startswith("Replaces"):
        assert " 0 of 0 " not in text


def leaking(monkeypatch, keep):
    """Compiled modules of which `keep` holds on to something at each call."""
    compiled = aottrain.compile

    def compile_and_keep(module, **options):
        call = compiled(module, **options)
        return lambda x: keep(module) or call(x)

    monkeypatch.setattr(aottrain, "compile", compile_and_keep)


def test_an_object_a_call_is_seen(monkeypatch, capsys):
    kept = []
    leaking(monkeypatch, lambda module: kept.append([]))
    assert endurance.main(["--calls", "300", "Counts"]) == 1
    assert ": GROWS\n" in capsys.readouterr().out


def test_what_is_replaced_and_stays_alive_is_seen(monkeypatch, capsys):
    kept = []
    leaking(monkeypatch, lambda module: kept.append(module.weight))
    assert endurance.main(["--calls", "20", "--objects", "100000", "--bytes", "10000000", "ReplacesParameter"]) == 1
    assert ", 50 of 50 replaced alive: GROWS\n" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["Nothing"], ["--calls", "0"], ["--bytes", "much"]])
def test_wrong_input(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        endurance.main(arguments)
    assert error.value.code == 2 and "error:" in capsys.readouterr().err
