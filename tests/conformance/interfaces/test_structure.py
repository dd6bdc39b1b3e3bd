"""How programs are called and what they return: any Python shape of arguments and results."""

import collections
import dataclasses
import functools

import pytest
import torch
from torch import nn

import aottrain
from tests.conformance.harness import PYTHON, case, cases_of, check, fill, grads, leaf, normal, raises

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: torch.Tensor
    k: float = 2.0


@case
def positional_keyword_and_defaults(comp):
    def f(x, y=None, *rest, k=2, **more):
        return x * k + (0 if y is None else y) + sum(rest) + sum(v for _, v in sorted(more.items()))

    g = comp(f)
    x = normal(2)
    y = normal(2, seed=1)
    return g(x), g(x, y), g(x, y, 1, 2.0), g(x, k=3), g(x=x, y=y), g(x, z=y, a=1), g(y=y, x=x, k=4)


@case
def keyword_order(comp):
    g = comp(lambda **kw: {k: v * i for i, (k, v) in enumerate(kw.items(), 1)})
    x, y = normal(2), normal(2, seed=1)
    return g(a=x, b=y), g(b=y, a=x)


@case
def tensor_default(comp):
    def f(x, w=torch.full((2,), 3.0)):  # noqa: B008
        return x * w

    g = comp(f)
    return g(normal(2)), g(normal(2), normal(2, seed=1))


@case
def mutable_default(comp):
    def f(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)

    g = comp(f)
    return g(normal(2)), g(normal(2)), g(normal(2))


@case
def nested_arguments(comp):
    def f(batch):
        return batch["ids"].float() + batch["more"][0] * batch["more"][1]["w"]

    x = leaf(2)
    out = comp(f)({"ids": torch.tensor([1, 2]), "more": (x, {"w": normal(2, seed=1)}), "n": None, "s": "text"})
    out.sum().backward()
    return out, grads(x)


@case
def named_tuples_in_and_out(comp):
    x, y = leaf(2), leaf(2, seed=1)
    out = comp(lambda p: Point(p.x * p.y, p.x))(Point(x, y))
    out.x.sum().backward()
    return type(out).__name__, out.x, out.y is x, grads(x, y)


@case
def dataclasses_in_and_out(comp):
    x = leaf(2)
    g = comp(lambda p: Pair(p.a * p.k, p.k))
    out = g(Frozen(x))
    other = g(Frozen(x, 5.0))
    out.a.sum().backward()
    return out, other, grads(x)


@case
def dataclass_argument_changed(comp):
    def f(p):
        p.b = p.a * 2
        return p.b + 1

    p = Pair(normal(2))
    out = comp(f)(p)
    return out, p


@case
def model_output_class(comp):
    class Output(collections.OrderedDict):
        def __getattr__(self, name):
            return self[name]

    out = comp(lambda x: Output(loss=x.sum(), logits=x * 2))(leaf(2))
    return type(out).__name__, out.loss, out.logits


@case
def ordered_and_default_dictionaries(comp):
    def f(x):
        d = collections.defaultdict(list)
        d["a"].append(x * 2)
        d["b"].append(x)
        return collections.OrderedDict(z=x, a=x + 1), d

    o, d = comp(f)(normal(2))
    return type(o).__name__, list(o), type(d).__name__, dict(o), dict(d)


@case
def dictionary_with_other_keys(comp):
    out = comp(lambda x: {1: x, (2, 3): x * 2, None: x + 1, False: 5})(normal(2))
    return out


@case
def empty_results(comp):
    g = comp(lambda x, k: {0: None, 1: (), 2: [], 3: {}, 4: (None, x), 5: [[], [x]], 6: "s", 7: 3.5}[k])
    return [g(normal(2), k) for k in range(8)]


@case
def set_result(comp):
    out = comp(lambda x: {x.shape[0], "a"})(normal(2))
    return sorted(map(str, out))


@case
def shape_and_size_results(comp):
    return comp(lambda x: (x.shape, x.size(0), x.stride(), x.dtype, x.device, x.numel(), x.dim(), x * 2))(normal(2, 3))


@case
def generator_result(comp):
    def f(x):
        return (x * i for i in range(3))

    return list(comp(f)(normal(2)))


@case
def generator_function(comp):
    def f(x):
        yield x * 2
        yield x * 3

    return list(comp(f)(normal(2)))


