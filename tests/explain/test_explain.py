import dataclasses

from aottrain.explain.figures import binned, by_module, bytes_by_kind, signed_bytes, with_optimizer
from aottrain.explain.report import CompileReport
from aottrain.explain.tables import explain, table, timeline_text
from tests.explain import example


def test_every_saved_and_recomputed_value_is_listed_with_its_reason():
    report = example.report()
    text = explain(report, max_rows=None)
    for value in (*report.graphs[0].saved, *report.graphs[0].recomputed):
        line = next(line for line in text.splitlines() if line.startswith(f"{value.name} "))
        assert line.endswith(value.reason)


def test_rows_beyond_the_limit_are_summed():
    text = explain(example.report(), max_rows=3)
    assert "logsumexp_0" not in text
    assert "... and 5 more: 3.12 MiB, 469 MFLOP to recompute" in text


def test_fallbacks_come_first():
    assert explain(example.report_with_fallbacks()).startswith("Ran eagerly, not compiled")


def test_an_empty_report_says_so():
    assert explain(CompileReport()) == "Nothing was compiled."


def test_module_totals_add_up_to_the_values():
    saved = example.train_graph().saved
    rows = by_module(saved)
    assert sum(num_bytes for _, _, num_bytes in rows) == sum(value.num_bytes for value in saved)
    assert [num_bytes for _, _, num_bytes in rows] == sorted((row[2] for row in rows), reverse=True)


def test_blocks_that_repeat_are_one_kind_and_small_kinds_are_others():
    shapes = {"blocks.0.mlp": 4, "blocks.11.mlp": 4, "block2.a1": 2, "head": 1}
    values = [example.value(f"v{i}", "aten.mm.default", m, (n, 1), "r") for i, (m, n) in enumerate(shapes.items())]
    size = values[3].num_bytes
    assert bytes_by_kind(values) == {"blocks.*.mlp": 8 * size, "block2.a1": 2 * size, "head": size}
    assert bytes_by_kind(values, most=1) == {"blocks.*.mlp": 8 * size, "others": 3 * size} and bytes_by_kind([]) == {}


def test_table_columns_line_up():
    assert table(("name", "n"), [("a", "1"), ("bcdef", "22")], right=[1]) == (
        "name    n\n-----  --\na       1\nbcdef  22"
    )


def test_the_optimizer_counts_in_training_and_once():
    report = with_optimizer(example.report(), 5)
    before, after = example.train_graph(), report.graphs[0]
    assert after.predicted_peak_bytes == before.predicted_peak_bytes + 5 and after.memory["optimizer"] == 5
    reserved = dataclasses.replace(before, memory={**before.memory, "reserved": 5})
    (told,) = with_optimizer(CompileReport(graphs=[reserved]), 5).graphs
    assert told.predicted_peak_bytes == before.predicted_peak_bytes
    assert told.memory == {**before.memory, "reserved": 0, "optimizer": 5}


def test_a_program_without_counted_work_is_shown_too():
    graph = dataclasses.replace(example.train_graph(), forward_flops=0, backward_flops=0, recompute_flops=0)
    assert "0 FLOP" in explain(CompileReport(graphs=[graph]))


def test_the_memory_over_the_step_is_drawn_in_plain_characters():
    timeline = example.timeline()
    lines = timeline_text(timeline, width=14, height=4).splitlines()
    assert lines[0].startswith("Memory over the step: ") and "in the backward" in lines[0]
    assert len(lines) == 6 and all(line.isascii() for line in lines)
    rows = [line.split("|", 1)[1] for line in lines[1:5]]
    assert rows[-1] == "#" * 14  # something is always alive
    assert rows[0][timeline.peak // 2] == "#" and not rows[0].startswith("#") and "forward|backwa" in lines[-1]


def test_the_largest_of_each_stretch_is_shown():
    assert binned([1, 5, 2, 9, 3, 3], 3) == [1, 3, 4]
    assert binned([4, 4], 10) == [0, 1]


def test_what_a_value_costs_and_brings_is_in_its_row():
    report = example.report_with_timeline()
    text = report.explain(max_rows=None)
    assert text == explain(report, max_rows=None)
    line = next(line for line in text.splitlines() if line.startswith("addmm_0 "))
    assert "1.50 ms" in line and "-1.00 MiB" in line
    assert "peak then" not in explain(example.report())
    assert "predicted peak" in text and ", without what library calls allocate inside themselves" in text
    assert "Alive at the top, the largest 2 of 9" in text and "reserved for others" in text


def test_the_optimizer_has_its_place_in_the_timeline():
    (graph,) = with_optimizer(example.report_with_timeline(), 5 * example.MIB).graphs
    assert graph.timeline.fixed["optimizer"] == 5 * example.MIB and graph.timeline.fixed["reserved"] == 2 * example.MIB
    assert max(graph.timeline.totals) == graph.predicted_peak_bytes == sum(graph.memory.values())
    (graph,) = with_optimizer(example.report_with_timeline(), 9 * example.MIB).graphs
    assert max(graph.timeline.totals) == graph.predicted_peak_bytes


def test_changes_of_bytes_have_a_sign():
    assert [signed_bytes(n) for n in (-1536, 2**20, 0, None)] == ["-1.50 KiB", "+1.00 MiB", "none", ""]
