"""Which run a checkpoint is of: the settings that must be the same where it goes on, and those that may be others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aottrain.config.choices import BF16_WEIGHTS, RECIPE_PATHS
from aottrain.config.run import RunConfig
from aottrain.config.schema import suggest
from aottrain.errors import ResumeError

# With another one of these an optimizer's state is of no use, or of other parameters.
_REGROUPING = (
    "optimizer.name", "optimizer.target", "optimizer.lr_factors", "optimizer.layer_decay",
    "optimizer.decay_norms_and_biases", "trainer.freeze",
)  # fmt: skip
# What an optimizer's groups call a setting, where that is not its own name. The rate is set at each step.
_IN_GROUPS = {"beta1": "betas", "beta2": "betas"}


def identity(config: RunConfig, data_fingerprint: str) -> dict[str, Any]:
    """What must be the same when a run goes on, as {"optimizer.lr": 0.002, ...}.

    Not in it: how long, where and how fast (steps, output, engine, partition, kernels, logging), where data, tokenizer
    and the folder of recipe=hf lie (their content counts), what an adapter began with and the schedule's length, which
    a checkpoint brings along.
    """
    flat: dict[str, Any] = {"seed": config.seed, "data.fingerprint": data_fingerprint}
    flat["trainer.accumulate"] = config.trainer.accumulate
    for key in ("precision", "freeze", "ema"):
        flat[f"trainer.{key}"] = getattr(config.trainer, key)
    for section in ("recipe", "adapter", "optimizer", "lr_schedule", "data"):
        _flatten(section, asdict(getattr(config, section)), flat)
    for key in ("adapter.base", "data.path", "data.tokenizer", "lr_schedule.total_steps", "optimizer.kernel"):
        del flat[key]
    return _without_paths(flat)


def _without_paths(flat: Mapping[str, Any]) -> dict[str, Any]:
    paths = RECIPE_PATHS.get(str(flat.get("recipe.name")), ())
    return {key: value for key, value in flat.items() if key not in paths}


def _flatten(prefix: str, values: Mapping[str, Any], flat: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _flatten(f"{prefix}.{key}", value, flat)
        else:
            flat[f"{prefix}.{key}"] = value


@dataclass(frozen=True)
class Changes:
    """Settings in which a run goes on otherwise, as `resume_override` allows."""

    keys: frozenset[str] = frozenset()
    lines: tuple[str, ...] = ()
    """What to say about them."""
    optimizer_begins_anew: bool = False
    """Without the checkpoint's state."""

    @property
    def of_groups(self) -> set[str]:
        """What the groups of the optimizer call the settings that have changed."""
        names = [key.rpartition(".")[2] for key in self.keys if key.startswith("optimizer.")]
        return {_IN_GROUPS.get(name, name) for name in names} - {"lr"}


def check_identity(
    saved: Mapping[str, Any], current: Mapping[str, Any], path: Path, override: Sequence[str] = ()
) -> Changes:
    """What differs between the checkpoint's settings and this run's, where `override` names all of it.

    override: keys, or sections. A setting that is newer than the checkpoint had its default there. ResumeError lists
    every other setting that differs, and what of `override` names none. Another recipe's options are no settings.
    """
    saved = _without_paths(saved)
    before = {**identity(RunConfig(), ""), **saved}
    known = saved.keys() | current.keys()
    named = {key for key in known if any(key == name or key.startswith(f"{name}.") for name in override)}
    if unknown := [name for name in override if not any(key == name or key.startswith(f"{name}.") for key in known)]:
        why = "names no setting that a checkpoint is compared by"
        raise ResumeError("\n".join(f"resume_override={name}: {why}{suggest(name, known)}" for name in unknown))
    differing = [key for key in sorted(known) if before.get(key) != current.get(key)]
    pairs = {key: (before.get(key), current.get(key)) for key in differing}
    lines = {key: f"{key}: {then!r} in the checkpoint, {now!r} in this run" for key, (then, now) in pairs.items()}
    if refused := [key for key in differing if key not in named]:
        is_another_recipe = not {"recipe.name", "recipe.target"}.isdisjoint(refused)
        of_recipe = {key: "recipe" for key in refused if is_another_recipe and key.startswith("recipe.")}
        own = ",".join(dict.fromkeys([*override, *(of_recipe.get(key, key) for key in refused)]))
        title = f"{path} is of another run; to go on all the same write 'resume_override=[{own}]'; it differs in"
        shown = [key for key in refused if key not in of_recipe or not key.startswith("recipe.model.")]
        raise ResumeError("\n".join([title, *(f"  {lines[key]}" for key in shown)]))
    begins_anew = not set(differing).isdisjoint(_REGROUPING) or BF16_WEIGHTS in pairs.get("trainer.precision", ())
    said = [f"resume_override: {lines[key]}" for key in differing]
    anew = ["resume_override: the optimizer begins anew, without the checkpoint's state"]
    return Changes(frozenset(differing), tuple(said + (anew if begins_anew else [])), begins_anew)