@case
def generator_inside(comp):
    def parts(x):
        for i in range(3):
            yield x * i

    x = leaf(2)
    out = comp(lambda x: sum(parts(x)))(x)
    out.sum().backward()
    return out, grads(x)


@case
def function_result(comp):
    def f(x):
        y = x * 2
        return lambda z: y + z

    return comp(f)(normal(2))(normal(2, seed=1))


@case
def iterator_argument(comp):
    g = comp(lambda xs: sum(x * 2 for x in xs))
    return g(iter([normal(2), normal(2, seed=1)])), g(normal(2) for _ in range(2))


@case
def range_and_slice_arguments(comp):
    g = comp(lambda x, s: x[s] * 2)
    x = normal(5)
    return g(x, slice(1, 3)), g(x, slice(None, None, 2)), g(x, 2), g(x, (..., None))


@case
def bound_method(comp):
    class Model:
        def __init__(self):
            self.w = leaf(2, seed=3)
            self.k = 2.0

        def loss(self, x):
            return (self.w * x * self.k).sum()

    m = Model()
    g = comp(m.loss)
    g(normal(2)).backward()
    m.k = 5.0
    out = g(normal(2))
    return out, grads(m.w)


@case
def method_of_a_module(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m.forward)
    out = g(normal(1, 2))
    out.sum().backward()
    return out, grads(*m.parameters())


@case
def partial_function(comp):
    w = leaf(2, seed=3)
    g = comp(functools.partial(lambda a, x, k: (a * x * k).sum(), w, k=3.0))
    out = g(normal(2))
    out.backward()
    return out, grads(w)


@case
def callable_object(comp):
    class Call:
        def __init__(self):
            self.w = leaf(2, seed=3)

        def __call__(self, x, k=2.0):
            return (self.w * x * k).sum()

    c = Call()
    g = comp(c)
    out = g(normal(2))
    out.backward()
    return out, g(normal(2), 5.0), grads(c.w)


@case
def wrapped_and_decorated(comp):
    def twice(f):
        @functools.wraps(f)
        def inner(*a, **k):
            return f(*a, **k) * 2

        return inner

    @twice
    def f(x, k=1.0):
        """Doc."""
        return x * k

    g = comp(f)
    return g(normal(2)), g(normal(2), k=3.0), g.__name__, g.__doc__


@case
def static_and_class_methods(comp):
    class Ops:
        k = 2.0

        @staticmethod
        def one(x):
            return x * 2

        @classmethod
        def two(cls, x):
            return x * cls.k

    return comp(Ops.one)(normal(2)), comp(Ops.two)(normal(2))


@case
def compiled_inside_compiled(comp):
    inner = comp(lambda x: x.sin() * 2)
    x = leaf(2)
    out = comp(lambda x: inner(x) + inner(x * 2))(x)
    out.sum().backward()
    return out, grads(x)


