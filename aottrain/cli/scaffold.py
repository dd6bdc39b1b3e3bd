"""`python -m aottrain new recipe NAME`: a small recipe that trains, its configuration and its test, to begin with."""

from __future__ import annotations

import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path

from aottrain.config.extensions.recipes import recipe_names
from aottrain.config.extensions.targets import is_well_formed
from aottrain.config.schema import command_line
from aottrain.errors import ConfigError
from aottrain.ir.settings.files import write_text_whole

USAGE = "new recipe NAME"

RECIPE = '''\
"""{name}: tells the points inside a ring from those around it. Change model, loss and data into your own.

The contract: Options is a frozen dataclass with `check`, build gives the model, loss a scalar, make_batch the data.
Without make_batch the fields of Options say what data it takes: context and vocab_size text, image_size and num_classes
images, num_features rows of numbers; or give data.target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Options:
    """Each option is a key, recipe.model.<option>."""

    width: int = 64
    """Units of a hidden layer, from 1."""
    num_layers: int = 2
    """Hidden layers, from 1."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"."""
        named = ("width", self.width), ("num_layers", self.num_layers)
        return [f"{{name}}={{value}}: must be at least 1" for name, value in named if value < 1]


def build(options: Options) -> nn.Module:
    """Points, float32 of (batch, 2) -> logits of (batch, 2)."""
    layers: list[nn.Module] = []
    size = 2
    for _ in range(options.num_layers):
        layers += [nn.Linear(size, options.width), nn.LayerNorm(options.width), nn.GELU()]
        size = options.width
    return nn.Sequential(*layers, nn.Linear(size, 2))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    points, kinds = batch
    return F.cross_entropy(model(points), kinds)


def make_batch(options: Options, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Points, and 1 for each that lies inside the ring; all random numbers come from the generator."""
    points = torch.randn(batch_size, 2, generator=generator)
    return points, (points.norm(dim=1) < 1.2).long()
'''

CONFIG = """\
# {name}: tells the points inside a ring from those around it.
name: {name}
target: {name} # the module, {name}.py
model: # the fields of its Options
  width: 64 # Units of a hidden layer, from 1
  num_layers: 2 # Hidden layers, from 1
"""

TEST = '''\
"""{name} checks its options, learns, and is compiled to what eager PyTorch computes."""

import torch

import aottrain
import {name}


def test_options_are_checked():
    assert {name}.Options().check() == []
    assert {name}.Options(width=0).check() == ["width=0: must be at least 1"]


def step(loss):
    """Of a model and a batch: the loss, and the gradient of each parameter."""

    def run(model, batch):
        model.zero_grad()
        value = loss(*batch)
        value.backward()
        return value.item(), [parameter.grad.clone() for parameter in model.parameters()]

    return run


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *batch):
        return {name}.loss(self.model, batch)


def test_it_learns_and_compiles_to_what_eager_computes():
    torch.manual_seed(0)
    options = {name}.Options(width=16)
    module = Loss({name}.build(options))
    batch = {name}.make_batch(options, 64, torch.Generator().manual_seed(1))
    eager, gradients = step(module)(module, batch)
    compiled, others = step(aottrain.compile(module, capture="trace"))(module, batch)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(others, gradients)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(50):
        last, _ = step(module)(module, batch)
        optimizer.step()
    assert last < 0.5 * eager
'''
FILES = {"{name}.py": RECIPE, "conf/recipe/{name}.yaml": CONFIG, "test_{name}.py": TEST}


def new(arguments: Sequence[str]) -> int:
    """Write the files of a new recipe into this folder and say what to do with them. ConfigError: the name cannot be
    one, or a file is there already; nothing is written then."""
    if {"-h", "--help"}.intersection(arguments):
        print(f"python -m aottrain {USAGE}: writes {', '.join(FILES).format(name='NAME')}, which train as they are")
        return 0
    if len(arguments) != 2 or arguments[0] != "recipe":
        raise ConfigError(f"{' '.join(['new', *arguments])}: write {USAGE}")
    name = arguments[1]
    if reason := _unfit(name):
        raise ConfigError(f"new recipe {name}: {reason}")
    texts = {Path(path.format(name=name)): text.format(name=name) for path, text in FILES.items()}
    if there := [str(path) for path in texts if path.exists()]:
        raise ConfigError(f"new recipe {name}: {', '.join(there)} is there already, and is not written over")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_whole(path, text)
        except OSError as error:
            raise ConfigError(f"new recipe {name}: {path}: cannot be written: {error.strerror}") from error
        print(f"written: {path}")
    print(f"train it: {command_line(['--config-dir', 'conf', f'recipe={name}', 'debug=fast'])}")
    first = "" if importlib.util.find_spec("pytest") else "pip install pytest && "
    print(f"test it:  {first}python -m pytest test_{name}.py")
    return 0


def _unfit(name: str) -> str:
    """Why it cannot be a recipe's name; empty where it can."""
    if not is_well_formed("recipe", name) or "." in name or keyword.iskeyword(name):
        return "must be a Python name, as it is a module's: letters, digits and _"
    if name in recipe_names() or name == "custom":
        return "is a recipe already"
    if importlib.util.find_spec(name) is not None and not Path(f"{name}.py").exists():
        return f"is the name of another module, {importlib.util.find_spec(name).origin}"  # type: ignore[union-attr]
    return ""
