"""toolchain/threads.py: a thread that ends before it has begun is not waited for."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from aottrain.toolchain import threads
from aottrain.toolchain.threads import Pool, Thread


@pytest.fixture
def stillborn(monkeypatch):
    """stillborn(number): only so many threads begin; others find no memory for their first frame."""
    monkeypatch.setattr(threads, "_BEGIN_S", 0.2)
    monkeypatch.setattr(threads, "_ONCE_MORE_S", 0.1)
    begin, left = threading.Thread._bootstrap, [0]

    def bootstrap(thread):
        if left[0] > 0:
            left[0] -= 1
            begin(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", bootstrap)
    return lambda number: left.__setitem__(0, number)


def test_one_that_never_begins_is_an_allocator_s_error(stillborn):
    with pytest.raises(MemoryError, match="has not begun"):
        Thread(target=print).start()
    stillborn(1)
    thread = Thread(target=print)
    thread.start()
    thread.join()


def test_a_pool_goes_on_with_those_that_begin(stillborn):
    pool = Pool(lambda number: 1 / number, [1, 2, 0, 4])
    with pytest.raises(MemoryError):
        pool.start(2)
    stillborn(1)
    pool.start(3)
    while len(pool.wait()) < 4:
        pass
    assert [future.exception() is None for future in pool.futures] == [True, True, False, True]
    assert pool.futures[3].result() == 0.25


def test_a_pool_whose_threads_have_ended_is_not_waited_for():
    pool = Pool(str, [1, 2])
    pool._left.clear()
    pool.start(2)
    with pytest.raises(MemoryError, match="before their work"):
        for _ in range(10):
            pool.wait()


def test_nobody_starts_a_thread_that_is_waited_for_without_an_end():
    package = Path(threads.__file__).parents[1]
    starts = re.compile(r"threading\.Thread\(|ThreadPoolExecutor|threading\.Timer\(")
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if starts.search(path.read_text())}
    assert files <= {"toolchain/threads.py"}
