"""The optimizer, its learning rate as a function of the step, and the gradient norm."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aottrain.compat import tree_flatten
from aottrain.config.choices import BF16_WEIGHTS, PRECISIONS
from aottrain.config.extensions.own_code import brief, error_text
from aottrain.config.extensions.targets import could_take, load_target, target_file
from aottrain.errors import ConfigError, RecipeError
from aottrain.metrics.memory import distinct_bytes
from aottrain.metrics.preserve import preserved_rng
from aottrain.ops.optimizers.lion import Lion, reads_found_inf
from aottrain.ops.optimizers.masters import HALVES, MASTER, MasterWeights, wide_bytes
from aottrain.ops.optimizers.muon import BY_MUON, Muon, matrices_apart
from aottrain.step import ClipsItself
from aottrain.trainer.weights.groups import FACTOR, parameter_groups

if TYPE_CHECKING:
    from aottrain.config.run import LrScheduleConfig, OptimizerConfig


PLAIN = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": Lion}  # by the names in the configuration


def build_optimizer(model: nn.Module, config: OptimizerConfig, precision: str = PRECISIONS[0]) -> torch.optim.Optimizer:
    """Torch's AdamW or SGD, fused: no temporaries of the parameters' size, one pass over memory; or Lion; or the class
    that `optimizer.target` names. ConfigError: that class refuses the model's parameters or its arguments; or see
    `parameter_groups`. precision: bf16_weights updates float32 copies of what is in half precision."""
    groups = _groups(model, config)
    if precision == BF16_WEIGHTS:
        return MasterWeights(partial(_of_groups, config), groups)
    return _of_groups(config, groups)


def _groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    groups = parameter_groups(model, config)
    return matrices_apart(model, groups) if _is_muon(config) else groups


def _is_muon(config: OptimizerConfig) -> bool:
    return config.target is not None and _of_target(config)[0] is Muon


def _of_groups(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.target is None:
        return PLAIN[config.name](groups, **hyperparameters(config))
    optimizer_class, arguments = _of_target(config)
    if "weight_decay" not in arguments:
        groups = _without_decay(groups)
    try:
        return optimizer_class(groups, **arguments)
    except Exception as error:
        file = target_file(config.target)
        text = error_text(error, [file] if file else []) or brief(error)
        raise ConfigError(f"optimizer.target={config.target}: cannot be built: {text}") from error


def _without_decay(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of one rate together."""
    by_rate: dict[float, list[nn.Parameter]] = {}
    for group in groups:
        by_rate.setdefault(group.get(FACTOR, 1.0), []).extend(group["params"])
    return [{"params": params, **({} if factor == 1 else {FACTOR: factor})} for factor, params in by_rate.items()]


def check_target(config: OptimizerConfig) -> None:
    """ConfigError: `optimizer.target` is no optimizer, or does not take what it is given."""
    _of_target(config)


def _of_target(config: OptimizerConfig) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The class that `optimizer.target` names, and its arguments behind the parameters. Learning rate and decay are
    given where it takes them; each parameter group has its rate in any case."""
    options, given = config.options or {}, f"optimizer.target={config.target}"
    if wrong := [name for name in ("lr", "weight_decay") if name in options]:
        raise ConfigError([f"optimizer.options.{name}: write optimizer.{name}" for name in wrong])
    loaded = load_target("optimizer", str(config.target), options)
    own = {name: value for name, value in (("lr", config.lr), ("weight_decay", config.weight_decay))}
    choices = [own, *({name: value} for name, value in own.items()), {}]
    taken = next(each for each in choices if each == {} or could_take(loaded, None, **options, **each))
    if "weight_decay" not in taken and config.weight_decay:
        raise ConfigError(f"optimizer.weight_decay={config.weight_decay}: {given} takes no weight_decay; give 0")
    return loaded, {**options, **taken}


def hyperparameters(config: OptimizerConfig) -> dict[str, Any]:
    """The arguments of the constructor of one of our optimizers, behind its parameters.

    `fused` is also what torch does after it has loaded the groups of a checkpoint that another optimizer wrote.
    """
    if config.name == "sgd":
        return {"lr": config.lr, "momentum": config.momentum, "fused": True}
    more = {"eps": config.eps, "fused": True} if config.name == "adamw" else {}
    return {"lr": config.lr, "betas": (config.beta1, config.beta2), **more}


# torch's optimizers count their steps in a float32 tensor.
_STEP_BYTES = 4


def optimizer_state_bytes(model: nn.Module, config: OptimizerConfig, precision: str = PRECISIONS[0]) -> int:
    """What the optimizer will hold for as long as it lives, known before its first step: moments, and the number of
    steps, of which AdamW has one for each parameter. What another class holds is seen at steps that are tried."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_bytes, masters = sum(parameter.numel() * parameter.element_size() for parameter in trained), 0
    if precision == BF16_WEIGHTS:
        num_bytes, masters = wide_bytes(trained), wide_bytes(each for each in trained if each.dtype in HALVES)
    if _is_muon(config):
        return masters + _state_bytes_of_muon(_groups(model, config), wide=precision == BF16_WEIGHTS)
    if config.target is not None:
        copies = [_without_memory(each) if masters and each.dtype in HALVES else each for each in trained]
        return masters + _state_bytes_of_target(copies, config)
    if config.name == "lion":
        return masters + num_bytes
    if config.name == "adamw":
        return masters + 2 * num_bytes + _STEP_BYTES * len(trained)
    return masters + (num_bytes if config.momentum > 0 else 0)


