"""Per-block checkpointing of eager modules, and torch's own budget: eager's gradients, less memory, no trace left."""

import pytest
import torch
from torch import nn

from aottrain.config.extensions.recipes import load_recipe
from aottrain.metrics.memory import watch_cpu_peak
from aottrain.peers import torch_backend
from aottrain.trainer.blocks import checkpointed, repeated_modules


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.expand, self.contract = nn.Linear(16, 64), nn.Linear(64, 16)
        self.pair = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x):
        return x + self.contract(nn.functional.dropout(self.expand(x).relu(), 0.3))


class Model(nn.Module):
    def __init__(self, num_layers=6):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_the_outermost_repetition_is_found():
    model = Model()
    assert repeated_modules(model) == list(model.layers)
    assert repeated_modules(nn.Linear(2, 2)) == repeated_modules(Model(1).first) == []
    assert repeated_modules(nn.Sequential(nn.ReLU(), nn.ReLU())) == []


@pytest.mark.parametrize(("recipe", "count"), [("transformer", 4), ("llama", 4), ("resnet", 9)])
def test_blocks_of_the_recipes(recipe, count):
    module = load_recipe(recipe)
    assert len(repeated_modules(module.build(module.Options()))) == count


def gradients(model, call, x):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    with watch_cpu_peak() as peak:
        call(x).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], peak.num_bytes


def test_checkpointed_blocks_give_eagers_gradients_in_less_memory():
    model, x = Model(), torch.randn(256, 8)
    keys = list(model.state_dict())
    model.layers[1].forward = model.layers[1].forward  # an attribute of the instance stays one
    mine = model.layers[1].forward
    expected, most = gradients(model, model, x)
    got, least = gradients(model, checkpointed(model, repeated_modules(model)), x)
    for value, other in zip(got, expected, strict=True):
        assert torch.equal(value, other)
    assert least < 0.6 * most
    assert vars(model.layers[1])["forward"] is mine and "forward" not in vars(model.layers[0])
    assert list(model.state_dict()) == keys


def test_torchs_own_budget_takes_effect():
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))), torch.randn(512, 64)
    assert torch_backend("inductor", None) == "inductor"
    kept = {}
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        sizes: list[int] = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.nbytes)
            return tensor

        compiled = torch.compile(model, backend=torch_backend("aot_eager", budget))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(x).sum().backward()
        kept[budget] = sum(sizes)
    # The outputs of four layers against none of them: the weights and the input remain.
    assert kept[1.0] - kept[0.0] >= 3 * x.nbytes
