"""The T5: what is hidden of a text, what its halves see, and its distances."""

from __future__ import annotations

import torch

from tests.recipes.training import small

t5, OPTIONS, _ = small("t5")
TEXT = torch.randint(256, (50, 20), generator=torch.Generator().manual_seed(0))
READ, BEFORE, WRITTEN = t5.prepare(OPTIONS, (TEXT, TEXT), torch.Generator().manual_seed(1))


def test_read_and_written_make_the_text():
    assert (OPTIONS.num_hidden, OPTIONS.num_spans) == (3, 1)
    options = t5.Options(context=40)
    text = torch.randint(256, (50, 40), generator=torch.Generator().manual_seed(0))
    read, before, written = t5.prepare(options, (text, text), torch.Generator().manual_seed(1))
    assert read.shape == (50, options.num_read) and written.shape == before.shape == (50, options.num_written)
    for row in range(50):
        spans: dict[int, list[int]] = {}
        for token in written[row].tolist():
            if token >= 256:
                spans[token] = []
                last = token
            else:
                spans[last].append(token)
        assert list(spans) == list(range(256, 256 + options.num_spans + 1)) and spans.pop(last) == []
        assert all(spans.values()) and sum(map(len, spans.values())) == options.num_hidden
        whole = [token for each in read[row].tolist() for token in spans.get(each, [each])]
        assert whole == text[row].tolist()
    assert torch.equal(before[:, 1:], written[:, :-1]) and (before[:, 0] == 256 + options.num_spans + 1).all()


def test_the_decoder_sees_all_that_is_read_and_what_it_wrote_before():
    torch.manual_seed(0)
    model = t5.build(OPTIONS)
    out = model(READ, BEFORE)
    later = BEFORE.clone()
    later[:, 3] = (later[:, 3] + 1) % 256
    assert torch.equal(model(READ, later)[:, :3], out[:, :3]) and not torch.equal(model(READ, later), out)
    other = READ.clone()
    other[:, -1] = (other[:, -1] + 1) % 256
    assert not torch.allclose(model(other, BEFORE)[:, 0], out[:, 0])


def test_distances_share_buckets_as_the_paper_has_them():
    both = t5.Distances(OPTIONS, 200, is_causal=False).buckets
    assert both[0, :8].tolist() == [0, *range(17, 24)] and both[:8, 0].tolist() == list(range(8))
    assert both[0, 127] == both[0, 199] == 31 and both[199, 0] == 15
    assert both[0, 8] == both[0, 11] == 24 and both[0, 12] == 25  # 8 * 16^(1/8) is 11.3
    causal = t5.Distances(OPTIONS, 200, is_causal=True)
    assert causal.buckets[:16, 0].tolist() == list(range(16)) and causal.buckets[199, 0] == 31
    bias = causal()
    assert bias.shape == (2, 200, 200) and (bias[:, 0, 1:] == float("-inf")).all() and bias[:, 5, :6].isfinite().all()
