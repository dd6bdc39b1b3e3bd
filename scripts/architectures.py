"""Small models of the `transformers` package, made from configurations: two training steps by eager and by aottrain.

    pip install transformers
    python scripts/architectures.py                       # every architecture, both front ends, budgets 1.0 and 0.2
    python scripts/architectures.py bert vit --frontends trace --budgets 0.5
    python scripts/architectures.py --dropout             # dropout on, rng="eager": eager's own masks
    python scripts/architectures.py --kernel cpp          # by generated kernels however small

Each step's outputs, gradients and buffers must be eager's, bit for bit; by generated kernels, which add in another
order, within a bound, or as far as eager's own numbers move where parameters are rounded another way. WRONG are other
numbers, a gradient that is None on one side only, and an error that eager does not raise. Exit code 1 where anything is
wrong, 2 where the input is.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import multiprocessing
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from architecture_table import GROUPS, OWN, SMALL
from torch import Tensor, nn

import aottrain
from aottrain.compat import tree_flatten
from aottrain.ir.settings.choices import CAPTURES

NUM_STEPS = 2
TIMEOUT_S = 900
BATCH, LENGTH, TARGET_LENGTH = 2, 16, 12
# Bitwise equal is the rule. "close" is what is within this of the tensor's largest number, or within a tenth of it of
# 0: where TorchDynamo breaks a graph, gradients from both sides of the break are summed in another order.
TOLERANCE = 1e-5
NEAR_ZERO = 0.1
# By generated kernels a number differs by some roundings of 2^-24 in each of some hundred ops of a model that it passes
# through twice, forward and backward, and the second step begins from what the first one gave: about 1e3 of them.
KERNEL_TOLERANCE = 1e-4
# Some models make more of a rounding (a batch norm over two numbers gives their signs): eager itself is then as far
# from what it gives where every parameter is another rounding of its number.
ROUNDING = 2.0**-24


@dataclass
class Result:
    """What became of one architecture: a verdict for each front end and budget, the reasons of what ran eagerly, and
    the number of generated kernels in all."""

    name: str
    verdicts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    num_kernels: int = 0

    @property
    def kind(self) -> str:
        kinds = {verdict.split(":")[0] for verdict in self.verdicts.values()}
        return next((kind for kind in KINDS if kind in kinds), "equal")


# From worst to best.
KINDS = ("WRONG", "not built", "refused", "partly eager", "close", "equal")


def make_config(name: str, dropout: bool) -> Any:
    import transformers

    defaults = transformers.AutoConfig.for_model(name).to_dict()
    config = transformers.AutoConfig.for_model(name, **_sizes(name, defaults))
    config.decoder_start_token_id = 2  # not all that read it have it
    config.problem_type = "single_label_classification"  # else the first call finds out, and writes it down here
    parts = [config, *(value for value in vars(config).values() if isinstance(value, transformers.PreTrainedConfig))]
    for part in parts:
        for key, value in list(vars(part).items()):
            # Whole layers are left out by a draw in Python, which no program can hold.
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.1 if dropout and "layerdrop" not in key else 0.0)
            elif key in ("mask_time_prob", "mask_feature_prob") and not dropout:
                setattr(part, key, 0.0)
    return config


def _sizes(name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """The small sizes that a configuration takes: those of its names whose defaults are numbers, or lists, too."""

    def fits(value: Any, small: Any) -> bool:
        return value is None or isinstance(value, (list, tuple)) == isinstance(small, tuple)

    sizes = {key: small for key, small in SMALL.items() if key in defaults and fits(defaults[key], small)}
    parts = {
        key: _sizes(defaults[key]["model_type"], defaults[key])
        for key in ("text_config", "vision_config")
        if key in defaults
    }
    return {**sizes, **parts, **OWN.get(name, {})}


def build(group: str, name: str, dropout: bool = False) -> nn.Module:
    """A model in training mode whose parameters depend on nothing but the seed; none is all zeros or all ones."""
    import transformers

    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"AutoModelFor{group}").from_config(make_config(name, dropout))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.train()


def make_batch(model: Any, group: str, seed: int) -> dict[str, Tensor]:
    """What the model's forward takes, of random numbers."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    vision, text = getattr(config, "vision_config", config), getattr(config, "text_config", config)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, min(getattr(text, "vocab_size", 99), 99), (BATCH, length), generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator)

    size = getattr(vision, "image_size", None) or 32
    size = size if isinstance(size, int) else size[0]
    image = (3, size, size)
    takes = inspect.signature(type(model).forward).parameters
    batch: dict[str, Tensor] = {}
    if group in ("CausalLM", "MaskedLM", "TokenClassification", "Seq2SeqLM", "ZeroShotImageClassification"):
        batch["input_ids"] = tokens(LENGTH)
        batch["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        batch["attention_mask"][1, -3:] = 0
    if group in ("ImageClassification", "ObjectDetection", "ZeroShotImageClassification"):
        batch["pixel_values"] = normal(*image)
    if group == "PreTraining":
        frames, tubelet = getattr(config, "num_frames", 0), getattr(config, "tubelet_size", 1)
        patches = (size // config.patch_size) ** 2 * (frames // tubelet or 1)
        batch["pixel_values"] = normal(frames, *image) if frames else normal(*image)
        batch["noise"] = normal(patches)
        batch["bool_masked_pos"] = (torch.arange(patches) % 4 > 0).expand(BATCH, -1).contiguous()
    if group in ("AudioClassification", "SpeechSeq2Seq"):
        batch["input_values"] = normal(32, 16) if "spectrogram" in config.model_type else normal(800)
        features = (16, 128) if config.model_type == "whisper" else (32, 16)
        batch["input_features"] = normal(*features)
    if group in ("CausalLM", "MaskedLM"):
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    elif group in ("Seq2SeqLM", "SpeechSeq2Seq"):
        batch["labels"] = tokens(TARGET_LENGTH)
    elif group == "TokenClassification":
        batch["labels"] = torch.randint(config.num_labels, (BATCH, LENGTH), generator=generator)
    elif group in ("ImageClassification", "AudioClassification"):
        batch["labels"] = torch.randint(config.num_labels, (BATCH,), generator=generator)
    if group == "ZeroShotImageClassification":
        return {**batch, "return_loss": True}  # type: ignore[dict-item]
    return {key: value for key, value in batch.items() if key in takes}


def loss_of(output: Any) -> Tensor:
    """The model's own loss; of one that gives none, the mean square of all that it gives."""
    if output.get("loss") is not None:
        return output["loss"]
    parts = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([part.square().mean() for part in parts]).sum()


def train(model: Any, group: str, call: Any) -> list[dict[str, Tensor | None]]:
    """What each step shows: outputs, gradients and buffers by name. `call` is the compiled model, None for eager."""
    seen = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(NUM_STEPS):
        batch = make_batch(model, group, seed=step)
        torch.manual_seed(step)
        random.seed(step)
        numpy.random.seed(step)
        optimizer.zero_grad()
        output = (call or model)(**batch)
        loss = loss_of(output)
        loss.backward()
        shown: dict[str, Tensor | None] = {"loss": loss}
        shown |= {f"output {i}": leaf for i, leaf in enumerate(tree_flatten(output)[0]) if isinstance(leaf, Tensor)}
        shown |= {f"gradient of {name}": value.grad for name, value in model.named_parameters()}
        shown |= {f"buffer {name}": value for name, value in model.named_buffers()}
        seen.append({key: None if value is None else value.detach().clone() for key, value in shown.items()})
        optimizer.step()
    return seen


def compare(eager: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]], tolerance: float = TOLERANCE) -> str:
    """ "equal", "close: how far" or "WRONG: what first"."""
    worst, where = 0.0, ""
    for step, (one, other) in enumerate(zip(eager, got, strict=True)):
        if one.keys() != other.keys():
            return f"WRONG: step {step} shows other values: {sorted(one.keys() ^ other.keys())[:3]}"
        for key, value in one.items():
            error = _distance(value, other[key])
            if isinstance(error, str):
                return f"WRONG: {key} of step {step} {error}"
            if error > worst:
                worst, where = error, f"{key} of step {step}"
    if worst == 0:
        return "equal"
    return f"{'close' if worst <= tolerance else 'WRONG'}: {where} by {worst:.1e}"


