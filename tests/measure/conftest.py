import pytest

from aottrain.toolchain import cache
from tests.numerics.comparison import isolated

__all__ = ["isolated"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where this test's measurements are kept."""
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    cache.forget_tables()
    yield tmp_path
    cache.forget_tables()
