"""`report` and `watch`: pages and tables of folders, and what is said of a folder that holds no run."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import subprocess
import threading
import urllib.error
import urllib.request
from html import escape
from pathlib import Path

import pytest

from aottrain.cli import main
from aottrain.cli.jobs import SweepJob, run_sweep
from aottrain.cli.lock import is_taken, only_run_in
from aottrain.cli.pages.serving import PageServer
from aottrain.cli.pages.watching import Remembered, drawing, follow, is_running
from aottrain.cli.sweeps import record
from aottrain.report.runs.drawing.pages import render
from aottrain.report.runs.folders import collect
from tests.report.fake_runs import write_comparison, write_run, write_sweep


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_report_writes_the_page_of_whatever_the_folder_holds(here, capsys):
    write_run(here / "run", steps=3)
    write_comparison(here / "compare", rounds=1)
    write_sweep(here / "sweep", [{"seed": 1}, {"seed": 2}], steps=3)
    for arguments, path in (
        (["run"], "run/run.html"),
        (["compare"], "compare/comparison.html"),
        (["sweep"], "sweep/sweep.html"),
        (["run", "sweep"], "runs.html"),
        (["-o", "mine.html", "compare"], "mine.html"),
    ):
        assert main(["report", *arguments]) == 0
        assert capsys.readouterr().out.strip() == path and Path(path).read_text().startswith("<!doctype html>")
    assert "sweep/seed=2" in Path("runs.html").read_text()


def test_plots_are_files_beside_the_page(here, capsys):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    write_sweep(here / "sweep", [{"seed": 1}, {"seed": 2}], steps=3)
    assert main(["report", "sweep", "--png"]) == 0
    page, *plots = capsys.readouterr().out.split()
    assert page == "sweep/sweep.html" and {"sweep/train_loss.png", "sweep/step_ms_median.png"} <= set(plots)
    assert all(Path(plot).read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_plots_without_matplotlib_are_one_line_before_any_work(here, capsys, monkeypatch):
    write_run(here / "run", steps=3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["report", "run", "--png"]) == 2
    assert "pip install 'aottrain[plots]'" in capsys.readouterr().err and not Path("run/run.html").exists()


@pytest.mark.parametrize("word", ["report", "watch"])
def test_a_folder_that_is_none_is_one_line_and_exit_code_2(here, capsys, word):
    (here / "empty").mkdir()
    (here / "file").write_text("")
    for folder, says in (("absent", "no such folder"), ("empty", "holds no run"), ("file", "is a file")):
        assert main([word, folder]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.splitlines() == [printed.err.strip()] and says in printed.err
        assert printed.err.startswith(f"aottrain {word}: {folder}: ")
    assert main([word]) == 2 and "give" in capsys.readouterr().err
    assert main([word, "--bogus", "empty"]) == 2 and "--bogus" in capsys.readouterr().err
    assert main([word, "--help"]) == 0 and capsys.readouterr().out.startswith(f"python -m aottrain {word} FOLDER")
    assert set(os.listdir()) == {"empty", "file"}


def test_a_page_that_cannot_be_written_is_one_line(here, capsys):
    write_run(here / "run", steps=3)
    assert main(["report", "run", "-o", "no/such/page.html"]) == 2
    assert "no/such/page.html: cannot be written: No such file" in capsys.readouterr().err
    assert main(["watch", "run", "--every", "0"]) == 2 and "must be from 0.1" in capsys.readouterr().err
    assert main(["watch", "run", "run"]) == 2 and "give one folder" in capsys.readouterr().err


def test_watching_ends_where_nothing_runs_and_says_how_it_ended(here, capsys):
    write_run(here / "a", steps=3, settings={"trainer.steps": 9}, status="running")
    write_run(here / "b\x1b[31m", steps=3, status="failed", error="NumericsError: \x1b[2J")
    assert main(["watch", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "step", "loss", "held-out"] and "3/9" in lines[2] and "gone" in lines[2]
    assert "failed" in lines[3] and "NumericsError" in lines[4] and "\x1b" not in "".join(lines)


def test_the_page_of_a_run_whose_process_is_gone_does_not_say_that_it_runs(here):
    write_run(here / "run", steps=3, status="running")
    assert main(["report", "run"]) == 0
    assert "Gone before its end after step 3" in (here / "run" / "run.html").read_text()
    with only_run_in(here, "hydra.sweep.dir"):  # a sweep's or a comparison's, which runs it
        assert main(["report", "run"]) == 0
    assert "Running at step 3" in (here / "run" / "run.html").read_text()


def test_watching_follows_the_files_until_the_lock_is_free(here, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    seen = []

    def wait(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == 1:
            write_run(here / "run", steps=4, status="running")
        elif len(seen) == 2:
            write_run(here / "run", steps=100, status="finished")
            taken.__exit__(None, None, None)

    taken = only_run_in(here / "run", "hydra.run.dir")
    taken.__enter__()
    follow(here / "run", wait, 0.5)
    drawn = capsys.readouterr().out
    assert seen == [0.5, 0.5] and drawn.index("nothing has been written") < drawn.index("4/100")
    assert drawn.index("4/100") < drawn.index("100/100") and "running" in drawn and "finished" in drawn
    assert "\x1b[1A\x1b[J" in drawn and "\x1b[3A\x1b[J" in drawn  # each drawing takes the place of the one before


def test_ctrl_c_ends_watching_without_a_traceback(here, capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    write_run(here / "run", steps=3)
    monkeypatch.setattr("aottrain.cli.pages.watching.follow", interrupted)
    assert main(["watch", "run"]) == 130 and capsys.readouterr().err == ""


def test_a_lock_is_seen_from_below_and_from_above(here):
    write_run(here / "sweep" / "0", steps=3)
    found = collect([here / "sweep"])
    assert not is_taken(here / "sweep") and not is_running(here / "sweep", found)
    (here / "sweep" / ".lock").write_text("1")  # of a process that was killed
    assert not is_taken(here / "sweep")
    with only_run_in(here / "sweep", "hydra.sweep.dir"):
        assert is_running(here / "sweep" / "0", collect([here / "sweep" / "0"]))
    with only_run_in(here / "sweep" / "0", "hydra.run.dir"):
        assert is_running(here / "sweep", found)


def test_files_that_have_not_changed_are_not_read_again(here):
    read = Remembered()
    write_run(here / "run", steps=3)
    first = read(here / "run")
    assert read(here / "run") is first
    write_run(here / "run", steps=4)
    assert len(read(here / "run").metrics["train/loss"]) == 4


def test_the_table_says_how_long_a_run_takes_yet(here):
    write_run(here, steps=10, step_ms=2000, jitter=0, settings={"trainer.steps": 20}, status="running")
    line = drawing(collect([here]), goes_on=True)[2]
    assert "10/20" in line and "20.0 s" in line and line.endswith("running")


def test_the_server_answers_its_page_alone_and_to_this_machine(here):
    write_run(here / "run", steps=3)
    others = set(threading.enumerate())
    with PageServer() as server:
        assert server.address.startswith("http://127.0.0.1:")
        waiting = urllib.request.urlopen(server.address)
        assert b"nothing has been written" in waiting.read() and waiting.headers["Refresh"]
        server.show(collect([here / "run"]))
        answer = urllib.request.urlopen(server.address)
        page = answer.read().decode()
        assert "Run of transformer" in page and 'href="metrics.csv' not in page
        # The page asks for itself anew, which its reader may end; without scripts the browser does.
        assert answer.headers["Refresh"] is None and "data-follow=" in page and "connect-src 'self'" in page
        assert '<noscript><meta http-equiv="refresh"' in page and page.count('http-equiv="refresh"') == 1
        file = render(collect([here / "run"]))
        assert not any(text in file for text in ('data-follow="', "connect-src", "refresh"))
        for path in ("summary.json", "../run/summary.json", "%2e%2e/", "?x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(server.address + path)
        foreign = http.client.HTTPConnection(*server.host.split(":"))
        foreign.request("GET", "/", headers={"Host": "evil.example"})
        assert foreign.getresponse().status == 403
        foreign.close()
    assert not any(thread.name.startswith("aottrain") for thread in set(threading.enumerate()) - others)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.address, timeout=5)


def test_a_sweep_leaves_its_page(here, capsys, monkeypatch):
    jobs = [SweepJob(i, {"seed": str(i)}, here / "out" / str(i), []) for i in (0, 1)]

    def start(job: SweepJob, running: object, is_quiet: bool) -> subprocess.Popen[bytes]:
        write_run(job.directory, steps=3, settings={"seed": job.number})
        running.processes.append(process := subprocess.Popen(["true"]))
        return process

    monkeypatch.setattr("aottrain.cli.jobs._start", start)
    assert run_sweep(jobs, here / "out") == 0
    assert f"page: {here / 'out' / 'sweep.html'}" in capsys.readouterr().out
    page = (here / "out" / "sweep.html").read_text()
    assert "seed=0" in page and "seed=1" in page


def test_a_sweep_says_with_which_command_it_was_made(here):
    write_sweep(here / "out", [{"seed": 1}, {"seed": 2}], steps=2)
    record(here / "out", ["-m", "seed=1,2", "recipe.model.name='a b'", "hydra.sweep.dir=out"])
    assert main(["report", "out"]) == 0
    page = (here / "out" / "sweep.html").read_text()
    command = """python -m aottrain -m seed=1,2 'recipe.model.name='"'"'a b'"'"''"""
    assert f"<code>{escape(command)}</code>" in page


def test_a_summary_that_changes_under_the_hand_is_no_traceback(here, capsys):
    folder = write_run(here / "run", steps=3)
    (folder / "summary.json").write_text(json.dumps({"status": "running", "steps": "many", "peak_bytes": [1]}))
    assert main(["watch", "run"]) == 0 and "gone" in capsys.readouterr().out
