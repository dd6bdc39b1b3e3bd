"""What a result shares memory with: inputs, parameters, other results, earlier results."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.harness import PROGRAMS, case, cases_of, check, fill, grads, leaf, normal, raises, shares


@case
def input_and_view_of_it(comp):
    x = leaf(4)
    a, v = comp(lambda x: (x, x.view(2, 2)))(x)
    (v * 2).sum().backward()
    return a is x, shares(v, x), v._base is x, v, grads(x)


@case
def view_of_input_written_by_caller(comp):
    x = normal(4)
    v = comp(lambda x: x[1:3])(x)
    v.add_(5)
    return v, x


@case
def view_of_non_leaf_written_by_caller(comp):
    b = leaf(4)
    x = b * 1
    v = comp(lambda x: x[1:3])(x)
    v.mul_(5)
    (x * x).sum().backward()
    return v, x, grads(b)


@case
def detached_input(comp):
    x = leaf(3)
    d = comp(lambda x: x.detach())(x)
    return shares(d, x), d


@case
def detach_and_value(comp):
    x = leaf(3)

    def f(x):
        y = x * 2
        return y, y.detach()

    y, d = comp(f)(x)
    d.add_(1)
    return y, d, shares(y, d), raises(lambda: y.sum().backward()), grads(x)


@case
def detached_copy_is_written_after_saving(comp):
    def f(x):
        y = x.exp()
        return y, y.detach()

    x = leaf(3)
    y, d = comp(f)(x)
    d.mul_(2)
    return raises(lambda: y.sum().backward())


@case
def value_and_its_view(comp):
    def f(x):
        y = x * 2
        return y, y[0], y.t()

    x = leaf(3, 3)
    y, r, t = comp(f)(x)
    r.add_(1)
    (t * y).sum().backward()
    return y, r, t, grads(x)


@case
def view_then_value_order(comp):
    def f(x):
        y = x * 2
        return y.view(-1), y

    x = leaf(2, 2)
    v, y = comp(f)(x)
    y.mul_(3)
    v.sum().backward()
    return v, y, v._is_view(), grads(x)


@case
def views_of_views(comp):
    def f(x):
        y = x.sin()
        return y[1:][:, ::2].t(), y.unsqueeze(0).expand(2, 4, 4)

    x = leaf(4, 4)
    a, b = comp(f)(x)
    (a.sum() + b.pow(2).sum()).backward()
    return a, b, grads(x)


@case
def split_chunk_unbind(comp):
    def f(x):
        y = x * 2
        return y.split(2), y.chunk(2), y.unbind(0)

    x = leaf(4)
    outs = comp(f)(x)
    sum(o.sum() for group in outs for o in group).backward()
    return outs, raises(lambda: outs[2][0].add_(1)), grads(x)


@case
def split_of_input_written(comp):
    x = normal(4)
    a, b = comp(lambda x: x.split(2))(x)
    a.add_(1)
    return a, b, x


@case
def split_under_no_grad_written(comp):
    x = leaf(4)
    with torch.no_grad():
        a, b = comp(lambda x: (x * 2).split(2))(x)
    a.add_(1)
    return a, b


@case
def same_value_in_two_places(comp):
    def f(x):
        y = x * 2
        return {"a": y, "b": [y, (y,)]}

    out = comp(f)(leaf(3))
    return out["a"] is out["b"][0], out["b"][0] is out["b"][1][0], out


@case
def one_view_in_two_places(comp):
    x = leaf(4)

    def f(x):
        of_input, of_value = x.view(2, 2), (x * 2).view(2, 2)
        return of_input, of_input, of_value, of_value

    a, b, c, d = comp(f)(x)
    between = [torch.autograd.grad(m, n, torch.ones(2, 2), retain_graph=True)[0] for m, n in ((a, b), (d, c))]
    (a * b * c * d).sum().backward()
    return a is b, c is d, between, grads(x)


@case
def equal_values_are_not_shared(comp):
    a, b, c = comp(lambda x: (x + 1, x + 1, (x + 1).clone()))(normal(3))
    a.add_(1)
    return a, b, c, shares(a, b)


@case
def casts_that_copy_or_not(comp):
    def f(x):
        return x.to(torch.float32), x.to(torch.float32, copy=True), x.type_as(x), x.contiguous(), x.to("cpu"), x.float()

    x = normal(3)
    outs = comp(f)(x)
    return [o is x for o in outs], [shares(o, x) for o in outs]


@case
def contiguous_of_transposed(comp):
    def f(x):
        return x.t().contiguous(), x.t().reshape(-1), x.reshape(-1), x.t().flatten(), x.flatten(), x.ravel()

    x = normal(3, 3)
    outs = comp(f)(x)
    return [shares(o, x) for o in outs], outs


@case
def shape_methods_that_alias(comp):
    def f(x):
        return (
            x.squeeze(),
            x.view_as(x),
            x.expand(3, 1, 2),
            x.expand_as(x),
            x.movedim(0, 2),
            x.T if x.dim() == 2 else x,
            x.unflatten(0, (3, 1)),
            x.swapaxes(0, 2),
            x.narrow(0, 1, 1),
            x.select(2, 0),
            x.diagonal(0, 0, 2),
            x.unfold(0, 2, 1),
        )

    x = normal(3, 1, 2)
    outs = comp(f)(x)
    return [o is x for o in outs], [shares(o, x) for o in outs], outs


@case
def differentiable_aliases(comp):
    def f(x):
        return x.view_as(x), x.expand_as(x), x.squeeze(0), x.alias() if hasattr(x, "alias") else x[:]

    x = leaf(2, 2)
    outs = comp(f)(x)
    sum((o * i).sum() for i, o in enumerate(outs, 1)).backward()
    return outs, [o is x for o in outs], grads(x)


@case
def identity_modules(comp):
    m = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Flatten(0)).eval()
    x = leaf(4)
    out = comp(m)(x)
    return out is x, shares(out, x), out


@case
def other_dtype_view(comp):
    def f(x):
        return x.view(torch.int32), x.view(torch.int16)

    x = normal(4)
    outs = comp(f)(x)
    outs[0].zero_()
    return outs, x


@case
def real_and_imaginary(comp):
    x = torch.complex(normal(3), normal(3, seed=1)).requires_grad_()
    r, i, v, c = comp(lambda x: (x.real, x.imag, torch.view_as_real(x), x.conj()))(x)
    (r.sum() + (i * i).sum() + v.sum() + c.real.sum()).backward()
    return r, i, v, c.resolve_conj(), [shares(o, x) for o in (r, i, v, c)], grads(x)


@case
def view_as_complex_result(comp):
    x = leaf(3, 2)
    out = comp(lambda x: torch.view_as_complex(x * 2))(x)
    out.abs().sum().backward()
    return out, grads(x)


@case
def parameter_returned(comp):
    m = fill(nn.Linear(2, 2))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            return self.m(x), self.m.weight, self.m.weight.t(), self.b, self.b[0], self.m.weight.detach()

    out, w, t, b, b0, d = comp(M())(normal(1, 2))
    (out.sum() + t.pow(2).sum()).backward()
    return out, w is m.weight, t, b, b0, shares(t, w), shares(d, w), shares(b0, b), grads(*m.parameters())


@case
def closed_over_tensor_returned(comp):
    k = leaf(3, seed=4)
    out, v = comp(lambda x: (k, k[1:] * x[1:]))(normal(3))
    v.sum().backward()
    return out is k, v, grads(k)


@case
def constant_returned_and_written(comp):
    def f(x):
        return x + 1, torch.tensor([1.0, 2.0]), torch.arange(3), torch.ones(2)

    g = comp(f)
    first = g(normal(2))
    [t.zero_() for t in first[1:]]
    return g(normal(2)), first


@case
def view_of_constant_returned_and_written(comp):
    def f(x):
        c = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        return c[0], c.t(), x * c

    g = comp(f)
    a, t, _ = g(normal(2))
    a.zero_()
    return t, g(normal(2))


@case
def constant_used_in_backward_and_written(comp):
    def f(x):
        c = torch.tensor([2.0, 3.0])
        return x * c, c

    g = comp(f)
    x = leaf(2)
    y, c = g(x)
    c.zero_()
    return raises(lambda: y.sum().backward()), g(x)


@case
def two_calls_share_nothing(comp):
    g = comp(lambda x: (x.sin(), x.cos() * 2))
    a = g(normal(3))
    b = g(normal(3))
    a[0].zero_()
    return a, b


@case
def result_kept_while_later_calls_run(comp):
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    g = comp(m)
    outs = [g(normal(2, 3, seed=i)) for i in range(4)]
    sum(o.pow(2).sum() for o in outs[::-1]).backward()
    return outs, grads(*m.parameters())


@case
def expanded_result_written_raises(comp):
    out = comp(lambda x: (x * 2).expand(3, 4))(normal(1, 4))
    return raises(lambda: out.add_(1)), out


@case
def no_grad_view_written_outside(comp):
    x = leaf(4)
    with torch.no_grad():
        v = comp(lambda x: x[1:])(x)
    return v.requires_grad, raises(lambda: v.mul_(2)), x


@case
def view_made_under_no_grad_inside(comp):
    def f(x):
        y = x * 2
        with torch.no_grad():
            v = y[1:]
        return y, v

    x = leaf(4)
    y, v = comp(f)(x)
    return v.requires_grad, raises(lambda: v.mul_(2)), y.requires_grad


@case
def leaf_view_written_raises(comp):
    x = leaf(4)
    v = comp(lambda x: x[1:])(x)
    return raises(lambda: v.mul_(2)), v


@case
def unfold_and_as_strided(comp):
    x = leaf(6)
    a, b = comp(lambda x: (x.unfold(0, 3, 1), x.as_strided((2, 2), (3, 1), 1)))(x)
    (a.pow(2).sum() + b.sum()).backward()
    return a, b, b.storage_offset(), grads(x)


@case
def as_strided_of_offset_view(comp):
    base = normal(10)
    out = comp(lambda x: x.as_strided((2,), (1,)) + x[:2])(base[4:])
    return out


@case
def slice_of_offset_view(comp):
    base = normal(10)
    v = comp(lambda x: x[1:3])(base[4:])
    v.zero_()
    return v, base, v.storage_offset()


@case
def offset_view_of_intermediate(comp):
    v = comp(lambda x: (x + 1)[2:])(normal(5))
    return v, v.storage_offset(), v.untyped_storage().nbytes()


@case
def inputs_that_share_returned(comp):
    base = leaf(4)
    a, b = comp(lambda a, b: (a[0:1], b * 2))(base[:2], base[2:])
    (a.sum() + b.sum()).backward()
    return a, b, grads(base)


@case
def dropout_in_eval_returns_input(comp):
    x = leaf(3)
    out = comp(lambda x: F.dropout(x, 0.5, False))(x)
    return out is x


@case
def dropout_in_eval_is_its_input_in_inference_mode(comp):
    """There a trace sees the operator itself, which hands its argument on."""

    def f(x, y):
        hidden = y * 2
        F.dropout(hidden, 0.5, False).add_(1)
        F.dropout(x, 0.0, True).mul_(3)
        return hidden, F.dropout(y, 0.5, False)

    x, y = normal(3), normal(3, seed=1)
    with torch.inference_mode():
        hidden, handed_on = comp(f)(x, y)
    return hidden, handed_on is y, x


@case
def dictionary_of_inputs_returned(comp):
    d = {"a": normal(2), "b": normal(2, seed=1)}
    out = comp(lambda d: {**d, "c": d["a"] + d["b"]})(d)
    return out["a"] is d["a"], out


@case
def argument_container_returned(comp):
    xs = [normal(2), normal(2, seed=1)]
    out = comp(lambda xs: xs)(xs)
    out.append(3)
    return len(xs), out


@case
def empty_and_zero_dim_views(comp):
    x = leaf(4)
    a, b = comp(lambda x: (x[2:2], x[3]))(x)
    (a.sum() + b * 2).backward()
    return a, b, shares(b, x), grads(x)


@case
def output_of_in_place_on_intermediate(comp):
    def f(x):
        y = x * 2
        z = y.view(2, 2)
        z.add_(1)
        return y, z

    x = leaf(4)
    y, z = comp(f)(x)
    z.mul_(2)
    y.sum().backward()
    return y, z, grads(x)


@case
def stacked_and_unstacked(comp):
    def f(x):
        s = torch.stack([x, x * 2])
        return s.unbind(0), s

    x = leaf(3)
    (a, b), s = comp(f)(x)
    (a * b + s.sum(0)).sum().backward()
    return a, b, s, shares(a, s), grads(x)


@case
def conjugate_of_an_input_and_of_a_result(comp):
    x = torch.complex(normal(3), normal(3, seed=1)).requires_grad_()
    c, y, d, i = comp(lambda x: (lambda y: (x.conj(), y, y.conj(), y.conj().imag))(x * 2))(x)
    (c * d.sin()).sum().abs().backward()
    return c.is_conj(), d.is_conj(), i.is_neg(), shares(c, x), shares(d, y), c, y, d, i, grads(x)


@case
def conjugate_alone_with_gradient(comp):
    x = leaf(6)
    out = comp(lambda x: torch.fft.ifft(x.sin()))(x)
    (out * out.conj()).real.sum().backward()
    return out.is_conj(), out, grads(x)


@case
def negative_view_written_by_caller(comp):
    z = torch.complex(normal(3), normal(3, seed=1))
    n = comp(lambda z: z.conj().imag)(z)
    n.mul_(2)
    return n.is_neg(), n, z


@case
def complex_view_of_a_real_input(comp):
    x = leaf(3, 2)
    z = comp(lambda x: torch.view_as_complex(x))(x)
    (z * z).abs().sum().backward()
    return shares(z, x), z, grads(x)


@case
def real_views_of_a_complex_result(comp):
    x = leaf(3, 2)
    z, r, i = comp(lambda x: (lambda z: (z, torch.view_as_real(z), z.imag))(torch.view_as_complex(x * 2)))(x)
    (z.real * r[:, 0] * i).sum().backward()
    return shares(z, r), shares(z, i), z, r, i, grads(x)


@case
def complex_view_of_a_part(comp):
    x = normal(4, 3, 2)
    g = comp(lambda x: torch.view_as_complex(x)[1:, ::2])
    z, w = g(x), g(normal(5, 3, 2)[1:])
    z.mul_(1j)
    return z, w, x


@case
def real_parts_of_an_input_elsewhere_in_its_memory(comp):
    g = comp(lambda z: (z.imag[1:], torch.view_as_real(z)[..., 1]))
    z = torch.view_as_complex(normal(6, 2))
    return [g(part) for part in (z, z[1:], z[2:5])]


@case
def bits_of_a_result_as_integers(comp):
    x = leaf(4)
    y, b = comp(lambda x: (lambda y: (y, y.view(torch.int32)[1:]))(x * 2))(x)
    y.sum().backward()
    c = comp(lambda x: x.detach().view(torch.int32))(x)
    return shares(y, b), y, b, c, shares(x, c), grads(x)


@case
def lazy_conjugate_as_tangent(comp):
    x = torch.complex(normal(3), normal(3, seed=1)).requires_grad_()
    z = comp(lambda x: torch.view_as_complex(torch.view_as_real(x * 2).exp()))(x)
    (z.conj() * torch.ones(3).mul(1j)).real.sum().backward()
    return z, grads(x)


@case
def offsets_counted_from_the_start_of_the_memory(comp):
    g = comp(lambda x: x.as_strided((2, 2), (2, 1), 1) * 2)
    x = normal(12)
    return g(x[:8]), g(x[2:10]), g(x[:8]), g(x[3:11])


@case
def parts_that_autograd_takes_for_no_views(comp):
    x = leaf(4, 6)

    def f(x):
        return x.unsafe_chunk(3, -1), torch.unsafe_split(x, 3, 0)[1], torch.unsafe_split_with_sizes(x, [1, 5], 1)[0]

    chunks, part, column = comp(f)(x)
    (chunks[0] * chunks[2]).sum().backward(retain_graph=True)
    (part.sin().sum() + column.exp().sum()).backward()
    return [(v._is_view(), shares(v, x), v) for v in (*chunks, part, column)], grads(x)


@case
def unsafe_parts_of_what_the_program_changes(comp):
    b = leaf(4, 2)
    x = b * 1

    def f(x):
        before = x.unsafe_chunk(2)
        x.mul_(2)
        return before[0], x.unsafe_chunk(2)[1]

    a, c = comp(f)(x)
    (a + c * 3).sum().backward()
    return a, c, x, grads(b)


@case
def parts_of_numbers_without_gradients(comp):
    """They are no views, and count writes of their own; so does .data, but not what is detached."""

    def f(x):
        y = x * 2
        whole = y + 1
        return *x.unsafe_chunk(2), torch.unsafe_split(y, 2)[1], x.data, x.detach(), whole, whole.data, whole.detach()

    x = torch.arange(6)
    parts = comp(f)(x)
    views = [(part._is_view(), part._version) for part in parts]
    parts[0].add_(10)
    parts[3].mul_(2)
    parts[4].sub_(1)
    parts[6].mul_(3)
    parts[7].sub_(4)
    return views, [part._version for part in (x, *parts)], parts, x


def _part_written(x):
    y = x * 1
    a, b = y.unsafe_chunk(2)
    return a.add_(1), b * 2


def _part_written_and_read_as_a_whole(x):
    y = x * 1
    y.unsafe_chunk(2)[0].add_(1)
    return y * 2


def _part_written_and_returned_with_the_whole(x):
    y = x * 1
    a, b = y.unsafe_chunk(2)
    a.add_(1)
    return a, b, y


def _part_of_an_input_written(x):
    x.unsafe_chunk(2)[0].add_(1)
    return x.sum()


def _whole_written_and_read_as_a_part(x):
    y = x * 1
    a = y.unsafe_chunk(2)[0]
    y.add_(1)
    return a * 2


def _part_written_and_read_in_another(x):
    y = x * 1
    a, b = torch.unsafe_split(y, 2)[0], torch.unsafe_split_with_sizes(y, [1, 3])[1]
    a[1:].add_(1)
    return b * 2


def _part_written_and_read_in_a_view_of_the_whole(x):
    y = x * 1
    row = y[0]
    y.unsafe_chunk(2)[0].add_(1)
    return row * 2


_WRITES_OF_PARTS = (
    _part_written, _part_written_and_read_as_a_whole, _part_written_and_returned_with_the_whole,
    _part_of_an_input_written, _whole_written_and_read_as_a_part, _part_written_and_read_in_another,
    _part_written_and_read_in_a_view_of_the_whole,
)  # fmt: skip


@case
def unsafe_parts_written_and_read_by_another_name(comp):
    found = []
    for f in _WRITES_OF_PARTS:
        g, x = comp(f), normal(4, 3)
        found.append((g(x), x))
    return found


@case
def unsafe_parts_written_and_read_by_another_name_in_inference_mode(comp):
    found = []
    for f in _WRITES_OF_PARTS:
        g = comp(f)
        with torch.inference_mode():
            x = normal(4, 3)
            found.append((g(x), x))
    return found


@case
def writes_behind_autograds_back(comp):
    """Through a detached alias, or under no_grad, a tensor keeps its history: no gradient comes by the program."""

    def f(x, y, z):
        y.detach().t().mul_(-1.5)
        with torch.no_grad():
            z.mul_(2)
        x.tanh_()

    a, b, c = leaf(3), leaf(3, 3), leaf(3)
    x, y, z = a.sin(), b * 1, c + 1
    comp(f)(x, y, z)
    names = [type(value.grad_fn).__name__ for value in (y, z)]
    first = torch.autograd.grad(x.sum(), a)
    return x, y, z, names, first, torch.autograd.grad(y.sum() + z.sum(), [b, c])


@case
def views_of_an_input_whose_elements_share_memory(comp):
    weight = normal(3, 4)

    def f(x):
        return x.t(), x[1:], x.sin()

    out = []
    for x in (normal(3, 1).expand(3, 4), normal(5).as_strided((3, 4), (0, 1)), normal(6).unfold(0, 4, 1)):
        x = x.detach().requires_grad_()
        transposed, rows, sines = comp(f)(x)
        ((transposed * weight.t()).sum() + (rows * weight[1:]).sum() + sines.sum()).backward()
        out.append((transposed, rows, x.grad))
    return out


@case(close="what comes from several results is added up result by result")
def views_of_a_computed_input_with_gaps(comp):
    out = []
    for start in (0, 1):
        base = leaf(5, 8)
        results = comp(lambda x: (x.t(), x[1:], x.sin()))((base * 2)[:, start::3])
        sum(result.pow(2).sum() for result in results).backward()
        out.append((results, base.grad))
    return out


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
