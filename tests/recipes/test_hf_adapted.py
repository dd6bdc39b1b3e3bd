"""A folder of transformers is adapted on lines of JSON by its own tokenizer, and exported as one that loads."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install 'aottrain[hf]')")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (pip install -e '.[test]')")

from aottrain.cli import main  # noqa: E402
from aottrain.config.run import AdapterConfig  # noqa: E402
from aottrain.trainer.checkpoint import load  # noqa: E402
from aottrain.trainer.weights.lora import adapt, merge  # noqa: E402
from recipes import _hf_models as models  # noqa: E402
from recipes import hf  # noqa: E402

TEXTS = [f"What is {i} and {i}? It is {2 * i}." for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a model, its tokenizer of 280 tokens and data.jsonl."""
    path = tmp_path_factory.mktemp("hf")
    (path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=288, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / "model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path / "model")
    return path


def test_it_is_adapted_and_its_export_gives_equal_logits(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    line = ["recipe=hf", "recipe.model.path=model", "recipe.model.context=16", "data.path=data.jsonl", "adapter=lora"]
    line += ["adapter.modules=[q_proj,v_proj,mlp]", "adapter.rank=2", "debug=fast", "engine=eager", "optimizer.lr=0.1"]
    assert main([*line, "trainer.steps=3", "hydra.run.dir=run"]) == 0
    printed = capsys.readouterr().out
    assert "model/tokenizer.json: 280 tokens" in printed
    assert main(["task=export", "export.run=run", "export.path=out", "hydra.run.dir=export"]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", local_files_only=True).eval()
    own = hf.build(hf.Options(path="model", context=16)).eval()
    tokens = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder / "out").encode(TEXTS[3])])
    base = own(tokens).logits
    adapt(own, AdapterConfig(name="lora", rank=2, modules=("q_proj", "v_proj", "mlp")))
    own.load_state_dict(load(folder / "run" / "checkpoints" / "step_00000003.pt").state["model"])
    logits = exported(tokens).logits
    assert torch.allclose(own(tokens).logits, logits, rtol=1e-5, atol=1e-6) and not torch.allclose(base, logits)
    assert torch.equal(merge(own)(tokens).logits, logits)
    assert main(["task=generate", "generate.run=run", "generate.length=3", "hydra.run.dir=text"]) == 0


def test_the_layers_of_gpt2_have_their_inputs_first(folder):
    options = hf.Options(type="gpt2", context=16)
    model, tokens = hf.build(options).eval(), torch.arange(16)[None]
    before = model(tokens).logits
    adapt(model, AdapterConfig(name="lora", modules=("c_attn", "c_proj")))
    assert torch.equal(model(tokens).logits, before)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            torch.nn.init.normal_(parameter)
    adapted = model(tokens).logits
    assert not torch.allclose(adapted, before, rtol=0.1)
    assert torch.allclose(merge(model)(tokens).logits, adapted, rtol=1e-3, atol=1e-4)


def test_what_is_hidden_is_a_token_of_the_tokenizer(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 103, "content": "[MASK]"}]}))
    assert models.mask_token(hf.Options(path=str(tmp_path))) == 103
    assert models.mask_token(hf.Options()) == models.MASK
    with pytest.raises(models.Unfit, match="its tokenizer.json adds none of"):
        models.mask_token(hf.Options(path=str(folder / "model"), task="masked"))
