"""wandb is a guest: it finds a place for its files, or goes without."""

from __future__ import annotations

import os

import pytest

from aottrain.metrics.wandb_sink import own_folders

NAMES = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")


@pytest.mark.parametrize("home", ["/dev/null", None], ids=["unwritable", "writable"])
def test_its_files_go_into_the_run_s_folder_where_the_home_folder_takes_none(tmp_path, monkeypatch, home):
    environment = {name: value for name, value in os.environ.items() if name not in (*NAMES, "XDG_CACHE_HOME")}
    monkeypatch.setattr(os, "environ", {**environment, "HOME": home or str(tmp_path)})
    own_folders(tmp_path / "run")
    assert [os.environ.get(name) for name in NAMES] == [str(tmp_path / "run" / "wandb") if home else None] * 3
