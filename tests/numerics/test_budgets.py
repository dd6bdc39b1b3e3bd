"""Whatever is saved and whatever is computed again, training is eager's, bit for bit.

Each program with each plan in the whole run; else a third of these pairs, in which each of both is several times.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aottrain.toolchain.native import find_compiler
from tests.numerics.comparison import PLANS, assert_trains_like_eager, compiled
from tests.numerics.programs import PROGRAMS
from tests.sampling import crossed, thinned


@pytest.mark.parametrize(("program", "plan"), crossed(PROGRAMS, PLANS, one_in=7))
def test_three_steps_equal_eager(program, plan):
    """Outputs, gradients (None where eager has None), buffers, inputs, parameters, generator: three steps in a row."""
    make, data = PROGRAMS[program]
    target = assert_trains_like_eager(make, data, plan)
    assert len(target.report.graphs) == 1 and target.report.num_fallbacks == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_three_steps_equal_eager_through_dynamo(program):
    target = assert_trains_like_eager(*PROGRAMS[program], 0.1, capture="dynamo")
    assert target.report.num_fallbacks == 0


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("program", "plan"), crossed(PROGRAMS, ["recompute_all", 1.0, 0.5, 0.1, 0.0], one_in=5))
def test_three_steps_by_generated_kernels(program, plan):
    """The forward's own draws, and the state that it read, whatever is computed again."""
    target = assert_trains_like_eager(*PROGRAMS[program], plan, kernel="cpp")
    (graph,) = target.report.graphs
    # In so small a program the buffers of one kernel may be more than a budget allows.
    assert graph.kernels or (plan != "recompute_all" and "would peak above" in graph.kernel_reason)
    assert target.report.num_fallbacks == 0


@pytest.mark.parametrize("program", thinned(PROGRAMS, one_in=3))
def test_the_peak_follows_the_budget(program):
    make, data = PROGRAMS[program]
    batch = data()[0]

    def report_of(plan):
        torch.manual_seed(5)
        return compiled(make(), plan).prepare(*batch)

    full = report_of("min_cut")
    assert report_of("save_all").saved_bytes == full.save_all_bytes
    before = report_of(1.0).predicted_peak_bytes
    for fraction in (1.0, 0.6, 0.2, 0.0):
        report = report_of(fraction)
        assert report.min_cut_saved_bytes == full.saved_bytes
        assert report.predicted_peak_bytes <= before, f"budget {fraction} peaks higher than a larger one"
        before = report.predicted_peak_bytes
    assert before == report.curve[-1][0]


@pytest.mark.parametrize("program", ["dropout", "resnet block", "gpt block"])
def test_evaluation_equals_eager(program):
    make, data = PROGRAMS[program]
    torch.manual_seed(5)
    model = make().eval()
    call = compiled(model)
    generator = torch.get_rng_state()
    for batch in data():
        with torch.no_grad():
            assert torch.equal(call(*batch), model(*batch))
    assert torch.equal(torch.get_rng_state(), generator), "evaluation drew a seed"


def test_a_parameter_that_shares_memory_and_one_that_is_tied_twice():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)
            self.b.weight = self.a.weight
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.b(self.a(x).tanh())

    assert_trains_like_eager(
        Tied, lambda: [(torch.randn(3, 6, generator=torch.Generator().manual_seed(i)),) for i in range(3)], 0.0
    )
