"""What scripts/bench_breadth.py times: models of middling size and of many kinds, each with its loss and a batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_models import MODELS as FOUR  # noqa: E402
from scripts.bench_models import Made  # noqa: E402
from scripts.breadth_transformers import BATCH, HEADS, LENGTH, NUM_HEADS, VOCABULARY, WIDTH, pretrained, tokens  # noqa: E402


class Depthwise(nn.Module):
    """MobileNet's middle: depthwise 3x3 convolutions, batch norms and ReLU6, 1x1 convolutions between."""

    def __init__(self, channels: int = 128, num_blocks: int = 4):
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(num_blocks):
            parts += [nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)]
            parts += [nn.BatchNorm2d(channels), nn.ReLU6(), nn.Conv2d(channels, channels, 1, bias=False)]
            parts += [nn.BatchNorm2d(channels), nn.ReLU6()]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class ConvNeXt(nn.Module):
    """Depthwise 7x7, a layer norm over channels, a gated residual."""

    def __init__(self, width: int = 96, num_blocks: int = 4):
        super().__init__()
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(num_blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_blocks))
        self.mlps = nn.ModuleList(mlp(width, 4 * width, width, nn.GELU) for _ in range(num_blocks))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((width,), 0.1)) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for depthwise, norm, layers, scale in zip(self.depthwise, self.norms, self.mlps, self.scales, strict=True):
            inner = layers(norm(depthwise(x).permute(0, 2, 3, 1))) * scale
            x = x + inner.permute(0, 3, 1, 2)
        return x.square().mean()


class UNet(nn.Module):
    """Two levels, group norms and SiLU, skips, nearest upsampling, a time embedding: predicts noise."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.time = mlp(64, 4 * width, 4 * width, nn.SiLU)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.middle = self._block(width, 2 * width), self._block(2 * width, 2 * width)
        self.up, self.last = self._block(4 * width, width), nn.Conv2d(2 * width, 3, 3, padding=1)
        self.shifts = nn.ModuleList(nn.Linear(4 * width, n) for n in (2 * width, 2 * width, width))

    def _block(self, width: int, out: int) -> nn.Module:
        return nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, out, 3, padding=1))

    def forward(self, image: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(torch.arange(32, device=time.device) * (-math.log(1e4) / 32))
        shifts = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.first(image + noise)
        one, two, three = (layer(shifts)[..., None, None] for layer in self.shifts)
        down = self.down(F.avg_pool2d(first, 2)) + one
        inner = self.middle(down) + two
        up = self.up(torch.cat([inner, down], 1)) + three
        return F.mse_loss(self.last(torch.cat([F.interpolate(up, scale_factor=2.0), first], 1)), noise)


class VAE(nn.Module):
    """Convolutions down and up, a sample, reconstruction and KL."""

    def __init__(self, width: int = 32, latent: int = 64):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU(), nn.Flatten(1),
            nn.Linear(2 * width * 64, 2 * latent),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(latent, 2 * width * 64), nn.Unflatten(1, (2 * width, 8, 8)), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(image).chunk(2, dim=1)
        made = self.decoder(mean + noise * (log_variance / 2).exp())
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(1).mean()
        return F.binary_cross_entropy_with_logits(made, image.sigmoid()) + 1e-3 * divergence


class Recurrent(nn.Module):
    """A language model of stacked LSTM or GRU layers."""

    def __init__(self, kind: Callable[..., nn.Module]):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.layers(self.tokens(tokens))[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GatedScan(nn.Module):
    """A linear recurrence in logarithms: cumulative sums and logcumsumexp along time (minGRU's parallel form)."""

    def __init__(self, num_layers: int = 4):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for gate, norm in zip(self.gates, self.norms, strict=True):
            forget, values = gate(norm(x)).chunk(2, dim=-1)
            kept = torch.cumsum(-F.softplus(forget), dim=1)
            new = -F.softplus(-forget) + torch.where(values >= 0, (F.relu(values) + 0.5).log(), -F.softplus(-values))
            x = x + (kept + torch.logcumsumexp(new - kept, dim=1)).exp()
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Factors(nn.Module):
    """DLRM's shape: looked-up rows, pairwise products, two small networks."""

    def __init__(self, num_tables: int = 16, rows: int = 20_000, width: int = 32):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(num_tables))
        self.dense, self.top = mlp(13, 128, width), mlp(width + num_tables * (num_tables + 1) // 2, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(num_tables + 1, num_tables + 1, -1))

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        dense = self.dense(numbers)
        rows = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *rows], 1)
        products = (stacked @ stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([dense, products], 1)).squeeze(1), clicked)


