"""The workspace and the report as JSON, read by wandb's own classes; nothing is sent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from scripts import dashboard

ws_internal = pytest.importorskip(
    "wandb_workspaces.workspaces.internal", reason="wandb-workspaces is not installed (pip install -e '.[test]')"
)
GROUP, BASELINE = "compare-a", "1mbku38n"


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """What the command prints, in a process of its own, which has no account and must need none."""
    command = [sys.executable, "scripts/dashboard.py", "--dry-run", "--group", GROUP, "--baseline", BASELINE]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        command, cwd=dashboard.ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def named(value: Any, key: str = "") -> Iterator[str]:
    """Every name of a figure in the JSON of a panel's configuration."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from named(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from named(item, key)
    elif isinstance(value, str) and key in ("metrics", "xAxis", "yAxis", "accessor"):
        yield value


def shown(panels: list[dict[str, Any]]) -> set[str]:
    """The figures that panels show, as they are logged; keys of the configuration are left out."""
    names = {name for panel in panels if panel["viewType"] != "Weave" for name in named(panel["config"])}
    prefixes = ("summary_metrics.", "summary:")
    plain = {next((name[len(p) :] for p in prefixes if name.startswith(p)), name) for name in names}
    return {name for name in plain if not name.startswith("config:")}


def test_the_workspace_is_one_that_wandb_reads(made):
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    read = ws.Workspace._from_model(ws_internal.View.model_validate(made["workspace"]))
    assert (read.name, read.project, read.auto_generate_panels) == (dashboard.TITLE, "aottrain", False)
    assert read.settings.x_axis == dashboard.STEP and read.runset_settings.baseline_run == BASELINE
    assert GROUP in read.runset_settings.filters
    assert read.runset_settings.pinned_columns == ["run:displayName", *dashboard.PINNED]
    panels = [panel for section in read.sections for panel in section.panels]
    assert not any(type(panel).__name__.startswith("Unknown") for panel in panels)
    curves = [panel for panel in panels if isinstance(panel, wr.LinePlot)]
    assert curves and all(getattr(panel.x, "name", panel.x) == dashboard.STEP for panel in curves)
    sections = made["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    figures = shown([panel for section in sections for panel in section["panels"]])
    assert figures == dashboard.columns(), "a figure that is logged and not shown, or shown and not logged"


def test_the_report_is_one_that_wandb_reads_and_shows_the_same_figures(made):
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces.reports.v2 import internal

    read = wr.Report._from_model(internal.ReportViewspec.model_validate(made["report"]))
    assert read.title == dashboard.TITLE.capitalize() and dashboard.EXPLANATION in str(made["report"])
    assert not any(type(block).__name__.startswith("Unknown") for block in read.blocks)
    grids = [block["metadata"] for block in made["report"]["spec"]["blocks"] if block["type"] == "panel-grid"]
    panels = [panel for grid in grids for panel in grid["panelBankSectionConfig"]["panels"]]
    assert shown(panels) <= dashboard.columns()
    assert {"train/loss", "bench/step_ms_median", "bench/peak_bytes"} <= shown(panels)
    for grid in grids:
        places = [(panel["layout"]["x"], panel["layout"]["y"]) for panel in grid["panelBankSectionConfig"]["panels"]]
        assert len(set(places)) == len(places), "panels that lie over each other"
        assert all(GROUP in json.dumps(each["filters"]) for each in grid["runSets"])


def test_without_the_package_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert dashboard.main(["--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'aottrain[dashboard]'" in said


def test_an_entity_is_needed_to_send(capsys):
    with pytest.raises(SystemExit, match="2"):
        dashboard.main([])
    assert "--entity" in capsys.readouterr().err
