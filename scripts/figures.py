"""The tables of figures in the texts, each written from what its benchmark recorded.

    python scripts/figures.py                 # write the tables into the texts
    python scripts/figures.py --check         # exit code 1 where a text says otherwise
    python scripts/figures.py --run kernels   # run that table's benchmark first; minutes to hours, on a quiet machine

A benchmark that is given `--record` keeps each row of its table in scripts/recorded/<name>.json with the command, the
machine, the versions and the date. Rows of one table may come from several runs. In a text a table stands between
`<!-- figures: name -->` and `<!-- end of figures -->`; a footer under it says where its rows come from. A table that is
shown as a picture stands between `<!-- plot: name -->` and the same end; before it is recorded, nothing is shown.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RECORDED = ROOT / "scripts" / "recorded"
TEXTS = (ROOT / "README.md", ROOT / "scripts" / "README.md")
# Of each table the commands that make it.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "budget": ("scripts/bench_training.py",),
    "budgets": ("scripts/bench_budget.py --recipe llama --recipe transformer --rounds 7 --steps 3",),
    "compare": ("scripts/bench_compare.py",),
    "compiling": ("scripts/bench_compile.py --layers 4 48",),
    "gpu": ("scripts/bench_gpu.py --rounds 3 --steps 8",),
    "gpu_breadth": ("scripts/bench_gpu_breadth.py",),
    "hf_models": ("scripts/hf_models.py",),
    "kernels": ("scripts/bench_kernels.py --rounds 5 --steps 3",),
    "learning": ("scripts/learning.py",),
    "losses": ("scripts/bench_training.py",),
    "loss_head": ("scripts/bench_loss_head.py",),
    "operators": ("scripts/databases.py --samples 3", "scripts/databases.py --samples 3 --frontend dynamo"),
    "optimizers": ("scripts/bench_optimizer.py", "scripts/bench_optimizer.py --dtype bfloat16"),
    "peaks": ("scripts/bench_peaks.py --engines eager torch.compile ours",),
    "published": ("scripts/published_points.py",),
    "traffic": ("scripts/bench_traffic.py",),
    "variants": ("scripts/bench_kernels.py --model gpt_dropout --model llama_tied --rounds 5 --steps 3",),
}
_PLOT = re.compile(r"(<!-- plot: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """Of a table of figures."""

    cells: tuple[str, ...]
    """The first one names the row."""
    command: str
    origin: str
    """Machine, versions, date, as one line."""


@dataclass(frozen=True)
class Figures:
    """A table as it was recorded."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]

    def with_row(self, row: Row) -> Figures:
        """In place of the row of that name, or after all others."""
        names = [other.cells[0] for other in self.rows]
        if row.cells[0] not in names:
            return Figures(self.header, (*self.rows, row))
        return Figures(self.header, tuple(row if other.cells[0] == row.cells[0] else other for other in self.rows))


def record(name: str, header: Sequence[str], rows: Sequence[Sequence[str]], versions: str = "") -> None:
    """Keep rows of the table `name`, as the command that runs gave them; rows of other names stay."""
    from aottrain.measure.machine import describe_machine

    figures = load(name)
    if figures is None or figures.header != tuple(header):
        figures = Figures(tuple(header), ())
    words = (f"scripts/{Path(sys.argv[0]).name}", *(word for word in sys.argv[1:] if word != "--record"))
    # A folder of the machine that it ran on is no part of what is repeated elsewhere.
    command = shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)
    origin = ", ".join(filter(None, (describe_machine(), versions)))
    for cells in rows:
        figures = figures.with_row(Row(tuple(cells), command, origin))
    save(name, figures)


def load(name: str) -> Figures | None:
    path = RECORDED / f"{name}.json"
    if not path.exists():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    rows = tuple(Row(tuple(row["cells"]), row["command"], row["origin"]) for row in stored["rows"])
    return Figures(tuple(stored["header"]), rows)


