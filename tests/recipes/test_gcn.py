"""The graph network: the graphs that are made, and that the order of nodes is nothing to it."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.training import small

gcn, OPTIONS, (ADJACENCY, HINTS, LABELS) = small("gcn", batch_size=200)


def test_graphs_are_normalised_and_joined_within_communities():
    assert torch.equal(ADJACENCY, ADJACENCY.transpose(1, 2)) and (ADJACENCY.diagonal(dim1=1, dim2=2) > 0).all()
    joined = (ADJACENCY > 0).float()
    degrees = joined.sum(dim=2)
    expected = joined / (degrees[:, :, None] * degrees[:, None, :]).sqrt()
    torch.testing.assert_close(ADJACENCY, expected)
    same = LABELS[:, :, None] == LABELS[:, None, :]
    others = joined[:, 6:, 6:] * (1 - torch.eye(14))
    within, between = others[same].sum() / (same.sum() - 200 * 14), others[~same].mean()
    assert within.item() == pytest.approx(0.3, abs=0.03) and between.item() == pytest.approx(0.05, abs=0.01)


def test_the_known_are_told_and_the_others_not():
    assert (HINTS[:, :6].sum(dim=2) == 1).all() and not HINTS[:, 6:].any() and LABELS.shape == (200, 14)


def test_the_order_of_nodes_is_nothing_to_it():
    torch.manual_seed(0)
    model = gcn.build(OPTIONS)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    shuffled = model(ADJACENCY[:, order][:, :, order], HINTS[:, order])
    torch.testing.assert_close(shuffled, model(ADJACENCY, HINTS)[:, order])
    scores, labels = gcn.predict(model, (ADJACENCY, HINTS, LABELS))
    torch.testing.assert_close(scores.unflatten(0, (200, 14)), model(ADJACENCY, HINTS)[:, 6:])
    assert labels.shape == (2800,)
