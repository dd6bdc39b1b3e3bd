"""One training step, whoever runs it: eager PyTorch, torch.compile, or a module that aottrain compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from aottrain.config.choices import FP16
from aottrain.errors import ParallelError, RecipeError
from aottrain.explain.report import CompileReport, GraphReport
from aottrain.step import Batch, Rungs, StepResult
from aottrain.trainer.parallel.shards import Shards
from aottrain.trainer.parallel.watch import meet
from aottrain.trainer.parallel.world import ALONE, World


def casts_of(precision: str, device: torch.device) -> AbstractContextManager:
    """In which a model of this precision is called."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.float16 if precision == FP16 else torch.bfloat16)


def _as_it_is(loss: torch.Tensor) -> torch.Tensor:
    return loss


class LossModule(nn.Module):
    """A model and its loss as one module: forward(*batch) -> scalar. This is what an engine compiles.

    precision other than "fp32": autocast, entered within the forward, so that every engine sees the same casts.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], torch.Tensor],
        precision: str = "fp32",
        weight: Callable[[Batch], Any] | None = None,
        world: World = ALONE,
    ):
        """weight: of a batch, how many things its loss is the mean of; None where each batch has as many. world: the
        processes of which each has a part of each batch."""
        super().__init__()
        self.model = model
        self.loss = loss
        self.precision = precision
        self.weight = weight
        self.world = world
        self.shards: Shards | None = None
        self.scaled: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
        """What is gone back from, of a loss."""

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the model has all its weights, of which each process may hold a part."""
        return nullcontext() if self.shards is None else self.shards.whole()

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        with self.whole(), self.casts(batch):
            loss = self.loss(self.model, batch)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # as it is traced, too
            _checked_loss(loss)
        return loss

    def size_of(self, name: str) -> int:
        """Elements of the model's parameter, of which this process may hold a part."""
        return self.model.get_parameter(name).numel() if self.shards is None else self.shards.shapes[name].numel()

    def norm_of_all(self, norm: torch.Tensor) -> torch.Tensor:
        """Of gradients of which each process has a part, from the norm of this one's."""
        return norm if self.shards is None else self.world.sum_of_parts(norm.double().square()).sqrt().to(norm.dtype)

    def casts(self, batch: Batch) -> AbstractContextManager:
        """In which the model is called: that of the run's precision."""
        return casts_of(self.precision, batch[0].device)

    def shares(self, batches: Sequence[Batch]) -> list[float]:
        """How much the loss of each batch counts in their mean; together 1, in all processes. With `weight` the device
        is waited for.

        So four micro-batches have the gradient of one batch of all their examples, where padding counts for nothing.
        """
        count = len(batches) * self.world.size
        if self.weight is None or count == 1:
            return [1 / count] * len(batches)
        weights = [_checked_weight(self.weight(batch)) for batch in batches]
        total = self.world.total(sum(weights))
        return [weight / total for weight in weights] if total else [1 / count] * len(batches)

    def reduced(self, loss: torch.Tensor) -> torch.Tensor:
        """After backwards that left each process's own gradients: they are those of all, and so is the loss."""
        self.world.sum_gradients(list(self.parameters()))
        return self.world.sum(loss)


