"""What random programs are made of: statements with holes, filled from the tensors that are at hand.

A template is Python text. A hole {kind} becomes the name of a tensor, a dimension or a number; {kind:1} is the same at
every place. Whether a filled statement is legal, eager decides: it is run. Kinds of tensors: a any, f float, n number,
i int64, b bool, c complex, w to be written, m matrix, v vector, q of rank 2 or more, cube, image; o broadcasts to the
first tensor of the statement, z has its shape.
"""

from __future__ import annotations

import random
import re
from typing import Any

import torch
from torch import Tensor

UNARY = [
    "torch.sin({f})", "torch.tanh({f})", "torch.sigmoid({f})", "torch.relu({f})", "F.gelu({f})", "{f}.abs()",
    "{f}.square()", "{f:1} * {f:1}.sign()", "{f}.clamp({lo}, {hi})", "torch.log1p({f}.abs())",
    "1.0 / (1.5 + {f}.abs())", "torch.where({f:1} > 0, {f:1} * 2, {f:1}.exp())",
    "{f:1}.masked_fill({f:1}.detach() < -0.3, {s})", "{f}.sqrt()", "{f:1} * {f:1}.detach().cos()", "F.silu({f})",
    "F.softplus({f})", "{f}.neg()", "{f}.exp().clamp(max=9.0)", "F.leaky_relu({f}, 0.2)", "{f}.rsqrt()",
    "torch.nan_to_num({f})", "{f} ** 2", "{f}.abs() ** {s}", "{f}.erf()", "F.hardtanh({f})", "{f}.clone()",
    "{f}.contiguous()", "{f}.round()", "{f}.frac()", "F.elu({f})", "F.mish({f})", "{f}.triu()", "{f}.tril({k})",
    "torch.special.expit({f})", "F.logsigmoid({f})", "{f}.floor()", "{s} - {f}", "{f} * {s}", "{f} + {k}", "{f} / {s}",
    "{n} + {k}", "{n} * {k}", "{f}.logit(eps=0.1)", "{f} * True", "{f} - 0.0",
]  # fmt: skip
TYPES = [
    "{f}.to({dt})", "{n}.to({dt})", "{f}.double()", "{f}.to(torch.bfloat16).float()", "{n}.float()", "{b}.float()",
    "{b}.to({dt})", "{f}.half()", "{n}.long()", "{f}.type_as({f})", "({f} * 10).int()", "({n} > {s})", "{i} % 3",
    "{i} // 2", "({f} * 30).abs().clamp(max=200.0).to(torch.uint8)", "~{b}", "{b} & ({n} > 0)", "{i} << 1", "{i} | 3",
]  # fmt: skip
REDUCTIONS = [
    "{f}.sum({d}, keepdim=True)", "{f}.mean({d})", "{f}.amax({d}, keepdim=True)", "{f}.var({d}, correction=0)",
    "{f}.logsumexp({d})", "{f}.sum()", "{f}.mean()", "{f}.softmax({d})", "{f}.log_softmax({d})", "{f}.cumsum({d})",
    "{f}.norm()", "{f}.max({d}).values", "{f}.min({d})[0]", "{f}.argmax({d})", "{f}.sort({d}).values", "{b}.any()",
    "{f}.topk(1, {d}).values", "{f}.prod({d})", "{f}.amin()", "{f}.std()", "{f}.median({d}).values", "{n}.sum()",
    "{i}.cumsum({d})", "{f}.argsort({d})", "{f}.cumprod({d})", "{f}.amax()", "{n}.sum({d}, dtype=torch.float64)",
    "{f}.aminmax().max", "{f}.logcumsumexp({d})", "{f}.kthvalue(1, {d}).values", "F.normalize({f}, dim={d})",
]  # fmt: skip
VIEWS = [
    "{a}.t()", "{a}.transpose({d}, {d})", "{a}.reshape(-1)", "{a}.view(-1)", "{a:1}.narrow({d:1}, 0, 1)", "{a}.mT",
    "{a}[::2]", "{a}[..., 1:]", "{a}[0]", "{a}.select({d}, -1)", "{a}.unsqueeze({d})", "{a}.squeeze()", "{a}[None]",
    "{a:1}.chunk(2, {d:1})[0]", "{a}.unbind(0)[-1]", "{a:1}.split(1, {d:1})[0]", "{a}.diagonal()", "{a}.flatten()",
    "{a}.movedim({d}, 0)", "{a}.expand(2, *{first}.shape)", "{a}.detach()", "{a}.view_as({first})",
    "{a}.swapaxes(0, -1)", "{a}.unfold({d}, 2, 1)", "{a:1}.view({a:1}.shape)", "{a}[..., -1:]",
    "{a}.detach().clone().as_strided((2, 2), (1, 1))", "{a}[:, 0]", "{a}.broadcast_to({o}.shape)", "{a}[:]", "{a}[...]",
    "{a}.mH", "{a}.tensor_split(2)[0]", "{a}.unflatten(-1, (1, -1))", "{a}.movedim(-1, 0)",
]  # fmt: skip
MOVES = [
    "{a}.flip({d})", "torch.cat([{a}, {z}], {d})", "torch.stack([{a}, {z}], {d})", "{a}.roll(1, {d})",
    "{a}.repeat(2, 1)", "F.pad({f}, (1, 0))", "F.pad({f}, (0, 1), value={s})",
    "{a:1}.gather({d:1}, {i}.clamp(0, {a:1}.shape[{d:1}] - 1))",
    "{a:1}.index_select({d:1}, {i}.reshape(-1).clamp(0, {a:1}.shape[{d:1}] - 1))",
    "{a:1}[{i}.clamp(0, {a:1}.shape[0] - 1)]", "{a:1}.take_along_dim({a:1}.argsort({d:1}), {d:1})",
    "torch.where({b}, {a}, {o})", "torch.where({n} > 0, {o}, {s})",
    "{f:1}.scatter({d:1}, {i}.clamp(0, {f:1}.shape[{d:1}] - 1), {s})", "{a}.repeat_interleave(2, {d})",
    "{f:1}.scatter_add({d:1}, {f:1}.argsort({d:1}), {f:1})",
    "{f:1}.index_add(0, {i}.reshape(-1).clamp(0, {f:1}.shape[0] - 1), {f:1})",
    "{a:1}.index_put(({i}.clamp(0, {a:1}.shape[0] - 1),), {a:1}[0])", "F.pad({f}, (1, 1), mode='replicate')",
    "{a}.rot90()", "torch.tril({a})", "{a:1}.masked_fill({b}, 0)", "F.embedding({i}.clamp(0, 1), {m})",
    "torch.outer({a}, {a})", "{a:1}.slice_scatter({a:1}[:1], 0, 0, 1)", "{a:1}.select_scatter({a:1}[0], 0, 0)",
    "torch.meshgrid({a}, {a}, indexing='ij')[0]",
]  # fmt: skip
BINARY = [
    "{n} + {o}", "{n} - {o}", "{n} * {o}", "torch.maximum({f}, {o})", "torch.lerp({f}, {z}, 0.3)",
    "{f} / ({o}.abs() + 0.5)", "torch.atan2({f}, {o}.abs() + 0.5)", "torch.addcmul({f}, {o}, {o})",
    "torch.minimum({n}, {o})", "{f} + {o} * {s}", "torch.add({n}, {o}, alpha=2)", "{n} == {o}", "{f} < {o}",
    "F.mse_loss({f}, {z})", "torch.hypot({f}, {o})", "{f:1} * {f:1}", "F.smooth_l1_loss({f}, {z}, reduction='none')",
    "torch.logaddexp({f}, {o})", "{f:1} + {f:1}", "torch.fmod({f}, {o}.abs() + 0.5)",
    "F.cosine_similarity({f}, {z}, -1)", "torch.copysign({f}, {o}.detach())", "{f} * 0.5 + {o} * 0.5",
]  # fmt: skip
PRODUCTS = [
    "{m} @ {m}", "torch.tanh({m:1} @ {m:1}.t())", "F.linear({m}, {m})", "torch.bmm({cube}, {cube}.transpose(1, 2))",
    "{m} @ {v}", "torch.addmm({f}, {m}, {m})", "torch.einsum('ij,kj->ik', {m}, {m})", "torch.dot({v}, {v})",
    "F.layer_norm({f:1}, {f:1}.shape[-1:])", "F.conv1d({cube}, {cube})", "F.conv2d({image}, {image}, padding=1)",
    "F.max_pool2d({image}, 2)", "F.avg_pool2d({image}, 2)", "torch.mv({m}, {v})",
    "F.batch_norm({f:1}, None, None, training=True)", "F.group_norm({f:1}, 1)", "F.rms_norm({f:1}, {f:1}.shape[-1:])",
    "torch.outer({v}, {v})", "F.scaled_dot_product_attention({q:1}, {q:1}, {q:1}.sin())",
    "F.cross_entropy({m:1}, {m:1}.argmax(1))", "F.interpolate({image}, scale_factor=2)",
    "F.adaptive_avg_pool2d({image}, 1)", "F.nll_loss({m:1}.log_softmax(1), {m:1}.argmin(1), reduction='none')",
    "F.glu({f})", "torch.cdist({m}, {m})", "F.binary_cross_entropy_with_logits({f:1}, {f:1}.detach().sigmoid())",
    "F.kl_div({f:1}.log_softmax(-1), {f:1}.softmax(-1), reduction='sum')",
]  # fmt: skip
COMPLEX = [
    "torch.complex({f:1}, {f:1}.sin())", "{c}.abs()", "{c} * {c}", "{c}.real", "{c}.conj() * {c}",
    "torch.view_as_real({c})", "{c}.imag * 2", "torch.complex({f:1}, {f:1}.cos()).imag",
    "torch.complex({f:1}, {f:1}.exp()).abs()",
    "torch.view_as_real(torch.complex({f:1}, {f:1}.tanh()))", "torch.view_as_complex(torch.stack([{f:1}, {f:1}], -1))",
]  # fmt: skip
DRAWS = [
    "F.dropout({f}, {p})", "{f:1} + torch.randn({f:1}.shape)", "{f:1} * torch.rand_like({f:1})",
    "torch.bernoulli({f}.sigmoid())", "{f:1} * torch.bernoulli(torch.full_like({f:1}, 0.6))",
    "torch.randn_like({f}) * {o}", "F.dropout({f}, {p}, inplace=False)", "torch.rand(2, 3)",
    "torch.randint(0, 4, (3,))", "F.alpha_dropout({f}, {p})", "torch.normal({f}, 1.0)", "torch.randperm(4)",
    "{f:1} + torch.empty_like({f:1}).uniform_(-1, 1)", "F.rrelu({f}, training=True)", "F.dropout1d({cube}, {p})",
    "torch.empty_like({f}).exponential_()", "torch.multinomial({m}.softmax(1), 1)", "torch.randint_like({f}, 5)",
]  # fmt: skip
WRITES = [
    "{w}.add_({o})", "{w}.mul_({s})", "{w}.copy_({o})", "{w}.zero_()", "{w}[0] = {s}", "{w}[..., :1] = {s}",
    "{w}.sin_()", "{w}.neg_()", "{w}.masked_fill_({b}, {s})", "{w}.fill_({k})", "{w}.clamp_(-1, 1)",
    "{w}.t().mul_({s})", "{w}.detach().add_({k})", "{w}[::2].mul_({s})",
    "{w}.index_fill_({d}, torch.tensor([0]), {s})", "{w}.sub_({o}, alpha=2)", "{w}.lerp_({z}, 0.2)",
    "{w}.addcmul_({o}, {o})", "{w} += {o}", "{w}.mul_({o})", "{w}[{b}] = 0.5", "{w}.view(-1)[0] = {s}",
    "{w:1}.index_add_(0, torch.tensor([0]), {w:1}[:1].clone())", "{w}.relu_()",
    "{w:1}.scatter_({d:1}, {i}.clamp(0, {w:1}.shape[{d:1}] - 1), {s})", "{w:1}.select({d:1}, 0).add_({o})",
    "{w}.sigmoid_()", "{w}.diagonal().fill_({s})", "{w:1}.copy_({w:1}.flip(0))", "{w}.tanh_()",
    "{w}.transpose(0, -1).add_({k})", "{w}.exp_()",
    "{w:1}.index_put_((torch.tensor([0, 0]),), {w:1}[:1].detach().clone(), accumulate=True)", "{w}.triu_()",
    "{w}.reciprocal_()", "{w:1}[1:] = {w:1}[:-1].clone()", "{w}.squeeze().mul_(2)", "{w}.div_({s})",
    "F.relu({w}, inplace=True)", "{w}.square_()",
]  # fmt: skip
WRITTEN_DRAWS = [
    "{w}.normal_()", "{w}.uniform_()", "{w}.bernoulli_({p})", "F.dropout({w}, {p}, inplace=True)", "{w}.random_(5)",
]  # fmt: skip

