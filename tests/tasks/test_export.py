"""task=export of recipes that have no form of their own, and what is refused."""

from __future__ import annotations

import resource
import signal
import types

import pytest
import torch
from safetensors.torch import load_file

from aottrain.cli import main
from aottrain.config.extensions.recipes import load_recipe
from aottrain.tasks import export
from tests.tasks.trained import TEXT, train
from tests.trainer.test_run import same


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of adapters on the weights of another run."""
    folder = tmp_path_factory.mktemp("runs")
    base = train(folder, "transformer", TEXT).rename(folder / "base")
    return train(folder, "transformer", TEXT, "adapter=lora", "adapter.modules=[qkv]", f"adapter.base={base}")


def test_adapters_are_merged_into_weights_that_the_recipe_loads(adapted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["task=export", f"export.run={adapted}", "export.path=out", "hydra.run.dir=export"]) == 0
    assert "weights.pt" in capsys.readouterr().out
    recipe = load_recipe("transformer")
    model = recipe.build(recipe.Options(num_layers=1, width=16, num_heads=2, context=16))
    model.load_state_dict(torch.load(tmp_path / "out" / "weights.pt", weights_only=True))
    checkpoint = load_file(adapted / "checkpoints" / "step_00000003.safetensors")
    (base,) = (value for name, value in checkpoint.items() if name.endswith("qkv.weight"))
    assert not torch.equal(model.blocks[0].attention.qkv.weight, base)
    assert main([
        "task=export", f"export.run={adapted}", "export.path=other", "export.format=safetensors", "hydra.run.dir=again"
    ]) == 0  # fmt: skip
    assert same(dict(model.state_dict()), load_file(tmp_path / "other" / "weights.safetensors"))


@pytest.mark.parametrize(("keys", "says"), [
    (["export.format=hf"], "export.format=hf: recipe=transformer has no such form (recipe=hf has); try weights"),
    (["export.format=onnx"], "export.format=onnx: must be one of auto, hf, weights, safetensors"),
    (["format=hf"], "format=hf: unknown key; did you mean export.format?"),
])  # fmt: skip
def test_a_form_that_there_is_not_is_one_line(adapted, tmp_path, monkeypatch, capsys, keys, says):
    monkeypatch.chdir(tmp_path)
    assert main(["task=export", f"export.run={adapted}", *keys, "hydra.run.dir=export"]) == 2
    assert says in capsys.readouterr().err


def test_a_form_of_ones_own_is_written_unless_weights_are_asked_for():
    def config(form):
        return types.SimpleNamespace(export=types.SimpleNamespace(format=form), recipe=types.SimpleNamespace(title="x"))

    own = types.SimpleNamespace(export=print)
    assert export._writer(own, config("auto")) is print
    assert export._writer(own, config("weights")) is export.write_weights
    with pytest.raises(Exception, match="no such form"):
        export._writer(own, config("hf"))


@pytest.mark.parametrize("write", [export.write_weights, export.write_safetensors])
def test_a_disk_that_takes_no_more_is_the_system_s_error(tmp_path, write):
    """Of a file that has taken a part of it; torch's zip writer raises a RuntimeError of its own there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(torch.nn.Linear(100, 100), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert list(tmp_path.iterdir()) == []
