"""recipe=hf where the package transformers is installed: models of five tasks, what is refused, and folders."""

from __future__ import annotations

import json
import re
from inspect import getsource
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'aottrain[hf]')")

import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers.models.whisper import modeling_whisper  # noqa: E402

import aottrain  # noqa: E402
from aottrain.cli import main  # noqa: E402
from aottrain.trainer.engines import LossModule  # noqa: E402
from recipes import _hf_data as data  # noqa: E402
from recipes import _hf_models as models  # noqa: E402
from recipes import hf  # noqa: E402

TEXT = {"context": 16}
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
T5 = {"d_model": 32, "d_kv": 16, "num_heads": 2, "num_layers": 1, "d_ff": 48}
CLIP = {"type": "clip", "config": {"vision_config": {"patchsize": 4}}}
WHISPER = {"d_model": 32, "encoder_layers": 1, "max_source_positions": 8}
OF_TASK: dict[str, dict[str, Any]] = {
    "causal": {"type": "qwen3", "config": {**TINY, "intermediate_size": 48, "num_key_value_heads": 1}, **TEXT},
    "masked": {"type": "bert", "config": {**TINY, "intermediate_size": 48}, **TEXT},
    "seq2seq": {"type": "t5", "config": T5, **TEXT},
    "image": {"type": "vit", "config": {**TINY, "image_size": 8}},
    "audio": {"type": "whisper", "task": "audio", "config": WHISPER},
}


