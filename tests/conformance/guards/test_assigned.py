"""Attributes that a forward assigns: counters, losses and activations that are kept, caches, weights that hooks make,
buffers that are replaced. After every call they hold what they hold in eager."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conformance.harness import PYTHON, Case, case, cases_of, check, disagreement, fill, grads, normal, run


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)


def kept(module):
    """All that its modules have as attributes of their own, in order."""
    return {
        f"{path}.{name}": value
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if not name.startswith("_")
    }


def trained(comp, module, shapes=((3, 4),) * 4, loss=lambda out: out.square().mean(), between=None):
    """Some steps: what each gave, and what the module has kept after it."""
    call, seen = comp(fill(module)), []
    for i, shape in enumerate(shapes):
        out = call(normal(*shape, seed=i))
        value = loss(out)
        module.zero_grad()
        value.backward()
        seen.append([out, value, grads(*module.parameters()), list(module.buffers()), kept(module)])
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * (0 if parameter.grad is None else parameter.grad)
        if between is not None:
            between(module, i)
    return seen


@case
def counter(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls, self.seen, self.left = 0, 3, 100

        def forward(self, x):
            self.calls += 1
            self.seen = self.seen + x.shape[0]
            self.left -= 1
            return self.a(x).tanh()

    def between(m, i):
        if i == 1:
            m.calls, m.left = 70, 2**70

    return trained(comp, M(), between=between)


@case
def counter_that_becomes_a_float(comp):
    class M(Base):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return self.a(x)

    def between(m, i):
        if i == 1:
            m.calls = 0.5

    return trained(comp, M(), between=between)


@case
def counter_that_is_read(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.a(x) * min(1.0, self.calls / 3)

    return trained(comp, M())


@case
def loss_that_is_kept(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.loss = None

        def forward(self, x):
            hidden = self.a(x).tanh()
            self.loss = hidden.square().mean()
            return self.b(hidden)

    m = M()
    return trained(comp, m, loss=lambda out: out.mean() + m.loss)


@case
def losses_of_children(comp):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 4)

        def forward(self, x):
            p = self.gate(x).softmax(-1)
            self.balance = p.mean(0).square().sum()
            return x * p

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gates = nn.ModuleList([Gate(), Gate()])

        def forward(self, x):
            for gate in self.gates:
                x = gate(x)
            x = self.gates[0](x)
            return x, sum(gate.balance for gate in self.gates)

    return trained(comp, M(), loss=lambda out: out[0].mean() + out[1])


@case
def the_result_itself_and_views(comp):
    class M(Base):
        def forward(self, x):
            out = self.a(x)
            self.out, self.again, self.part, self.detached = out, out, out[0], out.detach()
            self.input, self.turned = x, self.a.weight.t()
            return out

    m = fill(M())
    call = comp(m)
    seen = []
    for i in range(3):
        x = normal(2, 4, seed=i)
        out = call(x)
        same = m.out is out, m.again is out, m.input is x
        bases = m.part._base is out, m.turned._base is m.a.weight, m.detached.data_ptr() == out.data_ptr()
        out.sum().backward()
        seen.append([same, bases, kept(m), grads(*m.parameters())])
    return seen


@case
def containers_made_anew(comp):
    class M(Base):
        def forward(self, x):
            self.found = []
            hidden = self.a(x)
            self.found.append(hidden)
            self.found.append({"mean": hidden.detach().mean(), "text": "x", "shape": x.shape})
            return self.b(hidden)

    return trained(comp, M())


@case
def old_weight_norm(comp):
    return trained(comp, nn.utils.weight_norm(nn.Linear(4, 4)))


@case
def old_spectral_norm(comp):
    torch.manual_seed(1)
    m = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(4, 4)))
    return trained(comp, m)


@case
def codebook(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("codes", normal(8, 4))
            self.register_buffer("sizes", torch.ones(8))

        def forward(self, x):
            z = self.a(x)
            index = torch.cdist(z.detach(), self.codes).argmin(1)
            with torch.no_grad():
                self.calls += 1
                chosen = F.one_hot(index, 8).float()
                self.sizes = self.sizes * 0.9 + chosen.sum(0) * 0.1
                self.codes.lerp_(chosen.t() @ z / self.sizes.unsqueeze(1), 0.1)
            self.index = index
            return self.b(z + (self.codes[index] - z).detach())

    return trained(comp, M())


@case
def buffer_that_is_replaced(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("memory", torch.zeros(2, 4))
            self.register_buffer("later", None)

        def forward(self, x):
            hidden = self.a(torch.cat([self.memory, x]))
            self.memory = hidden[-2:].detach()
            self.later = self.memory * 2 if self.later is None else self.later + 1
            return hidden

    def between(m, i):
        if i == 1:
            m.memory = torch.ones(3, 4)
        if i == 2:
            m.memory = torch.ones(4, 3).t()

    return trained(comp, M(), ((3, 4),) * 5, between=between)


@case
def buffer_that_another_module_has(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("memory", torch.zeros(4))
            self.b.register_buffer("memory", self.memory)

        def forward(self, x):
            self.memory = self.memory + 1
            return self.a(x) * self.memory * self.b.memory

    return trained(comp, M())


@case
def state_that_is_carried_on(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 4)
            self.state = None

        def forward(self, x):
            out, state = self.rnn(x, self.state)
            self.state = tuple(value.detach() for value in state)
            return out

    def between(m, i):
        if i == 2:
            m.state = None

    return trained(comp, M(), between=between)


@case
def state_that_moves_on(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.now, self.before = torch.zeros(4), torch.ones(4)

        def forward(self, x):
            hidden = self.a(x) * self.before + self.now
            self.before = self.now
            self.now = hidden.detach().mean(0)
            return hidden

    return trained(comp, M())


@case
def state_with_a_gradient(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.last = None

        def forward(self, x):
            hidden = self.a(x)
            if self.last is not None:
                hidden = hidden + self.last.detach()
            self.last = hidden
            return hidden

    return trained(comp, M())


@case
def sum_that_is_kept(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.total = 0

        def forward(self, x):
            out = self.a(x)
            self.total += out.detach().mean()
            return out

    return trained(comp, M())


@case
def number_that_decays(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.temperature = 1.0

        def forward(self, x):
            self.temperature = max(0.5, self.temperature * 0.8)
            return self.a(x) / self.temperature

    return trained(comp, M(), ((3, 4),) * 6)


@case
def first_call(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.scale, self.is_ready = nn.Parameter(torch.ones(4)), False

        def forward(self, x):
            hidden = self.a(x)
            if not self.is_ready:
                with torch.no_grad():
                    self.scale.copy_(1 / hidden.std(0))
                self.is_ready = True
            return hidden * self.scale

    return trained(comp, M())


@case
def cache_that_grows(comp):
    class M(Base):
        table = None

        def forward(self, x):
            if self.table is None or self.table.shape[0] < x.shape[0]:
                self.table = torch.arange(x.shape[0]).cos().unsqueeze(1)
            return self.a(x) * self.table[: x.shape[0]]

    return trained(comp, M(), ((2, 4), (2, 4), (5, 4), (3, 4), (5, 4)))


@case
def table_in_a_buffer(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(0, 1), persistent=False)

        def forward(self, x):
            if self.table.shape[0] < x.shape[0]:
                self.register_buffer("table", torch.arange(x.shape[0]).cos().unsqueeze(1), persistent=False)
            return self.a(x) * self.table[: x.shape[0]]

    return trained(comp, M(), ((2, 4), (2, 4), (5, 4), (3, 4), (5, 4)))


@case
def child_put_into_evaluation(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            self.norm.eval()
            return self.norm(self.a(x))

    def between(m, i):
        if i == 1:
            m.train()

    return trained(comp, M(), between=between)


@case
def read_past_the_class(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls, self.last = 0, None

        def forward(self, x):
            times = vars(self)["calls"] + (self.__dict__["last"] is not None)
            self.calls += 1
            self.last = x
            return self.a(x) * times

    return trained(comp, M())


@case
def deleted(comp):
    class M(Base):
        def forward(self, x):
            self.first = x * 2
            self.second = self.first
            del self.first
            return self.a(self.second)

    return trained(comp, M())


@case
def property_of_the_class(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self._last = None

        @property
        def last(self):
            return self._last

        @last.setter
        def last(self, value):
            self._last = value * 2

        def forward(self, x):
            self.last = x.mean()
            return self.a(x) * self.last

    return trained(comp, M())


class CallsOn:
    """Reads what its owner has now."""

    def __init__(self, owner):
        self.owner = owner

    def __call__(self, gradient):
        return gradient * self.owner.scale


@case(dynamo_blind="what a backward reads it has read when it traces the forward")
def hook_of_the_backward_that_reads(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def forward(self, x):
            hidden = self.a(x)
            hidden.register_hook(CallsOn(self))
            self.scale = 3.0
            return self.b(hidden.tanh())

    return trained(comp, M())


@case
def hook_of_the_backward_that_assigns(comp):
    class M(Base):
        def forward(self, x):
            self.seen = None
            hidden = self.a(x).tanh()
            hidden.register_hook(lambda gradient: setattr(self, "seen", gradient))
            return self.b(hidden)

    return trained(comp, M())


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.owner.scale, None


@case(dynamo_blind="what a backward reads it has read when it traces the forward")
def custom_function_that_reads(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(())

        def forward(self, x):
            hidden = Scales.apply(self.a(x), self)
            self.scale = hidden.detach().mean()
            return self.b(hidden)

    return trained(comp, M())


@case(dynamo_blind="what a backward reads it has read when it traces the forward")
def custom_function_that_reads_the_state(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(())

        def forward(self, x):
            hidden = Scales.apply(self.a(x), self) * self.scale
            self.scale = hidden.detach().mean()
            return self.b(hidden)

    return trained(comp, M())


@case(dynamo_blind="what a backward reads it has read when it traces the forward")
def custom_function_that_reads_a_buffer(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            hidden = Scales.apply(self.a(x), self)
            self.scale = hidden.detach().mean()
            return self.b(hidden)

    return trained(comp, M())


@case(dynamo_blind="it leaves out what a checkpoint's second run does")
def state_in_a_checkpoint(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(4)

        def block(self, x):
            self.scale = self.scale * 2
            return self.a(x).tanh()

        def forward(self, x):
            first = self.scale.sum()
            return self.b(checkpoint(self.block, x, use_reentrant=False)) * first

    return trained(comp, M())


@case(dynamo_blind="it leaves out what a checkpoint's second run does")
def in_a_checkpoint(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls, self.flag = 0, False

        def block(self, x):
            self.calls += 1
            self.flag = not self.flag
            return self.a(x).tanh()

        def forward(self, x):
            return self.b(checkpoint(self.block, x, use_reentrant=False))

    return trained(comp, M())


@case(dynamo_blind="it leaves out what a checkpoint's second run does")
def buffer_in_a_checkpoint(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("times", torch.ones(4))

        def block(self, x):
            self._buffers["times"] = x.detach().mean(0)  # again in the backward
            return self.a(x).tanh()

        def forward(self, x):
            hidden = checkpoint(self.block, x, use_reentrant=False)
            self._buffers["times"] = torch.zeros(4)
            return self.b(hidden)

    return trained(comp, M())


@case
def beside_a_checkpoint(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            self.hidden = checkpoint(lambda value: self.a(value).tanh(), x, use_reentrant=False)
            return self.b(self.hidden)

    return trained(comp, M())


@case
def two_calls_before_a_backward(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls, self.last = 0, None
            self.register_buffer("memory", torch.ones(4))

        def forward(self, x):
            self.calls += 1
            out = self.a(x) * self.memory
            self.last, self.memory = out.sum(), self.memory * 2
            return out

    m = fill(M())
    call = comp(m)
    first, second = call(normal(2, 4)), call(normal(2, 4, seed=1))
    (first.sum() + second.mean() + m.last).backward()
    with torch.no_grad():
        third = call(normal(2, 4))
    return first, second, third, kept(m), m.memory, grads(*m.parameters())


@case
def module_that_a_function_calls(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("memory", torch.ones(4))

        def forward(self, x):
            self.calls += 1
            self.last = self.a(x)
            self.memory = self.memory + 1
            return self.last * self.memory

    m = fill(M())

    def loss(x):
        m.outer = m(x).mean()
        return m.outer * 2

    call, seen = comp(loss), []
    for i in range(3):
        value = call(normal(2, 4, seed=i))
        value.backward()
        seen.append([value, kept(m), m.memory, grads(*m.parameters())])
    return seen


@case
def error_after_an_assignment(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x, index):
            self.calls += 1
            self.last = self.a(x)
            return self.last[index]

    m = fill(M())
    call, seen = comp(m), []
    for i in (0, 1, 9, 1):
        try:
            seen.append(call(normal(2, 4), torch.tensor([i])))
        except IndexError:
            seen.append("an error")
        seen.append(kept(m))
    return seen


@case
def argument_that_is_the_state(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.memory = torch.ones(4)

        def forward(self, x):
            out = self.a(x) + self.memory
            self.memory = out.detach()
            return out

    m = fill(M())
    call = comp(m)
    return [call(m.memory), call(m.memory), call(normal(4)), kept(m)]


@case
def state_that_is_written_to(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.memory = torch.ones(4)

        def forward(self, x):
            self.memory.mul_(2)
            old = self.memory
            self.memory = self.memory + x.mean(0)
            return self.a(x) * old

    return trained(comp, M())


@case
def wrapped_by_a_partial(comp):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x, scale):
            self.calls += 1
            return self.a(x) * scale

    m = fill(M())
    call = comp(functools.partial(m, scale=2.0))
    return [call(normal(2, 4)), call(normal(2, 4)), m.calls]


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)


def caught(action):
    try:
        return action()
    except TypeError:
        return "an error"


class Holder:
    def __init__(self, number):
        self.number = number


# Ways in which a program may ask for a counter's number.
ASKED = {
    "compared": lambda n, x: n > 7,
    "its_truth": lambda n, x: bool(n),
    "in_a_text": lambda n, x: f"{n}",
    "formatted": lambda n, x: "%d" % n,  # noqa: UP031
    "as_a_key": lambda n, x: {6: "six"}.get(n),
    "as_an_index": lambda n, x: [*range(10)][n],
    "its_class": lambda n, x: type(n) is int and isinstance(n, int),
    "times_a_tensor": lambda n, x: x * n,
    "a_tensor_times_it": lambda n, x: n * x,
    "by_a_function_of_torch": lambda n, x: torch.mul(x, n),
    "an_error_is_caught": lambda n, x: caught(lambda: int.bit_length(n)),
    "of_math": lambda n, x: math.sqrt(n),
    "as_a_result": lambda n, x: n,
    "in_a_list": lambda n, x: [n, 2],
    "a_range": lambda n, x: len(range(n)),
    "its_remainder": lambda n, x: n % 2 == 0,
    "plus_a_float": lambda n, x: n + 0.5,
    "in_a_sum": lambda n, x: sum([n, 1]),
    "in_a_tensor": lambda n, x: torch.tensor(n),
    "full": lambda n, x: torch.full((4,), n),
    "of_an_object": lambda n, x: Holder(n).number.bit_length(),
    "a_maximum": lambda n, x: max(n, 8),
    "a_sliced_tensor": lambda n, x: x[:, : n - 4].sum(),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_counter_that_is_asked_for_is_a_number(name):
    class M(Base):
        def __init__(self):
            super().__init__()
            self.calls, self.told = 5, None

        def forward(self, x):
            self.calls += 1
            self.told = ASKED[name](self.calls, x)
            return self.a(x) * (self.told if isinstance(self.told, torch.Tensor) else 1)

    asking = Case(lambda comp: trained(comp, M()))
    eager, got = run(asking), run(asking, "trace")
    assert eager.error is None and disagreement(asking, "trace", eager, got) is None
    assert bool(got.num_graphs) == (name == "its_class") and len(got.fallbacks) == (name != "its_class")
