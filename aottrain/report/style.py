"""The reports' stylesheet. Every rule is nested in `.aottrain`, so that a report may stand within another page."""

from __future__ import annotations

# What memory is held for: a colour each in the light and in the dark scheme, alike from picture to picture. Most
# hues are those of Okabe and Ito; the small things are greys. People with any kind of colour vision tell them apart,
# which tests/report/test_style.py works out.
MEMORY = {
    "parameters": ("#0072b2", "#3b8fd0"),
    "optimizer": ("#90317e", "#c345aa"),
    "saved": ("#e69f00", "#e8a92e"),
    "gradients": ("#009e73", "#22a884"),
    "temporaries": ("#c24e00", "#cf6326"),
    "arena": ("#56b4e9", "#86cdf5"),
    "workspaces": ("#f0e442", "#f3ea7c"),
    "buffers": ("#a0a3a7", "#a7aaae"),
    "batch": ("#cfd2d4", "#c8cbce"),
    "outputs": ("#63686d", "#4a4d51"),
    "reserved": ("#2b2f33", "#eef0f2"),
}
# Of the series of a plot, in order; each has a shape of its own besides.
SERIES = (
    ("#0072b2", "#4aa0dd"),
    ("#d55e00", "#e8793a"),
    ("#009e73", "#2bb892"),
    ("#721577", "#c12a99"),
    ("#3a3e41", "#636a70"),
)
# Text and what it stands on.
LIGHT = {
    "page": "#fbfbfa",
    "card": "#ffffff",
    "ink": "#1c1e21",
    "dim": "#5f656c",
    "line": "#e1e3e1",
    "strong": "#0072b2",
    "weak": "#b4bfca",
    "alarm": "#a3341f",
    "alarm-page": "#fdf1ee",
    "good": "#23693f",
}
DARK = {
    "page": "#15171a",
    "card": "#1c1f23",
    "ink": "#e4e6e8",
    "dim": "#a0a7af",
    "line": "#343a40",
    "strong": "#4aa0dd",
    "weak": "#4d5a67",
    "alarm": "#f0917e",
    "alarm-page": "#2c1d1a",
    "good": "#78c294",
}