def _state_bytes_of_muon(groups: Sequence[Mapping[str, Any]], wide: bool) -> int:
    """A mean of gradients for each matrix of Muon's; AdamW's state for each other one. wide: of float32 copies."""
    total = 0
    for group in groups:
        parameters = group["params"]
        num_bytes = wide_bytes(parameters) if wide else sum(parameter.nbytes for parameter in parameters)
        total += num_bytes if group[BY_MUON] else 2 * num_bytes + _STEP_BYTES * len(parameters)
    return total


def _without_memory(parameter: nn.Parameter) -> Tensor:
    """The float32 copy of one in half precision."""
    return torch.empty_like(parameter, dtype=torch.float32, device="meta")


def _state_bytes_of_target(trained: Sequence[Tensor], config: OptimizerConfig) -> int:
    """By a step on parameters without memory; where the class reads numbers, by one on a parameter of each shape.

    0 where it raises there, too: its first step will say so."""
    try:
        return _state_bytes_after_a_step(trained, config, torch.device("meta"))
    except Exception:
        pass
    counts = Counter((parameter.shape, parameter.dtype, parameter.device) for parameter in trained)
    total = 0
    for (shape, dtype, device), count in counts.items():
        real = torch.device("cpu") if device.type == "meta" else device
        try:
            one = nn.Parameter(torch.ones(shape, dtype=dtype, device=real))
            total += count * _state_bytes_after_a_step([one], config, real)
        except Exception:
            return 0
    return total


def _state_bytes_after_a_step(parameters: Sequence[Tensor], config: OptimizerConfig, device: torch.device) -> int:
    twins = nn.ParameterList(nn.Parameter(torch.ones_like(parameter, device=device)) for parameter in parameters)
    with preserved_rng():
        optimizer = build_optimizer(twins, dataclasses.replace(config, lr_factors=(), layer_decay=None))
        set_learning_rate(optimizer, config.lr)
        for twin in twins:
            twin.grad = torch.ones_like(twin)
        optimizer.step()
    held, _ = tree_flatten([list(optimizer.state[twin].values()) for twin in twins if twin in optimizer.state])
    return distinct_bytes([value for value in held if isinstance(value, torch.Tensor)])


def learning_rate(step: int, peak: float, schedule: LrScheduleConfig, total_steps: int) -> float:
    """The rate of step 1, 2, ...: a straight rise over `warmup_steps`, then a curve down to `min_lr_ratio * peak`: a
    cosine, a straight line, or (wsd) the peak and a straight line over the last `decay_fraction`.

    "constant" stays at the peak. Steps after `total_steps` keep its rate: where a run stops changes no step before it.
    A target's factor is multiplied by the rise. RecipeError: it is none.
    """
    if schedule.target is not None:
        return peak * _factor_of_target(step, schedule, total_steps) * min(1.0, step / max(1, schedule.warmup_steps))
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    done = min(1.0, (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps))
    if schedule.name == "cosine":
        above_min = 0.5 * (1 + math.cos(math.pi * done))
    else:
        above_min = min(1.0, (1 - done) / (schedule.decay_fraction if schedule.name == "wsd" else 1.0))
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * above_min)


def _factor_of_target(step: int, schedule: LrScheduleConfig, total_steps: int) -> float:
    target, options = str(schedule.target), schedule.options or {}
    factor = load_target("lr_schedule", target, options)(step, total_steps, **options)
    try:
        if math.isfinite(factor) and factor >= 0:
            return float(factor)
    except (TypeError, ValueError):  # no number
        pass
    text = f"must give a factor of at least 0; for step {step} of {total_steps} it gave {factor!r}"
    raise RecipeError(f"lr_schedule.target={target}: {text}")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(FACTOR, 1.0)


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    clip_norm: float | None,
    of_all: Callable[[torch.Tensor], torch.Tensor] = lambda norm: norm,
) -> torch.Tensor:
    """Scale all gradients so that their joint 2-norm is at most `clip_norm`; returns the norm before that, unread.

    of_all: the norm with all processes' parts, from that of this one's."""
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = of_all(torch.nn.utils.get_total_norm([parameter.grad for parameter in with_grad]))
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(with_grad, clip_norm, norm)
    return norm


