"""What recipe hf knows of the package transformers: its model types, their configurations, and models made from them.

transformers is imported when it is first asked, so that the recipe's options can be read where it is not installed.
Nothing is fetched and no code of a model's folder is run.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .hf import Options

PACKAGE = "transformers"
INSTALL = "pip install 'aottrain[hf]'"
DEFAULT_TYPE = "qwen3"
# Of each task the auto class that adds the head, and the name of the table of the types that have one. A type that is
# in several has the first where no task is given: bert is more than a decoder, t5 more than an encoder.
AUTO = {
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "audio": ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
}
TEXT_TASKS = ("causal", "masked", "seq2seq")
# Their classes for task=causal compare each label with the token at its own place: they would learn to copy.
NOT_CAUSAL = {"xlnet", "xlm"}

# Bytes are the tokens, and of those that no text has four have the meaning that ASCII gives them: nothing, start and
# end of text, and what stands for a character that is lost.
VOCABULARY, PADDING, START, END, MASK = 256, 0, 2, 3, 26

WIDTH, HEADS, LAYERS, MLP = 128, 4, 2, 384
# Small sizes, by the names that configurations have for them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("decoder_hidden_size", "attention_hidden_size", "projection_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "hidden_dim", "dff", "n_inner"), MLP),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "decoder_intermediate_size"), MLP),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "d_head"), WIDTH // HEADS),
    **{"num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"image_size": 32, "patch_size": 4, "num_mel_bins": 32, "max_length": 64, "max_source_positions": 64},
    **{"conv_dim": [32, 32, 32], "conv_stride": [5, 4, 2], "conv_kernel": [10, 4, 3], "num_feat_extract_layers": 3},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 64},
    **{"feature_projection_input_dim": 32, "vocab_size": VOCABULARY, "use_cache": False},
    **{"pad_token_id": PADDING, "bos_token_id": START, "eos_token_id": END},
    **{"mask_token_id": MASK, "decoder_start_token_id": START},
}
_PIXELS = {"image_size": 64, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]}
# Of types whose sizes are lists that must fit each other.
OWN: dict[str, dict[str, Any]] = {
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"},
    "regnet": {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "groups_width": 8},
    "convnext": _PIXELS,
    "convnextv2": _PIXELS,
    "swin": {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    "swinv2": {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    # Of these two the package has several models for one type, and asks the configuration which.
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "levit": {"architectures": ["LevitForImageClassification"], "image_size": 64},
    "donut-swin": {"embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 16},
    "zaya": {"num_experts_per_tok": 1},
    "mobilenet_v2": {"image_size": 64, "depth_multiplier": 0.25},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    **dict.fromkeys(("gptj", "codegen"), {"rotary_dim": 16}),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 32},
    "wav2vec2-bert": {"intermediate_size": MLP},
    "nemotron": {"num_key_value_heads": 2},
    # Of its heads a part is turned; head_dim is that part.
    "deepseek_v3": {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": HEADS},
}
# What names a longest sequence.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "max_sequence_length")
# Room for the positions that some types keep for themselves: opt begins at 2, roberta at pad_token_id + 1.
SPARE_POSITIONS = 8
# Left out unless they are given: draws in Python or NumPy, by which a step would be another program each time.
UNASKED = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob")


def given(options: Options) -> Mapping[str, Any]:
    """The keys of the configuration class that were given."""
    return options.config or {}


class Unfit(ValueError):
    """Options that cannot be met, as "field=value: what is allowed"."""


def library() -> Any:
    """The package transformers, told to fetch nothing and to print errors alone. Unfit: it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # which it reads once, when it is imported
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        raise Unfit(f"type: recipe hf needs the package {PACKAGE}, which is not installed: {INSTALL}") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@functools.cache
def types() -> dict[str, tuple[str, ...]]:
    """Of each model type its tasks, the one first that it has where none is given."""
    from transformers.models.auto import modeling_auto  # after library()

    tasks: dict[str, list[str]] = {}
    for task, (_, table) in AUTO.items():
        for name in getattr(modeling_auto, table):
            if task != "causal" or name not in NOT_CAUSAL:
                tasks.setdefault(name, []).append(task)
    return {name: tuple(found) for name, found in tasks.items()}


def task_of(options: Options) -> str:
    """causal, masked, seq2seq, image or audio: as given, else what the type is first of all for."""
    return options.task if options.task is not None else types()[type_of(options)][0]


def type_of(options: Options) -> str:
    if options.path is None:
        return options.type or DEFAULT_TYPE
    return str(_read_json(Path(options.path), "config.json").get("model_type"))


