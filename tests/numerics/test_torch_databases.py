"""torch's own databases of operators and modules: every entry through the direct door gives what eager gives.

Under rng="eager" random entries are compared bit for bit with eager's own stream. An entry may run eagerly where its
program cannot be traced; which ones do is listed here, so that neither more nor fewer do unnoticed.
"""

import copy
import itertools
import warnings

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

import aottrain
from tests.numerics.tolerance import RTOL_ATOL

databases = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")
modules = pytest.importorskip("torch.testing._internal.common_modules", reason="needs expecttest")

NUM_CHUNKS = 8
NUM_SAMPLES = 2
MODULES_PER_ENTRY = 3

# Uninitialised memory: not even eager gives the same values twice.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# At least so many of an eighth's entries are compiled whole; the others need values (item, nonzero) or sparse tensors.
MIN_COMPILED_SHARE = 0.93


def clones(tree):
    def clone(value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided or 0 in value.stride():
            return value.detach().clone().requires_grad_(value.requires_grad)
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return out.copy_(value.detach()).requires_grad_(value.requires_grad)

    return tree_map(clone, tree)


def tensors_of(tree):
    return [value for value in tree_flatten(tree)[0] if isinstance(value, torch.Tensor)]


def difference(want, got, layout=True):
    """The first difference, in words; None where two results agree."""
    (wanted, _), (found, _) = tree_flatten(want), tree_flatten(got)
    if len(wanted) != len(found):
        return f"{len(wanted)} values became {len(found)}"
    for a, b in zip(wanted, found, strict=True):
        if not isinstance(a, torch.Tensor):
            if type(a) is not type(b) or (a == a and a != b):
                return f"{a} became {b}"
            continue
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype}{list(a.shape)} became another type or shape"
        if a.requires_grad != b.requires_grad:
            return "requires_grad changed"
        if a.layout != torch.strided or a.dtype == torch.complex32:
            continue
        if layout and a.numel() > 1 and a.stride() != b.stride():
            return f"strides {a.stride()} became {b.stride()}"
        rtol, atol = RTOL_ATOL.get(a.dtype, RTOL_ATOL[torch.float32] if a.is_complex() else (0.0, 0.0))
        if not (torch.allclose(a, b, rtol, atol, equal_nan=True) if rtol else torch.equal(a, b)):
            return f"values differ in {a.dtype}{list(a.shape)}"
    return None


def run_sample(function, sample):
    inputs = clones((sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    out = function(inputs[0], *inputs[1], **inputs[2])
    outputs = [value for value in tensors_of(out) if value.requires_grad]
    wanted = [value for value in tensors_of(inputs) if value.requires_grad]
    gradients = None
    if outputs and wanted:
        generator = torch.Generator().manual_seed(1)
        tangents = [torch.randn(v.shape, generator=generator).to(v.dtype) for v in outputs]
        gradients = torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
    return out, gradients, tensors_of(inputs), torch.get_rng_state()


def check_operator(op):
    """("equal" | "eager", None) or ("wrong", why); None where there is nothing to compare."""
    differentiable = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    verdict = None
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=differentiable), NUM_SAMPLES):

        def function(*args, **kwargs):
            return op.op(*args, **kwargs)

        try:
            want = run_sample(function, sample)
        except Exception:
            continue  # eager cannot run this sample (a sparse tangent, a missing kernel)
        compiled = aottrain.compile(function, capture="trace", rng="eager")
        got = run_sample(compiled, sample)
        # The strides of a gradient are autograd's own affair (a leaf's .grad takes the leaf's): values alone.
        found = difference(want[:1] + want[2:], got[:1] + got[2:]) or difference(want[1], got[1], layout=False)
        if found:
            return "wrong", found
        verdict = "eager" if compiled.report.fallbacks or verdict == "eager" else "equal"
    return verdict, None


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_operator_of_torch(chunk):
    warnings.simplefilter("ignore")  # pytest restores the filters after the test
    wrong, counts = {}, {"equal": 0, "eager": 0}
    for op in databases.op_db[chunk::NUM_CHUNKS]:
        if torch.float32 not in op.supported_dtypes("cpu") or op.name in UNDEFINED:
            continue
        verdict, why = check_operator(op)
        if verdict == "wrong":
            wrong[op.formatted_name] = why
        elif verdict is not None:
            counts[verdict] += 1
    assert not wrong
    assert counts["equal"] >= MIN_COMPILED_SHARE * sum(counts.values()), counts


def run_module(call, module, sample):
    args, kwargs = clones((sample.args, sample.kwargs))
    torch.manual_seed(1)
    out = call(*args, **kwargs)
    outputs = tensors_of(out)
    differentiable = [value for value in outputs if value.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(value) for value in differentiable])
    inputs = tensors_of((args, kwargs))
    gradients = [value.grad for value in [*inputs, *module.parameters()]]
    return [value.detach() for value in outputs], gradients, list(module.buffers()), [v.detach() for v in inputs]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_module_of_torch(chunk, training):
    warnings.simplefilter("ignore")
    wrong = {}
    for entry in modules.module_db[chunk::NUM_CHUNKS]:
        samples = entry.module_inputs_func(
            entry, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for sample in samples[:MODULES_PER_ENTRY]:
            torch.manual_seed(0)
            made = entry.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
            if sample.forward_input is None:
                continue
            eager, copied = copy.deepcopy(made), copy.deepcopy(made)
            try:
                want = run_module(eager, eager, sample.forward_input)
            except RuntimeError:
                continue  # eager refuses this sample itself
            compiled = aottrain.compile(copied, capture="trace", rng="eager")
            found = difference(want, run_module(compiled, copied, sample.forward_input), layout=False)
            if found:
                wrong[entry.name] = found
    assert not wrong
