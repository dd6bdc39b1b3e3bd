"""Run a schedule: its kernels, and the library calls between them, as one straight-line function."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from aottrain.compat import SIZE_NAMESPACE
from aottrain.compat_dispatch import ALONE, ALONE_NAMES, quick_empty
from aottrain.ir.analysis.liveness import freed_after, last_uses
from aottrain.ir.analysis.views import short_views
from aottrain.ir.flights import verify_flights
from aottrain.ir.graph import info, is_size, module_of, placeholders, results, source_of, spec_of, value_of
from aottrain.ir.kernels.open_sizes import size_names
from aottrain.ir.ops import OpKind
from aottrain.ir.schedule import (
    IN_PLACE,
    OUT_VARIANTS,
    KernelCall,
    MemoryPlan,
    Schedule,
    is_own_product,
    scratch_of,
)
from aottrain.ir.sizes.polynomials import is_open, likely
from aottrain.ir.tensor import TensorSpec, sizes_text
from aottrain.ops.attention import ATTENTIONS
from aottrain.ops.convolutions import convolve_into
from aottrain.ops.products.libraries import PRODUCTS
from aottrain.ops.rows import ADDED_IN_PLACE, ADDED_ROWS
from aottrain.ops.scans import SCANS
from aottrain.runtime.arena import ArenaLayout, begin, residual, settle_allocator
from aottrain.runtime.executor import Runner, call_text, laid_out, value_text
from aottrain.runtime.labels import labelled, with_labels
from aottrain.runtime.open_arena import Place, open_blocks, open_layouts

# What libraries give these as is never another layout or type than fake tensors say.
_ALWAYS_CONTIGUOUS = (
    torch.ops.aten.mm.default, torch.ops.aten.mm.dtype, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
)  # fmt: skip
Launch = Callable[..., None]  # of the buffers, and of memory to compute in where that was planned
_FRESH = object()  # the holder of programs that keep nothing
_LIBRARIES: Mapping[str, Callable[..., Any]] = {**PRODUCTS, **ATTENTIONS, **SCANS, **ADDED_ROWS}


def scheduled_runner(
    graph: fx.Graph, schedule: Schedule, launches: Mapping[str, Launch], memory: MemoryPlan | None = None
) -> Runner:
    """A function that takes the inputs as a list, which it empties, and returns the outputs as a list.

    launches: for each kernel's name what runs it on its buffers. memory: where buffers live; without it each is fresh.
    """
    settle_allocator()
    source, names = render(graph, schedule, launches, memory)
    namespace: dict[str, Any] = dict(names)
    exec(compile(source, "<aottrain program>", "exec"), namespace)

    def with_its_launches_labelled() -> Runner:
        named = {f"run_{name}": labelled(names[f"run_{name}"], label) for name, label in labels(schedule).items()}
        namespace = {**names, **named}
        exec(compile(source, "<aottrain program>", "exec"), namespace)
        return namespace["run"]

    return with_labels(namespace["run"], with_its_launches_labelled)


def labels(schedule: Schedule) -> dict[str, str]:
    """Of each kernel, by its name, what a profile calls it: with the modules and lines of what it computes."""
    written: dict[str, list[fx.Node]] = {}
    for call in schedule.calls:
        if isinstance(call, KernelCall):
            written.setdefault(call.kernel.name, []).extend(call.writes)
    texts = {}
    for name, nodes in written.items():
        modules = dict.fromkeys(module for node in nodes if (module := module_of(node)))
        sources = dict.fromkeys(source for node in nodes if (source := source_of(node)))
        texts[name] = " ".join(part for part in (name, ",".join(modules), ",".join(sources)) if part)
    return texts


def render(
    graph: fx.Graph, schedule: Schedule, launches: Mapping[str, Launch], memory: MemoryPlan | None = None
) -> tuple[str, dict[str, Any]]:
    """Python text of the program, and the names that it reads."""
    names: dict[str, Any] = {
        **SIZE_NAMESPACE, "inf": float("inf"), "nan": float("nan"), 
        # No op is named like these, as one is called `empty`.
        "run_laid_out": laid_out, "run_empty": torch.empty_strided, "run_as_strided": torch.as_strided,
    }  # fmt: skip
    inputs = placeholders(graph)
    planned = {} if memory is None else dict(memory.offsets)
    scratch = {} if memory is None else memory.scratch
    residuals = frozenset() if memory is None else memory.residuals
    lines = ["def run(inputs):"]
    if inputs:
        lines += [f"    {', '.join(node.name for node in inputs)}, = inputs", "    inputs.clear()"]
    returned = {node for node in results(graph) if node is not None}
    views = short_views(graph, schedule)
    verify_flights(graph, [call for call in schedule.calls if views.makes(call)], schedule.memory_of)
    last = last_uses(map(views.touched_by, schedule.calls))
    freed = freed_after(last, returned)
    unread = [node.name for node in inputs if node not in last and node not in returned and not is_size(node)]
    if unread:
        lines.append(f"    del {', '.join(unread)}")
    # Without a plan all memory is fresh, as a budget counts it: then what other programs keep is to go, too.
    names["run_begin"] = partial(begin, _FRESH if memory is None else memory.holder)
    lines.append("    run_begin()")
    if memory is not None:
        lines += _take_memory(schedule, memory, [node.name for node in inputs if is_size(node)], names)
    open_sizes = any(map(is_size, inputs))
    unbound: set[fx.Node] = set()  # tuples whose items are written to planned memory, and which have no name
    for position, call in enumerate(schedule.calls):
        scratch_name = f"run_scratch_{position}" if position in scratch else ""
        if isinstance(call, KernelCall):
            for node in call.writes:
                operand = schedule.in_place.get(node)
                lines += (
                    _allocate(node, node in planned, node in residuals, names)
                    if operand is None
                    else _written_over(node, _operand_in(schedule, call, operand), names)
                )
            name = f"run_{call.kernel.name}"
            names[name] = launches[call.kernel.name]
            buffers = ", ".join(_buffer(node, names) for node in call.buffers)
            sizes = size_names(call.kernel) if open_sizes else ()  # inputs by these names
            others = f", ({', '.join(sizes)},)" if sizes else ""
            lines.append(f"    {name}(({buffers},){others}{scratch_name and ', scratch=' + scratch_name})")
        elif any(node in planned or node in residuals for node in schedule.written(call)):
            lines += _placed_call(call, schedule, planned, residuals, scratch_name, names)
            unbound.update({call}.difference(schedule.written(call)))
        elif call in views.left_out or (call.all_input_nodes[:1] and call.all_input_nodes[0] in unbound):
            pass  # nothing reads it, or it is an item, which is there
        elif call in views.of:
            lines.append(views.text(call))
        elif call in schedule.in_place:
            own = ADDED_IN_PLACE.get(schedule.library(call))
            function = f"own_{own.__name__}" if own else str(IN_PLACE[call.target]).replace(".", "_")
            names[function] = own or IN_PLACE[call.target]
            lines.append(f"    {call.name} = {function}({call_text(call, names).split('(', 1)[1]}")
        else:
            lines += _library_call(call, names, schedule.libraries.get(call, ("",))[0], scratch_name)
        dying = [node for node in freed.get(position, ()) if not is_size(node)]
        dead = [node.name for node in dying if node not in planned and node not in unbound]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    if planned or scratch:
        lines.append("    run_layout.give(run_arena)")
    lines.append(f"    return {value_text(results(graph), names)}")
    return "\n".join(lines) + "\n", names


def _buffer(node: fx.Node, names: dict[str, Any]) -> str:
    """Complex numbers as the reals that a kernel reads."""
    spec = spec_of(node)
    if spec is None or not spec.dtype.is_complex:
        return node.name
    names["run_reals"] = torch.view_as_real
    return f"run_reals({node.name})"


def _operand_in(schedule: Schedule, call: KernelCall, memory: fx.Node) -> fx.Node:
    """The operand of a kernel that lies in this memory: what was written there last."""
    return next(node for node in call.reads if schedule.in_place.get(node, node) is memory)


def _written_over(node: fx.Node, operand: fx.Node, names: dict[str, Any]) -> list[str]:
    """What the graph was given is written over where nothing else refers to it: no retained graph, no hook, no view."""
    line = f"    {node.name} = {operand.name}"
    if operand.op != "placeholder":
        return [line]
    names.update(ALONE_NAMES)
    return [f"{line} if {ALONE.format(operand.name)} else {_fresh(node, names)}"]


def _take_memory(schedule: Schedule, memory: MemoryPlan, sizes: Sequence[str], names: dict[str, Any]) -> list[str]:
    """How a run comes to its planned memory. sizes: the names of those that are symbolic."""
    lines = []
    at = f"({', '.join(sizes)})"
    if memory.residuals and sizes:
        specs = [spec for node in memory.residuals if (spec := spec_of(node)) is not None]
        names["run_blocks"] = open_blocks(sizes, specs, memory.holder)
        lines.append(f"    {', '.join(node.name for node in memory.residuals)}, = run_blocks{at}.take()")
    elif memory.residuals:
        names["run_residual"] = partial(residual, memory.holder)
    views = [node.name for node in memory.offsets] + [f"run_scratch_{position}" for position in memory.scratch]
    if views:
        names["run_layout" if not sizes else "run_layouts"] = (
            _open_layouts(schedule, memory, sizes) if sizes else _layout(memory)
        )
        lines += [f"    run_layout = run_layouts{at}"] if sizes else []
        lines.append("    run_arena = run_layout.take()")
        lines.append(f"    {', '.join(views)}, = run_layout.tensors(run_arena)")
    return lines


def _open_layouts(schedule: Schedule, memory: MemoryPlan, sizes: Sequence[str]) -> Callable[..., ArenaLayout]:
    places = []
    for node in memory.offsets:
        spec = spec_of(node)
        assert spec is not None
        places.append(Place(lambda spec=spec: spec.at_hand().span_bytes, *memory.spans[node], spec))  # type: ignore[misc]
    device = places[0].spec.device if places and places[0].spec else torch.device("cpu")
    for position in memory.scratch:
        call = schedule.calls[position]
        places.append(Place(partial(_scratch_bytes, schedule, call), *memory.spans[position]))
    return open_layouts(sizes, places, device, memory.holder)


def _scratch_bytes(schedule: Schedule, call: KernelCall | fx.Node) -> int:
    return likely(scratch_of(schedule, call))


def _layout(memory: MemoryPlan) -> ArenaLayout:
    places = [(spec, offset) for node, offset in memory.offsets.items() for spec in [spec_of(node)] if spec]
    device = places[0][0].device if places else torch.device("cpu")
    places += [
        (TensorSpec((size,), (1,), torch.uint8, device, size), offset) for offset, size in memory.scratch.values()
    ]
    return ArenaLayout(memory.arena_bytes, places, device, memory.holder)


def _placed_call(
    call: fx.Node,
    schedule: Schedule,
    planned: Mapping[fx.Node, int],
    residuals: frozenset[fx.Node],
    scratch: str,
    names: dict[str, Any],
) -> list[str]:
    """A library call that writes to planned memory."""
    written = schedule.written(call)
    lines = [line for node in written for line in _allocate(node, node in planned, node in residuals, names)]
    arguments = call_text(call, names).split("(", 1)[1][:-1]
    if is_own_product(schedule.library(call)):
        function, out = schedule.library(call).replace(" ", "_"), f"out={call.name}, scratch={scratch or None}"
        names[function] = PRODUCTS[schedule.library(call)]
    elif call in written:
        function, out = str(call.target).replace(".", "_") + "_out", f"out={call.name}"
        into = convolve_into if call in schedule.placed else OUT_VARIANTS.get(call.target)
        names[function] = into or SCANS[schedule.library(call)]
    else:
        library = schedule.library(call)
        function, name_by_item = re.sub(r"\W", "_", library) + "_out", {node.args[1]: node.name for node in written}
        names[function] = ATTENTIONS[library]
        items = ", ".join(str(name_by_item.get(i)) for i in range(len(value_of(call))))
        out = f"out=({items},), scratch={scratch or None}"
    return [*lines, f"    {function}({arguments}, {out})"]


def _allocate(node: fx.Node, planned: bool, held: bool, names: dict[str, Any]) -> list[str]:
    if planned or (held and "run_blocks" in names):
        return []
    if held:
        names[f"t_{node.name}"] = spec_of(node)
        return [f"    {node.name} = run_residual(t_{node.name})"]
    return [f"    {node.name} = {_fresh(node, names)}"]


def _fresh(node: fx.Node, names: dict[str, Any]) -> str:
    """What makes memory for it."""
    spec = spec_of(node)
    assert spec is not None
    dtype = "k_" + str(spec.dtype).replace(".", "_")
    names[dtype] = spec.dtype
    device = "k_" + str(spec.device).replace(":", "_")
    shape, stride = sizes_text(spec.sizes), sizes_text(spec.strides)
    if quick := quick_empty(spec.device):
        names["run_quick_empty"] = quick
        return f"run_quick_empty({shape}, {stride}, {dtype})"
    names[device] = spec.device
    return f"run_empty({shape}, {stride}, dtype={dtype}, device={device})"


def _library_call(node: fx.Node, names: dict[str, Any], library: str, scratch: str) -> list[str]:
    """scratch: the planned memory that a function of our own computes in, if any."""
    text = call_text(node, names)
    if library:
        function = library.replace(" ", "_")
        names[function] = _LIBRARIES[library]
        text = f"{function}({text.split('(', 1)[1]}"
    if library and scratch:  # an operator by its own name has no such argument
        text = f"{text[:-1]}, scratch={scratch})"
    lines = [f"    {node.name} = {text}"]
    spec = spec_of(node)
    if spec is None or info(node).kind is OpKind.VIEW or not _is_strided(node):
        return lines
    if node.target in _ALWAYS_CONTIGUOUS and not library:
        return lines
    # Kernels were made for this type and these strides; fake tensors and libraries disagree on some.
    if spec.symbolic is None:
        strides = "s_" + "_".join(map(str, spec.stride))
        names[strides] = spec.stride
    else:
        strides = sizes_text(spec.strides)
    dtype = "k_" + str(spec.dtype).replace(".", "_")
    names[dtype] = spec.dtype
    lines.append(f"    if {node.name}.stride() != {strides}: {node.name} = run_laid_out({node.name}, {strides})")
    lines.append(f"    if {node.name}.dtype is not {dtype}: {node.name} = {node.name}.to({dtype})")
    return lines


def _is_strided(node: fx.Node) -> bool:
    return value_of(node).layout is torch.strided


def cpp_launch(function: Any, scratch_bytes: int, draws: Sequence[int]) -> Launch:
    """Runs `int function(void* const* p, char* scratch, int num_threads)`.

    draws: the numbers of the random draws that it makes, whose address follows those of its buffers. It computes in
    `scratch`, by as many threads as that holds, or in fresh memory. Raises IndexError for an index out of range.
    """
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    function.restype = ctypes.c_int
    threads = torch.get_num_threads
    pointer = Tensor.data_ptr
    draw_numbers = (ctypes.c_int64 * len(draws))(*draws)
    extra = (ctypes.addressof(draw_numbers),) if draws else ()
    num_extra = len(extra)

    def launch(buffers: Sequence[Tensor], scratch: Tensor | None = None) -> None:
        count = threads()
        table = (ctypes.c_void_p * (len(buffers) + num_extra))(*map(pointer, buffers), *extra)
        if scratch is not None:
            count = min(count, scratch.numel() // scratch_bytes)
        elif scratch_bytes:
            scratch = torch.empty(scratch_bytes * count, dtype=torch.uint8)
        if function(table, None if scratch is None else scratch.data_ptr(), count):
            raise IndexError("index out of range in self")

    launch.numbers = draw_numbers  # type: ignore[attr-defined]  # lives as long as what reads it
    return launch


def sized_cpp_launch(function: Any, scratch_bytes: Any, draws: Sequence[int], names: Sequence[str]) -> Launch:
    """As cpp_launch, of a kernel that also takes these sizes.

    scratch_bytes: for each thread, a polynomial of the sizes or a number.
    """
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    function.restype = ctypes.c_int
    draw_numbers = (ctypes.c_int64 * len(draws))(*draws)
    extra = (ctypes.addressof(draw_numbers),) if draws else ()

    def launch(buffers: Sequence[Tensor], sizes: Sequence[int] = (), scratch: Tensor | None = None) -> None:
        count, numbers = torch.get_num_threads(), (ctypes.c_int64 * len(names))(*sizes)
        pointers = (*map(Tensor.data_ptr, buffers), *extra, ctypes.addressof(numbers))
        each = scratch_bytes.at(dict(zip(names, sizes, strict=True))) if is_open(scratch_bytes) else scratch_bytes
        if scratch is not None:
            count = min(count, scratch.numel() // each) if each else count
        elif each:
            scratch = torch.empty(each * count, dtype=torch.uint8)
        table = (ctypes.c_void_p * len(pointers))(*pointers)
        if function(table, None if scratch is None else scratch.data_ptr(), count):
            raise IndexError("index out of range in self")

    launch.numbers = draw_numbers  # type: ignore[attr-defined]  # lives as long as what reads it
    return launch
