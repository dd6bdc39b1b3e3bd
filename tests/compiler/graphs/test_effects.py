"""Every operator of torch that checks, asserts or communicates: known as such, and kept by every pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aottrain.compiler.capture.capture import capture
from aottrain.compiler.graphs.effects import anchor_checks, drop_anchors
from aottrain.compiler.graphs.simplification import copy_graph
from aottrain.compiler.joint.analysis import analyse
from aottrain.compiler.pipeline import apply_partition, functional_joint, plan_partition
from aottrain.compiler.schedule.order import schedule
from aottrain.ir import ops
from aottrain.ir.graph import calls, effects_of
from aottrain.ir.ops import OpKind, op_info, uses_generator
from aottrain.ir.verify import verify_joint, verify_partition

aten = torch.ops.aten
EYE, ONES = torch.eye(3), torch.ones(3)


def overloads():
    """Every overload that this torch registers, without those of its own tests."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(torch.ops, namespace), packet, None)
        if found is not None and hasattr(found, overload or "default"):
            yield getattr(found, overload or "default")


def test_what_returns_nothing_is_an_effect():
    silent = [op for op in overloads() if not op._schema.returns and not op_info(op).writes]
    assert aten._linalg_check_errors.default in silent and aten._assert_async.msg in silent
    left_out = {str(op) for op in silent if op_info(op).kind is not OpKind.EFFECT}
    assert {name.partition(".")[0] for name in left_out} <= {"profiler"}


def test_what_asserts_by_its_name_is_an_effect():
    found = [op for op in overloads() if "assert" in op._schema.name.partition("::")[2] and op.namespace == "aten"]
    assert len(found) >= 5
    assert all(op_info(op).kind is OpKind.EFFECT and not ops.is_pure(op) for op in found)


def test_what_communicates_is_an_effect():
    found = [op for op in overloads() if op.namespace == "_c10d_functional" and not op_info(op).writes]
    assert found and all(op_info(op).kind is OpKind.EFFECT for op in found)


def test_the_table_names_operators_that_there_are():
    ours = {"ctc_loss", "linear_cross_entropy", "nll_rows", "sum_messages"}
    ours |= {"cholesky", "linalg_polar", "linalg_matrix_sqrth"}  # until torch 2.13, and after it
    assert [name for name in ops._RAISING if name not in ours and not hasattr(aten, name)] == []


def test_operators_of_other_libraries_may_raise():
    with torch.library._scoped_library("effects_test", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        assert op_info(torch.ops.effects_test.doubled.default).raises


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.effects = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if op_info(func).kind is OpKind.EFFECT and not uses_generator(func):
            self.effects.append(func)
        return func(*args, **(kwargs or {}))


def composites():
    """Functions of torch, with arguments, that check within what they are composed of."""
    names = [name for name in dir(torch.linalg) if not name.startswith("_")]
    functions = {f"linalg.{name}": getattr(torch.linalg, name) for name in names}
    functions |= {name: getattr(torch, name) for name in ("inverse", "logdet", "slogdet", "det")}
    for name, function in functions.items():
        for arguments in ((EYE,), (EYE, EYE), (EYE, -2), (EYE, ONES)):
            seen = _Seen()
            try:
                with seen:
                    function(*arguments)
            except Exception:
                continue
            if seen.effects:
                yield pytest.param(function, arguments, seen.effects, id=name)
                break


def joint_of(function, arguments, trains=True):
    given = [value.clone().requires_grad_(trains) if isinstance(value, torch.Tensor) else value for value in arguments]
    step = capture(function, None, given, {})
    return functional_joint(step, analyse(step))


STRATEGIES = [("save_all", None), ("min_cut", None), ("recompute_all", None), ("budget", 0.0), ("budget", 0.5)]


def check_partitions(joint, count):
    """count: of the effects of both halves, the last pass done."""
    verify_joint(joint)
    for strategy, budget in STRATEGIES:
        parts = apply_partition(joint, plan_partition(joint, strategy, budget))
        verify_partition(joint, parts)
        graphs = [parts.forward] if parts.backward is None else [parts.forward, parts.backward]
        assert sum(len(effects_of(graph)) for graph in graphs) == count
        for graph in graphs:
            ran = [call for call in schedule(graph).calls if call in set(effects_of(graph))]
            assert ran == effects_of(graph)


@pytest.mark.parametrize(("function", "arguments", "effects"), list(composites()))
def test_checks_within_composites_are_kept(function, arguments, effects):
    def unread(*given):
        function(*given)
        return given[0] * 2

    for program in (function, unread):
        joint = joint_of(program, arguments, function is not torch.linalg.ldl_factor)  # which has no derivative
        early, late = joint.effects()
        assert [node.target for node in early if node.target in effects] == effects
        check_partitions(joint, len(early) + len(late))


def test_there_are_such_composites():
    assert {"linalg.inv", "linalg.solve", "linalg.cholesky", "linalg.lu_factor"} <= {p.id for p in composites()}


def anchors(joint):
    return [node for node in calls(joint.graph) if node.target is torch.ops.aottrain.anchor.default]


def test_what_is_read_needs_no_anchor():
    joint = joint_of(lambda x: x.index_select(0, torch.tensor([0, 1])) * x[:2], (ONES,))
    assert anchors(joint) == [] and joint.effects() == ([], [])


def test_what_the_backward_alone_reads_is_anchored_in_the_forward():
    joint = joint_of(lambda x, y: (y.detach().gather(0, torch.tensor([0, 1])) * x[:2]).sum(), (ONES, ONES))
    assert len(anchors(joint)) == 0  # the forward multiplies by it
    joint = joint_of(lambda x, y: (x[:2].gather(0, torch.tensor([0, 1])), x.sum())[1], (ONES, ONES))
    assert len(anchors(joint)) == 1
    check_partitions(joint, 1)


def test_anchors_are_put_and_dropped_alike():
    joint = joint_of(lambda x: x.gather(0, torch.tensor([0, 1])), (ONES,))
    copied = joint.with_graph(copy_graph(joint.graph))
    anchor_checks(copied)
    assert len(anchors(copied)) >= 1
    drop_anchors(copied)
    assert anchors(copied) == []


def test_a_check_of_the_forwards_values_in_a_hook_stays_in_the_backward():
    def program(x):
        y = x.exp()
        y.register_hook(lambda g: torch._assert_async((x > 0).all()))
        y.register_hook(lambda g: torch._assert_async((g > 0).all()))
        return y.sin().sum()

    joint = joint_of(program, (ONES,))
    early, late = joint.effects()
    assert (len(early), len(late)) == (0, 2)
    check_partitions(joint, 2)
