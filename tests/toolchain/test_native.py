"""Compiled objects: kept by content, checked before they are loaded, safe when several processes make them at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aottrain.ops import attention, pools, rows, scans
from aottrain.ops.losses import loss_head
from aottrain.ops.products import pieces
from aottrain.toolchain import native
from aottrain.toolchain.native import Source, find_compiler, load, load_all, require_all

ROOT = Path(__file__).resolve().parents[2]
ANSWER = Source('extern "C" int answer() { return 42; }')

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and a process that has loaded nothing yet."""
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})
    return tmp_path


def answer(source: Source = ANSWER) -> tuple[int, bool]:
    """What the function gives, and whether it had to be compiled; as a new process would find it."""
    native._loaded.clear()
    (library,) = load_all([source])
    return library.functions.answer(), library.compiled


def test_what_one_process_has_compiled_another_one_loads(folder):
    assert answer() == (42, True)
    assert answer() == (42, False)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "other"])
def test_a_damaged_object_is_made_anew(folder, damage):
    assert answer() == (42, True)
    (kept,) = folder.glob("*.so")
    content = kept.read_bytes()
    middle = len(content) // 2
    changed = {
        "empty": b"",
        "half": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "other": b"\x7fELF, but no object",
    }[damage]
    # A file of its own: the bytes of one that is loaded are never written in place.
    (folder / "damaged").write_bytes(changed)
    os.replace(folder / "damaged", kept)
    assert answer() == (42, True)
    assert kept.read_bytes() != changed
    assert answer() == (42, False)


def test_other_flags_are_another_object(folder):
    text = 'extern "C" int answer() { return ANSWER; }'
    assert answer(Source(text, ("-DANSWER=1",))) == (1, True)
    assert answer(Source(text, ("-DANSWER=2",))) == (2, True)


def test_the_library_of_cxx_is_there_for_those_who_need_it(folder):
    """By g++ on Linux for no others: to look through it takes most of the time of a small text."""
    text = '#include <string>\nextern "C" int answer() { return std::stoi(std::string("42")); }'
    assert answer(Source(text, needs_cxx_library=True)) == (42, True)
    (kept,) = folder.glob("*.so")
    names = [b"libstdc++" in kept.read_bytes()]
    kept.unlink()
    assert answer() == (42, True)
    (kept,) = folder.glob("*.so")
    names.append(b"libstdc++" in kept.read_bytes())
    is_gnu = sys.platform == "linux" and "Free Software Foundation" in native._version(find_compiler())
    assert names == [True, False] or not is_gnu


def test_our_own_texts_name_nothing_that_no_process_has_on_a_processor_with_tiles(folder):
    """What a text says under a processor's name is compiled for that processor alone: here without running it."""
    texts = [
        pieces._PERMISSION,
        *(pieces._source(n) for n in (1, 2, 3)),
        loss_head.NATIVE,
        pools.NATIVE,
        rows.NATIVE,
        scans.NATIVE,
    ]
    texts += [source for dtype in attention.DTYPES for source in attention.native_sources(dtype, plain=True)]
    flag = "-march=sapphirerapids"
    if load(Source('extern "C" int answer() { return 0; }', (flag,))) is None:
        pytest.skip("this g++ or clang++ knows no processor with tiles")
    for library in require_all([source._replace(flags=(*source.flags, flag)) for source in texts]):
        assert library.compiled


@pytest.mark.skipif(not native._WIDE, reason="it is no x86 processor")
def test_vectors_are_as_wide_as_the_processor_s(tmp_path):
    (tmp_path / "loop.cpp").write_text('extern "C" void twice(float* x) { for (int i = 0; i < 4096; i++) x[i] *= 2; }')
    flags = native._arguments(find_compiler(), Source("", ("-march=skylake-avx512",)))
    command = [find_compiler(), *flags, "-S", "loop.cpp", "-o", "loop.s"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert "%zmm" in (tmp_path / "loop.s").read_text()


def test_several_are_compiled_at_once_and_one_that_fails_is_none(folder):
    sources = [Source(f'extern "C" int answer() {{ return {i}; }}') for i in range(5)]
    found = load_all([*sources, Source("no C++"), sources[0]])
    assert [library.functions.answer() for library in found[:5]] == list(range(5))
    assert found[5] is None and found[6] is found[0]


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(native, "_loaded", {})
    assert answer()[0] == 42


def test_processes_that_compile_the_same_at_once_all_load_it(tmp_path):
    program = "from tests.toolchain.test_native import answer; print(answer()[0])"
    environment = {**os.environ, "AOTTRAIN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 3
    assert {path.suffix for path in tmp_path.iterdir()} == {".so"}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system says of no process what it may use")
def test_processors_that_this_process_may_not_use_are_not_counted(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", {0: {2, 3, 5}}.__getitem__)
    assert native._num_processors() == 3
