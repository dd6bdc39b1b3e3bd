"""task=tour: four small programs through every stage of the compiler, with a sentence on each."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import aottrain
from aottrain.config.run import RunConfig
from aottrain.ir.graph import JointGraph
from aottrain.ir.text import graph_text, node_text
from aottrain.metrics.sinks import write_result
from aottrain.trainer.reliability.signals import interruptible

FILE = "tour.txt"
ROWS, COLUMNS = 4, 8
_WIDTH = 100


@dataclass(frozen=True)
class Stop:
    """A program of the tour."""

    title: str
    program: Callable[[Tensor], Tensor]
    remarks: dict[str, str]
    """By stage, what is to be seen in this program there."""

    @property
    def source(self) -> str:
        """The program as it was written."""
        program = self.program
        return repr(program) if isinstance(program, nn.Module) else textwrap.dedent(inspect.getsource(program)).strip()


@dataclass(frozen=True)
class Page:
    """What one stage gives of one program."""

    stage: str
    sentence: str
    text: str

    def __str__(self) -> str:
        told = "\n".join(textwrap.wrap(self.sentence, _WIDTH))
        return f"--- {self.stage}\n{told}\n\n{textwrap.indent(self.text, '    ')}\n"


def sines(x: Tensor) -> Tensor:
    return torch.sin(torch.sin(torch.sin(x)))


def wave(x: Tensor) -> Tensor:
    return torch.sin(x) + torch.cos(x)


def clipped(x: Tensor) -> Tensor:
    doubled = x * 2
    doubled.relu_()
    return doubled


def stops() -> tuple[Stop, ...]:
    """The programs of the tour, in order. The last one has parameters and buffers of its own, new each time."""
    return (
        Stop("sin(sin(sin(x)))", sines, {
            "joint graph": "The chain rule wants the cosine of each sine's input: the backward reads forward values.",
            "plan": "Nothing is saved: x is an input and alive anyway, and from it the sines are computed again, which "
                    "costs less than to write them to memory and read them back.",
            "backward graph": "The sines stand here again, between x and the gradient.",
            "kernels": "Each half is one loop: x is read once, and nothing in between is written.",
        }),
        Stop("sin(x) + cos(x)", wave, {
            "joint graph": "Autograd's formulas compute the sine and the cosine once more for the backward.",
            "simplified graph": "What is computed twice is computed once: the second sine and cosine are gone.",
            "plan": "Both could be saved now; to compute them again is cheaper here.",
        }),
        Stop("an in-place relu", clipped, {
            "joint graph": "relu_ writes over its input, and what is read of it afterwards is the new value.",
            "functional graph": "relu_ has become relu, a new value, and what read the old one after it reads this. "
                                "From here on the order of nodes carries no meaning beside who reads what.",
            "plan": "The result of relu is alive anyway, because it is the output: to save it costs nothing.",
        }),
        Stop("BatchNorm", nn.BatchNorm1d(COLUMNS), {
            "capture": "Parameters and buffers, which the module reads from itself, have become inputs.",
            "joint graph": "Running mean, variance and the count of batches are written in place.",
            "functional graph": "Each buffer that was written is an output now, beside the result: whoever calls the "
                                "program writes it back, once.",
            "plan": "Mean and inverse deviation of each column are saved: what writes a buffer may not run twice.",
            "kernels": "Sums over a column, then the normalised values and the new statistics, in one pass of rows.",
        }),
    )  # fmt: skip


def pages(stop: Stop, language: str = "cpp") -> Iterator[Page]:
    """What every stage gives of the program, for an input of ROWS x COLUMNS numbers. language: cpp or triton."""
    x = _example(stop)

    def page(stage: str, sentence: str, text: str) -> Page:
        return Page(stage, " ".join(filter(None, (sentence, stop.remarks.get(stage, "")))), text)

    yield page("program", "What a person writes.", stop.source)
    module = stop.program if isinstance(stop.program, nn.Module) else None
    step = aottrain.capture(stop.program, module, (x,), {})
    named = (step.inputs, step.primals)
    inputs = "\n".join(f"{value.name}: {list(tensor.shape)}" for value, tensor in zip(*named, strict=True))
    yield page("capture", "The call as a function of all that it reads, each an input.", inputs)
    joint = aottrain.trace_joint(step, aottrain.analyse(step))
    told = "Forward and backward are traced into one graph: inputs and, for each result, a tangent, the gradient that "
    yield page("joint graph", told + "comes from outside; results and the inputs' gradients go out.", _text(joint))
    functional = aottrain.functionalize(joint)
    yield page("functional graph", "No node writes to a value that another one reads.", _text(functional))
    simple = aottrain.simplify(functional)
    yield page("simplified graph", "Without what is computed twice, or for nothing.", _text(simple))
    plan = aottrain.plan_partition(simple, "min_cut")
    told = "A minimum cut decides what the backward finds saved and what it computes again, each with its reason."
    yield page("plan", told, str(plan))
    parts = aottrain.apply_partition(simple, plan)
    halves = [("forward", parts.forward)] + ([("backward", parts.backward)] if parts.backward is not None else [])
    for name, graph in halves:
        told = {"forward": "The results, and behind them what is handed to the backward.",
                "backward": "What was handed over and the tangents, to gradients."}[name]  # fmt: skip
        yield page(f"{name} graph", told, graph_text(graph))
    told = "Calls that may share a loop are one kernel, first as its formula, then in the language of the device."
    yield page("kernels", told, "\n\n".join(text for name, graph in halves for text in _kernels(name, graph, language)))
    yield page("compared with eager", "The compiled program is run, and its results held against eager's.",
               _compared(stop))  # fmt: skip


def _example(stop: Stop) -> Tensor:
    """An input: of the functions the gradient is asked for, of the module that of its parameters."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return x.requires_grad_(not isinstance(stop.program, nn.Module))


