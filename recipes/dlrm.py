"""A recommendation model of numbers and categories; the contract of a recipe is told in transformer.py.

Naumov et al. (2019), "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv:1906.00091: a row of a table for each category, layers that bring the numbers to the rows' width, the products of
all pairs of these, and layers that find from them whether it was clicked. The fields' tables are one tensor.

With `data=arrays` the first columns are numbers, the last ones categories, which a table's rows take modulo their
count, and y is 0 or 1. Else rows are made: see `make_batch`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ._checks import checked, whole_numbers

TASTES = 4  # numbers of a category's hidden taste, in rows that are made


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model's own options; the sentence after each is its documentation."""

    num_numbers: int = 4
    """Columns that are numbers, from 1."""
    num_categories: int = 6
    """Columns that are categories, from 1."""
    num_rows: int = 50
    """Rows of each category's table, from 1 to 2^24, up to which float32 counts."""
    row_width: int = 16
    """Numbers of a row, from 1."""
    bottom_width: int = 64
    """Width of the layer between the numbers and what is as wide as a row, from 1."""
    top_width: int = 128
    """Width of the two layers after the products, from 1."""

    @property
    def num_features(self) -> int:
        """Columns of data=arrays."""
        return self.num_numbers + self.num_categories

    @property
    def num_pairs(self) -> int:
        """Products of the categories' rows and the numbers' with each other."""
        return (self.num_categories + 1) * self.num_categories // 2

    def check(self) -> list[str]:
        """Every mistake as "field=value: what is allowed"; an empty list if there is none."""
        sizes = ("num_numbers", "num_categories", "num_rows", "row_width", "bottom_width", "top_width")
        mistakes = whole_numbers(self, *sizes)
        if not mistakes and self.num_rows > 1 << 24:
            mistakes.append(f"num_rows={self.num_rows}: must be at most 2^24, up to which float32 counts")
        return mistakes


class Dlrm(nn.Module):
    """x, float32 of (batch, num_features), numbers and then categories -> logits of a click, (batch,)."""

    def __init__(self, options: Options):
        super().__init__()
        self.num_numbers, self.num_rows = options.num_numbers, options.num_rows
        self.tables = nn.Embedding(options.num_categories * options.num_rows, options.row_width)
        nn.init.uniform_(self.tables.weight, -(options.num_rows**-0.5), options.num_rows**-0.5)
        self.bottom = nn.Sequential(
            nn.Linear(options.num_numbers, options.bottom_width), nn.ReLU(),
            nn.Linear(options.bottom_width, options.row_width), nn.ReLU(),
        )  # fmt: skip
        self.top = nn.Sequential(
            nn.Linear(options.num_pairs + options.row_width, options.top_width), nn.ReLU(),
            nn.Linear(options.top_width, options.top_width), nn.ReLU(),
            nn.Linear(options.top_width, 1),
        )  # fmt: skip
        starts = torch.arange(options.num_categories) * options.num_rows
        rows, columns = torch.tril_indices(options.num_categories + 1, options.num_categories + 1, offset=-1)
        self.register_buffer("starts", starts, persistent=False)
        self.register_buffer("pairs", rows * (options.num_categories + 1) + columns, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers, categories = x[:, : self.num_numbers], x[:, self.num_numbers :].long()
        rows = self.tables(categories % self.num_rows + self.starts)
        bottom = self.bottom(numbers)
        vectors = torch.cat((bottom[:, None], rows), dim=1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat((bottom, products), dim=1))[:, 0]


def build(options: Options) -> nn.Module:
    """The initialised model; ValueError lists every mistake in the options."""
    return Dlrm(checked(options))


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Mean cross-entropy in nats per row; batch = (x, y), y float32 of (batch_size,), 1 where it was clicked."""
    x, y = batch
    return F.binary_cross_entropy_with_logits(model(x), y)


def predict(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores of no click and of one, (batch_size, 2); which it was, int64 of (batch_size,))."""
    x, y = batch
    logits = model(x)
    return torch.stack((torch.zeros_like(logits), logits), dim=1), y.long()


def make_batch(options: Options, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, float32 of (batch_size, num_features); y, float32 of (batch_size,)).

    Each category has a hidden taste, the same in every batch. A row is clicked by the more chance the better its
    categories' tastes agree, pair by pair, and by what its first number is: nothing that a column alone would tell.
    """
    numbers = torch.randn(batch_size, options.num_numbers, generator=generator)
    shape = (batch_size, options.num_categories)
    categories = torch.randint(options.num_rows, shape, generator=generator)
    tastes = _tastes(options.num_categories, options.num_rows)[torch.arange(options.num_categories), categories]
    agreement = (tastes.sum(dim=1).square() - tastes.square().sum(dim=1)).sum(dim=1) / 2  # over all pairs
    logits = 2 * agreement / max(TASTES * options.num_pairs, 1) ** 0.5 + numbers[:, 0]
    y = (torch.rand(batch_size, generator=generator) < logits.sigmoid()).float()
    return torch.cat((numbers, categories.float()), dim=1), y


@functools.lru_cache(maxsize=4)
def _tastes(num_categories: int, num_rows: int) -> torch.Tensor:
    """Standard normal, (num_categories, num_rows, TASTES)."""
    return torch.randn(num_categories, num_rows, TASTES, generator=torch.Generator().manual_seed(0))


def flops_per_sample(options: Options) -> int:
    """FLOPs of forward and backward for one row, without recomputation: 2 for each multiplication of the layers and of
    all pairs both ways; the backward has two products for each of the forward, but needs no gradient of the numbers."""
    first = options.num_numbers * options.bottom_width
    bottom = options.bottom_width * options.row_width
    pairs = (options.num_categories + 1) ** 2 * options.row_width
    top = (options.num_pairs + options.row_width + options.top_width + 1) * options.top_width
    return 2 * (3 * (bottom + pairs + top) + 2 * first)