_RULES = """
* { box-sizing: border-box; }
h1, .h1 { font-size: 1.6em; line-height: 1.2; margin: 0 0 .3em; letter-spacing: -.01em; }
h2:not([class]), .h2 { font-size: 1.25em; margin: 2.2em 0 .7em; padding-top: 1.1em; border-top: 1px solid var(--line); }
h3, .h3 { font-size: 1em; margin: 1.8em 0 .5em; }
h4, .h4 { font-size: .9em; margin: .8em 0 .3em; }
p:is(.h1, .h2, .h3, .h4) { font-weight: bold; }
h3 small, .h3 small, summary small { font-weight: normal; color: var(--dim); margin-left: .5em; font-size: .9em; }
p:where(:not([class^=h])) { margin: .35em 0; }
p { max-width: 110ch; overflow-wrap: break-word; }
.dim { color: var(--dim); }
.good { color: var(--good); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(11.4em, 100%), 1fr)); gap: .8em;
  margin: 1.2em 0; }
.card, .panel { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.card { padding: .8em .95em; }
.card p.title { margin: 0; font-size: .8em; font-weight: 600; color: var(--dim); }
.card .figure { font-size: 1.45em; line-height: 1.4; font-weight: 600; letter-spacing: -.02em; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.card p:not(.title) { font-size: .85em; color: var(--dim); }
.panel { padding: .9em 1em; margin: .6em 0; }
.alarm { background: var(--alarm-page); border: 1px solid var(--alarm); border-radius: 8px; padding: .4em 1em .9em;
  margin: 1.2em 0; }
.alarm h2 { border: 0; padding: 0; margin: .5em 0; color: var(--alarm); }
svg.bar { display: block; width: 100%; height: 1.75em; border-radius: 4px; }
.bar rect { stroke: var(--card); stroke-width: 2; vector-effect: non-scaling-stroke; }
.legend { list-style: none; margin: .6em 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3em 1.3em;
  font-size: .88em; }
.legend li { margin: 0; }
.legend b, .bars b { font-weight: 600; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .4em; }
.key-mark { width: 1em; height: 1em; margin-right: .35em; vertical-align: -.12em; }
.bars .row { display: grid; grid-template-columns: minmax(7em, 30%) 1fr 5.5em; gap: .7em; align-items: center;
  padding: .15em 0; font-size: .9em; }
.bars svg { display: block; width: 100%; height: .8em; }
.bars b { text-align: right; }
.bars .weak { color: var(--dim); }
rect.strong { fill: var(--strong); }
rect.weak { fill: var(--weak); }
.chart { container-type: inline-size; }
.chart .narrow, .chart .middle { display: none; }
@container (max-width: 880px) { .chart .wide { display: none; } .chart .middle { display: block; } }
@container (max-width: 520px) { .chart .middle { display: none; } .chart .narrow { display: block; } }
svg.plot { display: block; width: 100%; height: auto; font-size: 13px; }
.plot text { fill: var(--dim); stroke: none; }
.plot text.label, .plot text.axis { fill: var(--ink); }
.plot text.label { paint-order: stroke; stroke: var(--card); stroke-width: 3; stroke-linejoin: round; }
.plot .grid { stroke: var(--line); }
.plot polyline { fill: none; stroke-width: 1.5; opacity: .6; }
.plot .whisker { fill: none; stroke-width: 1.5; }
.plot .predicted { stroke: var(--dim); stroke-width: 2; stroke-dasharray: 2 5; stroke-linecap: round; opacity: .9; }
.plot .point { stroke: var(--card); stroke-width: 1; }
.plot .beaten { opacity: .45; }
.plot .knee { stroke: var(--ink); stroke-width: 2; }
.plot .layer { stroke: var(--card); stroke-width: .6; }
.plot .top { fill: none; stroke: var(--ink); stroke-width: 2; }
.plot .mark { stroke: var(--dim); stroke-dasharray: 3 4; }
.table { container-type: inline-size; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  margin: .6em 0; overflow: hidden; }
table { border-collapse: collapse; width: 100%; font-size: .87em; margin: 0; table-layout: auto; color: inherit; }
table.fixed { table-layout: fixed; }
th { text-align: left; font-weight: 600; color: var(--dim); box-shadow: inset 0 -1px var(--line); }
th, td { padding: .42em .7em; vertical-align: top; overflow-wrap: anywhere; text-align: left; background: none; }
td { border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td small { display: block; color: var(--dim); font-size: .92em; }
.meter { height: .3em; margin-top: .25em; border-radius: 2px; background: var(--strong); }
@container (max-width: 720px) {
  .table table, .table tr, .table td { display: block; width: auto; }
  .table tbody { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19em, 100%), 1fr)); }
  .table td:first-child > div { font-weight: 600; }
  .table td:first-child small { font-weight: normal; }
  .table thead, .table colgroup { display: none; }
  .table tr { padding: .5em .8em; border-bottom: 1px solid var(--line); }
  .table tr:last-child { border-bottom: 0; }
  .table td, .table td.number { display: grid; grid-template-columns: 7.6em 1fr; gap: .6em; padding: .12em 0;
    border: 0; text-align: left; }
  .table td.empty, .table td.number.empty { display: none; }
  .table td::before { content: attr(data-label); color: var(--dim); }
}
code, pre, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .92em; }
details { margin: .5em 0; }
summary { cursor: pointer; padding: .25em 0; font-weight: 600; font-size: .92em; }
details .table { margin-top: .3em; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; color: inherit;
  padding: .8em 1em; line-height: 1.4; font-size: .8em; margin: .3em 0 .8em; }
"""


def variables(index: int) -> str:
    """The colours as CSS variables, 0: of the light scheme, 1: of the dark one."""
    colours = dict((LIGHT, DARK)[index])
    colours |= {f"m-{name}": pair[index] for name, pair in MEMORY.items()}
    colours |= {f"s{i}": pair[index] for i, pair in enumerate(SERIES)}
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _fills() -> str:
    names = [(f"m-{name}", f"m-{name}") for name in MEMORY] + [(f"s{i}", f"s{i}") for i in range(len(SERIES))]
    filled = "\n".join(f".{css} {{ fill: var(--{name}); background: var(--{name}); }}" for css, name in names)
    return filled + "\n" + "\n".join(f".l{i} {{ stroke: var(--s{i}); }}" for i in range(len(SERIES)))


CSS = f""".aottrain {{ {variables(0)}
color-scheme: light; background: var(--page); color: var(--ink);
font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
@media (prefers-color-scheme: dark) {{ & {{ color-scheme: dark; {variables(1)} }} }}
{_RULES}{_fills()}
}}
body.aottrain {{ margin: 0; }}
.aottrain > main {{ max-width: 1180px; margin: 0 auto; padding: 1.6em 1.25em 4em; }}
div.aottrain {{ padding: 1em 1.25em; border-radius: 8px; }}
@media (max-width: 600px) {{ .aottrain > main {{ padding: 1em .9em 3em; }} }}
"""
