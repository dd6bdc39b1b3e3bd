"""A script that shows, without aottrain, the value of one node of a graph beside the one that was expected."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from aottrain.ir.graph import info
from aottrain.ir.settings.files import write_text_whole, write_whole
from aottrain.ir.text import node_text


def write_script(folder: Path, stage: str, node: fx.Node, expected_values: Mapping[str, Any], value: Any) -> str:
    """Writes reproduce.py and the values that it reads; the script's path.

    expected_values: by node name, this node's among them, as the stage before `stage` gave them. value: this node's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inputs = {source.name: expected_values.get(source.name) for source in node.all_input_nodes}
    values = {"inputs": inputs, "expected": expected_values[node.name], "found": value}
    write_whole(folder / "values.pt", partial(torch.save, values))
    path = folder / "reproduce.py"
    write_text_whole(
        path,
        f'"""Stage {stage}: {node_text(node)}"""\n'
        "import pathlib\n\nimport torch\n\n"
        'saved = torch.load(pathlib.Path(__file__).parent / "values.pt")\n'
        + "".join(f"{name} = saved['inputs'][{name!r}]\n" for name in inputs)
        + _call_text(node)
        + 'print("largest difference, found:", (saved["found"] - saved["expected"]).abs().max())\n',
    )
    return str(path)


def _call_text(node: fx.Node) -> str:
    if node.op != "call_function" or not info(node).name.startswith("aten."):
        return "# the value of this node is not one PyTorch op of its inputs\n"
    arguments = [_literal(value) for value in node.args] + [f"{k}={_literal(v)}" for k, v in node.kwargs.items()]
    call = f"torch.ops.{info(node).name}({', '.join(arguments)})"
    return f'again = {call}\nprint("largest difference, run again:", (again - saved["expected"]).abs().max())\n'


def _literal(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)
