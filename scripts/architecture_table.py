"""What scripts/architectures.py trains: model types of the `transformers` package, and how each is made small."""

from __future__ import annotations

from typing import Any

# fmt: off
# Model types, by the auto class that adds the head.
GROUPS = {
    "CausalLM": """
        gpt2 gpt_neo gptj gpt_neox gpt_bigcode openai-gpt llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3
        opt bloom falcon stablelm olmo olmo2 cohere starcoder2 granite persimmon codegen biogpt xglm mpt ctrl
        glm nemotron smollm3 helium modernbert-decoder mamba mamba2 rwkv recurrent_gemma mixtral qwen2_moe olmoe""",
    "MaskedLM": """
        bert roberta albert electra distilbert deberta deberta-v2 mpnet convbert funnel squeezebert mobilebert
        nystromformer longformer big_bird roformer camembert ernie esm ibert layoutlm fnet rembert megatron-bert
        xlm-roberta roberta-prelayernorm modernbert xlm yoso""",
    "TokenClassification": "lilt canine xlnet",
    "Seq2SeqLM": """
        t5 mt5 umt5 bart mbart pegasus pegasus_x marian m2m_100 led blenderbot blenderbot-small prophetnet plbart
        bigbird_pegasus longt5 switch_transformers""",
    "ImageClassification": """
        vit deit beit swin swinv2 convnext convnextv2 resnet mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 segformer
        regnet dinov2 levit poolformer pvt pvt_v2 cvt focalnet efficientnet bit data2vec-vision swiftformer hiera
        ijepa""",
    "PreTraining": "vit_mae videomae",
    "ObjectDetection": "yolos",
    "AudioClassification": """
        wav2vec2 hubert wavlm unispeech unispeech-sat sew data2vec-audio wav2vec2-conformer wav2vec2-bert
        audio-spectrogram-transformer""",
    "SpeechSeq2Seq": "whisper speech_to_text moonshine",
    "ZeroShotImageClassification": "clip siglip blip align",
}

# For every configuration that has the name: sizes, then no cache and tokens of this vocabulary.
SMALL: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, d_model=32, n_embd=32, dim=32, emb_dim=32, embed_dim=32, embedding_size=32,
    attention_hidden_size=32, intermediate_size=48, ffn_dim=48, d_ff=48, hidden_dim=48, encoder_ffn_dim=48,
    decoder_ffn_dim=48, d_kv=8, d_inner=48, d_head=8, head_dim=8, projection_dim=16, decoder_hidden_size=32,
    decoder_intermediate_size=48, state_size=8, shared_expert_intermediate_size=48, moe_intermediate_size=48, dff=48,
    num_hidden_layers=2, num_layers=2, n_layer=2, n_layers=2, encoder_layers=2, decoder_layers=2, num_encoder_layers=2,
    num_decoder_layers=2, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
    num_attention_heads=4, num_heads=4, n_head=4, n_heads=4, num_key_value_heads=2,
    encoder_attention_heads=4, decoder_attention_heads=4, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
    decoder_num_attention_heads=4, max_position_embeddings=64, n_positions=64, max_seq_len=64, max_source_positions=64,
    max_target_positions=64, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, image_size=32,
    patch_size=8, num_frames=4, num_experts=4, num_local_experts=4, num_experts_per_tok=2, attention_window=8,
    num_mel_bins=16, input_feat_per_channel=16, conv_channels=32, conv_dim=(16, 16), conv_stride=(5, 2),
    conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    classifier_proj_size=16, mask_time_length=2, mask_feature_length=2, num_detection_tokens=5,
    use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
_LAYERS4: dict[str, Any] = dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], image_size=64)
_RESNET: dict[str, Any] = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
_SWIN: dict[str, Any] = dict(embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4, patch_size=4, image_size=32)
_PYRAMID: dict[str, Any] = dict(num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2],
                                mlp_ratios=[2, 2], sr_ratios=[2, 1], sequence_reduction_ratios=[2, 1])
_EFFICIENT: dict[str, Any] = dict(hidden_dim=1280, kernel_sizes=[3, 5], in_channels=[32, 16], out_channels=[16, 24],
                                  strides=[1, 2], num_block_repeats=[1, 2], expand_ratios=[1, 6], width_coefficient=1.0,
                                  depth_coefficient=1.0, image_size=32)