class GraphConvolution(nn.Module):
    """Messages along edges, added up at their ends by index_add."""

    def __init__(self, width: int = 128, num_layers: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        degree = x.new_zeros(len(x)).index_add(0, target, x.new_ones(len(target))).clamp(min=1)
        for layer in self.layers:
            messages = layer(x)[source] * degree[target].rsqrt()[:, None]
            x = F.relu(torch.zeros_like(x).index_add(0, target, messages)) + x
        return F.cross_entropy(x, labels)


class Experts(nn.Module):
    """A mixture of experts, each token through all, weighted by a router's two best."""

    def __init__(self, num_experts: int = 4):
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.inner = nn.Parameter(torch.randn(num_experts, WIDTH, 2 * WIDTH) / 16)
        self.outer = nn.Parameter(torch.randn(num_experts, 2 * WIDTH, WIDTH) / 24)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, places = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, places, best / best.sum(-1, keepdim=True))
        out = F.silu(x @ self.inner) @ self.outer
        return (x + torch.einsum("enw,ne->nw", out, weights)).square().mean() + 0.01 * scores.mean(0).square().sum()


class Mixer(nn.Module):
    """MLP-Mixer: products over places and over channels in turn."""

    def __init__(self, places: int = 64, num_blocks: int = 4):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * num_blocks))
        self.places = nn.ModuleList(mlp(places, 2 * places, places, nn.GELU) for _ in range(num_blocks))
        self.channels = nn.ModuleList(mlp(WIDTH, 2 * WIDTH, WIDTH, nn.GELU) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for i, (places, channels) in enumerate(zip(self.places, self.channels, strict=True)):
            x = x + places(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return x.square().mean()


class Modulated(nn.Module):
    """DiT's blocks: layer norms without weights, scaled and shifted by what a condition gives, gated residuals."""

    def __init__(self, num_blocks: int = 4):
        super().__init__()
        self.conditions = nn.ModuleList(nn.Linear(WIDTH, 6 * WIDTH) for _ in range(num_blocks))
        self.attention = nn.ModuleList(Attention(WIDTH) for _ in range(num_blocks))
        self.mlps = nn.ModuleList(mlp(WIDTH, 4 * WIDTH, WIDTH, nn.GELU) for _ in range(num_blocks))

    def forward(self, x: Tensor, condition: Tensor, target: Tensor) -> Tensor:
        for layer, attention, layers in zip(self.conditions, self.attention, self.mlps, strict=True):
            parts = layer(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
            x = x + parts[2] * attention(F.layer_norm(x, (WIDTH,)) * (1 + parts[0]) + parts[1])
            x = x + parts[5] * layers(F.layer_norm(x, (WIDTH,)) * (1 + parts[3]) + parts[4])
        return F.mse_loss(x, target)


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Detection(nn.Module):
    """Two levels of a feature pyramid, a shared head, focal and smooth L1 losses."""

    def __init__(self, width: int = 64, classes: int = 20):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
        self.deeper = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
        self.head = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, classes + 4, 3, 1, 1))
        self.classes = classes

    def forward(self, image: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        fine = self.stem(image)
        coarse = self.deeper(fine)
        fine = fine + F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        found = torch.cat([self.head(level).flatten(2) for level in (fine, coarse)], 2)
        scores, places = found.split([self.classes, 4], dim=1)
        entropy = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        probability = scores.sigmoid()
        missed = torch.where(labels > 0, 1 - probability, probability)
        return (missed.square() * entropy).mean() + F.smooth_l1_loss(places, boxes)


class Waves(nn.Module):
    """WaveNet's stack: dilated convolutions in time, gated by tanh and sigmoid."""

    def __init__(self, width: int = 64, num_layers: int = 8):
        super().__init__()
        sizes = [2**i for i in range(num_layers)]
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=n, dilation=n) for n in sizes)
        self.outs = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer, out in zip(self.layers, self.outs, strict=True):
            values, gates = layer(x).chunk(2, dim=1)
            x = x + out(values.tanh() * gates.sigmoid())
        return x.square().mean()


