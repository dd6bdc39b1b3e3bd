"""Which line of a stack is the user's: told by where torch, aottrain and Python lie, not by what folders are called."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import pytest
import torch

import aottrain
from aottrain.compiler.graphs import source_locations as places

TORCH, OURS, PYTHON = (os.path.dirname(module.__file__) for module in (torch, aottrain, contextlib))

PROGRAM = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x).relu().sin()
"""


def line_seen_from(file):
    """What a call says of its line when its code is of this file; of the line here where that is passed over."""
    scope = {"user_line": places.user_line}
    exec(compile("def call():\n    return user_line()", file, "exec"), scope)
    return scope["call"]()


@pytest.mark.parametrize(
    "file",
    [
        "/srv/someone/aottrain/train.py",
        "/srv/someone/aottrain/recipes/train.py",
        "/srv/torch/models/train.py",
        os.path.join(os.path.dirname(TORCH), "transformers", "train.py"),
        os.path.join(OURS, "recipes", "train.py"),  # as a wheel has them
        os.path.join(PYTHON, "site-packages", "timm", "train.py"),
        OURS + "_of_mine/train.py",
        "<stdin>",
        "<ipython-input-3-9f86d081884c>",
    ],
)
def test_the_users_code_is_shown(file):
    assert line_seen_from(file) == f"{os.path.basename(file)}:2"


@pytest.mark.parametrize(
    "file",
    [
        os.path.join(TORCH, "nn", "modules", "linear.py"),
        os.path.join(OURS, "compiler", "joint.py"),
        contextlib.__file__,
        "<frozen runpy>",
        "<string>",
        "<eval_with_key>.3",
    ],
)
def test_the_code_that_runs_it_is_not(file):
    assert line_seen_from(file).startswith("test_source_locations.py:")


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_lines_of_a_project_in_a_folder_of_our_name(capture, tmp_path):
    file = tmp_path / "torch" / "aottrain" / "mine.py"
    file.parent.mkdir(parents=True)
    file.write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("mine", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    step = aottrain.compile(module.Model(), partition="save_all", kernel="aten", capture=capture)
    step(torch.randn(3, 4)).sum().backward()
    (graph,) = step.report.graphs
    assert graph.saved and {record.source for record in graph.saved} == {"mine.py:8"}