class ModuleStep:
    """TrainStep over `call(*batch) -> scalar loss`, with gradients left in `.grad`.

    With several micro-batches gradients are those of the mean of their losses, in which each has its share.
    shares: see `LossModule.shares`. A micro-batch that has none is not run: the mean of nothing is no number.
    draws: a context in which the forward runs, to say where its random numbers come from.
    explain: says, for a batch whose numbers are wrong, where in the engine they first go wrong.
    compile_for: compiles for a batch without running it; None where the engine only compiles as it runs.

    `splits` parts of each micro-batch run one after the other, as further micro-batches; `rungs` are other programs.
    `doing` says what a step was at when it raised.

    module: of what `call` runs, where several processes train it. reduces: whether its compiled programs sum gradients
    over them; else that is done after the backwards.
    """

    def __init__(
        self,
        engine: str,
        call: Callable[..., torch.Tensor],
        *,
        tokens_per_batch: int,
        shares: Callable[[Sequence[Batch]], Sequence[float]],
        report: CompileReport | None = None,
        draws: Callable[[], AbstractContextManager] = nullcontext,
        explain: Callable[[Batch], str] | None = None,
        compile_for: Callable[[Batch], GraphReport | None] | None = None,
        module: LossModule | None = None,
        reduces: bool = False,
    ):
        self.engine = engine
        self.call = call
        self.tokens_per_batch = tokens_per_batch
        self.shares = shares
        self.report = report
        self.draws = draws
        self.explain = explain
        self.compile_for = compile_for
        self.module = module
        self.reduces = reduces
        self._agreed: set[Any] = set()
        self.rungs: Rungs | None = None
        self.splits = 1
        self.doing = "forward"

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult:
        total: torch.Tensor | None = None
        ran_eagerly = []
        parts = self.split(micro_batches)
        world = ALONE if self.module is None else self.module.world
        # A process whose part of a batch has no share has no backward in which it could sum gradients with the others.
        is_sharded = self.module is not None and self.module.shards is not None
        is_whole = not (self.reduces or is_sharded) or world.all_hold(all(share for _, share in parts))
        if is_sharded and not is_whole:
            text = "some process has a part of this batch in which nothing counts, and all must gather each weight"
            raise ParallelError(f"parallel=shard: {text}; take a larger data.batch_size, or parallel=ddp")
        for batch, share in parts:
            if world.size > 1 and is_whole:
                self._agree(world, batch)
            if not share:
                ran_eagerly.append(False)
                continue
            num_eager_calls = self._num_eager_calls()
            self.doing = "forward"
            with self.draws():
                loss = _checked_loss((self.call if is_whole or self.module is None else self.module)(*batch))
            ran_eagerly.append(self._num_eager_calls() > num_eager_calls or not is_whole)
            self.doing = "backward"
            part = loss * share if len(parts) * world.size > 1 else loss
            (part if self.module is None else self.module.scaled(part)).backward()
            part = loss.detach().float() * share
            total = part if total is None else total + part
        if world.size > 1:
            total = self._reduced(world, total, ran_eagerly, is_whole)
        num_samples = sum(len(batch[0]) for batch in micro_batches) * world.size
        each = len(parts) // len(micro_batches)
        eagerly = tuple(any(ran_eagerly[i : i + each]) for i in range(0, len(parts), each))
        return StepResult(total, num_samples, self.tokens_per_batch * len(micro_batches), eagerly)

    def _agree(self, world: World, batch: Batch) -> None:
        """Before the first batch of its kind: all processes have the same program for it, or all run it eagerly."""
        kind = tuple((tensor.shape, tensor.dtype) for tensor in batch)
        key = kind, id(self.call)
        meet(str([list(shape) for shape, _ in kind]), key not in self._agreed)
        if key in self._agreed:
            return
        self._agreed.add(key)
        report = None if self.compile_for is None else self.compile_for(batch)
        order = "runs eagerly" if report is None else "\n".join(("compiled", *map(str, report.collectives)))
        world.agree(f"the program for {[list(shape) for shape, _ in kind]}", order)

    def _reduced(
        self, world: World, total: torch.Tensor | None, ran_eagerly: Sequence[bool], is_whole: bool
    ) -> torch.Tensor:
        """The loss of all processes; gradients of all, where the programs have not summed them."""
        assert self.module is not None
        total = torch.zeros((), device=next(self.module.parameters()).device) if total is None else total
        in_programs = self.reduces and is_whole and hasattr(self.call, "report") and not all(ran_eagerly)
        if in_programs and any(ran_eagerly):
            raise ParallelError("of the parts of one batch some are compiled and some run eagerly; take engine=eager")
        return world.sum(total) if in_programs else self.module.reduced(total)

    def split(self, micro_batches: Sequence[Batch]) -> list[tuple[Batch, float]]:
        """The parts that run one after the other, each with its share in the loss."""
        if self.splits == 1:
            return list(zip(micro_batches, self.shares(micro_batches), strict=True))
        parts = [part for batch in micro_batches for part in split_batch(batch, self.splits)]
        weights = [len(part[0]) for part in parts]
        shares = self.shares(parts)
        if len({*shares}) == 1 and len({*weights}) > 1:  # each batch has as many: of unequal parts each its examples
            size = 1 if self.module is None else self.module.world.size
            shares = [weight / sum(weights) / size for weight in weights]
        return list(zip(parts, shares, strict=True))

    def _num_eager_calls(self) -> int:
        return 0 if self.report is None else self.report.num_eager_calls


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The examples of a batch in this many parts, as equal as they can be. ValueError: it cannot be cut."""
    count = len(batch[0])
    if count < parts or any(tensor.ndim == 0 or len(tensor) != count for tensor in batch):
        raise ValueError(f"a batch of {count} examples cannot be cut into {parts}")
    bounds = [count * i // parts for i in range(parts + 1)]
    return [tuple(tensor[low:high] for tensor in batch) for low, high in zip(bounds, bounds[1:], strict=False)]


def _checked_weight(value: Any) -> float:
    """RecipeError: it is no number from 0."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise RecipeError(f"weight(batch) must return a number of at least 0, it returned {value!r}")
    return float(value)


def _checked_loss(value: Any) -> torch.Tensor:
    """The loss of a batch, where it is one. RecipeError says what else the recipe gave."""
    if not isinstance(value, torch.Tensor):
        problem = f"it returned {type(value).__name__}"
    elif value.numel() != 1:
        problem = f"it returned a tensor of shape {list(value.shape)}"
    elif not value.requires_grad:
        problem = "what it returned does not depend on any parameter that takes a gradient"
    else:
        return value
    raise RecipeError(f"loss(model, batch) must return a scalar tensor to go back from: {problem}")