class Contrast(nn.Module):
    """Two towers, normalised rows, a symmetric cross-entropy over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(512, 512, WIDTH, nn.GELU), mlp(512, 512, WIDTH, nn.GELU)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, two = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        logits, labels = one @ two.t() * self.scale.exp(), torch.arange(len(left), device=left.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class Points(nn.Module):
    """PointNet: the same network for each point, batch norms, the largest over all points."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 64, 128, 256)
        self.layers = nn.ModuleList(nn.Conv1d(a, b, 1) for a, b in zip(sizes, sizes[1:], strict=False))
        self.norms, self.head = nn.ModuleList(nn.BatchNorm1d(n) for n in sizes[1:]), nn.Linear(256, 40)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            points = F.relu(norm(layer(points)))
        return F.cross_entropy(self.head(points.amax(2)), labels)


class Waveform(nn.Module):
    """SIREN: sines of layers, a regression."""

    def __init__(self, num_layers: int = 5):
        super().__init__()
        self.first, self.last = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, places: Tensor, colours: Tensor) -> Tensor:
        x = torch.sin(30 * self.first(places))
        for layer in self.layers:
            x = torch.sin(layer(x))
        return F.mse_loss(self.last(x), colours)


class Masked(nn.Module):
    """torch's own encoder and decoder layers, with padding masks and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Transformer(WIDTH, NUM_HEADS, 2, 2, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, source: Tensor, target: Tensor, padded: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.network(source, target, tgt_mask=mask, src_key_padding_mask=padded, memory_key_padding_mask=padded)
        return out.square().mean()


def mlp(width: int, inner: int, out: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), activation(), nn.Linear(inner, out))


def _edges() -> tuple[Tensor, ...]:
    ends = [torch.randint(0, 10_000, (60_000,)) for _ in range(2)]
    return torch.randn(10_000, 128), *ends, torch.randint(0, 128, (10_000,))


def _boxes() -> tuple[Tensor, ...]:
    places = 32 * 32 + 16 * 16
    return torch.randn(8, 3, 128, 128), (torch.rand(8, 20, places) > 0.98).float(), torch.randn(8, 4, places)


def _clicks() -> tuple[Tensor, ...]:
    return torch.randn(2048, 13), torch.randint(0, 20_000, (2048, 16)), (torch.rand(2048) > 0.5).float()


def _conditioned() -> tuple[Tensor, ...]:
    return torch.randn(8, LENGTH, WIDTH), torch.randn(8, WIDTH), torch.randn(8, LENGTH, WIDTH)


def _padded() -> Tensor:
    return torch.arange(LENGTH).expand(BATCH, -1) >= torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1))


def _called(make: Callable[[], nn.Module], batch: Callable[[], tuple[Tensor, ...]]) -> Callable[[], Made]:
    return lambda: (make(), lambda call, *tensors: call(*tensors), batch())


MODELS: dict[str, Callable[[], Made]] = {
    **FOUR,
    "depthwise": _called(Depthwise, lambda: (torch.randn(8, 128, 32, 32),)),
    "convnext": _called(ConvNeXt, lambda: (torch.randn(8, 96, 28, 28),)),
    "unet": _called(UNet, lambda: (torch.randn(8, 3, 64, 64), torch.randn(8, 3, 64, 64), torch.rand(8))),
    "vae": _called(VAE, lambda: (torch.randn(32, 3, 32, 32), torch.randn(32, 64))),
    "lstm": _called(lambda: Recurrent(nn.LSTM), lambda: (tokens(), tokens())),
    "gru": _called(lambda: Recurrent(nn.GRU), lambda: (tokens(), tokens())),
    "gated scan": _called(GatedScan, lambda: (tokens(), tokens())),
    "dlrm": _called(Factors, _clicks),
    "graph convolution": _called(GraphConvolution, _edges),
    "experts": _called(Experts, lambda: (torch.randn(1024, WIDTH),)),
    "mixer": _called(Mixer, lambda: (torch.randn(16, 64, WIDTH),)),
    "modulated": _called(Modulated, _conditioned),
    "detection": _called(Detection, _boxes),
    "waves": _called(Waves, lambda: (torch.randn(8, 64, 1024),)),
    "contrast": _called(Contrast, lambda: (torch.randn(512, 512), torch.randn(512, 512))),
    "points": _called(Points, lambda: (torch.randn(16, 3, 1024), torch.randint(0, 40, (16,)))),
    "waveform": _called(Waveform, lambda: (torch.rand(8192, 2), torch.rand(8192, 3))),
    "masked": _called(Masked, lambda: (torch.randn(8, 128, WIDTH), torch.randn(8, 64, WIDTH), _padded())),
    **{f"hf {kind}": partial(pretrained, kind) for kind in HEADS},
}


if __name__ == "__main__":
    print("A part of another command: python scripts/bench_breadth.py --help")
