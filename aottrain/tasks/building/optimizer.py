"""Which optimizer a run updates with: torch's own, or the same with generated kernels."""

from __future__ import annotations

import torch

from aottrain.config.choices import BF16_WEIGHTS, GENERATING
from aottrain.config.run import RunConfig
from aottrain.errors import ConfigError
from aottrain.trainer.engines import LossModule
from aottrain.trainer.optim import build_optimizer, hyperparameters, leaves_steps_out
from aottrain.trainer.weights.groups import parameter_groups


def choose_optimizer(config: RunConfig, module: LossModule, device: torch.device) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer, and what its update runs as: "cpp", "triton", "torch (why)", or for `optimizer.target` its own.

    ConfigError: optimizer.kernel=generated, and this machine cannot.
    """
    if config.optimizer.target is not None:
        optimizer = build_optimizer(module, config.optimizer, config.trainer.precision)
        waits = "" if leaves_steps_out(optimizer) or device.type == "cpu" else "; each step waits for the device"
        return optimizer, f"its own step, not compiled, after torch's clipping{waits}"
    setting, kernel = config.optimizer.kernel, "triton" if device.type == "cuda" else "cpp"
    reason = "" if setting == "generated" else _other_choice(config)
    if not reason:
        obstacle = _obstacle(kernel, device)
        if obstacle and setting == "generated":
            raise ConfigError(f"optimizer.kernel=generated: {obstacle}; use optimizer.kernel=torch")
        reason = obstacle
    if reason:
        return build_optimizer(module, config.optimizer, config.trainer.precision), f"torch ({reason})"
    import aottrain  # the compiler, which the others do without

    optimizer_class = {"adamw": aottrain.AdamW, "sgd": aottrain.SGD, "lion": aottrain.Lion}[config.optimizer.name]
    groups = parameter_groups(module, config.optimizer)
    more = {"clip_norm": config.optimizer.clip_norm, "skip_nonfinite": True, "kernel": kernel}
    more["master_weights"] = config.trainer.precision == BF16_WEIGHTS
    return optimizer_class(groups, **hyperparameters(config.optimizer), **more), kernel


def _other_choice(config: RunConfig) -> str:
    """Why the configuration means torch's; empty where it means generated kernels, if they can be."""
    if config.optimizer.kernel == "torch":
        return "optimizer.kernel=torch"
    if config.engine.name != "aot":
        return f"engine={config.engine.name}"
    return "" if config.kernel.name in GENERATING else f"kernel={config.kernel.name}"


def _obstacle(kernel: str, device: torch.device) -> str:
    if kernel == "cpp":
        from aottrain.toolchain.native import compiler_obstacle

        return compiler_obstacle()
    from aottrain.runtime.cuda.triton_launch import check_device

    try:
        check_device(device)
    except ConfigError as error:
        return str(error)
    return ""