def mistakes(options: Options) -> list[str]:
    """What keeps these options from a model, each as "field=value: what is allowed"."""
    try:
        library()
        _check_type(options)
        kind = type(library().AutoConfig.for_model(type_of(options)))
        unknown = list(_unknown_keys(kind, given(options), "config"))
        if unknown:
            return unknown
        config = configuration(options)
        if task_of(options) in ("masked", "seq2seq"):
            mask_token(options)
        found = list(_wrong_sizes(options, config))
        return found or _refusal(options, config)
    except Unfit as error:
        return str(error).splitlines()
    except Exception as error:  # a class may refuse even its own defaults
        return [_line(options, error)]


def _check_type(options: Options) -> None:
    """Unfit: the type is not known, the folder has no model, or the type has none for the task."""
    if options.path is not None:
        _check_folder(options)
    name = type_of(options)
    about = f"type={name}" if options.path is None else f"path={options.path}"
    if name not in types():
        near = _near(name, types())
        what = f"a folder of model type {name}, which is not one" if options.path is not None else "not a model type"
        raise Unfit(f"{about}: {what} that {PACKAGE} trains for {', '.join(AUTO)}{near}")
    if options.task is not None and options.task not in types()[name]:
        raise Unfit(f"task={options.task}: {PACKAGE} has no such model of type {name}, but {', '.join(types()[name])}")


TOKENIZER = "tokenizer.json"
# What a folder has beside it that says how text becomes tokens.
TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Tokens that stand for what is hidden, the first that a tokenizer has: BERT's, RoBERTa's, T5's.
MASKS = ("[MASK]", "<mask>", "<extra_id_0>")


def tokenizer_file(options: Options) -> str | None:
    """The tokenizer.json of the model's folder; None where there is none."""
    file = None if options.path is None else Path(options.path, TOKENIZER)
    return str(file) if file is not None and file.is_file() else None


def tokenizer_files(options: Options) -> dict[str, bytes]:
    """What the folder has of its tokenizer, by the files' names."""
    files = [] if options.path is None else [Path(options.path, name) for name in TOKENIZER_FILES]
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def mask_token(options: Options) -> int:
    """The token that stands for a hidden one. Unfit: the folder's tokenizer has none."""
    if options.path is None or tokenizer_file(options) is None:
        return MASK
    if (found := _mask_of(options.path)) is None:
        text = f"its {TOKENIZER} adds none of {', '.join(MASKS)}, one of which task={task_of(options)} needs"
        raise Unfit(f"path={options.path}: {text}")
    return found


@functools.cache
def _mask_of(folder: str) -> int | None:
    """Asked at each step, and no folder changes."""
    added = _read_json(Path(folder), TOKENIZER).get("added_tokens", [])
    known = {entry["content"]: int(entry["id"]) for entry in added}
    return next((known[name] for name in MASKS if name in known), None)


