"""What lies on disk is run only where this user alone could have written it."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import pytest

from aottrain.runtime.cuda.triton_launch import load_module
from aottrain.toolchain import cache, native
from aottrain.toolchain.kept import keep, read_kept
from aottrain.toolchain.native import Source, find_compiler, load_all

ROOT = Path(__file__).resolve().parents[2]
ANSWER = Source('extern "C" int answer() { return 7; }')
MODULE = "answer = 7\n"

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(cache, "_warned", set())
    load_module.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of this user's, in which an object and a module lie."""
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "kept"))
    compiled()
    load_module(MODULE)
    load_module.cache_clear()
    return tmp_path / "kept"


def compiled() -> bool:
    """Whether the object had to be made; as a new process would find it."""
    native._loaded.clear()
    (library,) = load_all([ANSWER])
    assert library.functions.answer() == 7
    return library.compiled


@needs_compiler
def test_a_folder_that_we_make_is_ours_alone(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not compiled() and cache.cache_obstacle() == ""


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_is_refused_loudly(folder, mode):
    folder.chmod(mode)
    with pytest.warns(UserWarning, match=f"others may write to {folder} .mode {mode:o}.*AOTTRAIN_CACHE_DIR"):
        assert compiled()
    assert load_module(MODULE).answer == 7 and str(folder) not in load_module(MODULE).__file__
    assert "others may write" in cache.cache_obstacle()
    folder.chmod(0o700)
    assert not compiled()


@needs_compiler
def test_what_another_user_owns_is_refused_loudly(folder, monkeypatch):
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.warns(UserWarning, match=f"{folder} belongs to another user"):
        assert compiled()


@needs_compiler
@pytest.mark.parametrize("change", ["writable", "link", "name"])
def test_an_object_that_others_may_have_made_is_made_anew(folder, tmp_path, change):
    (tmp_path / "other").mkdir()
    (kept,) = folder.glob("*.so")
    if change == "writable":
        kept.chmod(0o775)
    elif change == "link":
        kept.rename(tmp_path / "other" / kept.name)
        kept.symlink_to(tmp_path / "other" / kept.name)
    else:  # an object of ours, which is another program's
        load_all([Source('extern "C" int answer() { return 8; }')])
        newest = max(folder.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)
        newest.rename(kept)
    assert compiled()
    assert not kept.is_symlink() and not kept.stat().st_mode & 0o022 and not compiled()


@needs_compiler
def test_no_predictable_folder_of_the_temporary_directory_is_used(tmp_path, monkeypatch):
    """Anybody may have made it, and what lies in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"aottrain_{os.getpid()}"
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(planted))
    compiled()
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is no folder"):
        assert compiled()


@needs_compiler
def test_a_private_folder_is_ours_alone_and_ends_with_its_process(tmp_path):
    program = (
        "from aottrain.toolchain.cache import private_folder\n"
        "from aottrain.toolchain.native import Source, load_all\n"
        "print(load_all([Source('extern \"C\" int answer() { return 7; }')])[0].functions.answer())\n"
        "print(oct(private_folder().stat().st_mode), private_folder())"
    )
    (tmp_path / "file").write_text("no folder")
    settings = {"AOTTRAIN_CACHE_DIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    answer, place = done.stdout.splitlines()
    mode, folder = place.split(" ", 1)
    assert answer == "7" and mode.endswith("40700") and Path(folder).parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@needs_compiler
def test_a_cache_that_cannot_be_kept_is_said_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is no folder.*AOTTRAIN_CACHE_DIR") as said:
        compiled()
    assert len(said) == 1 and str(tmp_path / "file") in cache.cache_obstacle()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled()


@pytest.mark.parametrize("variable", ["HOME", "AOTTRAIN_CACHE_DIR"])
def test_without_a_home_nothing_is_kept(monkeypatch, tmp_path, variable):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AOTTRAIN_CACHE_DIR", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path if variable == "HOME" else str(tmp_path))
    assert (cache.cache_folder() is None) == (variable == "HOME")
    assert cache.cache_obstacle().startswith("there is no home folder") == (variable == "HOME")
    assert not (tmp_path / "~").exists()


def test_bytecode_beside_a_module_is_not_run(folder):
    (kept,) = (folder / "triton").glob("*.py")
    facts = kept.stat()
    kept.write_text("answer = 8\n")
    os.utime(kept, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    py_compile.compile(str(kept))
    kept.write_text(MODULE)
    os.utime(kept, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert load_module(MODULE).answer == 7


def test_a_module_that_others_may_have_written_is_written_anew(folder):
    (kept,) = (folder / "triton").glob("*.py")
    kept.chmod(0o666)
    assert load_module(MODULE).answer == 7
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_kept_value_that_may_not_be_looked_at_is_none(folder):
    """As in a folder that a run of another user has made in this one's: the system refuses to say what lies there."""
    name = "n" * 300  # of this length none may be looked at by anybody
    keep("families", name, [1])
    assert read_kept("families", name) is None
    keep("families", "a", [1])
    assert read_kept("families", "a") == [1]


def test_a_pipe_in_the_place_of_a_kept_file_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    (tmp_path / "kind").mkdir(mode=0o700)
    for name in ("rates.json", "rates.lock", "kind/key"):
        os.mkfifo(tmp_path / name, 0o600)
    found = []

    def use() -> None:
        table = cache.Table(tmp_path / "rates.json")
        table.add({"one": 1.0})
        keep("kind", "key", [1])
        found.extend([table.get("one"), read_kept("kind", "key")])

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(30)
    assert found == [1.0, [1]]
