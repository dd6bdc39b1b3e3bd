"""Models of `transformers` that scripts/bench_breadth.py times, of middling size, made from their configurations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_models import Made  # noqa: E402

WIDTH, NUM_HEADS, LENGTH, BATCH, VOCABULARY = 256, 8, 128, 8, 4096
# By the model type, the auto class of the head and what the configuration has beside the sizes below.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("gpt2", "qwen3", "gemma2", "opt", "bloom"), ("CausalLM", {})),
    "mixtral": ("CausalLM", {"num_local_experts": 4}),
    **dict.fromkeys(("bert", "distilbert", "deberta-v2"), ("MaskedLM", {})),
    # Their decoders begin with a token of their own, which must stand in the vocabulary of these sizes.
    **dict.fromkeys(("t5", "bart"), ("Seq2SeqLM", {"decoder_start_token_id": 0})),
    "whisper": ("SpeechSeq2Seq", {"decoder_start_token_id": 1}),
    "vit": (
        "ImageClassification",
        {"patch_size": 8, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 4},
    ),
    **dict.fromkeys(("convnext", "resnet", "efficientnet", "segformer"), ("ImageClassification", {})),
    "mobilenet_v2": ("ImageClassification", {"depth_multiplier": 0.5}),
}
# What a configuration of tokens or sounds has of these names.
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 1024),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), NUM_HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("head_dim", "d_kv"), WIDTH // NUM_HEADS),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 128),
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "num_mel_bins": 40,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PICTURES = {"image_size": 64, "num_labels": 10}


def pretrained(kind: str) -> Made:
    """A model of that type with new weights, its loss and a batch; the package is imported here alone."""
    import transformers

    head, own = HEADS[kind]
    config = transformers.AutoConfig.for_model(kind)
    pictures = head == "ImageClassification"
    for key, value in (_PICTURES if pictures else _SIZES).items():
        if hasattr(config, key):
            setattr(config, key, value)
    for key, value in own.items():
        setattr(config, key, value)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config).train()
    if pictures:
        batch = {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": torch.randint(0, 10, (BATCH,))}
    elif head == "SpeechSeq2Seq":
        batch = {"input_features": torch.randn(4, 40, 256), "labels": tokens(4, 64)}
    else:
        batch = {"input_ids": tokens(), "labels": tokens()}
    names = tuple(batch)
    return model, lambda call, *tensors: call(**dict(zip(names, tensors, strict=True))).loss, tuple(batch.values())


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape or (BATCH, LENGTH))


if __name__ == "__main__":
    print("A part of another command: python scripts/bench_breadth.py --help")