DETACHED = [
    "{f:1} * {f:1}.detach()", "{f:1} + ({f:1}.round() - {f:1}).detach()", "{f:1}.detach().sin() - {f:1}",
    "torch.cat([{f:1}.detach(), {f:1}])", "{f:1} / {f:1}.detach().abs().add(1)",
]  # fmt: skip
TRANSFORMS = [
    "torch.vmap(lambda t: t * 2)({f})", "torch.vmap(lambda t: t.sin() * {s})({v})", "torch.vmap(lambda t: 1 - t)({v})",
    "torch.vmap(lambda t: t * 2 + 1)({v})", "torch.vmap(lambda t: t / {k})({n})",
    "torch.vmap(lambda t: t.sum() + {k})({f})", "torch.vmap(torch.mul, in_dims=(0, None))({q}, {v})",
    "torch.vmap(lambda t, u: t @ u, in_dims=(0, None))({cube}, {m})", "torch.vmap(lambda t: t.clone().mul_({s}))({f})",
    "torch.vmap(lambda t: t.softmax(-1), in_dims={d:1}, out_dims={d:1})({q:1})",
    "torch.vmap(torch.func.grad(lambda t: (t.sin() * t).sum()))({f})", "torch.vmap(lambda t: t.new_ones(3) * t)({v})",
    "torch.vmap(lambda t: torch.where(t > 0, t, {s}))({f})", "torch.func.grad(lambda t: (t * t.sin()).sum())({f})",
    "torch.func.jacrev(lambda t: t.exp() * 2)({v})", "torch.vmap(lambda t: t[0] / {k})({q})",
    "torch.vmap(lambda t: t.to(torch.float64) + 1)({f})", "torch.vmap(lambda t, u: t - u * 2)({f:1}, {f:1}.detach())",
    "torch.vmap(torch.vmap(lambda t: t ** 2))({q})", "torch.vmap(lambda t: t.cumsum(0).flip(0))({q})",
    "torch.func.jvp(lambda t: t.sin() * 2, ({f:1},), (torch.ones_like({f:1}),))[1]",
    "torch.func.vjp(lambda t: t.tanh() * {s}, {f:1})[1](torch.ones_like({f:1}))[0]",
]  # fmt: skip
SQUARES = [
    "torch.linalg.inv(torch.eye(3, dtype={f:1}.dtype) * (1.5 + {f:1}.square().mean()))",
    "torch.linalg.cholesky(torch.eye(2, dtype={f:1}.dtype) * (1 + {f:1}.square().mean()))",
    "torch.linalg.solve(torch.eye({m:1}.shape[0], dtype={m:1}.dtype) * 2, {m:1})",
    "torch.linalg.det(torch.eye(3, dtype={f:1}.dtype) + {f:1}.tanh().mean())",
    "torch.linalg.lu_factor(torch.eye(3, dtype={f:1}.dtype) * (2 + {f:1}.sin().mean()))[0]",
]  # fmt: skip
SPARSE = [
    "F.embedding(torch.tensor([1, 0, 0]), {m}, sparse=True)", "self.table(torch.tensor([6, 1, 6]))",
    "self.table.weight * {s} + self.table(torch.tensor([3]))",
    "self.table(torch.tensor([2, 2])) @ self.table.weight.t()",
    "{f:1}.gather({d:1}, {f:1}.argsort({d:1}), sparse_grad=True) * {f:1}",
    "F.embedding({m}.argmax(1), {m}, sparse=True)",
]  # fmt: skip
BRANCHES = [
    "torch.cond({f:1}.sum() > 0, lambda t: t.sin(), lambda t: t * 2, ({f:1},))",
    "torch.cond({f}.mean() > 0, lambda t: t.exp() + 1, lambda t: t.exp() - 1, ({f},))",
]
# Statements that give nothing, and may raise: the check of a result that nobody reads counts, too.
EFFECTS = [
    "torch._assert_async(({f} < {hi}).all())", "torch._assert_async({f}.isfinite().all(), 'not finite')",
    "torch._assert_async({n}.sum() != 0)", "torch.linalg.cholesky(torch.eye(2) * {f}.detach().float().amax())",
    "torch.linalg.inv(torch.eye(2) * ({f}.detach() > 0).any())", "torch._assert_async({b}.any())",
    "torch.linalg.solve(torch.eye(2) * ({f} > 0.2).any(), torch.ones(2))",
    "F.binary_cross_entropy({f:1}.detach().float(), torch.ones({f:1}.shape))",
    "torch.linalg.lu_factor(torch.eye(2) * ({n} > 1).any())",
]  # fmt: skip
# Python looks at the value: no direct trace can.
ASSERTIONS = [
    "torch._assert(({f} > -3).all(), 'small')", "assert ({f} < 4).all(), 'large'", "torch._check({a}.dim() < 4)",
]  # fmt: skip
# What an effect may raise, by type and words; all else is a statement that does not fit.
ERRORS = (AssertionError, RuntimeError)
RAISED = re.compile(r"assert|singular|not positive-definite|between 0 and 1|U\[\d+,\d+\] is zero|to be True", re.I)

