"""The device that a plan is for, by its name or from a file of rates."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aottrain.errors import ConfigError
from aottrain.ir.settings.devices import DEVICES, Target, is_file
from aottrain.ir.settings.files import yaml_of

_TEXTS = ("name", "source", "kind")
_COUNTS = ("memory_bytes", "per_machine", "product_workspace_bytes")
NEEDED = tuple(
    field.name
    for field in dataclasses.fields(Target)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
)


def find_target(device: str) -> Target:
    """ConfigError: no device is called so, or the file is not there or says something else than rates."""
    if not is_file(device):
        return DEVICES[device]
    import yaml  # which a name does not need

    try:
        values = yaml.safe_load(yaml_of(Path(device)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no YAML"
        raise ConfigError(f"device={device}: cannot be read: {reason}") from error
    if mistakes := list(_mistakes(values)):
        raise ConfigError([f"device={device}: {mistake}" for mistake in mistakes])
    return Target(**{**values, "flops": {name: float(rate) for name, rate in values["flops"].items()}})


def _mistakes(values: Any) -> list[str]:
    if not isinstance(values, Mapping):
        return ["must be a file that task=measure wrote: keys with values"]
    fields = {field.name for field in dataclasses.fields(Target)}
    found = [f"has no {name}" for name in NEEDED if name not in values]
    for name, value in values.items():
        if name not in fields:
            found.append(f"{name} is not known (keys: {', '.join(sorted(fields))})")
        elif name in _TEXTS:
            found += [] if isinstance(value, str) else [f"{name}={value!r} must be text"]
        elif name == "flops":
            rates = value.values() if isinstance(value, Mapping) else ()
            if not rates or "float32" not in value or not all(_is_positive(rate) for rate in rates):
                found.append("flops must have operations each second by type, float32 at least")
        elif not (_is_positive(value) or (value == 0 and not isinstance(value, bool))):
            found.append(f"{name}={value!r} must be a number, not below 0")
        elif name in _COUNTS and int(value) != value:
            found.append(f"{name}={value!r} must be a whole number")
    if values.get("kind", "cuda") not in ("cuda", "cpu"):
        found.append(f"kind={values['kind']!r} must be cuda or cpu")
    zero = [
        name for name in ("memory_bytes", "bytes_per_s", "products", "attention", "traffic") if values.get(name) == 0
    ]
    return found + [f"{name}=0 must be above 0" for name in zero]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
