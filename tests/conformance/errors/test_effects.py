"""Python that does more than compute: prints, appends, raises, branches on values, reads clocks, calls backward."""

import contextlib
import io
import logging
import sys
import time
import warnings

import pytest
import torch
from torch import nn

from tests.conformance.harness import PYTHON, case, cases_of, check, fill, grads, leaf, normal, raises

_SEEN = []


def printed(action):
    """What three calls print."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        for i in range(3):
            action(i)
    return stream.getvalue()


@case
def prints_each_call(comp):
    def f(x):
        print("called")
        return x * 2

    g = comp(f)
    return printed(lambda i: g(normal(2)))


@case
def prints_shapes(comp):
    def f(x):
        y = x * 2
        print(tuple(y.shape))
        return y

    g = comp(f)
    return printed(lambda i: g(normal(2 + i)))


@case
def prints_values(comp):
    def f(x):
        y = x * 2
        print(float(y.sum()))
        return y

    g = comp(f)
    return printed(lambda i: g(normal(2, seed=i)))


@case
def writes_to_standard_output(comp):
    def f(x):
        sys.stdout.write("called\n")
        return x * 2

    g = comp(f)
    return printed(lambda i: g(normal(2)))


@case
def writes_to_an_open_file(comp):
    stream = io.StringIO()

    def f(x):
        stream.write("called\n")
        return x * 2

    g = comp(f)
    [g(normal(2)) for _ in range(3)]
    return stream.getvalue()


@case
def logs_each_call(comp):
    lines = []
    logger = logging.getLogger("conformance")
    logger.setLevel(logging.INFO)
    logger.propagate = False

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Keep()
    logger.addHandler(handler)

    def f(x):
        logger.info("called")
        return x * 2

    before = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        g = comp(f)
        [g(normal(2)) for _ in range(3)]
    finally:
        logger.removeHandler(handler)
        logging.disable(before)
    return lines


@case
def warns_each_call(comp):
    def f(x):
        warnings.warn("careful", stacklevel=1)
        return x * 2

    g = comp(f)
    counts = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            g(normal(2))
        counts.append(sum("careful" in str(w.message) for w in seen) > 0)
    return counts


@case
def appends_to_a_closed_over_list(comp):
    log = []

    def f(x):
        log.append(len(log))
        return x * 2

    g = comp(f)
    [g(normal(2)) for _ in range(3)]
    return log


@case
def appends_to_a_global_list(comp):
    _SEEN.clear()

    def f(x):
        _SEEN.append(1)
        return x * 2

    g = comp(f)
    [g(normal(2)) for _ in range(3)]
    return list(_SEEN)


class Counting(nn.Module):
    calls = 0
    log = []

    def forward(self, x):
        type(self).calls += 1
        self.log.append(1)
        return x * 2


@case(dynamo_was_blind="takes a class's counter for a constant")
def class_level_counter_and_list(comp):
    Counting.calls = 0
    Counting.log.clear()
    g = comp(Counting())
    [g(normal(2)) for _ in range(3)]
    return Counting.calls, list(Counting.log)


@case
def counter_on_the_module(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, x):
            self.n += 1
            return x * self.n

    m = M()
    g = comp(m)
    return [g(normal(2)) for _ in range(3)], m.n


@case
def attribute_set_to_a_result(comp):
    class M(nn.Module):
        def forward(self, x):
            self.last = x * 2
            return self.last + 1

    m = M()
    g = comp(m)
    a = g(normal(2))
    one = m.last.clone()
    g(normal(2, seed=1))
    return a, one, m.last


@case
def attention_weights_stored_on_a_child(comp):
    class Inner(nn.Module):
        def forward(self, x):
            self.weights = x.softmax(-1)
            return self.weights * x

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x) + 1

    m = M()
    g = comp(m)
    x = leaf(2, 3)
    g(x).sum().backward()
    one = m.inner.weights.detach().clone()
    g(normal(2, 3, seed=1))
    return one, m.inner.weights, grads(x)


@case
def global_counter(comp):
    global _COUNT
    _COUNT = 0

    def f(x):
        global _COUNT
        _COUNT += 1
        return x * _COUNT

    g = comp(f)
    return [g(normal(2)) for _ in range(3)], _COUNT


@case
def nonlocal_counter(comp):
    n = 0

    def f(x):
        nonlocal n
        n += 1
        return x * n

    g = comp(f)
    return [g(normal(2)) for _ in range(3)], n


@case
def set_and_deque_written(comp):
    import collections

    s, d = set(), collections.deque(maxlen=2)

    def f(x):
        s.add(x.shape[0])
        d.append(x.shape[0])
        return x * 2

    g = comp(f)
    [g(normal(2 + i)) for i in range(3)]
    g(normal(2))
    return sorted(s), list(d)


@case
def counter_object_written(comp):
    import collections

    c = collections.Counter()

    def f(x):
        c["calls"] += 1
        return x * 2

    g = comp(f)
    [g(normal(2)) for _ in range(3)]
    return dict(c)


@case
def object_written_through_a_method(comp):
    class Meter:
        def __init__(self):
            self.total = 0

        def update(self, n):
            self.total += n

    m = Meter()

    def f(x):
        m.update(x.shape[0])
        return x * 2

    g = comp(f)
    [g(normal(2)) for _ in range(3)]
    return m.total


@case
def slots_object_written(comp):
    class Meter:
        __slots__ = ("n",)

    m = Meter()
    m.n = 0

    def f(x):
        m.n += 1
        return x * 2

    g = comp(f)
    [g(normal(2)) for _ in range(3)]
    return m.n


@case
def function_attribute_written(comp):
    def f(x):
        f.n += 1
        return x * f.n

    f.n = 0
    g = comp(f)
    return [g(normal(2)) for _ in range(3)], f.n


@case
def values_collected_by_item(comp):
    log = []

    def f(x):
        log.append(round(x.sum().item(), 4))
        return x * 2

    g = comp(f)
    [g(normal(2, seed=i)) for i in range(3)]
    return log


@case
def item_scales_the_result(comp):
    g = comp(lambda x: x * x.max().item())
    x = leaf(3)
    out = g(x)
    out.sum().backward()
    return out, g(normal(3, seed=1)), grads(x)


@case
def tolist_int_float_bool_len(comp):
    def f(x):
        n = int(x.abs().sum())
        return x * n + float(x[0]) + bool(x[0] > 0) + len(x) + sum(x.tolist())

    g = comp(f)
    return g(normal(3)), g(normal(3, seed=1))


@case
def branch_on_a_value(comp):
    def f(x):
        return x * 2 if x.mean() > 0 else x - 1

    g = comp(f)
    x = leaf(3)
    a, b = g(x.abs()), g(-x.abs())
    (a.sum() + b.sum()).backward()
    return a, b, g(x.abs()), grads(x)


@case
def branch_on_nan(comp):
    def f(x):
        if torch.isnan(x).any():
            return torch.zeros_like(x)
        return x * 2

    g = comp(f)
    return g(normal(2)), g(torch.full((2,), float("nan")))


@case
def loop_until_converged(comp):
    def f(x):
        n = 0
        while x.norm() > 0.1 and n < 20:
            x = x * 0.5
            n += 1
        return x, n

    g = comp(f)
    return g(normal(3)), g(normal(3) * 100)


@case
def python_minimum_and_assert(comp):
    def f(x):
        assert x.sum() > -1e9, "sum"
        return max(x[0], x[1]) * min(3, x.shape[0])

    g = comp(f)
    return g(normal(3)), g(-normal(3))


@case
def assert_fails_later(comp):
    def f(x):
        assert x.shape[0] == 2 and bool((x > 0).all()), "positive"
        return x * 2

    g = comp(f)
    return g(torch.ones(2)), raises(lambda: g(-torch.ones(2))), raises(lambda: g(torch.ones(3)))


@case
def raises_for_some_values(comp):
    def f(x, k):
        if k < 0:
            raise ValueError("negative")
        return x * k

    g = comp(f)
    out = [g(normal(2), 1.0)]
    try:
        g(normal(2), -1.0)
    except ValueError as error:
        out.append(str(error))
    return out, g(normal(2), 2.0)


@case
def raises_after_writing(comp):
    def f(x, ok):
        x.add_(1)
        if not ok:
            raise RuntimeError("late")
        return x * 2

    g = comp(f)
    x = normal(2)
    g(x, True)
    return raises(lambda: g(x, False)), x


@case
def raises_after_writing_state(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0
            self.register_buffer("b", torch.zeros(2))

        def forward(self, x):
            self.n += 1
            self.b += x
            if self.n == 2:
                raise RuntimeError("second")
            return x * self.n + self.b

    m = M()
    g = comp(m)
    a = g(normal(2))
    r = raises(lambda: g(normal(2)))
    return a, r, g(normal(2)), m.n, m.b


@case(refused={"dynamo": "Dynamo does not catch shape errors of its stand-ins"})
def try_and_except_inside(comp):
    def f(x, y):
        try:
            return x @ y
        except RuntimeError:
            return x * 2
        finally:
            _SEEN.append(1)

    _SEEN.clear()
    g = comp(f)
    return g(normal(2, 3), normal(3, 2)), g(normal(2, 3), normal(2, 3)), len(_SEEN)


@case(dynamo_blind="the absence of an attribute of a module argument")
def except_for_a_missing_attribute(comp):
    def f(x, m):
        try:
            return x * m.k
        except AttributeError:
            return x * 3

    m = nn.Module()
    g = comp(f)
    a = g(normal(2), m)
    m.k = 7.0
    return a, g(normal(2), m)


@case
def shape_error_then_fine(comp):
    g = comp(lambda x, y: x @ y)
    return raises(lambda: g(normal(2, 3), normal(2, 3))), g(normal(2, 3), normal(3, 2))


@case
def error_kinds(comp):
    kinds = []
    for f in (
        lambda x: x @ x,
        lambda x: x[7],
        lambda x: x.view(5),
        lambda x: {}["k"],
        lambda x: x + "a",
        lambda x: 1 / 0,
        lambda x: x.nothing,
    ):
        try:
            comp(f)(normal(2, 3))
            kinds.append("none")
        except Exception:
            kinds.append("raised")
    return kinds


@case
def clock_read_inside(comp):
    def f(x):
        return x * 0 + time.perf_counter()

    g = comp(f)
    a = g(torch.zeros(1, dtype=torch.float64))
    time.sleep(0.01)
    b = g(torch.zeros(1, dtype=torch.float64))
    return bool(b > a)


@case
def wall_clock_read_inside(comp):
    def f(x):
        return x * 0 + time.time()

    g = comp(f)
    a = g(torch.zeros(1, dtype=torch.float64))
    time.sleep(0.01)
    b = g(torch.zeros(1, dtype=torch.float64))
    return bool(b > a)


@case
def clock_imported_by_name(comp):
    from time import perf_counter

    def f(x):
        return x * 0 + perf_counter()

    g = comp(f)
    a = g(torch.zeros(1, dtype=torch.float64))
    time.sleep(0.01)
    b = g(torch.zeros(1, dtype=torch.float64))
    return bool(b > a)


@case(dynamo_was_blind="guards on a method object that is made anew each time")
def date_read_inside(comp):
    import datetime

    def f(x):
        return x * 0 + datetime.datetime.now().timestamp()

    g = comp(f)
    a = g(torch.zeros(1, dtype=torch.float64))
    time.sleep(0.01)
    b = g(torch.zeros(1, dtype=torch.float64))
    return bool(b > a)


@case
def time_is_measured(comp):
    times = []

    def f(x):
        start = time.perf_counter()
        y = x * 2
        times.append(time.perf_counter() - start >= 0)
        return y

    g = comp(f)
    [g(normal(2)) for _ in range(3)]
    return times


@case
def backward_of_a_loss_inside(comp):
    m = fill(nn.Linear(2, 1))

    def step(x):
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    g = comp(step)
    return g(normal(3, 2)), g(normal(3, 2, seed=1)), grads(*m.parameters())


@case(dynamo_was_blind="rounds an optimizer's step otherwise, also with its eager backend")
def whole_training_step(comp):
    m = fill(nn.Linear(2, 1))
    o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)

    def step(x):
        o.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        o.step()
        return loss.detach()

    g = comp(step)
    return [g(normal(3, 2, seed=i)) for i in range(3)], list(m.parameters())


@case
def tensor_backward_method_inside(comp):
    def f(x):
        y = (x * x).sum()
        torch.autograd.backward([y])
        return x.grad * 2

    x = leaf(2)
    out = comp(f)(x)
    return out, grads(x)


@case(dynamo_was_blind="rounds an optimizer's step otherwise, also with its eager backend")
def optimizer_step_inside_alone(comp):
    m = fill(nn.Linear(2, 1))
    o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)

    def step():
        o.step()

    g = comp(step)
    m(normal(3, 2)).sum().backward()
    g()
    m(normal(3, 2)).sum().backward()
    g()
    return list(m.parameters())


@case
def grad_mode_left_changed(comp):
    def f(x, on):
        y = x * 2
        torch.set_grad_enabled(on)
        return y

    g = comp(f)
    a = g(leaf(2), False)
    s = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    b = g(leaf(2), True)
    return a, s, b


@case
def default_dtype_left_changed(comp):
    def f(x):
        torch.set_default_dtype(torch.float64)
        return x * 2

    out = comp(f)(normal(2))
    return out, torch.get_default_dtype()


@case
def training_flag_set_inside(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.d = nn.Dropout(1.0)

        def forward(self, x):
            y = self.d(x)
            self.eval()
            return y

    m = M()
    g = comp(m)
    return g(torch.ones(2)), g(torch.ones(2)), m.training


@case
def deterministic_flag_set_inside(comp):
    def f(x):
        torch.use_deterministic_algorithms(True)
        return x * 2

    g = comp(f)
    out = g(normal(2))
    flag = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    g(normal(2))
    return out, flag, torch.are_deterministic_algorithms_enabled()


@case
def num_threads_set_inside(comp):
    before = torch.get_num_threads()

    def f(x):
        torch.set_num_threads(1)
        return x * 2

    try:
        g = comp(f)
        torch.set_num_threads(2)
        g(normal(2))
        torch.set_num_threads(2)
        g(normal(2))
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@case
def parameter_requires_grad_set_inside(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = fill(nn.Linear(2, 2))

        def forward(self, x):
            self.a.weight.requires_grad_(False)
            return self.a(x)

    m = M()
    out = comp(m)(normal(1, 2))
    out.sum().backward()
    return m.a.weight.requires_grad, grads(*m.a.parameters())


@case
def parameter_registered_inside(comp):
    class M(nn.Module):
        def forward(self, x):
            if not hasattr(self, "w"):
                self.w = nn.Parameter(torch.ones(x.shape[-1]))
            return x * self.w

    m = M()
    g = comp(m)
    a = g(normal(2))
    a.sum().backward()
    return a, g(normal(2)), list(m.state_dict()), grads(m.w)


@case
def lazy_module(comp):
    torch.manual_seed(1)
    m = nn.LazyLinear(2)
    g = comp(m)
    a = g(normal(3, 4))
    return a.shape, g(normal(3, 4)).requires_grad, m.weight.shape


@case
def hook_registered_inside(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = fill(nn.Linear(2, 2))
            self.done = False

        def forward(self, x):
            if not self.done:
                self.a.register_forward_hook(lambda m, i, o: o * 2)
                self.done = True
            return self.a(x)

    m = M()
    g = comp(m)
    return g(normal(1, 2)), g(normal(1, 2))


@case
def context_manager_with_state(comp):
    depth = [0]

    @contextlib.contextmanager
    def deeper():
        depth[0] += 1
        try:
            yield depth[0]
        finally:
            depth[0] -= 1

    def f(x):
        with deeper() as a, deeper() as b:
            return x * (a + b)

    g = comp(f)
    return g(normal(2)), g(normal(2)), depth


@case
def exec_and_eval_inside(comp):
    def f(x):
        scope = {"x": x}
        exec("y = x * 2", scope)
        return scope["y"] + eval("x + 1", {"x": x})

    return comp(f)(normal(2))


@case
def sorts_by_value(comp):
    def f(x):
        return torch.stack(sorted(x.unbind(), key=lambda v: v.item()))

    g = comp(f)
    return g(normal(4)), g(normal(4, seed=1))


@case
def nonzero_and_unique(comp):
    def f(x):
        return x[x > 0], x.nonzero(), torch.unique(x.round()), x[x > 0].sum()

    g = comp(f)
    x = leaf(6)
    outs = g(x)
    outs[0].sum().backward()
    return outs, g(normal(6, seed=1)), grads(x)


@case
def string_of_a_tensor(comp):
    log = []

    def f(x):
        log.append(str(x))
        return x * 2

    g = comp(f)
    g(torch.ones(2))
    g(torch.zeros(2))
    return log


@case
def identity_and_hash_used(comp):
    table = {}

    def f(x):
        table[id(x)] = table.get(id(x), 0) + 1
        return x * table[id(x)]

    g = comp(f)
    x = normal(2)
    return g(x), g(x), len(table)


@case
def version_read_inside(comp):
    g = comp(lambda x: x * x._version)
    x = normal(2)
    a = g(x)
    x.add_(1)
    return a, g(x)


@case
def data_pointer_read_inside(comp):
    g = comp(lambda x, y: x * 2 if x.data_ptr() == y.data_ptr() else x * 3)
    x = normal(2)
    return g(x, x.view(2)), g(x, normal(2, seed=1))


@case(dynamo_blind="whether an input is a view")
def base_read_inside(comp):
    g = comp(lambda x: x * 2 if x._base is None else x * 3)
    x = normal(4)
    return g(x[:2]), g(normal(2)), g(x[1:3])


@case
def weak_reference_kept(comp):
    import weakref

    refs = []

    def f(x):
        y = x * 2
        refs.append(weakref.ref(y))
        return y

    g = comp(f)
    out = g(normal(2))
    return refs[0]() is out


@case
def tensor_memoised_between_calls(comp):
    memo = {}

    def f(x):
        if "first" not in memo:
            memo["first"] = x * 2
        return x + memo["first"]

    g = comp(f)
    x = leaf(2)
    a, b = g(x), g(normal(2, seed=1))
    (a.sum() + b.sum()).backward()
    return a, b, grads(x)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
