"""installed: the tracing thread sees stand-ins in a module's slots, every other thread the module as it is."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler.capture.substitutes import installed
from aottrain.errors import UnsupportedError


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    made.register_buffer("missing", None)
    return made


def stand_ins(module: nn.Module) -> dict[int, torch.Tensor]:
    return {id(value): torch.zeros_like(value) - 7 for value in [*module.parameters(), *module.buffers()]}


def elsewhere(look: Callable[[], Any]) -> Any:
    """What another thread sees."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda m: list(m.parameters()),
    "an attribute": lambda m: [m[0].weight, m[1].running_mean, m[2].bias],
    "state_dict": lambda m: list(m.state_dict().values()),
    "the slots": lambda m: [
        *m[0]._parameters.values(),
        *dict(m[1]._buffers).values(),
        *({**m[2]._parameters}).values(),
    ],
    "names": lambda m: [name for name, _ in m.named_parameters()] + list(m[1]._buffers),
    "a copy": lambda m: list(copy.deepcopy(m).state_dict().values()),
    "a pickle": lambda m: list(pickle.loads(pickle.dumps(m)).state_dict().values()),
    "a call": lambda m: [m.eval()(torch.ones(2, 3))],
}


def same(one: Any, other: Any) -> bool:
    return one is other or (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)


@pytest.mark.parametrize("look", LOOKS)
def test_another_thread_sees_the_module_as_it_is(look: str) -> None:
    module = model()
    table = stand_ins(module)
    known = LOOKS[look](module)
    with installed(module, table):
        mine, theirs = LOOKS[look](module), elsewhere(lambda: LOOKS[look](module))
    assert all(map(same, theirs, known))
    assert look == "names" or not any(map(same, mine[:1], known[:1]))
    assert all(map(same, LOOKS[look](module), known))
    assert all(type(table) is dict for child in module.modules() for table in (child._parameters, child._buffers))


def test_what_another_thread_writes_stays() -> None:
    module, new = model(), nn.Parameter(torch.ones(4, 3))

    def write() -> bool:
        module[0].weight = new
        module[1].register_buffer("count", torch.zeros(1))
        return True

    with installed(module, stand_ins(module)):
        assert elsewhere(write)
        assert module[0].weight is not new and "count" not in module[1]._buffers
    assert module[0].weight is new and "count" in module[1]._buffers


@pytest.mark.parametrize("write", [
    lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 3))),
    lambda m: m[1].register_buffer("count", torch.zeros(1)),
    lambda m: m[1]._buffers.pop("running_mean"),
    lambda m: delattr(m[0], "bias"),
    lambda m: m[0]._parameters.update(bias=None),
])  # fmt: skip
def test_what_the_program_itself_writes_is_refused(write: Callable[[nn.Module], Any]) -> None:
    module = model()
    before = [*module.state_dict()]
    with pytest.raises(UnsupportedError, match="assigns another tensor to"), installed(module, stand_ins(module)):
        write(module)
    assert [*module.state_dict()] == before


def test_a_thread_that_saves_the_module_while_another_traces_it() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    module = Slow()
    known = module.state_dict(keep_vars=True)
    compiled, stop, seen = aottrain.compile(module, capture="trace", on_unsupported="error"), threading.Event(), []

    def save() -> None:
        while not stop.is_set():
            state = module.state_dict(keep_vars=True)
            seen.append(state.keys() == known.keys() and all(state[name] is known[name] for name in known))

    thread = threading.Thread(target=save)
    thread.start()
    for size in (1, 2, 3):
        compiled(torch.ones(size, 4)).sum().backward()
    stop.set()
    thread.join()
    assert len(seen) > 10 and all(seen)
