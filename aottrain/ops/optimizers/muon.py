"""Torch's Muon for hidden matrices and torch's AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from aottrain.ops.optimizers.lion import loss_of

_MUON = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
_ADAMW = partial(torch.optim.AdamW, fused=True)
BY_MUON = "by_muon"  # in a group: whether its parameters are updated by Muon, else by AdamW


class Muon(torch.optim.Optimizer):
    """Orthogonal updates of matrices (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024),
    and AdamW for what is none.

    Updates of matrices are scaled to the size that AdamW's have (Liu et al., "Muon is Scalable for LLM Training",
    2025), so that one rate and one decay are for both. Of a group that does not say `by_muon` parameters of two
    dimensions are Muon's: embeddings and the layer that gives the outputs, which AdamW should update, are told apart
    by `matrices_apart`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        super().__init__(
            [split for group in groups for split in _split(group)], {"lr": lr, "weight_decay": weight_decay}
        )
        self._inner: dict[bool, torch.optim.Optimizer] = {}
        # They check their arguments, and add what else they have to the groups.
        self._of(True, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        self._of(False, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._inner = {}

    def _of(self, by_muon: bool, **arguments: Any) -> torch.optim.Optimizer | None:
        """Torch's optimizer of these groups and of this one's state; None where there are no such groups."""
        groups = [group for group in self.param_groups if group[BY_MUON] is by_muon]
        if not groups:
            return None
        if by_muon not in self._inner:
            self._inner[by_muon] = (_MUON if by_muon else _ADAMW)(groups, **arguments)
        inner = self._inner[by_muon]
        inner.param_groups, inner.state = groups, self.state
        return inner

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for by_muon in (True, False):
            if (inner := self._of(by_muon)) is not None:
                inner.step()
        return loss


def matrices_apart(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`groups`, in which Muon's parameters are in groups of their own: matrices but those of embeddings and of the last
    linear layer."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    others = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)] + layers[-1:]
    kept_from_it = {id(module.weight) for module in others}
    return [split for group in groups for split in _split(group, kept_from_it)]


def _split(group: Mapping[str, Any], kept_from_it: Collection[int] = ()) -> list[dict[str, Any]]:
    if BY_MUON in group:
        return [dict(group)]
    parts: dict[bool, list[Any]] = {}
    for parameter in group["params"]:
        parts.setdefault(parameter.ndim == 2 and id(parameter) not in kept_from_it, []).append(parameter)
    return [{**group, "params": parameters, BY_MUON: by_muon} for by_muon, parameters in sorted(parts.items())]
