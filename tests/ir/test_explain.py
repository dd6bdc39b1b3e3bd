import dataclasses

from aottrain.ir.explain import explain, table
from aottrain.ir.figures import by_module, with_optimizer
from aottrain.ir.report import CompileReport
from tests.report import example


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
