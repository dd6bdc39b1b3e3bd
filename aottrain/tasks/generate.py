"""task=generate: text that the model of a run writes, printed and in sample.txt."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from aottrain.config.extensions.recipes import program_errors, recipe_of, writes_text
from aottrain.config.extensions.targets import could_take
from aottrain.config.run import RunConfig
from aottrain.data.batches import Codec
from aottrain.errors import ConfigError
from aottrain.explain.report import CompileReport
from aottrain.tasks.building.build import build_batches, chosen_device, load_kernel
from aottrain.tasks.building.loading import able_recipes, load_weights, newest_of_run
from aottrain.tasks.building.model import build_model, model_options
from aottrain.tasks.building.samples import unknown_token, write_sample, written
from aottrain.tasks.measuring.determinism import as_deterministic_as_asked, decisions_asked
from aottrain.trainer.reliability.signals import interruptible


@interruptible()
def run(config: RunConfig) -> int:
    """Write on from `generate.prompt` by the model of the newest checkpoint of `generate.run`.

    ConfigError: the recipe writes no text, its tokens stand for none that is known, or the prompt has others than the
    model. ResumeError: there is no checkpoint, or it is of another model. OutputError: sample.txt cannot be written.
    """
    asked = config.generate
    recipe, options = recipe_of(config.recipe), model_options(config)
    limits = {} if asked.top_k is None else {"top_k": asked.top_k}
    with program_errors(config), as_deterministic_as_asked(config):
        _check_writes(config, recipe, limits)
        loaded = newest_of_run("generate.run", asked.run)
        device = chosen_device(config)
        codec = build_batches(config, recipe, options, device).codec
        if codec is None:
            text = "nothing says which text its tokens stand for; give data.tokenizer, the path of a tokenizer.json"
            raise ConfigError(f"data={config.data.name}: {text}")
        prompt = _prompt(config, codec)
        model = build_model(recipe, options, config)
        load_weights(model, loaded, "generate.weights", config.generate.weights)
        seed = config.seed if asked.seed is None else asked.seed
        more = {"precision": config.trainer.precision, **limits}
        writer, report = _writer(config, model.to(device), getattr(options, "context", None))
        text = written(recipe, writer, codec, prompt, asked.length, asked.temperature, seed, **more)
    path = write_sample(Path(config.output_dir), text)
    by = "eager" if report is None or report.num_eager_calls or not report.graphs else "aot"
    print(f"after step {loaded.step} of {asked.run}, run by {by}:\n---\n{text}\n---\n{path}", flush=True)
    for fallback in report.fallbacks if report else ():
        print(f"runs eagerly: {fallback.reason} {fallback.source}".rstrip(), flush=True)
    return 0


def _writer(config: RunConfig, model: nn.Module, longest: int | None) -> tuple[nn.Module, CompileReport | None]:
    """What writes: under engine aot programs of the model's forward alone, for a few lengths; else the model itself.

    longest: the most tokens that it reads, where it says so."""
    if config.engine.name != "aot":
        return model, None
    import aottrain  # the compiler, which the other engines do without
    from aottrain.tasks.building.writing import FewLengths

    def compiled(module: nn.Module) -> Any:
        return aottrain.compile(
            module,
            capture="trace",
            kernel=load_kernel(config),
            on_unsupported=config.engine.on_unsupported,
            decisions=decisions_asked(config),
        )

    writer = FewLengths(model, compiled, longest)
    return writer, writer.report


def _check_writes(config: RunConfig, recipe: ModuleType, limits: dict[str, int]) -> None:
    """ConfigError: the recipe has no `generate`, or none with these keywords, or its model writes no text."""
    title = f"recipe={config.recipe.title}"
    if not hasattr(recipe, "generate"):
        lacks = "has no generate(model, prompt, num_tokens, temperature, generator), which task=generate needs"
        raise ConfigError(f"{title}: {lacks}; there is {able_recipes('generate')}")
    if not writes_text(recipe, model_options(config)):
        raise ConfigError(f"{title}: with the options of that run (recipe.model) it writes no text")
    if limits and not could_take(recipe.generate, None, b"", 1, 1.0, torch.Generator(), **limits):
        raise ConfigError(f"generate.top_k={config.generate.top_k}: the generate of {title} takes no top_k; use null")


def _prompt(config: RunConfig, codec: Codec) -> bytes | list[int]:
    """The prompt's tokens. ConfigError: there are none, or the model lacks one."""
    tokens, options = codec.encode(config.generate.prompt), model_options(config)
    if not tokens:
        raise ConfigError("generate.prompt: has no token")
    if (token := unknown_token(tokens, options)) is not None:
        text = f"has token {token}, but the model's tokens are below recipe.model.vocab_size={options.vocab_size}"
        raise ConfigError(f"generate.prompt={config.generate.prompt!r}: {text}")
    return tokens