def save(name: str, figures: Figures) -> None:
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.json").write_text(json.dumps(asdict(figures), indent=1) + "\n", encoding="utf-8")


def markdown(figures: Figures) -> str:
    """The table, and under it for each origin the command and, where there are several, the rows that it gave."""
    lines = [figures.header, tuple("---" for _ in figures.header), *(row.cells for row in figures.rows)]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{text}\n{footer(figures)}"


def footer(figures: Figures) -> str:
    """For each origin the command and, where there are several, the rows that it gave."""
    origins: dict[tuple[str, str], list[str]] = {}
    for row in figures.rows:
        origins.setdefault((row.command, row.origin), []).append(row.cells[0])
    footers = []
    for (command, origin), names in origins.items():
        of = "" if len(origins) == 1 else f"{', '.join(names)}: "
        footers.append(f"<sub>{of}`python {command}`; {origin}</sub>\n")
    return "<br>".join(footers)


def picture(name: str, figures: Figures) -> str:
    """The plot of a table as a text shows it; its figures stand in the alternative text."""
    told = "; ".join(_told(figures.header, row.cells) for row in figures.rows)
    return f"![{figures.header[0]}. {told}](scripts/recorded/{name}.svg)\n\n{footer(figures)}"


def _told(header: Sequence[str], cells: Sequence[str]) -> str:
    """A row in words; of a line where it begins and ends."""
    from scripts.plots import LINES, points_of

    if header[1] != LINES:
        return f"{cells[0]}: {cells[1]} ms, {cells[2]} MiB"
    first, *_, last = points_of(cells[1])
    return f"{cells[0]}: {first[1]:g} at {header[2]} {first[0]:g}, {last[1]:g} at {last[0]:g}"


def plots() -> dict[Path, str]:
    """The picture of each recorded table that a text shows as one."""
    from scripts.plots import drawn

    names = {name for path in TEXTS for name in plots_in(path.read_text(encoding="utf-8"))}
    recorded = {name: load(name) for name in sorted(names)}
    return {
        RECORDED / f"{name}.svg": drawn(figures.header, [row.cells for row in figures.rows])
        for name, figures in recorded.items()
        if figures is not None
    }


def written(text: str) -> str:
    """The text with each of its tables as recorded. Raises KeyError with the name of a table that is not recorded."""

    def replace(match: re.Match[str]) -> str:
        figures = load(match[2])
        if figures is None:
            raise KeyError(match[2])
        return f"{match[1]}{markdown(figures)}{match[3]}"

    def show(match: re.Match[str]) -> str:
        figures = load(match[2])
        return f"{match[1]}{'' if figures is None else picture(match[2], figures)}{match[3]}"

    return _PLOT.sub(show, _BLOCK.sub(replace, text))


def tables_in(text: str) -> list[str]:
    return [match[2] for match in _BLOCK.finditer(text)]


def plots_in(text: str) -> list[str]:
    return [match[2] for match in _PLOT.finditer(text)]


def run(name: str) -> int:
    """The exit code of the first of the table's commands that fails, else 0."""
    for command in COMMANDS[name]:
        words = [sys.executable, *shlex.split(command), "--record"]
        code = subprocess.run(words, cwd=ROOT).returncode
        if code:
            print(f"figures.py: `{command}` ended with exit code {code}", file=sys.stderr)
            return code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a text differs")
    names = ", ".join(COMMANDS)
    parser.add_argument("--run", nargs="+", choices=tuple(COMMANDS), default=[], metavar="table", help=names)
    options = parser.parse_args()
    codes = [run(name) for name in options.run]
    stale = []
    current = {**{path: written(path.read_text(encoding="utf-8")) for path in TEXTS}, **plots()}
    for path, new in current.items():
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            stale.append(path)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'other figures than recorded' if options.check else 'written'}")
    return max([*codes, int(options.check and bool(stale))], default=0)


if __name__ == "__main__":
    sys.exit(main())