def _check_folder(options: Options) -> None:
    folder = Path(str(options.path))
    about = f"path={options.path}"
    if not folder.is_dir():
        raise Unfit(f"{about}: no such folder; one with config.json and weights (*.safetensors) is needed")
    _read_json(folder, "config.json")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = set(_read_json(folder, index.name).get("weight_map", {}).values())
        missing = sorted(name for name in files if not (folder / name).is_file())
        if missing:
            raise Unfit(f"{about}: {index.name} names {missing[0]}, which is missing")
    elif not (folder / "model.safetensors").is_file():
        raise Unfit(f"{about}: the folder has no model.safetensors, nor {index.name}")
    if options.type is not None and options.type != (own := type_of(options)):
        raise Unfit(f"type={options.type}: the folder {options.path} has a model of type {own}; leave type out")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Unfit: it is missing, or is no JSON object."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise Unfit(f"path={folder}: {name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Unfit(f"path={folder}: {name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise Unfit(f"path={folder}: {name} is no JSON object")
    return value


def _near(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _unknown_keys(kind: Any, keys: Mapping[str, Any], prefix: str) -> Iterable[str]:
    """A mistake for each key that a configuration class does not have, its parts' classes included."""
    names = {*kind().to_dict(), *kind.attribute_map, "num_labels"} - {"transformers_version", "model_type"}
    for key, value in keys.items():
        part = kind.sub_configs.get(key)
        if key not in names:
            yield f"{prefix}.{key}={value}: {kind.__name__} of {PACKAGE} has no such key{_near(key, names)}"
        elif isinstance(value, Mapping) and hasattr(part, "attribute_map"):
            yield from _unknown_keys(part, value, f"{prefix}.{key}")


def configuration(options: Options) -> Any:
    """The configuration of the model. Unfit: its class refuses it."""
    auto = library().AutoConfig
    try:
        if options.path is not None:
            loaded = auto.from_pretrained(options.path, local_files_only=True, trust_remote_code=False)
            config = type(loaded).from_dict(_merged(loaded.to_dict(), given(options)))
        else:
            name = type_of(options)
            small = {**_small(auto.for_model(name), options), **OWN.get(name, {})}
            config = auto.for_model(name, **_merged(small, _by_own_names(auto.for_model(name), given(options))))
    except Unfit:
        raise
    except Exception as error:  # each class has its own checks, and errors for them
        raise Unfit(_line(options, error)) from error
    _adapt(config, options)
    return config


def _by_own_names(config: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as the class itself names them, where it also takes another name."""
    return {config.attribute_map.get(key, key): value for key, value in keys.items()}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, section by section."""

    def value(key: str) -> Any:
        sections = isinstance(over[key], Mapping) and isinstance(base.get(key), Mapping)
        return _merged(base[key], over[key]) if sections else over[key]

    return {**base, **{key: value(key) for key in over}}


def _small(config: Any, options: Options) -> dict[str, Any]:
    """The small sizes of those names that the configuration has, its parts' included; a head's width fits the rest."""

    def fits(name: str, small: Any) -> bool:
        own = getattr(config, name)
        if name in ("num_key_value_heads", "n_inner") and own is None:
            return False  # which is then what follows from the others
        return own is None or isinstance(own, (list, tuple)) == isinstance(small, list)

    names = {name for name in vars(config) if not name.startswith("_")}
    sizes = {name: small for name, small in SIZES.items() if name in names and fits(name, small)}
    numbered = [name for name in POSITIONS if name in names and isinstance(getattr(config, name), int)]
    sizes |= dict.fromkeys(numbered, options.context + SPARE_POSITIONS)
    width, heads = (_given(config, options, name) for name in ("hidden_size", "num_attention_heads"))
    if "head_dim" in sizes and isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads == 0:
        sizes["head_dim"] = width // heads
    parts = {name: part for name, part in vars(config).items() if isinstance(part, library().PreTrainedConfig)}
    return sizes | {name: {**_small(part, options), **OWN.get(part.model_type, {})} for name, part in parts.items()}


def _given(config: Any, options: Options, name: str) -> Any:
    own = config.attribute_map.get(name, name)
    keys = given(options)
    return keys.get(name, keys.get(own, SIZES.get(own)))


def _parts(config: Any) -> list[Any]:
    return [config, *(part for part in vars(config).values() if isinstance(part, library().PreTrainedConfig))]


def _adapt(config: Any, options: Options) -> None:
    """What training asks of any configuration, in place."""
    task = task_of(options)
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            if name in UNASKED:
                if name not in given(options):
                    setattr(part, name, 0.0)
            elif options.dropout is not None and "drop" in name and isinstance(value, float):
                setattr(part, name, options.dropout)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if task in TEXT_TASKS:
        if task == "causal" and hasattr(config, "is_decoder") and not config.is_encoder_decoder:
            config.is_decoder = True  # else an encoder's tokens see what comes after them
        if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = START
    else:
        config.num_labels = options.num_classes
        config.problem_type = "single_label_classification"  # else the first call finds out and writes it down here


def _wrong_sizes(options: Options, config: Any) -> Iterable[str]:
    if task_of(options) not in TEXT_TASKS:
        return
    text = config.get_text_config()
    if text.vocab_size < VOCABULARY and tokenizer_file(options) is None:
        yield f"config.vocab_size={text.vocab_size}: tokens are bytes, so at least {VOCABULARY} are needed"
    for name in POSITIONS:
        longest = vars(text).get(name)
        if isinstance(longest, int) and 0 < longest < options.context:
            yield f"context={options.context}: is more than config.{name}={longest}"


def _refusal(options: Options, config: Any) -> list[str]:
    """Why the model cannot be built. First without numbers, which is quick; some models need them to be built."""
    auto = getattr(library(), AUTO[task_of(options)][0])
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                auto.from_config(config)
            return []
        except Exception as error:  # each class has its own checks, and errors for them
            reason = _line(options, error)
    return [reason]


def _line(options: Options, error: Exception) -> str:
    """An error of transformers as a mistake in the options."""
    text = " ".join(str(error).split()) or type(error).__name__
    keys = ",".join(f"{key}:{value}" for key, value in given(options).items())
    about = f"config={{{keys}}}" if keys else f"type={type_of(options)}"
    return f"{about}: {PACKAGE} cannot build it: {text[:300]}"


def model(options: Options) -> nn.Module:
    """The model, with the weights of the folder where there is one. Unfit: a weight does not fit the configuration."""
    made = _made(options)
    made.task, made.label_smoothing = task_of(options), options.label_smoothing  # which `loss` reads
    return made


def _made(options: Options) -> Any:
    transformers, config = library(), configuration(options)
    auto = getattr(transformers, AUTO[task_of(options)][0])
    # Where only sizes are asked for, there is nothing to read into.
    if options.path is None or torch.get_default_device().type == "meta":
        return auto.from_config(config)
    try:
        return auto.from_pretrained(
            options.path, config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
            use_safetensors=True,
        )  # fmt: skip
    except Exception as error:
        raise Unfit(f"path={options.path}: {PACKAGE} cannot load it: {' '.join(str(error).split())[:300]}") from error
