"""Peak memory of full-size models of the `transformers` package: eager, torch.compile and aottrain, one table.

    pip install transformers
    python scripts/bench_peaks.py --out peaks.json                      # all models and engines; minutes for each model
    python scripts/bench_peaks.py --out peaks.json --names gpt2 vit --engines eager ours budget=0.5

Models are made from configurations; nothing is downloaded. A step is a forward and a backward, the model's results
alive until it ends. The peak is that of the second step, by the allocator's own events, above parameters, buffers and
batch. Each run is a process of its own, one at a time (up to 6 GiB). What --out has already is not run again, so a
table that was interrupted goes on. Peaks do not depend on what else the machine does. Exit code 1 where a run failed,
or a default of ours peaks above eager or torch.compile.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aottrain  # noqa: E402
from aottrain.explain.tables import table  # noqa: E402
from aottrain.metrics.memory import distinct_bytes, watch_cpu_peak  # noqa: E402
from scripts.figures import record  # noqa: E402

ENGINES = ("eager", "torch.compile", "ours", "budget=1.0", "budget=0.5", "budget=0.0")
TIMEOUT_S = 3600
MIB = 2**20
RECORDED = ("model", "batch", "eager", "torch.compile", "aottrain (predicted)")  # in MiB
NUM_WARM_STEPS = 1
# By the head, with its model type, what its configuration has instead of its defaults, and how large a batch is:
# sequences and tokens, images and pixels, or recordings and samples.
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "gpt2": ("CausalLM", "gpt2", {}, (2, 256)),
    "bert-base": ("MaskedLM", "bert", {}, (2, 256)),
    "roberta-base": ("MaskedLM", "roberta", {"max_position_embeddings": 514}, (2, 256)),
    "distilbert": ("MaskedLM", "distilbert", {}, (4, 256)),
    "electra-small": ("MaskedLM", "electra", {}, (4, 256)),
    "albert-base": (
        "MaskedLM", "albert", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}, (4, 128),
    ),
    "opt-125m": ("CausalLM", "opt", {}, (2, 256)),
    "pythia-160m": (
        "CausalLM", "gpt_neox",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}, (2, 256),
    ),
    "qwen2-0.5b, 8 layers": (
        "CausalLM", "qwen2",
        {"hidden_size": 896, "num_hidden_layers": 8, "num_attention_heads": 14, "num_key_value_heads": 2,
         "intermediate_size": 4864, "tie_word_embeddings": True}, (1, 256),
    ),
    "llama, 12 layers of 768": (
        "CausalLM", "llama",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}, (2, 256),
    ),
    "t5-small": (
        "Seq2SeqLM", "t5", {"decoder_start_token_id": 0}, (4, 128),
    ),
    "bart-base": (
        "Seq2SeqLM", "bart",
        {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
         "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}, (2, 128),
    ),
    "whisper-tiny": ("SpeechSeq2Seq", "whisper", {}, (2, 64)),
    "wav2vec2-base": ("AudioClassification", "wav2vec2", {}, (2, 16000)),
    "vit-base": ("ImageClassification", "vit", {}, (4, 224)),
    "deit-base": ("ImageClassification", "deit", {}, (8, 224)),
    "swin-tiny": ("ImageClassification", "swin", {}, (4, 224)),
    "convnext-tiny": ("ImageClassification", "convnext", {}, (4, 224)),
    "resnet-50": ("ImageClassification", "resnet", {}, (8, 160)),
    "mobilenet_v2": ("ImageClassification", "mobilenet_v2", {}, (8, 224)),
    "segformer-b0": ("ImageClassification", "segformer", {}, (8, 224)),
}  # fmt: skip
# What a table in the texts calls them, where that is another name.
TITLES = {
    "gpt2": "GPT-2 124M", "bert-base": "BERT-base", "roberta-base": "RoBERTa-base", "distilbert": "DistilBERT",
    "electra-small": "ELECTRA-small", "albert-base": "ALBERT-base", "opt-125m": "OPT-125M",
    "pythia-160m": "Pythia-160M",
    "qwen2-0.5b, 8 layers": "Qwen2-0.5B, 8 of 24 layers", "llama, 12 layers of 768": "Llama, 12 layers of width 768",
    "t5-small": "T5-small", "bart-base": "BART-base", "whisper-tiny": "Whisper-tiny", "wav2vec2-base": "wav2vec2-base",
    "vit-base": "ViT-base", "deit-base": "DeiT-base", "swin-tiny": "Swin-tiny", "convnext-tiny": "ConvNeXt-tiny",
    "resnet-50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "segformer-b0": "SegFormer-B0",
}  # fmt: skip


def build(name: str) -> nn.Module:
    import transformers

    group, kind, changes, _ = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **changes)
    config.use_cache = False
    config.architectures = config.architectures or []  # of deit there are two classes, and None is looked into
    config.problem_type = "single_label_classification"  # else the first call finds out, and writes it down here
    for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob"):
        if hasattr(config, key):
            setattr(config, key, 0.0)  # drawn in Python
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"AutoModelFor{group}").from_config(config)
    return model.train()


def make_batch(model: Any, name: str) -> dict[str, Tensor]:
    """Random numbers that the model's forward takes, with labels."""
    group, kind, _, (count, size) = MODELS[name]
    config, generator = model.config, torch.Generator().manual_seed(0)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, config.vocab_size, (count, length), generator=generator)

    if group in ("CausalLM", "MaskedLM", "Seq2SeqLM"):
        words = tokens(size)
        return {"input_ids": words, "labels": words.clone()}
    if group == "SpeechSeq2Seq":
        features = torch.randn(count, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": features, "labels": tokens(size)}
    takes = inspect.signature(type(model).forward).parameters
    shape = (count, size) if "input_values" in takes else (count, 3, size, size)
    values = torch.randn(shape, generator=generator)
    labels = torch.randint(0, config.num_labels, (count,), generator=generator)
    return {"input_values" if "input_values" in takes else "pixel_values": values, "labels": labels}


def measure(name: str, engine: str) -> dict[str, Any]:
    """Peak, and of ours what was predicted: bytes above parameters, buffers and batch."""
    model = build(name)
    batch = make_batch(model, name)
    call: Any = model
    if engine == "torch.compile":
        call = torch.compile(model)
    elif engine != "eager":
        budget = None if engine == "ours" else float(engine.partition("=")[2])
        call = aottrain.compile(model, budget=budget)

    def step() -> None:
        result = call(**batch)
        result.loss.backward()

    start = time.perf_counter()
    for _ in range(NUM_WARM_STEPS):
        step()
        model.zero_grad(set_to_none=True)
    with watch_cpu_peak() as peak:
        step()
    figures: dict[str, Any] = {"peak": peak.num_bytes, "seconds": time.perf_counter() - start}
    if engine not in ("eager", "torch.compile"):
        fixed = distinct_bytes([*model.parameters(), *model.buffers(), *batch.values()])
        graphs = [graph for graph in call.report.graphs if graph.mode == "train"]
        figures["predicted"] = max(graph.predicted_peak_bytes for graph in graphs) - fixed if len(graphs) == 1 else None
        figures["graphs"] = len(call.report.graphs)
        figures["fallbacks"] = [fallback.reason for fallback in call.report.fallbacks]
    return figures


def measure_apart(name: str, engine: str) -> dict[str, Any]:
    """The same in a process of its own; where it fails, under "error" its last line."""
    command = [sys.executable, __file__, "--measure", name, engine]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {TIMEOUT_S} s"}
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    if ran.returncode == 0:
        return dict(json.loads(ran.stdout.splitlines()[-1]))
    return {"error": lines[-1] if lines else f"exit code {ran.returncode}"}


def rows_of(figures: dict[str, dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    def text(run: dict[str, Any]) -> str:
        if "peak" not in run:
            return "failed" if run else ""
        predicted = run.get("predicted")
        return f"{run['peak'] / MIB:,.1f}" + (f" ({predicted / MIB:,.1f})" if predicted is not None else "")

    rows = []
    for name in names:
        runs = figures.get(name, {})
        peaks = {engine: runs[engine]["peak"] for engine in ENGINES if "peak" in runs.get(engine, {})}
        ratios = [
            f"{peaks['ours'] / peaks[other]:.2f}" if "ours" in peaks and other in peaks else "" for other in ENGINES[:2]
        ]
        rows.append([name, *(text(runs.get(engine, {})) for engine in ENGINES), *ratios])
    return rows


def recorded(figures: dict[str, dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """The rows of the table in the texts: models that eager and ours have run."""

    def text(run: dict[str, Any]) -> str:
        if "peak" not in run:
            return "not measured"
        if "predicted" not in run:
            return f"{run['peak'] / MIB:,.0f}"
        predicted = f"{run['graphs']} graphs"
        if run["predicted"] is not None:
            predicted = f"{run['predicted'] / MIB:,.0f}"
        return f"{run['peak'] / MIB:,.0f} ({predicted})"

    rows = []
    for name in names:
        runs = figures.get(name, {})
        if all("peak" in runs.get(engine, {}) for engine in ("eager", "ours")):
            group, (count, size) = MODELS[name][0], MODELS[name][3]
            batch = f"{count} x {size} x {size}" if group == "ImageClassification" else f"{count} x {size}"
            rows.append([TITLES[name], batch, *(text(runs.get(engine, {})) for engine in ENGINES[:3])])
    return rows


def went_well(figures: dict[str, dict[str, Any]], names: Sequence[str]) -> bool:
    """No run failed, and no default of ours peaks above another engine."""
    for name in names:
        runs = figures.get(name, {})
        if any("error" in run for run in runs.values()):
            return False
        ours = runs.get("ours", {}).get("peak", 0)
        if any(ours > runs[other]["peak"] for other in ENGINES[:2] if other in runs):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", choices=tuple(MODELS), default=list(MODELS), metavar="name")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="engine")
    parser.add_argument("--out", type=Path, default=Path("peaks.json"), help="figures so far; kept up to date")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--record", action="store_true", help="keep the figures for the tables of the texts")
    parser.add_argument("--measure", nargs=2, metavar=("name", "engine"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print("bench_peaks.py needs the package transformers: pip install transformers", file=sys.stderr)
        return 2
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return 0
    figures = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    for name in options.names:
        for engine in options.engines:
            if options.again or "peak" not in figures.get(name, {}).get(engine, {}):
                measured = measure_apart(name, engine)
                figures.setdefault(name, {})[engine] = measured
                options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
                print(name, engine, measured, flush=True)
    head = ["model", *(f"{engine}, MiB" for engine in ENGINES), "to eager", "to torch.compile"]
    print(table(head, rows_of(figures, options.names)))
    if options.record:
        record("peaks", RECORDED, recorded(figures, options.names), f"transformers {version('transformers')}")
    return 0 if went_well(figures, options.names) else 1


if __name__ == "__main__":
    sys.exit(main())
