"""A plan as a file, made where there was time to choose, and used where the program is the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from aottrain.errors import ConfigError
from aottrain.ir.graph import JointGraph
from aottrain.ir.plan import PartitionPlan, StoredPlan
from aottrain.ir.settings.files import values_of
from aottrain.ir.text import node_text

KEY = "partition_plan"
_FORM = "is no plan.json that task=plan wrote for a named device"


def stored_plan(joint: JointGraph, plan: PartitionPlan, kernel: str) -> dict[str, Any]:
    """As plain data. joint: the program that the plan was made for, as it was rewritten for the kernel."""
    texts = {node.name: _text(node) for node in joint.graph.nodes}
    return {
        "saved": list(plan.saved),
        "recomputed": list(plan.recomputed),
        "schedule": None if plan.schedule is None else list(plan.schedule),
        "limit": plan.limit,
        "saved_bytes": plan.saved_bytes,
        "values": {name: texts[name] for name in plan.saved},
        "kernel": kernel,
        "fingerprint": _fingerprint(joint),
    }


def read_plan(path: str) -> StoredPlan:
    """ConfigError: the file is not there, or is none of ours."""
    try:
        values = values_of(Path(path))[KEY]
        schedule = values["schedule"] and tuple(values["schedule"])
        return StoredPlan(
            path, tuple(values["saved"]), tuple(values["recomputed"]), schedule, values["limit"],
            int(values["saved_bytes"]), dict(values["values"]), str(values["kernel"]), str(values["fingerprint"]),
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"partition.path={path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"partition.path={path}: {_FORM}") from error


def fitted(stored: StoredPlan, joint: JointGraph) -> PartitionPlan:
    """The plan, for the same program. ConfigError says where this one is another."""
    if stored.fingerprint != _fingerprint(joint):
        raise ConfigError(f"partition.path={stored.path}: the plan is of another program: {_difference(stored, joint)}")
    reason = f"as {Path(stored.path).name} has it"
    reasons = dict.fromkeys((*stored.saved, *stored.recomputed), reason)
    return PartitionPlan(
        "plan", stored.saved, stored.recomputed, reasons, stored.saved_bytes, None, stored.schedule, (), stored.limit
    )


def _difference(stored: StoredPlan, joint: JointGraph) -> str:
    texts = {node.name: _text(node) for node in joint.graph.nodes}
    for name, text in stored.values.items():
        if name not in texts:
            return f"there is no {text} (planned for kernel={stored.kernel})"
        if texts[name] != text:
            return f"here is {texts[name]}, there was {text} (planned for kernel={stored.kernel})"
    return f"what it saves is here, and other operators differ (planned for kernel={stored.kernel})"


def _text(node: Any) -> str:
    """Without the line of the program that it comes from."""
    return node_text(node).partition("  # ")[0]


def _fingerprint(joint: JointGraph) -> str:
    return hashlib.sha256("\n".join(map(_text, joint.graph.nodes)).encode()).hexdigest()[:32]
