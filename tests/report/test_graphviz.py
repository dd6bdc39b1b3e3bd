"""Graphviz's places, where its program is installed: taken where fewer lines cross by them, and never needed."""

from __future__ import annotations

import itertools

import pytest

from aottrain.report.graph import graphviz, layered
from aottrain.report.graph.layered import Item, lay_out


def tangled(count: int = 6) -> tuple[list[Item], list[layered.Edge]]:
    """Rows of boxes, between which lines cross however they are ordered."""
    rows = [[Item(40, 20) for _ in range(count)] for _ in range(3)]
    pairs = [(i, (i * k + s) % count) for i in range(count) for k, s in ((1, 0), (5, 2), (3, 1))]
    edges = [(up[a], None, low[b], None) for up, low in itertools.pairwise(rows) for a, b in dict.fromkeys(pairs)]
    return list(itertools.chain(*rows)), edges


def drawn(monkeypatch, answer):
    """The places and crossings of the tangled drawing, with `answer` for `graphviz.places`; None: not installed."""
    monkeypatch.setattr(graphviz, "is_there", lambda: answer is not None)
    monkeypatch.setattr(graphviz, "places", answer)
    items, edges = tangled()
    _, width, _ = lay_out(items, edges)
    for layer in (items[:6], items[6:12], items[12:]):
        ordered = sorted(layer, key=lambda item: item.x)
        assert all(a.x + a.width + layered.GAP_X <= b.x + 1e-6 for a, b in itertools.pairwise(ordered))
        assert ordered[0].x >= -1e-6 and ordered[-1].x + 40 <= width + 1e-6
    return [item.x for item in items], layered._crossings(edges)


def test_what_crosses_less_is_taken(monkeypatch):
    own, before = drawn(monkeypatch, None)
    monkeypatch.setattr(layered, "_SWEEPS", 0)  # the order in which they are given
    _, more = drawn(monkeypatch, None)
    assert more > before > 0
    taken, now = drawn(monkeypatch, lambda layers, joints, gap: own)
    assert now == before and [round(x, 3) for x in taken] == [round(x, 3) for x in own]
    monkeypatch.undo()
    worse = [x for shift in (0, 3, 0) for x in (100.0 * ((i * 5 + shift) % 6) for i in range(6))]
    assert drawn(monkeypatch, lambda layers, joints, gap: worse) == (own, before)


def test_places_that_overlap_are_moved_apart(monkeypatch):
    own, _ = drawn(monkeypatch, None)
    monkeypatch.setattr(layered, "_SWEEPS", 0)
    _, crossings = drawn(monkeypatch, lambda layers, joints, gap: [x / 50 for x in own])
    assert crossings == layered._crossings(tangled_at(own))


def tangled_at(places):
    items, edges = tangled()
    lay_out(items, edges)
    for item, x in zip(items, places, strict=True):
        item.x = x
    return edges


NODE = 'import sys\nfor i in range(18): print("node", f"n{i}", i % 6, 1, 1, 1, "a")\n'
ANSWERS = {
    "garbage": "print('node n0 here 1')",
    "too few": "print('node n0 1.0 1.0')",
    "not finite": NODE.replace("i % 6", '"nan"'),
    "fails": "raise SystemExit(3)",
    "hangs": "import time; time.sleep(60)",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_program_that_gives_no_places_is_done_without(monkeypatch, tmp_path, answer):
    own = drawn(monkeypatch, None)
    monkeypatch.undo()
    use(monkeypatch, tmp_path, ANSWERS[answer])
    items, edges = tangled()
    lay_out(items, edges)
    assert ([item.x for item in items], layered._crossings(edges)) == own


def test_it_is_asked_in_its_language(monkeypatch, tmp_path):
    use(
        monkeypatch, tmp_path, f"{NODE}open({str(tmp_path / 'asked')!r}, 'w', encoding='utf-8').write(sys.stdin.read())"
    )
    found = graphviz.places([[(72.0, 36.0)] * 6] * 3, [((0, 6), 1.0), ((6, 12), 36.0)], 18.0)
    assert found == [72.0 * (i % 6) - 36.0 for i in range(18)]
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    assert "n0 -> n6 [weight=1]" in asked and "n6 -> n12 [weight=36]" in asked and asked.count("rank=same") == 3


def use(monkeypatch, folder, program):
    """`program`, in Python, stands for Graphviz's."""
    import sys

    file = folder / "dot"
    file.write_text(f"#!{sys.executable}\n{program}\n", encoding="utf-8")
    file.chmod(0o755)
    monkeypatch.setattr(graphviz, "_program", lambda: str(file))
    monkeypatch.setattr(graphviz, "_TIMEOUT_S", 2.0)