def rounding(model: nn.Module, group: str, expected: Sequence[dict[str, Any]]) -> float:
    """The farthest that eager's numbers move where each parameter is rounded another way, three times."""
    distances = [0.0]
    for seed in range(3):
        moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1 + ROUNDING * torch.randn(parameter.shape, generator=generator))
        steps = zip(expected, train(moved, group, None), strict=True)
        found = [_distance(value, step[key]) for one, step in steps for key, value in one.items()]
        distances += [distance for distance in found if isinstance(distance, float)]
    return max(distances)


def _distance(one: Tensor | None, other: Tensor | None) -> float | str:
    """0 where bitwise equal, else relative to the largest number; or words for what is no matter of distance."""
    if one is None or other is None:
        return 0.0 if one is other else f"is {'None' if other is None else 'not None'}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"is {tuple(other.shape)} {other.dtype} and not {tuple(one.shape)} {one.dtype}"
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    same = one == other
    if one.is_floating_point():  # 0 is not -0, and NaN is NaN
        same = same & (one.signbit() == other.signbit()) | one.isnan() & other.isnan()
    if same.all():
        return 0.0
    finite = one.isfinite() & other.isfinite()
    if not one.is_floating_point() or not same[~finite].all():
        return "differs"
    distance, scale = (one - other)[finite].abs().max(), one[finite].abs().max()
    return max(float(distance / (scale + NEAR_ZERO)), 1e-16)


