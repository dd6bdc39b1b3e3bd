"""task=measure: what this machine's device can do, as a file that task=plan takes in the place of a device's name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import yaml

from aottrain.config.run import RunConfig
from aottrain.ir.settings.decisions import OVERHEAD, TRAFFIC, Timing
from aottrain.ir.settings.devices import Target
from aottrain.ir.units import format_bytes, format_flops, format_percent, format_seconds
from aottrain.measure.calls import quiet
from aottrain.measure.machine import describe_machine
from aottrain.measure.rates import attention_run, rate_runs
from aottrain.measure.stopwatch import in_turns
from aottrain.measure.workspaces import product_workspace_bytes
from aottrain.metrics.memory import total_bytes
from aottrain.metrics.sinks import write_result
from aottrain.tasks.building.build import chosen_device
from aottrain.trainer.reliability.signals import interruptible

FILE = "device.yaml"
_ATTENTION = "attention"


def run(config: RunConfig) -> int:
    """Measure the device, print its rates and write them to device.yaml. A busy machine is said to be one."""
    with interruptible():
        if config.trainer.num_threads is not None:
            torch.set_num_threads(config.trainer.num_threads)
        device = chosen_device(config)
        dtype, attention = attention_run(device)
        with quiet():
            times, is_busy = in_turns({**rate_runs(device), _ATTENTION: attention}, device)
        target = _target(device, times, dtype)
        path = Path(config.output_dir) / FILE
        values = {name: value for name, value in dataclasses.asdict(target).items() if name != "world"}
        write_result(path, yaml.safe_dump(values, sort_keys=False))
        print(_text(target))
        if is_busy:
            print("warning: the machine was busy, or its times did not agree: measure it again when it is quiet")
        print(f"\n{path}: task=plan device={path} plans for this device elsewhere")
    return 0


def _target(device: torch.device, times: dict[str, Timing], dtype: torch.dtype) -> Target:
    """What was reached stands as what can be."""
    on_cuda = device.type == "cuda"
    rates = {name: 1 / max(time.seconds, 1e-18) for name, time in times.items()}
    flops = {name.removeprefix("torch."): rate for name, rate in rates.items() if name.startswith("torch.")}
    own = Target.__dataclass_fields__["gap_s"].default, Target.__dataclass_fields__["launch_s"].default
    # On a CPU a call is over before the next one begins.
    gap_s, launch_s = own if on_cuda else (times[OVERHEAD].seconds, 0.0)
    return Target(
        name=torch.cuda.get_device_name(device) if on_cuda else "CPU",
        source=f"task=measure on {describe_machine(device)}",
        kind=device.type,
        memory_bytes=total_bytes(device),
        flops=flops,
        attention=rates[_ATTENTION] / flops[str(dtype).removeprefix("torch.")],
        bytes_per_s=rates[TRAFFIC],
        gap_s=gap_s,
        launch_s=launch_s,
        product_workspace_bytes=product_workspace_bytes(device) if on_cuda else 0,
    )


def _text(target: Target) -> str:
    rows = [("device", target.source), ("memory", format_bytes(target.memory_bytes))]
    rows += [(f"products, {name}", f"{format_flops(rate)}/s") for name, rate in target.flops.items()]
    rows += [
        ("attention", f"{format_percent(target.attention)} of that"),
        ("traffic", f"{format_bytes(target.bytes_per_s)}/s"),
    ]
    rows.append(("between calls", format_seconds(target.gap_s)))
    return "\n".join(f"{name:<20}{text}" for name, text in rows)