def batch_of(options: hf.Options, size: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    if not options.reads_text:
        return hf.make_batch(options, size, generator)
    text = torch.randint(32, 127, (2, size, options.context), generator=generator)
    return hf.prepare(options, tuple(text), generator)


def trained(options: hf.Options, kernel: str | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps and the weights after them; kernel=None is eager."""
    torch.manual_seed(0)
    module = LossModule(hf.build(options), hf.loss).train()
    step: Any = module
    if kernel is not None:
        step = aottrain.compile(module, capture="trace", kernel=kernel, on_unsupported="error", decisions="default")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = step(*batch_of(options))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("task", OF_TASK)
def test_a_model_of_each_task_trains_as_by_eager(task):
    options = hf.Options(**OF_TASK[task])
    if task == "audio" and "self.training and self.layerdrop" not in getsource(modeling_whisper.WhisperEncoder.forward):
        pytest.skip("this transformers decides by a random number at each layer of Whisper, though it drops none")
    assert options.check() == [] and models.task_of(options) == task
    losses, weights = trained(options, None)
    compiled_losses, compiled_weights = trained(options, "aten")
    assert compiled_losses == losses and losses[-1] < losses[0]
    assert all(torch.equal(one, other) for one, other in zip(compiled_weights, weights, strict=True))


@pytest.mark.parametrize("task", ["causal", "masked", "seq2seq"])
def test_the_loss_is_that_of_the_tokens_it_is_meant_for(task):
    options = hf.Options(**OF_TASK[task])
    model, batch = hf.build(options).eval(), batch_of(options)
    logits = model(batch[0], **({"labels": batch[1]} if task == "seq2seq" else {})).logits
    if task == "causal":
        logits, labels = logits[:, :-1], batch[0][:, 1:]
    else:
        labels = batch[1]
    chosen = labels != data.IGNORED
    assert (chosen.float().mean() < 0.5) == (task == "masked")
    expected = torch.nn.functional.cross_entropy(logits[chosen], labels[chosen])
    assert torch.allclose(hf.loss(model, batch), expected, rtol=1e-6)


def test_an_encoder_that_is_trained_as_a_decoder_sees_no_later_token():
    options = hf.Options(task="causal", **OF_TASK["masked"])
    assert options.check() == []
    model, tokens = hf.build(options).eval(), batch_of(options)[0]
    other = tokens.clone()
    other[:, -1] = 1
    assert torch.equal(model(tokens).logits[:, :-1], model(other).logits[:, :-1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"type": "qwen33"}, "type=qwen33: not a model type that transformers trains for .*; did you mean qwen3?"),
        ({"type": "vit", "task": "causal"}, "task=causal: transformers has no such model of type vit, but image"),
        ({"config": {"hidden_sise": 4}}, "config.hidden_sise=4: Qwen3Config .* no such key; did you mean hidden_size?"),
        (CLIP, "config.vision_config.patchsize=4: .* patch_size?"),
        ({"config": {"hidden_size": "wide"}}, r"config={hidden_size:wide}: .* expected int, got str .*"),
        ({"type": "bert", "config": {"hidden_size": 30}}, r"config={hidden_size:30}: .*multiple of .* heads \(4\)"),
        ({"type": "gpt2", "config": {"n_embd": 30}}, r"config={n_embd:30}: .*must be divisible by num_heads.*"),
        ({"type": "gpt2", "config": {"vocab_size": 99}}, "config.vocab_size=99: tokens are bytes, so at least 256 .*"),
        ({"type": "gpt2", "config": {"n_positions": 64}}, "context=128: is more than config.n_positions=64"),
    ],
)
def test_a_mistake_is_one_line(options, text):
    (line,) = hf.Options(**options).check()
    assert re.fullmatch(text.replace("?", r"\?"), line), line


def test_what_a_model_writes_down_in_its_first_call_is_there_before_it_is_compiled():
    """swin keeps what it finds out about its windows; without that call the first step would run eagerly."""
    options = hf.Options(type="swin", num_classes=2, config={"image_size": 8, "patch_size": 2, "window_size": 2})
    losses, _ = trained(options, "aten")  # with on_unsupported="error"
    assert losses == trained(options, None)[0]


def test_dropout_and_random_branches_are_as_asked():
    config = models.configuration(hf.Options(type="bart", dropout=0.3, config={"activation_dropout": 0.2}))
    assert config.dropout == config.attention_dropout == 0.3 and config.encoder_layerdrop == 0.0
    own = models.configuration(hf.Options(type="bert", dropout=None))
    assert own.hidden_dropout_prob == transformers.BertConfig().hidden_dropout_prob > 0


def test_flops_are_those_of_matrix_products():
    options = hf.Options(type="bert", **TEXT)
    width, mlp, time, layers = models.WIDTH, models.MLP, options.context, models.LAYERS
    block = 4 * width**2 + 2 * width * mlp
    weights = layers * block + width**2 + models.VOCABULARY * width
    assert hf.flops_per_sample(options) == 3 * (2 * weights * time + layers * 4 * time**2 * width)
    state = torch.get_rng_state()
    assert hf.flops_per_sample(hf.Options(**OF_TASK["causal"])) > 0  # it asks its tensors for values
    assert torch.equal(torch.get_rng_state(), state)


def test_it_writes_after_a_prompt():
    options = hf.Options(**OF_TASK["causal"])
    model = hf.build(options).train()
    written = hf.generate(model, b"ab", 3, temperature=0)
    assert len(written) == 3 and model.training and written == hf.generate(model, b"ab", 3, temperature=0)
    assert not hf.Options(**OF_TASK["masked"]).writes_text
    learned_positions = hf.build(hf.Options(type="gpt2", context=8))
    assert len(hf.generate(learned_positions, b"a", 30)) == 30


def test_a_run_is_exported_and_its_folder_trained_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keys = [f"recipe.model.config.{key}={value}" for key, value in OF_TASK["causal"]["config"].items()]
    common = ["recipe=hf", "debug=fast", "recipe.model.context=16", "engine=eager", "trainer.steps=2"]
    assert main([*common, *keys, "hydra.run.dir=run"]) == 0
    assert main(["task=export", "export.run=run", "export.path=model", "hydra.run.dir=export"]) == 0
    checkpoint = load_file(next((tmp_path / "run" / "checkpoints").glob("*.safetensors")))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True).eval()
    own = hf.build(hf.Options(**OF_TASK["causal"])).eval()
    own.load_state_dict(checkpoint)
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens).logits, own(tokens).logits)

    capsys.readouterr()
    assert main([*common, "recipe.model.path=model", "hydra.run.dir=on"]) == 0
    assert json.loads((tmp_path / "on" / "summary.json").read_text())["num_parameters"] == own.num_parameters()
    (tmp_path / "elsewhere").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "elsewhere")
        assert main(["task=eval", "eval.run=../on", "hydra.run.dir=eval"]) == 0
    assert main(["resume=run", "trainer.steps=3", "hydra.run.dir=goes_on"]) == 0
    assert "going on after step 2" in capsys.readouterr().out
    assert main(["task=export", "export.run=run", "export.path=model"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_what_a_folder_lacks_is_named(tmp_path):
    def mistake(**options) -> str:
        (line,) = hf.Options(path=str(tmp_path), **options).check()
        return line.removeprefix(f"path={tmp_path}: ")

    assert mistake() == "config.json cannot be read: No such file or directory"
    (tmp_path / "config.json").write_text("{")
    assert mistake().startswith("config.json is not valid JSON")
    config = {"model_type": "someones", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert mistake() == "the folder has no model.safetensors, nor model.safetensors.index.json"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert mistake() == "model.safetensors.index.json names one.safetensors, which is missing"
    (tmp_path / "one.safetensors").write_bytes(b"")
    assert "a folder of model type someones, which is not one that transformers trains for" in mistake()
    assert "has a model of type someones; leave type out" in mistake(type="bert")
    (absent,) = hf.Options(path=str(tmp_path / "none")).check()
    assert absent.startswith(f"path={tmp_path / 'none'}: no such folder; one with config.json and weights")