def check(
    group: str, name: str, frontends: Sequence[str], budgets: Sequence[float], dropout: bool, kernel: str = "aten"
) -> Result:
    """One architecture: eager, then each front end at each budget."""
    result, start = Result(name), time.perf_counter()
    try:
        model = build(group, name, dropout)
        expected = train(copy.deepcopy(model), group, None)
        tolerance = TOLERANCE if kernel == "aten" else max(KERNEL_TOLERANCE, rounding(model, group, expected))
    except Exception as error:
        result.verdicts["eager"] = f"not built: {_line(error)}"
        return result
    for frontend in frontends:
        for budget in budgets:
            torch.compiler.reset()
            trained = copy.deepcopy(model)
            rng = "eager" if dropout else "philox"
            compiled = aottrain.compile(trained, capture=frontend, budget=budget, rng=rng, kernel=kernel)
            try:
                verdict = compare(expected, train(trained, group, compiled), tolerance)
            except Exception as error:
                verdict = f"WRONG: {_line(error)}"
            report = compiled.report
            result.num_kernels += sum(len(graph.kernels) for graph in report.graphs)
            result.reasons.setdefault(frontend, {}).update(
                {fallback.reason: fallback.count for fallback in report.fallbacks}
            )
            if report.fallbacks and not verdict.startswith("WRONG"):
                verdict = "partly eager" if report.graphs else "refused"
            result.verdicts[f"{frontend} {budget:g}"] = verdict
    result.seconds = time.perf_counter() - start
    return result


def _line(error: BaseException) -> str:
    """An error in one line, with the place in this package or in the model that it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__} at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}: {text[:160]}"


def _work(pipe: Any, *task: Any) -> None:
    warnings.simplefilter("ignore")
    pipe.send(check(*task))


def check_apart(group: str, name: str, *task: Any) -> Result:
    """The same in a process of its own: what one model leaves behind, or takes down with it, is no other's matter."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_work, args=(child, group, name, *task))
    process.start()
    child.close()
    try:
        if parent.poll(TIMEOUT_S):
            return parent.recv()
        reason = f"no result after {TIMEOUT_S} s"
    except EOFError:
        process.join()
        reason = f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return Result(name, {"process": f"WRONG: {reason}"})


def chosen(names: Sequence[str]) -> list[tuple[str, str]]:
    """(group, model type) of the names; of all where none is given. Raises ValueError for one that is not there."""
    group_of = {name: group for group, text in GROUPS.items() for name in text.split()}
    missing = [name for name in names if name not in group_of]
    if missing:
        raise ValueError(f"{missing[0]} is not in the table; there are {', '.join(sorted(group_of))}")
    return [(group_of[name], name) for name in names or group_of]


def describe(result: Result) -> Iterator[str]:
    """A line for the architecture, and one for each verdict or reason that wants an explanation."""
    kernels = f", {result.num_kernels} generated kernels" if result.num_kernels else ""
    yield f"{result.name:<30} {result.kind:<13} {result.seconds:6.1f} s{kernels}"
    for where, verdict in result.verdicts.items():
        if ":" in verdict:
            yield f"    {where}: {verdict}"
    for frontend, reasons in result.reasons.items():
        yield from (f"    {frontend} ran eagerly, {count} times: {reason}" for reason, count in sorted(reasons.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model types of transformers; default: all")
    parser.add_argument("--frontends", nargs="+", choices=CAPTURES, default=CAPTURES)
    parser.add_argument("--budgets", nargs="+", type=float, default=[1.0, 0.2])
    parser.add_argument("--dropout", action="store_true", help='dropout of 0.1 everywhere, rng="eager"')
    parser.add_argument("--kernel", choices=("aten", "cpp"), default="aten", help="aten is compared bit for bit")
    options = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print("architectures.py needs the package transformers: pip install transformers", file=sys.stderr)
        return 2
    try:
        architectures = chosen(options.names)
    except ValueError as error:
        print(f"architectures.py: {error}", file=sys.stderr)
        return 2
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    results = []
    for group, name in architectures:
        task = options.frontends, options.budgets, options.dropout, options.kernel
        results.append(check_apart(group, name, *task))
        print("\n".join(describe(results[-1])), flush=True)
    counts = {kind: sum(result.kind == kind for result in results) for kind in reversed(KINDS)}
    runs = [verdict for result in results for verdict in result.verdicts.values()]
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    print(f"{len(results)} architectures, kernel={options.kernel}: {kinds}")
    num_equal, num_close = (sum(verdict.split(":")[0] == kind for verdict in runs) for kind in ("equal", "close"))
    print(f"{len(runs)} runs, {num_equal} of them equal with nothing run eagerly, and {num_close} close")
    return 1 if counts["WRONG"] or counts["not built"] else 0


if __name__ == "__main__":
    sys.exit(main())
