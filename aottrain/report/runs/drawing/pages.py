"""The page of whatever runs a folder holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from aottrain.ir.settings.files import write_text_whole
from aottrain.report.runs.drawing.one import render_run
from aottrain.report.runs.drawing.overview import render_overview
from aottrain.report.runs.folders import Collection, Read, collect
from aottrain.report.runs.reading import read_run

OF_SEVERAL = "runs.html"  # of several folders together, in the current one


def render(found: Collection, *, again_s: int = 0) -> str:
    """As text. again_s: seconds after which it asks for itself anew, where a server shows it. There must be a run."""
    one = found.kind == "run" and len(found.runs) == 1
    return render_run(found, again_s=again_s) if one else render_overview(found, again_s=again_s)


def leave_page(folder: Path) -> str:
    """Write the page at the end of what was run there; the line that says where it is. That it cannot be written is
    said and passed over: all that it shows is in the files beside it."""
    try:
        path = write_page([folder])
    except OSError as error:
        return f"warning: {error.filename or folder}: cannot be written: {error.strerror}"
    return f"page: {path}" if path else "no page: there are no figures of a run"


def write_page(folders: Sequence[Path], path: Path | None = None, read: Read = read_run) -> Path | None:
    """The page of the runs in `folders`; where it was written, None where there are no runs.

    path: where to, instead of the folder of the runs. read: see `collect`. Raises OSError where it cannot be written.
    """
    found = collect(folders, read)
    if not found.runs:
        return None
    target = path or (found.page if len(folders) == 1 else Path(OF_SEVERAL))
    if path is not None or len(folders) > 1:  # links are taken from where the page lies
        found = dataclasses.replace(found, folder=target.parent)
    text = render(found)
    write_text_whole(target, text)
    return target