def _text(joint: JointGraph) -> str:
    return graph_text(joint.graph)


def _kernels(name: str, graph: fx.Graph, language: str) -> Iterator[str]:
    for call in aottrain.schedule(graph).calls:
        if isinstance(call, fx.Node):
            yield f"{name}: a library's call\n{node_text(call)}"
        else:
            yield f"{name}: {call.kernel}\n\n{aottrain.render(call.kernel, language).strip()}"


def _compared(stop: Stop) -> str:
    """The largest differences of result and gradients, each of both sides' own run."""
    found = []
    for program in (stop.program, aottrain.compile(stop.program, capture="trace", on_unsupported="error")):
        x = _example(stop)
        result: Tensor = program(x)
        leaves: list[Any] = [x] if x.requires_grad else list(stop.program.parameters())  # type: ignore[attr-defined]
        found.append([result, *torch.autograd.grad(result.square().sum(), leaves)])
    errors = [float((one - other).detach().abs().max()) for one, other in zip(*found, strict=True)]
    return f"result: {errors[0]:.1e}\n" + "\n".join(f"gradient {index}: {e:.1e}" for index, e in enumerate(errors[1:]))


@interruptible()
def run(config: RunConfig) -> int:
    """Print the tour and write tour.txt. `kernel=triton` shows Triton's kernels, for which no device is needed.

    OutputError: tour.txt cannot be written.
    """
    on_cuda = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    language = "triton" if config.kernel.name == "triton" or (config.kernel.name == "auto" and on_cuda) else "cpp"
    parts = []
    for number, stop in enumerate(stops(), start=1):
        title = f"{number}. {stop.title}"
        parts.append(f"{title}\n{'=' * len(title)}\n")
        parts += map(str, pages(stop, language))
    text = "\n".join(parts)
    path = Path(config.output_dir) / FILE
    write_result(path, text)
    print(f"{text}\n{path}", flush=True)
    return 0
