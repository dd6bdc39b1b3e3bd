"""Pictures of programs: what is folded, where things lie, and what the pages show of them."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import aottrain
from aottrain.explain.records import (
    BACKWARD,
    IS_RECOMPUTED,
    IS_SAVED,
    KERNEL,
    LIBRARY,
    SAVED,
    Diagram,
    Flow,
    KernelRecord,
    Step,
)
from aottrain.ir.plan import PartitionPlan
from aottrain.report.graph.folding import Group, fold
from aottrain.report.graph.layered import Item, lay_out
from aottrain.report.graph.nested import place
from aottrain.report.graph.picture import draw
from aottrain.report.graph.standalone import Drawing
from aottrain.report.highlight import highlight
from aottrain.report.page import inner_of, page


def blocks(count: int, odd: int = -1) -> Diagram:
    """A chain of blocks of two steps; block `odd` does something else."""
    steps = []
    for i in range(count):
        modules = (("model", 0), (f"model.blocks.{i}", 0))
        steps.append(Step(f"mm_{i}", LIBRARY, "mm", modules, num_bytes=4096, fate=IS_SAVED))
        steps.append(Step(f"kernel_{i}", KERNEL, "tanh" if i == odd else "gelu", modules, num_bytes=64))
    flows = [Flow(i, i + 1, 64) for i in range(len(steps) - 1)]
    return Diagram("Forward graph", tuple(steps), tuple(flows))


def names(group: Group) -> list[tuple[str, int]]:
    found = []
    for item in group.items:
        if isinstance(item, Group):
            found += [(item.label, item.count), *names(item)]
    return found


def test_repeated_blocks_are_one_with_a_count():
    folded = fold(blocks(12))
    assert ("blocks.0\u201311", 12) in names(folded.root)
    assert [leaf.count for leaf in folded.root.leaves()] == [12, 12]
    inside, onwards = sorted(folded.lines, key=lambda line: line.to_next)
    assert (inside.count, inside.to_next, onwards.count, onwards.to_next) == (12, False, 11, True)


def test_a_block_that_differs_stands_for_itself():
    found = names(fold(blocks(6, odd=2)).root)
    assert ("blocks.0\u20131, 3\u20135", 5) in found and ("blocks.2", 1) in found
    types = [Step(f"a_{i}", LIBRARY, "mm", ((f"b.{i}", 0),), type=f"float32[{i}]") for i in range(3)]
    assert len(list(fold(Diagram("d", tuple(types), ())).root.leaves())) == 3


def test_a_page_does_not_grow_with_the_depth():
    small, large = (len(draw(blocks(count), "g")) for count in (4, 400))
    assert large < small + 200


def test_a_program_that_cannot_be_folded_is_drawn_by_modules():
    steps = tuple(
        Step(f"s{i}_{k}", LIBRARY, f"op{i}", (("m", 0), (f"m.part.{i}", 0))) for i in range(400) for k in range(2)
    )
    flows = tuple(Flow(i, i + 1, 4) for i in range(799))
    folded = fold(Diagram("d", steps, flows))
    kinds = {leaf.step.kind for leaf in folded.root.leaves()}
    assert kinds == {"module"} and sum(leaf.num_steps for leaf in folded.root.leaves()) == 800
    assert len(folded.lines) == 399


def test_layers_go_down_and_boxes_do_not_overlap():
    items = [Item(60, 20) for _ in range(6)]
    edges = [(items[a], None, items[b], None) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3), (0, 4), (3, 5), (0, 5))]
    lines, width, height = lay_out(items, edges)
    assert all(a.y + a.height < b.y for a, _, b, _ in edges)
    for a in items:
        for b in items:
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
            assert a is b or apart
        assert 0 <= a.x <= width - a.width and 0 <= a.y <= height - a.height
    long = [point for piece in lines[6] for point in piece]
    assert long[0][1] == items[0].height and long[-1][1] == items[5].y
    assert [y for _, y in long] == sorted(y for _, y in long)


def test_boxes_lie_in_the_frames_of_their_modules():
    placed = place(fold(blocks(5, odd=3)))
    frames = {id(box.group): box for box in placed.boxes if box.group is not None}
    boxes = {id(box.leaf): box for box in placed.boxes if box.leaf is not None}
    checked = 0
    for frame in frames.values():
        for leaf in frame.group.leaves():
            box = boxes[id(leaf)]
            assert frame.x < box.x and box.x + box.width < frame.x + frame.width
            assert frame.y < box.y and box.y + box.height < frame.y + frame.height
            checked += 1
    assert checked >= 4
    assert any(stroke.ends is not None for stroke in placed.strokes)


def test_what_is_saved_is_thick_and_what_is_recomputed_is_dashed():
    steps = (
        Step("a", LIBRARY, "mm", num_bytes=1 << 24, fate=IS_SAVED),
        Step("b", LIBRARY, "gelu", num_bytes=1 << 12, fate=IS_RECOMPUTED),
        Step("c", KERNEL, "mul", half=BACKWARD),
    )
    flows = (Flow(0, 1, 64), Flow(0, 2, 1 << 24, IS_SAVED), Flow(1, 2, 1 << 12, IS_RECOMPUTED))
    svg = draw(Diagram("Joint graph", steps, flows), "g")
    ElementTree.fromstring(svg)
    width = re.search(r'class="flow saved"[^>]*stroke-width:([\d.]+)', svg)
    thin = re.search(r'class="flow recomputed"[^>]*stroke-width:([\d.]+)', svg)
    assert float(width[1]) > 3 * float(thin[1]) and ">16.0 MiB<" in svg and 'class="step library recomputed"' in svg
    assert "computed again in the backward" in svg and ">forward<" in svg and ">backward<" in svg


def test_no_name_becomes_markup():
    step = Step("<b>", LIBRARY, "<script>alert(1)</script>", (('"><i>', 0),), source="<x>", type="<t>")
    other = Step("c", LIBRARY, "mm", (('"><i>', 0),))
    svg = draw(Diagram('"<d>', (step, other), ()), "g")
    ElementTree.fromstring(svg)
    assert "<script" not in svg and "<i>" not in svg and "<x>" not in svg


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    step = aottrain.compile(model, capture="trace", kernel="cpp", partition="recompute_all")
    step(torch.randn(4, 8)).sum().backward()
    return step.report


def test_a_compiled_program_has_three_pictures(compiled):
    graph = compiled.main_graph
    joint, forward, backward = graph.diagrams
    assert [each.title for each in graph.diagrams] == ["Joint graph", "Forward graph", "Backward graph"]
    kernels = [step.name for each in (forward, backward) for step in each.steps if step.kind == KERNEL]
    assert sorted(kernels) == sorted(graph.kernels)
    kept = [step for step in backward.steps if step.kind == SAVED]
    assert {f"saved {value.name}" for value in graph.saved} == {step.label for step in kept}
    assert all(flow.fate == IS_SAVED for flow in backward.flows if backward.steps[flow.start].kind == SAVED)
    assert any(step.fate == IS_RECOMPUTED for step in backward.steps)
    crossing = [flow for flow in joint.flows if joint.steps[flow.start].half != joint.steps[flow.end].half]
    assert crossing and any(flow.fate == IS_RECOMPUTED for flow in crossing)
    assert all(flow.start < flow.end for each in (forward, backward) for flow in each.flows)


def test_every_kernel_is_on_the_page_with_its_formula_code_and_lines(compiled, tmp_path):
    graph = compiled.main_graph
    assert sorted(name for record in graph.kernel_records for name in record.names) == sorted(graph.kernels)
    text = compiled.save(tmp_path / "report.html").read_text(encoding="utf-8")
    for record in graph.kernel_records:
        assert isinstance(record, KernelRecord) and record.moved_bytes > 0
        assert f"{record.names[0]}<" in text.replace("<wbr>", "") and highlight(record.code) in text
    assert text.count("<script>") == 1 and "script-src 'sha256-" in text and "Guards" in text
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert compiled._repr_html_().count("<svg") > 3


def test_values_of_the_compiler_show_themselves():
    shown = PartitionPlan("min_cut", ("mm",), ("gelu",), {"mm": "a <product>"}, 64)._repr_html_()
    assert "a &lt;product&gt;" in shown and "recomputed" in shown and "64 B" in shown


def test_the_autograd_graph_counts_each_storage_once(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(4, 8)
    drawing = aottrain.draw_autograd(model(x).sum(), model)
    saved = [step for step in drawing.diagram.steps if step.kind == SAVED]
    seen = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        kept = model(x).sum()
    state = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    expected = sum(t.untyped_storage().nbytes() for pointer, t in seen.items() if pointer not in state)
    assert sum(step.num_bytes for step in saved) == expected and kept.requires_grad
    labels = {step.label for step in drawing.diagram.steps}
    assert {"Addmm", "Gelu", "0.weight", "2.bias"} <= labels
    root = ElementTree.parse(drawing.save(tmp_path / "graph.svg")).getroot()
    assert root.tag.endswith("svg") and "prefers-color-scheme: dark" in drawing._repr_svg_()
    with pytest.raises(ValueError, match="no grad_fn"):
        aottrain.draw_autograd(torch.ones(2))


def test_functions_are_named_as_what_they_are_the_backward_of():
    """Autograd numbers those that an operator has several of: SqueezeBackward1."""
    x = torch.ones(2, 1, requires_grad=True)
    labels = {step.label for step in aottrain.draw_autograd((x.squeeze(1) * 2.0).sum()).diagram.steps}
    assert labels >= {"Squeeze", "Mul", "Sum"} and not any("Backward" in label for label in labels)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_parameters_and_buffers_are_no_batch_whoever_captures(capture):
    """TorchDynamo hands them in among the inputs of the call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    step = aottrain.compile(model, capture=capture, kernel="aten")
    step(torch.randn(8, 16)).sum().backward()
    joint, forward, _ = step.report.main_graph.diagrams
    for diagram in (joint, forward):
        assert [each.type for each in diagram.steps if each.label == "batch"] == ["float32[8, 16]"]
        assert all(min(flow.start, flow.end) >= 0 and max(flow.start, flow.end) < len(diagram.steps)
                   for flow in diagram.flows)  # fmt: skip
        read = {flow.end for flow in diagram.flows if diagram.steps[flow.start].label == "batch"}
        assert "addmm" in {diagram.steps[end].label.partition(" ")[0] for end in read}


def test_a_freed_graph_is_drawn_without_what_it_kept():
    loss = nn.Linear(3, 3)(torch.ones(1, 3)).pow(2).sum()
    loss.backward()
    assert not [step for step in aottrain.draw_autograd(loss).diagram.steps if step.kind == SAVED]


def test_a_picture_stands_by_itself():
    svg = Drawing(blocks(3)).svg
    assert ElementTree.fromstring(svg).attrib["width"] and "--card" in svg


def test_code_is_told_apart_and_escaped():
    shown = highlight('for (int i = 0; i < 10; ++i) { x[i] = "a<b"; } // <end>')
    assert '<span class="k">for</span> (<span class="t">int</span>' in shown and "&lt;end&gt;" in shown
    assert re.sub(r"</?span[^>]*>", "", shown).count("<") == 0


def test_a_page_stands_within_another():
    assert inner_of(page("t", ["<h1>A</h1>", "<p>b</p>"])).strip() == "<h2>A</h2>\n<p>b</p>"
