"""Plans of tensors without memory are those of real ones, and of CUDA as its kernels are."""

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compat import FakeTensorMode
from aottrain.compiler.absent.planning import plan_step, trace_step
from aottrain.compiler.absent.tensors import fake_of
from aottrain.compiler.options import check_options
from aottrain.config.extensions.recipes import load_recipe, makes_batches, recipe_names
from aottrain.errors import UnsupportedError
from aottrain.toolchain.native import compiler_obstacle
from aottrain.trainer.engines import LossModule
from tests.sampling import WHOLE

# Of a report what hangs on when and where it was made.
_OF_THE_RUN = {"stages", "decisions", "guards", "machine", "traffic", "kernel_records", "diagrams"}
_SMALL = {"transformer": {"num_layers": 2, "width": 32, "num_heads": 2, "context": 16}, "resnet": {"width": 8}}
_NAMES = ("transformer", "resnet")


def _made(name: str) -> tuple[LossModule, tuple[torch.Tensor, ...]]:
    recipe = load_recipe(name)
    options = recipe.Options(**_SMALL.get(name, {}))
    generator = torch.Generator().manual_seed(0)
    if makes_batches(recipe, options):
        batch = tuple(recipe.make_batch(options, 2, generator))
    else:
        text = torch.randint(0, options.vocab_size, (2, options.context), generator=generator)
        batch = (text, text)
        if hasattr(recipe, "prepare"):
            batch = tuple(recipe.prepare(options, batch, generator))
    torch.manual_seed(0)
    return LossModule(recipe.build(options), recipe.loss, "fp32", None).train(), batch


def _comparable(report: Any) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(report)} - _OF_THE_RUN
    return {name: getattr(report, name) for name in fields}


@pytest.mark.parametrize("kind", ["cpu", "xla"])
def test_a_batch_that_is_a_view_holds_what_it_will_hold_there(kind):
    """Labels of a part of the nodes: of all where they stay, without gaps where they move."""
    labels = torch.arange(12).view(2, 6)[:, 2:]
    there = labels if kind == "cpu" else labels.to("meta")  # which is as much another device
    fake = fake_of(labels, FakeTensorMode(), torch.device(kind))
    assert (fake.shape, fake.stride(), fake.storage_offset()) == (there.shape, there.stride(), there.storage_offset())
    assert fake.untyped_storage().nbytes() == there.untyped_storage().nbytes() == (96 if kind == "cpu" else 64)
    assert fake.dtype == torch.int64 and not fake._is_view()


class SaysOnce(nn.Module):
    """What transformers' models do by `warning_once`; a second call is silent."""

    def __init__(self, of: str):
        super().__init__()
        self.inner, self.of, self.has_said = nn.Linear(4, 4), of, False

    def forward(self, x):
        if not self.has_said:
            logging.getLogger("tests").warning("of the first call alone: %s", self.of)
            self.has_said = True
        if self.of == "each call":
            logging.getLogger("tests").warning("of each call")
        return self.inner(x).square().sum()


def test_what_a_model_does_in_its_first_call_alone_is_over_when_it_is_planned():
    options = check_options(kernel="aten", capture="trace", on_unsupported="error")
    with torch.device("meta"):
        models = SaysOnce("some"), SaysOnce("each call")
    x = torch.zeros(2, 4)
    planned = plan_step(trace_step(models[0], (x,), options, None), options)
    assert planned.report.num_parameters == 4 * 4 + 4
    with pytest.raises(UnsupportedError, match="logging"):
        trace_step(models[1], (x,), options, None)


@pytest.mark.parametrize("kernel", ["aten", pytest.param("cpp", marks=WHOLE)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[WHOLE] * (name not in _NAMES)) for name in recipe_names()])
def test_plans_of_fake_and_of_real_tensors_are_identical(name, kernel):
    if name == "hf":
        pytest.importorskip("transformers", reason="transformers is not installed")
    if kernel == "cpp" and compiler_obstacle():
        pytest.skip("there is no C++ compiler")
    for budget in (0.0, 0.4):
        options = {"budget": budget, "kernel": kernel, "capture": "trace", "decisions": "default"}
        module, batch = _made(name)
        real = aottrain.compile(module, **options)
        real.prepare(*batch)
        fake, batch = _made(name)
        options = check_options(**options, on_unsupported="error")
        planned = plan_step(trace_step(fake, batch, options, None), options)
        assert _comparable(planned.report) == _comparable(real.report.graphs[-1])