def clip_and_update(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    clip_norm: float | None,
    loss: torch.Tensor,
    of_all: Callable[[torch.Tensor], torch.Tensor] = lambda norm: norm,
) -> torch.Tensor:
    """One optimizer step with gradients clipped, left out where loss or norm is not finite; returns the norm, unread.

    An optimizer that clips by itself does so by its own `clip_norm`, in the same pass over memory as the update.
    """
    if isinstance(optimizer, ClipsItself):
        update(optimizer, loss)
        return optimizer.grad_norm.to(torch.float32)
    grad_norm = clip_gradients(parameters, clip_norm, of_all)
    update(optimizer, loss, grad_norm)
    return grad_norm


def leaves_steps_out(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it reads `found_inf`, as `update` says: ours, Lion, torch's fused ones and those over copies do."""
    return isinstance(optimizer, ClipsItself) or reads_found_inf(optimizer)


def update(optimizer: torch.optim.Optimizer, *needed: torch.Tensor) -> None:
    """One optimizer step, which the device itself leaves out where one of these numbers is not finite; before one that
    cannot do so, the host waits for these numbers.

    `found_inf` is how GradScaler tells a fused optimizer to keep parameters and state as they are. The host hears of
    it at the next log step, without having waited for every step until then.
    """
    finite = torch.stack([torch.isfinite(number) for number in needed]).all()
    if not leaves_steps_out(optimizer):
        if finite:
            optimizer.step()
        return
    optimizer.found_inf = (~finite).to(torch.float32)
    fresh = _without_momentum(optimizer)
    optimizer.step()
    del optimizer.found_inf
    for parameter in fresh:
        if (momentum := optimizer.state.get(parameter, {}).get("momentum_buffer")) is not None:
            momentum.copy_(torch.where(finite, momentum, torch.zeros_like(momentum)))


def _without_momentum(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Parameters whose momentum torch's SGD makes in this step: memory that a step which is left out does not fill."""
    if isinstance(optimizer, ClipsItself) or not isinstance(getattr(optimizer, "inner", optimizer), torch.optim.SGD):
        return []
    parameters = [parameter for group in optimizer.param_groups if group["momentum"] for parameter in group["params"]]
    return [p for p in parameters if optimizer.state.get(p, {}).get("momentum_buffer") is None]


# States of a parameter's own size, as torch's optimizers and ours call them.
_OF_ADAM = ("step", "exp_avg", "exp_avg_sq")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", MASTER)


def adopt(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """After `load_state_dict`, which takes whatever it is given: moments lie as their parameters do, which kernels rely
    on. before: the groups until then. ValueError: something else than a state of this optimizer was given."""
    torch_s = getattr(optimizer, "inner", optimizer)
    needed = _OF_ADAM if isinstance(torch_s, torch.optim.Adam | torch.optim.AdamW) else ()
    is_known = type(torch_s).__module__.startswith(("torch.", "aottrain."))  # others may keep anything in a group
    states = optimizer.state.values()
    if any(not isinstance(one, dict) or (one and any(one.get(name) is None for name in needed)) for one in states):
        raise ValueError("a state is none of a parameter")
    for group, own in zip(optimizer.param_groups, before, strict=True):
        for name in own if is_known else ():
            if name != "params" and not _is_alike(group.setdefault(name, own[name]), own[name]):
                raise ValueError(f"its {name} is a {type(group[name]).__name__}")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if not _is_step(state.get("step", 0)):
                raise ValueError("its step is no number")
            for name in [name for name in _MOMENTS if state.get(name) is not None]:
                value = state[name]
                if not isinstance(value, Tensor) or value.shape != parameter.shape or value.is_sparse:
                    raise ValueError(f"its {name} is none of {list(parameter.shape)}")
                if value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _is_step(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else type(value) in (int, float)


def _is_alike(value: Any, own: Any) -> bool:
    """Whether a setting of a group is of the kind that its own is."""
    if own is None or type(own) is bool:
        return value is None or type(value) is bool
    if type(own) in (list, tuple):
        return type(value) in (list, tuple) and len(value) == len(own) and all(map(_is_alike, value, own))
    return type(value) in (int, float) if type(own) in (int, float) else type(value) is type(own)
