"""task=tour: every stage of every program is shown, and what is said of it is so."""

from __future__ import annotations

from aottrain.cli import main
from aottrain.tasks import tour

STAGES = ["program", "capture", "joint graph", "functional graph", "simplified graph", "plan", "forward graph",
          "backward graph", "kernels", "compared with eager"]  # fmt: skip


def test_it_shows_every_stage_of_every_program(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["task=tour", "hydra.run.dir=run"]) == 0
    out, text = capsys.readouterr().out, (tmp_path / "run" / "tour.txt").read_text()
    assert text in out
    titles = [line.removeprefix("--- ") for line in text.splitlines() if line.startswith("--- ")]
    assert titles == STAGES * 4
    errors = [line.split(": ")[1] for line in text.splitlines() if line.startswith(("    result: ", "    gradient "))]
    assert len(errors) == 9 and all(float(error) < 1e-5 for error in errors)


def test_what_is_said_of_the_programs_is_so():
    sines, wave, clipped, norm = ({page.stage: page.text for page in tour.pages(stop)} for stop in tour.stops())
    assert "0 saved" in sines["plan"] and sines["backward graph"].count("= sin(") == 2
    assert sines["kernels"].count("static int kernel") == 2
    assert wave["functional graph"].count("= sin(") == 2 and wave["simplified graph"].count("= sin(") == 1
    assert "relu_(" in clipped["joint graph"] and "relu_(" not in clipped["functional graph"]
    assert "save relu: output: alive anyway" in clipped["plan"]
    assert "running_mean" in norm["capture"] and "add_" in norm["joint graph"] and "add_" not in norm["forward graph"]
    assert "2 saved" in norm["plan"]


def test_triton_needs_no_device():
    page = next(page for page in tour.pages(tour.stops()[0], "triton") if page.stage == "kernels")
    assert "@triton.jit" in page.text and "tl.load" in page.text


def test_every_remark_is_of_a_stage_that_is_shown():
    assert all(set(stop.remarks) <= set(STAGES) for stop in tour.stops())
