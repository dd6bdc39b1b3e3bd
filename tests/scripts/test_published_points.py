"""Published runs are planned as they ran there."""

from __future__ import annotations

from collections import Counter

import torch

import aottrain
from aottrain.trainer.engines import LossModule
from recipes import llama
from scripts.published_points import SavesEverySecond, _loss_of_titan

NUM_LAYERS = 4


def planned(partition, loss=_loss_of_titan):
    options = llama.Options(num_layers=NUM_LAYERS, width=32, num_heads=2, mlp_width=64, context=64)
    module = LossModule(llama.build(options), loss, "bf16")
    call = aottrain.compile(module, capture="trace", kernel="aten", partition=partition, decisions="default")
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    return call.prepare(tokens, tokens)


def test_each_block_is_checkpointed_by_itself():
    """Its input is saved, and of its products the same as of any other's: else all blocks are computed again before the
    last one's gradients, and held until theirs."""
    graph = planned(SavesEverySecond())
    values = [(value.op, value.module.partition(".blocks.")[2]) for value in graph.saved]
    sums = [place for op, place in values if op == "aten.add.Tensor"]
    assert sums == [str(number) for number in range(NUM_LAYERS)]
    products = Counter(place.partition(".")[0] for op, place in values if op == "aten.mm.default" and place)
    # Of those of the queries, values and gate: the last saved one, of the sum behind it, is read by nothing.
    assert products == {str(number): 3 for number in range(NUM_LAYERS)}


def test_the_loss_is_that_of_logits_in_float32():
    by_theirs, by_ours = (planned("save_all", loss) for loss in (_loss_of_titan, llama.loss))
    assert "log_softmax" in by_theirs.timeline.at
    sizes = {value.op: value.num_bytes for value in by_theirs.saved}
    assert sizes["aten._log_softmax.default"] == 4 * 64 * 256 * 4
    assert by_theirs.predicted_peak_bytes >= by_ours.predicted_peak_bytes
