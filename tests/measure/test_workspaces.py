"""workspace_bytes: what single calls allocate inside themselves, and the file that keeps the figures."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
import torch

import aottrain.ops.losses.loss_head  # noqa: F401  (defines an operator)
from aottrain.ir.settings.decisions import ATEN, ONEDNN, OWN
from aottrain.ir.tensor import TensorSpec, tensor_spec
from aottrain.measure import calls, workspaces
from aottrain.measure.calls import OpCall
from aottrain.measure.workspaces import workspace_by_rule, workspace_bytes
from aottrain.toolchain import cache

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_failed_yet(monkeypatch):
    monkeypatch.setattr(workspaces, "_failed", set())


def spec(*shape, dtype=torch.float32):
    return tensor_spec(torch.empty(shape, dtype=dtype))


def call(target, *args, **kwargs):
    return OpCall(target, args, kwargs)


def batch_norm_backward():
    x, c = spec(8, 16, 32, 32), spec(16)
    return call(aten.native_batch_norm_backward.default, x, x, c, c, c, c, c, True, 1e-5, [True, True, True])


def convolution():
    return call(
        aten.convolution.default,
        spec(8, 16, 32, 32),
        spec(16, 16, 3, 3),
        None,
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
    )


def integer_sum():
    return call(aten.mul.Tensor, spec(1000), spec(1000, dtype=torch.int64))


def own_loss():
    x, target = spec(32, 16), spec(32, dtype=torch.int64)
    rule = 1, -100, torch.float32, torch.float32, 256, [True, True, False]
    return call(torch.ops.aottrain.linear_cross_entropy.default, x, spec(64, 16), None, target, *rule)


def the_file(folder):
    (path,) = folder.glob("workspaces-*.json")
    return path


def test_known_workspaces():
    # Batch norm's backward keeps one more tensor of its input's size; the operand that is converted is a copy.
    assert workspace_bytes([batch_norm_backward(), integer_sum()]).num_bytes == (8 * 16 * 32 * 32 * 4, 4000)
    assert not workspace_bytes([convolution()]).unknown


def test_calls_without_a_workspace():
    x = spec(64, 64)
    calls = [call(aten.mm.default, x, x), call(aten.sin.default, x), call(aten.t.default, x), call(aten.sum.default, x)]
    found = workspace_bytes(calls)
    assert found.num_bytes == (0, 0, 0, 0) and not found.unknown
    assert found.num_run == 2  # the pointwise op and the view are known to need none


def test_equal_calls_run_once_and_other_processes_read_the_file(folder):
    first = workspace_bytes([batch_norm_backward(), batch_norm_backward(), convolution()])
    assert first.num_run == 2
    assert workspace_bytes([convolution(), batch_norm_backward()]).num_run == 0
    cache.forget_tables()
    again = workspace_bytes([batch_norm_backward(), batch_norm_backward(), convolution()])
    assert again.num_run == 0 and again.num_bytes == first.num_bytes


def test_figures_are_the_same_when_measured_again(folder):
    first = workspace_bytes([batch_norm_backward(), convolution(), integer_sum()])
    the_file(folder).unlink()
    cache.forget_tables()
    assert workspace_bytes([batch_norm_backward(), convolution(), integer_sum()]) == first


def test_figures_of_our_own_ops_end_with_their_code(folder, monkeypatch):
    assert workspace_bytes([own_loss(), integer_sum()]).num_run == 2
    assert workspace_bytes([own_loss(), integer_sum()]).num_run == 0
    monkeypatch.setattr(calls, "own_code", lambda: "of another version")
    assert workspace_bytes([own_loss(), integer_sum()]).num_run == 1


@pytest.mark.parametrize("damage", ["", "{", "[1, 2]", "null", "\udc80"])
def test_a_damaged_file_is_measured_again(folder, damage):
    first = workspace_bytes([integer_sum()])
    the_file(folder).write_bytes(damage.encode("utf-8", "surrogateescape"))
    cache.forget_tables()
    assert workspace_bytes([integer_sum()]) == first
    assert json.loads(the_file(folder).read_text()) == {integer_sum().text: 4000}


@pytest.mark.parametrize("value", ["7", -1, None, True, float("nan"), {}, {"date": 1}, [4000], 1 << 70, 1e300, 4e3])
def test_a_wrong_figure_is_measured_again(folder, value):
    workspace_bytes([integer_sum()])
    the_file(folder).write_text(json.dumps({integer_sum().text: value}))
    cache.forget_tables()
    assert workspace_bytes([integer_sum()]).num_bytes == (4000,)
    assert json.loads(the_file(folder).read_text()) == {integer_sum().text: 4000}


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path / "file"))
    assert workspace_bytes([integer_sum()]).num_bytes == (4000,)
    assert workspace_bytes([integer_sum()]).num_run == 0


def test_another_number_of_threads_is_another_figure(folder):
    threads = torch.get_num_threads()
    q = spec(1, 2, 64, 16)
    attention = call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    try:
        torch.set_num_threads(1)
        (one,) = workspace_bytes([attention]).num_bytes
        torch.set_num_threads(2)
        (two,) = workspace_bytes([attention]).num_bytes
    finally:
        torch.set_num_threads(threads)
    assert two == 2 * one > 0


def test_nothing_is_left_behind():
    x = torch.randn(4, requires_grad=True)
    state = torch.get_rng_state()
    with torch.enable_grad():
        workspace_bytes([convolution(), batch_norm_backward()])
        assert torch.is_grad_enabled() and x.sin().requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_indices_are_valid():
    weight, index = spec(10, 8), spec(4, 6, dtype=torch.int64)
    embedding = call(aten.embedding.default, weight, index)
    backward = call(aten.embedding_dense_backward.default, spec(4, 6, 8), index, 10, -1, False)
    loss = call(aten.nll_loss_forward.default, spec(6, 10), spec(6, dtype=torch.int64), None, 1, -100)
    assert not workspace_bytes([embedding, backward, loss]).unknown


@pytest.mark.parametrize(
    "unknown",
    [
        call(aten.mm.default, spec(2, 3), spec(2, 3)),  # raises
        call(aten.bernoulli.default, spec(3)),  # draws from the generator
        call(aten.cumsum_.default, spec(3), 0),  # writes
        call(aten.sort.default, object(), 0),
        call(aten.sort.default, TensorSpec((1 << 40,), (1,), torch.float32, torch.device("cpu"), 0), 0),
        call(aten.sort.default, tensor_spec(torch.empty(3, device="meta")), 0),
    ],
    ids=lambda value: str(value.target),
)
def test_what_cannot_be_measured_counts_nothing_and_is_named(unknown):
    state = torch.get_rng_state()
    found = workspace_bytes([unknown, integer_sum()])
    assert found.num_bytes == (0, 4000) and found.unknown == (unknown,)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_found_no_memory_is_measured_the_next_time(monkeypatch):
    def without(*given):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(OpCall, "arguments", without)
        assert workspace_bytes([integer_sum()]).unknown == (integer_sum(),)
    assert workspace_bytes([integer_sum()]).num_bytes == (4000,)


def test_results_count_against_the_memory_that_is_free():
    big = OpCall(aten.cumsum.default, (spec(3), 0), {}, result_bytes=1 << 60)
    assert workspace_bytes([big]).unknown == (big,)


@pytest.mark.parametrize("profile", [torch.autograd.profiler.profile, torch.profiler.profile])
def test_inside_the_callers_own_profiler_they_are_as_without(profile, folder):
    """It sees nothing of it."""
    calls = [convolution(), batch_norm_backward(), integer_sum()]
    with profile(profile_memory=True) as record:
        found = workspace_bytes(calls)
        mine = torch.empty(1000)
    assert found.num_run == 3 and not found.unknown
    results = record.kineto_results if hasattr(record, "kineto_results") else record.profiler.kineto_results
    assert [event.nbytes() for event in results.events() if event.name() == "[memory]"] == [mine.nbytes]
    the_file(folder).unlink()
    cache.forget_tables()
    assert workspace_bytes(calls) == found


def test_while_another_thread_is_profiled_they_are_as_without():
    found = []
    thread = threading.Thread(target=lambda: found.append(workspace_bytes([integer_sum()])))
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True):
        thread.start()
        thread.join()
    assert found[0].num_bytes == (4000,) and found[0].num_run == 1


def test_threads_measure_one_after_another():
    found = {}

    def measure(n):
        found[n] = workspace_bytes([call(aten.mul.Tensor, spec(n), spec(n, dtype=torch.int64))]).num_bytes

    threads = [threading.Thread(target=measure, args=(n,)) for n in range(100, 120)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: (4 * n,) for n in range(100, 120)}


def test_of_two_writers_the_first_is_believed(folder):
    mine, other = cache.Table(folder / "t.json"), cache.Table(folder / "t.json")
    other.add({"a": 1, "b": 2})
    mine.add({"a": 9, "c": 3})
    assert mine.get("a") == 1 and mine.get("b") == 2
    assert json.loads((folder / "t.json").read_text()) == {"a": 1, "b": 2, "c": 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_allocators_events_count():
    x = tensor_spec(torch.empty(512, 512, device="cuda"))
    found = workspace_bytes([call(aten.sort.default, x, 0), call(aten.cumsum.default, x, 0)])
    assert not found.unknown and found.num_bytes[0] > 0


def test_the_most_that_was_there_at_once_counts_but_for_what_stays():
    def event(name, start, end=0, num_bytes=0):
        given = {"name": name, "start_ns": start, "end_ns": end, "nbytes": num_bytes}
        methods = {key: lambda value=value: value for key, value in given.items()}
        return SimpleNamespace(**methods, device_type=lambda: torch.autograd.DeviceType.CUDA)

    marks = [event(f"{workspaces._MARK}{i}", 10 * i, 10 * i + 5) for i in range(4)]
    changes = {1: 100, 2: -60, 7: 500, 11: -8, 21: 30, 22: 30, 23: -60, 33: 64}
    events = [*marks, *(event("[memory]", at, num_bytes=size) for at, size in changes.items())]
    record = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    assert workspaces._peaks(record) == {0: 60, 1: 0, 2: 60, 3: 0}


def made_of(count):
    return spec(count, dtype=torch.int64)


def test_integers_of_made_up_inputs_are_such_as_the_call_takes():
    """LAPACK counts rows from 1, and ATen refuses a pivot of 0."""
    factors, pivots = spec(4, 4), spec(4, dtype=torch.int32)
    (_, made, _), _ = call(aten.linalg_lu_solve.default, factors, pivots, spec(4, 2)).arguments()
    assert made.tolist() == [1] * 4
    (_, indices, offsets), _ = call(aten._embedding_bag.default, spec(10, 4), made_of(12), made_of(5)).arguments()
    assert indices.tolist() == [0] * 12 and offsets.tolist() == [0, 3, 6, 9, 12]
    (_, made), _ = call(aten.embedding.default, spec(1, 8), spec(4, dtype=torch.int64)).arguments()
    assert made.tolist() == [0] * 4


@pytest.mark.parametrize("library", [ATEN, ONEDNN, OWN])
@pytest.mark.parametrize("rows", [200, 600])
@pytest.mark.parametrize("mask", [(True, True, False), (True, False, False), (False, False, False), (True, True, True)])
def test_the_rule_of_a_loss_head_is_what_is_measured(library, rows, mask):
    loss_head = loss_head_call(rows, 256, torch.float32, mask, library)
    (measured,) = workspace_bytes([loss_head]).num_bytes
    # Libraries pack operands in up to 128 KiB of their own.
    assert measured - (128 << 10) <= workspace_by_rule(loss_head) <= measured + 4096


@pytest.mark.parametrize("softmax", [torch.float32, torch.bfloat16])
def test_the_rule_of_a_loss_head_in_bfloat16_is_what_is_measured(softmax):
    loss_head = loss_head_call(600, 256, torch.bfloat16, (True, True, False), ATEN, softmax)
    (measured,) = workspace_bytes([loss_head]).num_bytes
    assert abs(workspace_by_rule(loss_head) - measured) <= 128 << 10


def loss_head_call(rows, chunk, dtype, mask, library, softmax=torch.float32):
    """Of 3,000 classes and width 128."""
    tensors = spec(rows, 128, dtype=dtype), spec(3000, 128, dtype=dtype), spec(3000, dtype=dtype)
    target = spec(rows, dtype=torch.int64)
    rule = 1, -100, softmax, softmax, chunk, list(mask), library
    return call(torch.ops.aottrain.linear_cross_entropy.default, *tensors, target, *rule)