@case
def compiled_submodule(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    m[0] = comp(m[0])
    x = leaf(3, 2)
    out = m(x)
    out.sum().backward()
    return out, grads(x, *m.parameters()), [n for n, _ in m.named_parameters()]


@case
def compiled_submodule_of_compiled(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    m[0] = comp(m[0])
    g = comp(m)
    x = leaf(3, 2)
    out = g(x)
    out.sum().backward()
    return out, grads(x, *m.parameters())


@case
def many_arguments(comp):
    xs = [leaf(2, seed=i) for i in range(40)]
    out = comp(lambda *xs: sum(x * i for i, x in enumerate(xs)))(*xs)
    out.sum().backward()
    return out, grads(*xs)


@case
def no_arguments(comp):
    m = nn.Linear(2, 2)
    fill(m)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self):
            return self.m.weight.sum() * 2

    out = comp(M())()
    out.backward()
    return out, comp(lambda: torch.ones(2) * 2)(), grads(m.weight)


@case
def only_numbers(comp):
    return comp(lambda a, b: a + b)(1, 2), comp(lambda a: torch.full((2,), a))(3.0)


@case
def argument_names_that_clash(comp):
    return comp(lambda self, function, args, kwargs: self * 2 + function + args["a"] + kwargs)(
        normal(2), function=normal(2, seed=1), args={"a": 1}, kwargs=3
    )


@case
def wrong_arguments_raise(comp):
    g = comp(lambda x: x * 2)
    return raises(lambda: g()), raises(lambda: g(normal(2), 3)), raises(lambda: g(y=normal(2))), g(normal(2))


@case
def module_dictionary_and_parameter_list(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.d = nn.ModuleDict({"a": fill(nn.Linear(2, 2)), "b": nn.Tanh()})
            self.p = nn.ParameterList([torch.ones(2), torch.ones(2) * 2])
            self.q = nn.ParameterDict({"k": torch.ones(2) * 3})

        def forward(self, x):
            for m in self.d.values():
                x = m(x)
            for p in self.p:
                x = x * p
            return x * self.q["k"]

    m = M()
    out = comp(m)(normal(1, 2))
    out.sum().backward()
    return out, grads(*m.parameters())


@case
def module_without_forward_raises(comp):
    return raises(lambda: comp(nn.Module())(normal(2)))


@case
def functional_call(comp):
    m = fill(nn.Linear(2, 2))
    w = leaf(2, 2, seed=9)
    out = comp(lambda x, w: torch.func.functional_call(m, {"weight": w}, (x,)))(normal(1, 2), w)
    out.sum().backward()
    return out, grads(w, *m.parameters())


@case
def functional_call_of_the_compiled_module(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    w = leaf(2, 2, seed=9)
    out = torch.func.functional_call(g, {"weight": w}, (normal(1, 2),))
    out.sum().backward()
    return a, out, grads(w, *m.parameters())


@case
def packed_sequence(comp):
    m = fill(nn.GRU(2, 3, batch_first=True))

    def f(x, n):
        p = nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        out, h = m(p)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0], h

    x = leaf(2, 4, 2)
    a, h = comp(f)(x, torch.tensor([4, 2]))
    a.sum().backward()
    return a, h, grads(x, *m.parameters())


# Where oneDNN is off, gradients of the weights add up over time in another order.
@case(close="" if torch.backends.mkldnn.enabled else "the LSTM is taken apart")
def recurrent_state_passed_along(comp):
    m = fill(nn.LSTM(2, 3))
    g = comp(m)
    x = normal(4, 1, 2)
    out, state = g(x)
    out, state = g(x, state)
    out.sum().backward()
    return out, state, grads(*m.parameters())


@case
def recursion(comp):
    def f(x, n):
        return x if n == 0 else f(x * 2, n - 1) + n

    g = comp(f)
    return g(normal(2), 3), g(normal(2), 5)


@case
def numpy_arrays_in_and_out(comp):
    import numpy

    g = comp(lambda x, a: (x * torch.from_numpy(a), x.detach().numpy() * 2))
    out = g(normal(2), numpy.ones(2, dtype=numpy.float32))
    return out[0], out[1].tolist(), type(out[1]).__name__


@case
def numpy_scalar_argument(comp):
    import numpy

    g = comp(lambda x, k: x * k)
    return g(normal(2), numpy.float64(2.0)), g(normal(2), numpy.int64(3)), g(normal(2), numpy.float32(0.1))


@case
def numpy_scalars_are_numbers(comp):
    import numpy

    g = comp(lambda x, k: (x * k, x.sum() + numpy.sqrt(k), k * 2))
    several = numpy.float64(1.5), numpy.float16(2.0), numpy.int32(3), numpy.bool_(True), numpy.array(1.5)
    kept = comp(lambda x, k: x * k)
    return [g(x, k) for x in (torch.arange(3), normal(3)) for k in several], [kept(normal(3), k) for k in several]


@case
def numbers_of_numpy(comp):
    """As attention's 1 / np.sqrt(d): no tensor, which would round and promote otherwise."""
    import numpy

    programs = (
        lambda x: (x @ x.mT / numpy.sqrt(x.shape[-1])).softmax(-1),
        lambda x: x.chunk(int(numpy.ceil(x.shape[0] / 3)), 0)[-1] * float(numpy.log2(8)),
        lambda x: x * (1 / numpy.sqrt(3)) - numpy.pi,
        lambda x: x.bfloat16() * numpy.float64(0.1) + numpy.float32(0.1) ** numpy.int64(2),
        lambda x: numpy.sqrt(2) * x.clamp(-numpy.log(2), numpy.log(2)) ** numpy.float64(2),
        lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin() * numpy.sqrt(2), x, use_reentrant=False),
    )
    x, results = leaf(4, 3, 2), []
    for program in programs:
        out = comp(program)(x)
        results += [out, *torch.autograd.grad(out.sum(), x)]
    return results


@case
def numbers_of_numpy_that_promote(comp):
    import numpy

    programs = (
        lambda x: x.sum() * numpy.sqrt(2),
        lambda x: x.argmax(1) * numpy.sqrt(2),
        lambda x: (x * 2, numpy.sqrt(2)),
        lambda x: torch.full((3,), numpy.sqrt(2)) * x.sum(),
        lambda x: x / (numpy.log(0.0) if x.shape[0] == 3 else 1),  # eager warns
    )
    return [comp(program)(normal(3, 2)) for program in programs]


@case
def tensor_subclass_argument(comp):
    class Tagged(torch.Tensor):
        pass

    x = normal(2).as_subclass(Tagged)
    out = comp(lambda x: x * 2)(x)
    return type(out).__name__, out.as_subclass(torch.Tensor)


@case
def elements_that_sparse_tensors_inside_store(comp):
    def twice(x):
        rows = torch.tensor([[0, 1, 0], [0, 1, 0]])
        return torch.sparse_coo_tensor(rows, x[0], (2, 2)).coalesce().values() * x.sum()

    programs = (
        lambda x: x.to_sparse().coalesce().values().sum(),
        lambda x: torch.sparse.sum(x.to_sparse().coalesce() * 2),
        lambda x: x.sin().to_sparse().coalesce().values().pow(2).sum(),
        lambda x: x.to_sparse_csr().values().sum(),
        lambda x: x.detach().to_sparse()._nnz() * x,
        lambda x: (x * 1).to_sparse() @ torch.ones(3, 2),
        twice,
    )
    found = []
    for program in programs:
        x = torch.tensor([[1.0, 0, 2], [0, 3, 0]], requires_grad=True)
        out = comp(program)(x)
        out.sum().backward()
        found.append((out.detach(), x.grad))
    return found


@case
def sparse_argument(comp):
    i = normal(3, 3).relu().to_sparse()
    w = leaf(3, 2)
    out = comp(lambda s, w: torch.sparse.mm(s, w))(i, w)
    out.sum().backward()
    return out, grads(w)


@case
def nested_tensor_argument(comp):
    n = torch.nested.nested_tensor([normal(2), normal(3)], layout=torch.jagged)
    out = comp(lambda n: n * 2)(n)
    return [t for t in out.unbind()]


@case
def a_container_of_the_modules_own_is_returned(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = {"k": 1}

        def forward(self, x):
            return x * 2, self.kept

    m = M()
    out = comp(m)(normal(2))
    out[1]["k"] = 3
    return out[1] is m.kept, m.kept


@case
def meta_argument(comp):
    out = comp(lambda x: x * 2)(torch.empty(3, device="meta"))
    return out.device.type, out.shape


@case
def buffer_of_none_and_non_persistent(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", None)
            self.register_buffer("b", torch.ones(2), persistent=False)

        def forward(self, x):
            return x * self.b + (0 if self.a is None else self.a)

    m = M()
    g = comp(m)
    a = g(normal(2))
    m.a = torch.ones(2) * 5
    return a, g(normal(2)), list(m.state_dict())


def _of_shape(x, size, more):
    return x.expand(size) * more["sizes"][0].numel(), size, isinstance(size, torch.Size)


@case
def shapes_as_arguments(comp):
    g = comp(_of_shape)
    x = leaf(3)
    out, size, kept = g(x, torch.Size((2, 3)), {"sizes": [x.shape]})
    (out * 2).sum().backward()
    again = g(x, torch.Size((1, 3)), {"sizes": [x.shape]})[0].detach(), g(x, (2, 3), {"sizes": [x.shape]})[1:]
    return out.detach(), size, type(size) is torch.Size, kept, again, grads(x)


@case
def shapes_as_arguments_of_custom_functions(comp):
    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, size):
            ctx.numel = size.numel()
            return x.expand(size).clone()

        @staticmethod
        def backward(ctx, g):
            return g.sum(0) * ctx.numel, None

    x = leaf(3)
    out = comp(lambda x, size: Fill.apply(x, size) * 2)(x, torch.Size((2, 3)))
    out.sum().backward()
    return out.detach(), grads(x)


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shape_as_an_argument_compiles(frontend, dynamic):
    g = aottrain.compile(_of_shape, capture=frontend, dynamic=dynamic, on_unsupported="error")
    x = leaf(3)
    assert g(x, torch.Size((2, 3)), {"sizes": [x.shape]})[1:] == (torch.Size((2, 3)), True)
    assert g.report.num_fallbacks == 0


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