# (how likely, statements) of each kind; writes and effects assign nothing.
KINDS: dict[str, tuple[float, list[str]]] = {
    "unary": (6, UNARY), "types": (2, TYPES), "reduce": (2.5, REDUCTIONS), "view": (4, VIEWS), "move": (3, MOVES),
    "binary": (5, BINARY), "product": (3, PRODUCTS), "complex": (0.8, COMPLEX), "write": (4, WRITES),
    "detached": (0.8, DETACHED), "transform": (1.2, TRANSFORMS), "squares": (0.3, SQUARES), "sparse": (0.4, SPARSE),
    "branch": (0.08, BRANCHES), "effect": (0.5, EFFECTS),
    "asserted effect": (0.07, ASSERTIONS),
}  # fmt: skip
RANDOM_KINDS: dict[str, tuple[float, list[str]]] = {"draw": (3, DRAWS), "written draw": (0.6, WRITTEN_DRAWS)}
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
_HOLE = re.compile(r"\{(\w+)(?::(\d))?\}")
_TENSORS = ("a", "f", "n", "i", "b", "w", "c", "m", "v", "q", "cube", "image")


class Scope:
    """The tensors that a statement can name, as they are where it will stand."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.names: list[str] = []
        self.env: dict[str, Any] = {}

    def value(self, name: str) -> Tensor:
        head, _, attribute = name.partition(".")
        return getattr(self.env[head], attribute) if attribute else self.env[head]

    def fill(self, template: str) -> str | None:
        """The template with every hole filled; None where no tensor fits one."""
        known: dict[str, str] = {}
        first: list[str] = []

        def replace(match: re.Match[str]) -> str:
            kind, number = match[1], match[2]
            if match[0] not in known:
                known[match[0]] = found = first[0] if kind == "first" else self._fill(kind, first)
                if kind in _TENSORS:
                    first.append(found)
            return known[match[0]] if number or kind == "first" else known.pop(match[0])

        try:
            return _HOLE.sub(replace, template)
        except IndexError:
            return None

    def _fill(self, kind: str, first: list[str]) -> str:
        rng = self.rng
        numbers = {
            "s": ["0.5", "-1.5", "2", "2.0", "-0.0", "0.1", "float('inf')"],
            "k": ["1", "2", "-1", "3"],
            "p": ["0.3", "0.5", "0.1"],
        }
        if kind in numbers:
            return rng.choices(numbers[kind], [1.0] * (len(numbers[kind]) - 1) + [0.2])[0]
        if kind == "lo":
            return rng.choice(["-0.5", "-1", "0.0"])
        if kind == "hi":
            return rng.choice(["0.7", "1", "2.0"])
        if kind == "dt":
            return "torch." + rng.choice(DTYPES[:6])
        rank = self.value(first[0]).dim() if first else 1
        if kind == "d":
            return str(rng.randrange(-rank, rank) if rank else 0)
        fits = [name for name in self.names if self._fits(kind, self.value(name), first)]
        # Recent values more often, so that programs are deep; the newest get half of all choices.
        return fits[-rng.randint(1, min(3, len(fits)))] if fits and rng.random() < 0.5 else rng.choice(fits)

    def _fits(self, kind: str, value: Tensor, first: list[str]) -> bool:
        like = self.value(first[0]) if first else value
        floats = value.dtype.is_floating_point
        whole = not floats and not value.is_complex() and value.dtype != torch.bool
        if kind == "o":  # the other operand: it broadcasts to the first
            same = value.dtype == like.dtype or self.rng.random() < 0.25
            return same and not value.is_complex() and _broadcasts(value.shape, like.shape)
        if kind == "z":
            return value.shape == like.shape and (value.dtype == like.dtype or self.rng.random() < 0.2)
        if kind in ("cube", "image", "m", "v", "q"):
            rank = {"cube": 3, "image": 4, "m": 2, "v": 1}.get(kind, value.dim())
            return floats and value.dim() == rank and value.dtype != torch.float16 and (kind != "q" or value.dim() >= 2)
        kinds = {"f": floats, "n": floats or whole, "i": value.dtype == torch.int64, "c": value.is_complex()}
        kinds |= {"b": value.dtype == torch.bool, "a": True, "w": floats or self.rng.random() < 0.3}
        return kinds[kind]


def _broadcasts(shape: Any, to: Any) -> bool:
    try:
        return torch.broadcast_shapes(shape, to) == to
    except RuntimeError:
        return False