# What one model type needs beside, for itself or for the part of it that is named first.
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=8),
    "gptj": dict(rotary_dim=4), "codegen": dict(rotary_dim=4), "ctrl": dict(n_positions=64),
    "mamba": dict(conv_kernel=4, time_step_rank=4), "mamba2": dict(conv_kernel=4, num_heads=8, head_dim=8, n_groups=2),
    "rwkv": dict(context_length=64, attention_hidden_size=32),
    "recurrent_gemma": dict(lru_width=32, num_hidden_layers=3),
    "qwen2_moe": dict(decoder_sparse_step=1), "longformer": dict(attention_window=[8, 8]),
    "big_bird": dict(attention_type="original_full"), "bigbird_pegasus": dict(attention_type="original_full"),
    "mobilebert": dict(embedding_size=32, intra_bottleneck_size=16, true_hidden_size=16), "esm": dict(vocab_size=99),
    "lilt": dict(hidden_size=96),
    "canine": dict(max_position_embeddings=64, local_transformer_stride=8, num_hash_buckets=97),
    "funnel": dict(block_sizes=[1, 1], block_repeats=[1, 1]),
    "deit": dict(pooler_output_size=32, architectures=["DeiTForImageClassification"]),
    "pegasus_x": dict(block_size=8, num_global_tokens=4),
    "convnext": _LAYERS4, "convnextv2": _LAYERS4, "resnet": _RESNET,
    "regnet": dict(_RESNET, layer_type="y", groups_width=4),
    "bit": dict(_RESNET, layer_type="preactivation", num_groups=2), "poolformer": dict(_LAYERS4),
    "mobilenet_v1": dict(depth_multiplier=0.125), "mobilenet_v2": dict(depth_multiplier=0.125, image_size=64),
    "mobilevit": dict(hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
                      patch_size=2, image_size=64),
    "mobilevitv2": dict(width_multiplier=0.25, patch_size=2, image_size=64, base_attn_unit_dims=[32, 32, 32]),
    "swin": _SWIN, "swinv2": dict(_SWIN, pretrained_window_sizes=[0, 0]),
    "segformer": dict(_PYRAMID, patch_sizes=[7, 3], strides=[4, 2]),
    "pvt": dict(_PYRAMID, patch_sizes=[4, 2], strides=[4, 2]),
    "pvt_v2": dict(_PYRAMID, patch_sizes=[7, 3], strides=[4, 2], image_size=[32, 32]),
    "levit": dict(architectures=["LevitForImageClassification"], patch_size=16, hidden_sizes=[16, 32],
                  num_attention_heads=[2, 4], depths=[1, 1], key_dim=[8, 8], image_size=64, mlp_ratio=[2,
                  2], attention_ratio=[2, 2],
                  down_ops=[["Subsample", 8, 2, 4, 2, 2]]),
    "cvt": dict(patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], embed_dim=[16, 32], num_heads=[1, 2],
                depth=[1, 2], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0],
                drop_path_rate=[0.0, 0.0], qkv_bias=[True, True], cls_token=[False, True],
                qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2],
                padding_q=[1, 1], stride_q=[1, 1]),
    "focalnet": dict(embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3],
                     patch_size=4),
    "efficientnet": _EFFICIENT, "align_vision_model": _EFFICIENT,
    "swiftformer": dict(depths=[1, 1, 1, 1], embed_dims=[8, 16, 16, 32], image_size=64),
    "hiera": dict(embed_dim=16, image_size=[64, 64], depths=[1, 1, 1], num_heads=[1, 2, 2], num_query_pool=2,
                  masked_unit_attention=[True, True, False], masked_unit_size=[4, 4]),
    "yolos": dict(image_size=[32, 32]), "speech_to_text": dict(conv_kernel_sizes=[5, 5]),
    "sew": dict(squeeze_factor=2), "audio-spectrogram-transformer": dict(max_length=32),
    "wav2vec2-bert": dict(feature_projection_input_dim=16),
}
# fmt: on


if __name__ == "__main__":
    print("A part of another command: python scripts/architectures.py --help")
