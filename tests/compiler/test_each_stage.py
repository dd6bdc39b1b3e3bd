"""Each stage alone, by the very lines that the documentation has; and that every public name is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import aottrain
import aottrain.compiler.pipeline as pipeline

TEXT = (Path(pipeline.__file__).parent / "README.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("\n## Each stage alone\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
STAGES = (
    "capture analyse trace_joint functionalize simplify plan_partition apply_partition fuse lower schedule render link"
)


def test_the_documentation_s_lines_run_and_print_what_they_say(capsys):
    scope: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), scope)
        said = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert said and capsys.readouterr().out.splitlines() == said
    model, x, gradients = scope["model"], scope["x"], scope["gradients"]
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert len(gradients) == len(wanted)
    for got, parameter, want in zip(gradients, model.parameters(), wanted, strict=True):
        assert torch.equal(got, want) and torch.equal(parameter.grad, want)


@pytest.mark.parametrize("stage", STAGES.split())
def test_a_stage_takes_at_most_five_lines(stage):
    (block,) = (block for block in BLOCKS if f"aottrain.{stage}(" in block)
    assert len([line for line in block.splitlines() if line]) <= 5
    assert stage in aottrain.__all__ and callable(getattr(aottrain, stage))


def test_an_unknown_language_is_told():
    with pytest.raises(aottrain.ConfigError, match="language='rust' is none of cpp, triton"):
        aottrain.render(None, "rust")


def test_no_public_name_is_also_a_module_s():
    for name in set(aottrain.__all__) - {"errors"}:
        assert importlib.util.find_spec(f"aottrain.{name}") is None
        assert not isinstance(getattr(aottrain, name), ModuleType)
