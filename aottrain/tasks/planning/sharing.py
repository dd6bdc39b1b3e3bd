"""A training step's state shared among devices, by arithmetic: each holds a part of parameters, gradients and optimizer
state, and gathers a block's parameters where the step comes to it (Rajbhandari et al., 2020, stage 3; FSDP)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aottrain.compiler.absent.step_time import StepTime, moving
from aottrain.ir.settings.devices import Target
from aottrain.trainer.blocks import repeated_modules


@dataclass(frozen=True)
class State:
    """Bytes that a training step of one device keeps beside its activations."""

    parameters: int
    trained: int
    """Of the parameters that have gradients; so many bytes the gradients are."""
    optimizer: int
    others: int = 0
    """Averages of weights, sums of gradients over micro-batches."""
    root: int = 0
    """Of the parameters outside of repeated blocks."""
    block: int = 0
    """Of those of the largest block."""
    width: float = 1.0
    """Bytes of a parameter as it is gathered, over those as it is kept: halves are gathered of what autocast casts."""

    def held(self, world: int) -> dict[str, int]:
        """By category, throughout the step, by each of so many devices; one device has all, and no part in `unsharded`.

        Gathered are what is outside of blocks and two blocks, the one that is computed and the next one, and a
        gradient of each until it is reduced."""
        if world == 1:
            return {"parameters": self.parameters, "optimizer": self.optimizer + self.others}
        gathered = int((self.root + 2 * self.block) * self.width)
        reduced = self.root + 2 * self.block
        return {
            "parameters": -(-self.parameters // world),
            "gradient shards": -(-self.trained // world),
            "optimizer": -(-(self.optimizer + self.others) // world),
            "unsharded": gathered + reduced,
        }

    def exchange_s(self, world: int, target: Target) -> tuple[float, float]:
        """Seconds of a step's exchanges, which run beside its calls: parameters gathered twice, gradients reduced once;
        and of the first gather, which nothing runs beside."""
        if world == 1:
            return 0.0, 0.0
        rate = target.link(world)
        if not rate:
            return float("inf"), 0.0
        share = (world - 1) / world
        gathers = 2 * self.parameters * self.width * share
        return (gathers + self.trained * share) / rate, (self.root + self.block) * self.width * share / rate


def state_of(module: nn.Module, optimizer: int, others: int, precision: str) -> State:
    """optimizer, others: bytes of the optimizer's state, and of what else the run keeps."""
    blocks = repeated_modules(module)
    within = [_bytes(block.parameters()) for block in blocks]
    parameters = _bytes(module.parameters())
    trained = _bytes(parameter for parameter in module.parameters() if parameter.requires_grad)
    width = 0.5 if precision == "bf16" else 1.0
    return State(parameters, trained, optimizer, others, parameters - sum(within), max(within, default=0), width)


def whole_step(
    time: StepTime, state: State, target: Target, num_micro_batches: int = 1, clips: bool = True
) -> tuple[StepTime, float, float]:
    """Of an optimizer step whose micro-batches each take `time`: what the device does, seconds of exchanges, which run
    at the same time but for the first gather, and seconds in all. Clipping, the update and sums over micro-batches
    read and write what they must once."""
    moved = 2 * state.parameters + state.trained + 2 * state.optimizer + clips * state.trained
    moved += 3 * state.trained * (num_micro_batches - 1)
    total = time.times(num_micro_batches) + moving(moved / target.world, target, 4)
    exchange, first = state.exchange_s(target.world, target)
    exchange *= num_micro_batches
    return total, exchange, max(total.seconds, exchange) + first


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of distinct ones."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def dtype_name(precision: str) -> str:
    """Of the numbers that products multiply."""
    return str(torch.float32 if precision == "fp32" else torch.bfloat16).removeprefix("torch.")
