"""Model types of the `transformers` package by recipe=hf: some steps of each by eager and as aottrain compiles them.

    pip install 'aottrain[hf]'
    python scripts/hf_models.py                         # the types below, 20 steps each; an hour or two on two cores
    python scripts/hf_models.py bert t5 --steps 5 --kernel aten
    python scripts/hf_models.py --results found.jsonl   # adds to that file, and does not run again what is in it

Each runs as `python -m aottrain recipe=hf recipe.model.type=...` does, small, in a process of its own. The gradients of
the first step are held against eager's, and the loss of every step against that of a run by eager of the same weights
and batches. Exit code 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TIMEOUT_S = 900
# Relative, of any step's loss: what rounding becomes in some steps of AdamW, as for task=compare.
LOSS_TOLERANCE = 1e-3
# Of the first step, as verify.grad_tolerance.
GRADIENT_TOLERANCE = 1e-4
TYPES = {
    "causal": """
        qwen3 llama gpt2 mistral qwen2 gemma gemma2 gemma3_text phi phi3 opt bloom falcon gpt_neox gptj gpt_neo
        gpt_bigcode codegen openai-gpt stablelm olmo olmo2 olmo3 cohere cohere2 starcoder2 granite biogpt xglm mpt ctrl
        glm glm4 smollm3 helium nemotron modernbert-decoder persimmon exaone4 ernie4_5 seed_oss arcee apertus mamba
        mamba2 rwkv recurrent_gemma mixtral qwen2_moe qwen3_moe olmoe granitemoe gpt_oss deepseek_v3 qwen3_next lfm2
        bamba falcon_h1""",
    "masked": """
        bert roberta albert electra distilbert deberta deberta-v2 mpnet convbert funnel squeezebert mobilebert
        nystromformer longformer big_bird roformer camembert ernie esm ibert layoutlm fnet rembert megatron-bert
        xlm-roberta roberta-prelayernorm modernbert yoso eurobert""",
    "seq2seq": """
        t5 mt5 umt5 bart mbart pegasus marian m2m_100 led blenderbot blenderbot-small prophetnet plbart longt5
        switch_transformers mvp t5gemma""",
    "image": """
        vit deit beit swin swinv2 convnext convnextv2 resnet mobilenet_v1 mobilenet_v2 mobilevit segformer regnet
        dinov2 poolformer pvt pvt_v2 focalnet efficientnet bit data2vec-vision swiftformer ijepa siglip clip""",
    "audio": "wav2vec2 hubert wavlm unispeech sew data2vec-audio wav2vec2-conformer wav2vec2-bert whisper",
}
HEADER = ("task", "trained as by eager, all compiled", "trained as by eager, partly run eagerly", "wrong or not run")


@dataclass(frozen=True)
class Result:
    """What became of one model type."""

    task: str
    name: str
    verdict: str
    """equal, partly eager, or what is wrong."""
    reasons: tuple[str, ...] = ()
    """Of what ran eagerly."""
    losses: tuple[float, ...] = ()
    """Of each step."""
    error: float = 0.0
    """The largest relative difference from eager, of any step's loss or of a gradient of the first."""
    num_kernels: int = 0
    """Generated ones."""
    seconds: float = 0.0

    @property
    def falls(self) -> bool:
        """Whether the last quarter of the losses is lower than the first one."""
        part = max(len(self.losses) // 4, 1)
        return sum(self.losses[-part:]) < sum(self.losses[:part])


@dataclass(frozen=True)
class Trained:
    """What the steps of one engine gave."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor | None]
    """Of the first step."""
    reasons: tuple[str, ...]
    """Of what ran eagerly."""
    num_kernels: int


def train(task: str, name: str, steps: int, kernel: str) -> Result:
    """One type, in this process: by aottrain, then by eager."""
    model = {"type": name, "task": task, "context": 32, "num_classes": 2}
    values = {
        "recipe": {"name": "hf", "model": model},
        "kernel": {"name": kernel},
        "data": {"batch_size": 4},
        "decisions": "default",
    }
    ours, eager = trained_by("aot", values, steps), trained_by("eager", values, steps)
    result = judged(task, name, ours, eager)
    if "differ" not in result.verdict:
        return result
    exact = trained_by("eager", values, 1, torch.float64).gradients
    errors = [worst_gradient(one.gradients, exact)[0] for one in (ours, eager)]
    told = "; from float64 the first gradients of ours differ by {:.1e}, of eager's by {:.1e}".format(*errors)
    return replace(result, verdict=result.verdict + told)


def trained_by(engine: str, values: dict[str, Any], steps: int, dtype: torch.dtype = torch.float32) -> Trained:
    """The steps of one engine. ConfigError: the type cannot be built."""
    from aottrain.config.reading import read_config, read_model
    from aottrain.errors import ConfigError
    from aottrain.tasks.building.build import build_job

    config, mistakes = read_config({**values, "engine": {"name": engine}})
    config, wrong = read_model(config)
    if mistakes or wrong:
        raise ConfigError([str(mistake) for mistake in (*mistakes, *wrong)])
    job = build_job(config)
    job.module.to(dtype)
    # Torch's own for both: what is compared is the step's forward and backward.
    optimizer = torch.optim.AdamW(job.module.parameters(), lr=1e-3)
    losses: list[float] = []
    gradients: dict[str, torch.Tensor | None] = {}
    for step in range(1, steps + 1):
        losses.append(float(job.step([as_dtype(batch, dtype) for batch in job.batches.at(step)]).loss))
        if step == 1:
            named = job.module.named_parameters()
            gradients = {key: None if value.grad is None else value.grad.clone() for key, value in named}
        optimizer.step()
        optimizer.zero_grad()
    report = job.step.report
    reasons = () if report is None else tuple(dict.fromkeys(fallback.reason for fallback in report.fallbacks))
    kernels = 0 if report is None else sum(len(graph.kernels) for graph in report.graphs)
    return Trained(tuple(losses), gradients, reasons, kernels)


def as_dtype(batch: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(item.to(dtype) if item.is_floating_point() else item for item in batch)


def judged(task: str, name: str, ours: Trained, eager: Trained) -> Result:
    """Whether both trained alike, and what of it ran eagerly."""
    pairs = zip(ours.losses, eager.losses, strict=True)
    loss_error = max(_or_infinite(abs(one - other) / max(abs(other), 1e-12)) for one, other in pairs)
    gradient_error, where = worst_gradient(ours.gradients, eager.gradients)
    verdict = "partly eager" if ours.reasons else "equal"
    if not gradient_error <= GRADIENT_TOLERANCE:
        verdict = f"gradient of {where} differs from eager's by {gradient_error:.1e}"
    elif not loss_error <= LOSS_TOLERANCE:
        verdict = f"losses differ from eager's by {loss_error:.1e}"
    figures = {"error": max(loss_error, gradient_error), "num_kernels": ours.num_kernels}
    return Result(task, name, verdict, ours.reasons, tuple(round(loss, 4) for loss in ours.losses), **figures)


def worst_gradient(ours: Mapping[str, Any], eager: Mapping[str, Any]) -> tuple[float, str]:
    """The largest difference of a gradient, of its own largest number or of a thousandth of the largest of any, for
    many that are 0 are noise; infinite where one side alone has none. And its name."""
    filled = [value for value in eager.values() if value is not None and value.numel()]
    largest = max((float(value.abs().max()) for value in filled), default=0.0)
    worst, where = 0.0, ""
    for name, value in eager.items():
        other = ours[name]
        if value is None or other is None or not value.numel():
            error = 0.0 if (value is None) == (other is None) else math.inf
        else:
            error = _or_infinite(float((value - other).abs().max()) / (float(value.abs().max()) + 1e-3 * largest))
        if error > worst:
            worst, where = error, name
    return worst, where


def _or_infinite(error: float) -> float:
    """What is not a number is smaller than nothing and larger than nothing."""
    return math.inf if math.isnan(error) else error


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1].strip()


def _work(pipe: Any, *task: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        pipe.send(train(*task))
    except BaseException as error:  # which is the result
        pipe.send(Result(*task[:2], f"{type(error).__name__}: {_last_line(str(error))}"))


def load_once() -> None:
    """What every run imports, here instead of in each process that is forked from this one."""
    import aottrain.compiler.pipeline
    import aottrain.tasks.building.build  # noqa: F401
    from recipes import hf

    for task in TYPES:
        hf.Options(type=TYPES[task].split()[0]).check()


def train_apart(task: str, name: str, steps: int, kernel: str) -> Result:
    """The same in a process of its own: what one model leaves behind, or takes down with it, is no other's matter."""
    start = time.perf_counter()
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_work, args=(child, task, name, steps, kernel))
    process.start()
    child.close()
    try:
        result = parent.recv() if parent.poll(TIMEOUT_S) else Result(task, name, f"no result after {TIMEOUT_S} s")
    except EOFError:
        process.join()
        result = Result(task, name, f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return Result(**{**asdict(result), "seconds": round(time.perf_counter() - start, 1)})


def chosen(names: Sequence[str]) -> list[tuple[str, str]]:
    """(task, type) of the names; of all where none is given. Raises ValueError for one that is not there."""
    task_of = {name: task for task, text in TYPES.items() for name in text.split()}
    missing = [name for name in names if name not in task_of]
    if missing:
        raise ValueError(f"{missing[0]} is not in the table; there are {', '.join(sorted(task_of))}")
    return [(task_of[name], name) for name in names or task_of]


def rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """Of each task a row of the table."""
    for task in TYPES:
        own = [result for result in results if result.task == task]
        if not own:
            continue
        equal = [result.name for result in own if result.verdict == "equal"]
        partly = [result for result in own if result.verdict == "partly eager"]
        rest = [result for result in own if result.verdict not in ("equal", "partly eager")]
        by_reason: dict[str, list[str]] = {}
        for result in partly:
            by_reason.setdefault("; ".join(result.reasons) or "not said", []).append(result.name)
        told = "<br>".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
        wrong = "<br>".join(f"{result.name}: {result.verdict}" for result in rest)
        yield task, f"{len(equal)}: {', '.join(equal)}", f"{len(partly)}" + f": {told}" * bool(told), wrong or "0"


def describe(result: Result) -> str:
    line = f"{result.task:<8} {result.name:<24}{result.seconds:6.1f} s"
    if result.losses:
        falls = "" if result.falls else " (does not fall)"
        line += f" loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}{falls}"
        line += f", error {result.error:.1e}, {result.num_kernels} kernels:"
    reasons = "".join(f"\n    ran eagerly: {reason}" for reason in result.reasons)
    return f"{line} {result.verdict}{reasons}"


def read(path: Path | None) -> list[Result]:
    if path is None or not path.is_file():
        return []

    def result(line: str) -> Result:
        values = json.loads(line)
        return Result(**{**values, "reasons": tuple(values["reasons"]), "losses": tuple(values["losses"])})

    return [result(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model types; default: all of the table")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kernel", choices=("auto", "cpp", "aten"), default="auto")
    parser.add_argument("--results", type=Path, help="a file of results to add to")
    parser.add_argument("--record", action="store_true", help="keep the table for scripts/README.md")
    options = parser.parse_args()
    try:
        asked = chosen(options.names)
    except ValueError as error:
        print(f"hf_models.py: {error}", file=sys.stderr)
        return 2
    try:
        import transformers
    except ModuleNotFoundError:
        print("hf_models.py needs the package transformers: pip install 'aottrain[hf]'", file=sys.stderr)
        return 2
    load_once()
    results = [result for result in read(options.results) if (result.task, result.name) in asked]
    for task, name in asked:
        if (task, name) in {(result.task, result.name) for result in results}:
            continue
        results.append(train_apart(task, name, options.steps, options.kernel))
        print(describe(results[-1]), flush=True)
        if options.results is not None:
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
    good = sum(result.verdict in ("equal", "partly eager") for result in results)
    print(f"{len(results)} model types, {options.steps} steps each: {good} equal to eager's in every step")
    if options.record:
        from scripts import figures

        figures.record("hf_models", HEADER, list(rows(results)), f"transformers {transformers.__version__}")
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main())
