"""Small models in which a compiler can go wrong: randomness, state, sharing, frozen and unused parameters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


def batches(*shape, count=3):
    def make():
        generator = torch.Generator().manual_seed(21)
        return [(torch.randn(*shape, generator=generator),) for _ in range(count)]

    return make


def token_batches(vocabulary, *shape, count=3):
    def make():
        generator = torch.Generator().manual_seed(22)
        return [(torch.randint(vocabulary, shape, generator=generator),) for _ in range(count)]

    return make


class Dropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(F.dropout(F.gelu(F.dropout(self.first(x), 0.3, self.training)), 0.5, self.training))


class RandomInputs(nn.Module):
    """rand, rand_like on a transposed tensor, bernoulli and Gaussian noise, each read by the backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        h = x @ self.weight.t() * torch.rand(6, device=x.device)
        h = h * torch.rand_like(h.t()).t() + torch.randn(h.shape, device=h.device) * self.weight.std()
        return h * torch.bernoulli(torch.sigmoid(h.detach())) + torch.empty_like(h).exponential_() * self.weight.mean()


class GumbelSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x):
        return F.gumbel_softmax(self.linear(x), tau=0.7) + F.gumbel_softmax(self.linear(x), hard=True)


class ResNetBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=0.3)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4, affine=False))

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        h = F.dropout2d(self.norm2(self.conv2(h)), 0.2, self.training)
        h += self.shortcut(x)
        return F.relu(h).mean((2, 3))


class ReadThenMutated(nn.Module):
    """Whoever recomputes the sine's argument needs the buffer's old value, which the step overwrites."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 8))

    def forward(self, x):
        h = torch.sin(self.linear(x) + self.scale)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(h.detach().abs().mean(0))
        return h * self.scale + torch.cos(h - self.scale)


class StepCounter(nn.Module):
    """The output depends on how often the model has run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(4, 4))

    def forward(self, x):
        self.step += 1
        out = self.linear(x) / self.step * torch.cos(self.step.float())
        self.history.index_copy_(0, (self.step % 4).view(1), out.detach().mean(0, keepdim=True))
        return out + self.history.sum(0)


class AveragedParameter(nn.Module):
    """An exponential moving average of a parameter in a buffer, which the forward reads after updating it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("average", torch.zeros(4, 8))

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.weight, 0.1)
        return (x @ self.weight.t()).tanh() + x @ self.average.t()


class MutatesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = (self.linear(x.clone()) + x).sin()
        x.mul_(0.5)
        x[:, :4] += 1.0
        return h * x.clone() + (h - x).tanh()


class Block(nn.Module):
    """A GPT block with attention dropout (the math path on a CPU) and a causal mask."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = 0.2 if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + F.dropout(self.out(h.transpose(1, 2).reshape(batch, length, width)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), 0.1, self.training)


class TiedLanguageModel(nn.Module):
    """Embedding and output share their weight; positions are a buffer; the loss is inside."""

    def __init__(self, blocks=1):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.Sequential(*[Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.randn(6, 16), persistent=False)

    def forward(self, tokens):
        h = self.blocks(self.embedding(tokens) + self.positions)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), tokens.roll(-1, 1).flatten())


class FrozenAndUnused(nn.Module):
    """A frozen layer, a parameter that nothing reads, and an output that gradients do not reach."""

    def __init__(self):
        super().__init__()
        self.frozen, self.live = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.only_detached = nn.Linear(8, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        h = self.live(F.silu(self.frozen(x)))
        return h.sigmoid(), self.only_detached(h).detach() * 2.0


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.group, self.layer = nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.LayerNorm([8, 6])
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x):
        h = self.layer(F.mish(self.group(self.conv(x))))
        return F.rms_norm(h, (6,), self.weight) + F.softplus(h)


class PaddedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.scores = nn.Linear(6, 1)

    def forward(self, tokens):
        h = self.embedding(tokens) * math.sqrt(6)
        scores = self.scores(h).squeeze(-1).masked_fill(tokens == 0, -math.inf).softmax(-1)
        return torch.einsum("bt,btd->bd", scores, h) * 1.0


class Indexing(nn.Module):
    """Views written in place, gathers, masks, sorts: the backward is made of scatters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        h = x @ self.weight
        h[:, 0] = h[:, 1] * 2
        h[:, 2:4].mul_(h[:, 4:6].detach().exp())
        top = h.topk(3).values
        return torch.cat([top.cumsum(-1), h.sort(-1).values[:, ::2], h.gather(1, h.argsort(-1)[:, :2])], 1)


class BFloat16(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.net(x.to(torch.bfloat16)).float().square()


class NextTokens(nn.Module):
    """A loss of all positions but the last one, and rows of a softmax between zeros."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        logits = self.head(self.embedding(tokens))
        shifted = F.cross_entropy(logits[:, :-1].reshape(-1, 16), tokens[:, 1:].reshape(-1), ignore_index=3)
        return F.pad(logits.softmax(-1), (0, 0, 1, 1)) * shifted


PROGRAMS = {
    "dropout": (Dropouts, batches(6, 8)),
    "random inputs": (RandomInputs, batches(6, 8)),
    "gumbel softmax": (GumbelSoftmax, batches(6, 8)),
    "resnet block": (ResNetBlock, batches(3, 4, 6, 6)),
    "buffer read then mutated": (ReadThenMutated, batches(6, 8)),
    "step counter": (StepCounter, batches(6, 8)),
    "averaged parameter": (AveragedParameter, batches(6, 8)),
    "mutated input": (MutatesItsInput, batches(6, 8)),
    "gpt block": (Block, batches(2, 5, 16)),
    "tied weights": (TiedLanguageModel, token_batches(11, 2, 6)),
    "frozen and unused": (FrozenAndUnused, batches(6, 8)),
    "norms": (Norms, batches(3, 4, 8)),
    "padded embedding": (PaddedEmbedding, token_batches(7, 4, 5)),
    "indexing": (Indexing, batches(4, 8)),
    "bfloat16": (BFloat16, batches(6, 8)),
    "next tokens": (NextTokens, token_batches(16, 3, 9)),
}
