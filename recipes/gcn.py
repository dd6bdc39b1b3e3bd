"""A graph convolutional network that finds communities; the contract of a recipe is told in transformer.py.

Kipf & Welling (2017), "Semi-Supervised Classification with Graph Convolutional Networks", arXiv:1609.02907: each layer
is relu(A x W), with A the adjacency matrix with loops, divided by the roots of both nodes' degrees. Graphs are made by
the stochastic block model (Holland, Laskey & Leinhardt, 1983): nodes of one community are joined more often. Of a few
nodes it is told to which they belong; of the others it is to be found.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._checks import checked, rates, whole_numbers


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_layers: int = 3
    """Layers, from 1: as many edges away a node sees."""
    width: int = 64
    """Numbers of a node between layers, from 1."""
    num_nodes: int = 64
    """Nodes of a graph, from 2."""
    num_known: int = 16
    """Nodes whose community is told, from 0 to below num_nodes."""
    num_communities: int = 4
    """Communities, from 2."""
    joined_within: float = 0.3
    """Chance of an edge between nodes of one community, from 0 to below 1."""
    joined_between: float = 0.05
    """Chance of an edge between nodes of two, from 0 to below 1."""
    dropout: float = 0.0
    """Probability that dropout zeroes a value, from 0 to below 1."""

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        mistakes = whole_numbers(self, "num_layers", "width")
        mistakes += whole_numbers(self, "num_nodes", "num_communities", least=2)
        mistakes += whole_numbers(self, "num_known", least=0)
        if not mistakes and self.num_known >= self.num_nodes:
            mistakes.append(f"num_known={self.num_known}: must be below num_nodes={self.num_nodes}")
        return mistakes + rates(self, "joined_within", "joined_between", "dropout")

    @property
    def widths(self) -> list[int]:
        """Numbers of a node before each layer, and after the last."""
        return [self.num_communities, *[self.width] * (self.num_layers - 1), self.num_communities]


class Gcn(nn.Module):
    """(adjacency, float32 of (batch, nodes, nodes); hints, of (batch, nodes, num_communities)) -> logits of each node's
    community, of the hints' shape."""

    def __init__(self, options: Options):
        super().__init__()
        pairs = zip(options.widths, options.widths[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.dropout = nn.Dropout(options.dropout)
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, adjacency: torch.Tensor, hints: torch.Tensor) -> torch.Tensor:
        x = hints
        for index, layer in enumerate(self.layers):
            x = adjacency @ layer(self.dropout(x) if index else x)
            x = F.relu(x) if index < len(self.layers) - 1 else x
        return x


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Gcn(checked(options))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per node that is not told; batch: see `make_batch`."""
    scores, labels = predict(model, batch)
    return F.cross_entropy(scores, labels)


def predict(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, of (nodes that are not told, num_communities); their communities, int64), of all graphs together."""
    adjacency, hints, labels = batch
    known = hints.shape[1] - labels.shape[1]
    return model(adjacency, hints)[:, known:].flatten(0, 1), labels.flatten()


def make_batch(options: Options, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(adjacency, float32 of (batch_size, num_nodes, num_nodes); hints, of (batch_size, num_nodes, num_communities), 1
    for the community of each of the first num_known nodes, else 0; communities of the others, int64)."""
    shape = (batch_size, options.num_nodes)
    communities = torch.randint(options.num_communities, shape, generator=generator)
    is_within = communities[:, :, None] == communities[:, None, :]
    chances = torch.where(is_within, options.joined_within, options.joined_between)
    drawn = torch.rand(*shape, options.num_nodes, generator=generator) < chances
    above = drawn.triu(diagonal=1).float()
    joined = above + above.transpose(1, 2) + torch.eye(options.num_nodes)
    roots = joined.sum(dim=2).rsqrt()
    hints = F.one_hot(communities, options.num_communities).float()
    hints[:, options.num_known :] = 0
    return roots[:, :, None] * joined * roots[:, None, :], hints, communities[:, options.num_known :]


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one graph, without recomputation: 2 for each multiplication; the backward has
    two products for each of the forward, but needs no gradient of the adjacency and of the hints."""
    nodes, widths = options.num_nodes, options.widths
    weights = [nodes * before * after for before, after in zip(widths, widths[1:], strict=False)]
    spread = sum(nodes**2 * after for after in widths[1:])
    return 2 * (3 * sum(weights) - weights[0] + 2 * spread)
