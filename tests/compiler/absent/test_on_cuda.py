"""What a process takes CUDA to be that has none: in a child, as it holds for the whole process."""

import subprocess
import sys

import pytest

from aottrain.toolchain.native import compiler_obstacle

pytestmark = [
    pytest.mark.usefixtures("quick_children"),
    pytest.mark.skipif(bool(compiler_obstacle()), reason="there is no C++ compiler"),
]

_PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn
from aottrain.compiler.absent.planning import plan_step, trace_step
from aottrain.compiler.options import check_options
from aottrain.ir.settings.devices import DEVICES


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.tied = nn.Linear(64, 192), nn.RMSNorm(64), nn.Linear(64, 64, bias=False)
        self.again, self.experts = self.tied, nn.Parameter(torch.zeros(2, 64, 24))

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            q, k, v = self.inner(self.norm(x)).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            masked = F.scaled_dot_product_attention(q, k, v, torch.ones(32, 32, dtype=torch.bool, device=x.device))
            out = self.again(self.tied(F.dropout(mixed, 0.1))) + masked.transpose(1, 2).flatten(2)
        ends = torch.tensor([32, 64], dtype=torch.int32, device=x.device)
        by_experts = F.grouped_mm(out.float().flatten(0, 1), self.experts, offs=ends)
        return F.mish(out).float().sum() + by_experts.square().sum()


def make():
    with torch.device("meta"):
        return Model(), (torch.zeros(2, 32, 64),)


options = check_options(kernel="aten", capture="trace", workspaces=True, on_unsupported="error")
module, batch = make()
traced = trace_step(module, batch, options, DEVICES["a100-80"])
assert module.tied.weight is module.again.weight and str(module.inner.bias.device) == "cuda:0"
planned = plan_step(traced, options)
ops = planned.report.tuned_calls
for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"):
    assert ops[f"aten.{name}.default"] == ops[f"aten.{name}_backward.default"] == 1, ops
text = planned.report.forward_text + planned.report.backward_text
assert ops["aten._grouped_mm.default"] == 3 and "float32[64, 24]" in text, ops  # whose kernel takes float32 too
assert "_fused_rms_norm_backward" in text and "mish_backward" in text and "bfloat16[64, 128]" not in text
assert planned.report.num_parameters == 64 * 192 + 192 + 64 + 64 * 64 + 2 * 64 * 24  # of the tied ones, one
assert planned.report.memory["workspaces"] >= 0 and planned.time.device_s > 0 and planned.time.num_calls > 20
assert torch.cuda.get_device_capability("cuda:0") >= (8, 0)  # by which models choose how to compute
try:
    torch.ones(2, device="cuda")
except (RuntimeError, AssertionError):
    print("nothing runs there")
"""


def test_a_step_is_traced_as_cuda_runs_it(tmp_path):
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "nothing runs there" in done.stdout, done.stdout + done.stderr
