"""A workspace and a report in wandb, "eager against compiled": the same panels for every engine, eager as the baseline.

    python scripts/dashboard.py --dry-run                            # print both as JSON; no account, nothing is sent
    python scripts/dashboard.py --entity me --group compare-a        # make them, after `wandb login`
    python scripts/dashboard.py --entity me --baseline 1mbku38n      # differences are shown from that run, by its id

It needs wandb-workspaces: pip install 'aottrain[dashboard]'. Without an account `python -m aottrain report FOLDER...`
writes a page of the same figures from the runs' own files. Each panel names a column of metrics.csv, which every engine
logs, or one of the summary's `bench/...`, so that runs of different engines lie over each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aottrain.metrics.guest import BENCH  # noqa: E402
from aottrain.metrics.sinks import COLUMNS  # noqa: E402

TITLE = "eager against compiled"
STEP = "trainer/step"
# By section: curves over the steps, of the columns of metrics.csv.
CURVES = {
    "Training": ("train/loss", "val/loss", "train/grad_norm", "train/lr"),
    "Speed and memory over the run": (
        "perf/step_ms", "perf/tokens_per_s", "perf/samples_per_s", "memory/peak_bytes", "memory/peak_rss_bytes",
    ),
    "Checks against eager": ("verify/max_error",),
}  # fmt: skip
# By section: a bar for each run, of the summary's figures.
BARS = {
    TITLE.capitalize(): ("step_ms_median", "step_ms_p90", "tokens_per_s", "samples_per_s", "peak_bytes"),
    "The compiler": ("compile_s", "saved_bytes", "predicted_peak_bytes", "fallbacks", "verify_max_error"),
    "Where they end": ("last_loss", "val_loss"),
}
# The columns of the list of runs, beside their names.
PINNED = (
    "config:engine.value.name", "config:kernel.value.name", "config:partition.value.budget",
    "summary:bench/step_ms_median", "summary:bench/tokens_per_s", "summary:bench/peak_bytes", "summary:bench/last_loss",
)  # fmt: skip
TABLES = ("compile/values", "compile/kernels", "compile/memory")
EXPLANATION = (
    "Each run trains the same recipe from the same seed; they differ in the engine: eager PyTorch, torch.compile, "
    "or aottrain, whose budget bounds the peak memory of a step. Losses must lie over each other. Times are comparable "
    "where the runs took turns on one machine, as those of task=compare do."
)


def columns() -> set[str]:
    """Every name of a figure that a panel may show: those that each engine logs."""
    return {STEP, *COLUMNS[1:], *(f"bench/{name}" for name in BENCH)}


def curves(names: Sequence[str]) -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    return [wr.LinePlot(title=name, x=STEP, y=[name], smoothing_type="none", max_runs_to_show=20) for name in names]


def bars(names: Sequence[str]) -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    return [
        wr.BarPlot(title=name, metrics=[wr.SummaryMetric(f"bench/{name}")], orientation="h", max_runs_to_show=20)
        for name in names
    ]


def memory_against_time() -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.ScatterPlot(
        title="peak memory against the time of a step",
        x=wr.SummaryMetric("bench/peak_bytes"),
        y=wr.SummaryMetric("bench/step_ms_median"),
    )


def budgets() -> Any:
    import wandb_workspaces.reports.v2 as wr

    axes = [wr.Config("partition.budget")]
    axes += [wr.SummaryMetric(f"bench/{name}") for name in ("saved_bytes", "peak_bytes", "step_ms_median", "last_loss")]
    return wr.ParallelCoordinatesPlot(
        title="what a budget gives and takes", columns=[wr.ParallelCoordinatesPlotColumn(metric=axis) for axis in axes]
    )


def differences() -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.RunComparer(diff_only="split")


def pages() -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    return [
        wr.MediaBrowser(title="the page of each run", media_keys=["page"], num_columns=1),
        *(wr.WeavePanelSummaryTable(table_name=name) for name in TABLES),
    ]


def workspace(entity: str, project: str, group: str | None, baseline: str | None) -> Any:
    """Not saved yet. group: those runs alone; baseline: the run that the others are compared to, by its id."""
    import wandb_workspaces.expr as expr
    import wandb_workspaces.workspaces as ws

    first, compiler, ends = BARS.items()
    training, over_time, checks = CURVES.items()
    sections = [
        ws.Section(name=first[0], panels=[memory_against_time(), *bars(first[1])], is_open=True),
        ws.Section(name=training[0], panels=curves(training[1]), is_open=True),
        ws.Section(name=over_time[0], panels=curves(over_time[1]), is_open=True),
        ws.Section(name=compiler[0], panels=[budgets(), *bars(compiler[1])]),
        ws.Section(name=checks[0], panels=[*curves(checks[1]), *bars(ends[1])]),
        ws.Section(name="Configurations", panels=[differences()]),
        ws.Section(name="Pages and tables", panels=pages()),
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=TITLE,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=20),
        runset_settings=ws.RunsetSettings(
            filters=[expr.Metric("Group") == group] if group else [],
            order=[expr.Ordering(expr.Metric("Name"), ascending=True)],
            pinned_columns=list(PINNED),
            baseline_run=baseline,
        ),
    )


def report(entity: str, project: str, group: str | None, *, looks_up_project: bool) -> Any:
    """Not saved yet. looks_up_project: ask wandb for the project of the runs, which needs an account."""
    import wandb_workspaces.expr as expr
    import wandb_workspaces.reports.v2 as wr

    def grid(*panels: Any) -> Any:
        where = {"entity": entity, "project": project} if looks_up_project else {}
        filters = [expr.Metric("Group") == group] if group else []
        return wr.PanelGrid(runsets=[wr.Runset(**where, name="runs", filters=filters)], panels=list(panels))

    first, compiler, ends = BARS.items()
    training, over_time, _ = CURVES.items()
    blocks = [
        wr.P(EXPLANATION),
        wr.H2("Which is fastest, and which needs least memory"),
        grid(memory_against_time(), *bars(first[1])),
        wr.H2("Whether they train the same"),
        grid(*curves(training[1]), *bars(ends[1])),
        wr.H2(over_time[0]),
        grid(*curves(over_time[1])),
        wr.H2("What compiling takes, and what is saved for the backward"),
        grid(budgets(), *bars(compiler[1])),
        wr.H2("How their configurations differ"),
        grid(differences()),
    ]
    return wr.Report(project=project, entity=entity, title=TITLE.capitalize(), blocks=blocks, width="fluid")


def as_json(made: Any) -> dict[str, Any]:
    """What `save` would send: wandb-workspaces has no public way to it that needs no account."""
    return json.loads(made._to_model().model_dump_json(by_alias=True, exclude_none=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entity", help="your user name in wandb, or your team's; not needed for --dry-run")
    parser.add_argument("--project", default="aottrain", help="as logger.project (default: %(default)s)")
    parser.add_argument("--group", help="runs of this group alone, as logger.group; a comparison's is compare-<folder>")
    parser.add_argument("--baseline", help="the id of the run to compare others to, the last part of its address")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    chosen = parser.parse_args(arguments)
    if not (chosen.entity or chosen.dry_run):
        parser.error("--entity is needed, or --dry-run")
    try:
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        print(f"dashboard: {error.name} is not installed: pip install 'aottrain[dashboard]'", file=sys.stderr)
        return 2
    entity = chosen.entity or "entity"
    made = {
        "workspace": workspace(entity, chosen.project, chosen.group, chosen.baseline),
        "report": report(entity, chosen.project, chosen.group, looks_up_project=not chosen.dry_run),
    }
    if chosen.dry_run:
        print(json.dumps({name: as_json(each) for name, each in made.items()}, indent=2))
        return 0
    for each in made.values():
        each.save()
        print(each.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
