"""The style of the plots of runs, beside that of the other reports."""

from __future__ import annotations

_RULES = """
.verdict { font-size: 1.12em; margin: .9em 0; padding: .8em 1em; background: var(--card); border: 1px solid var(--line);
  border-left: 4px solid var(--strong); border-radius: 8px; }
.verdict p { max-width: 90ch; }
.verdict p + p { margin-top: .45em; }
.verdict small { color: var(--dim); font-size: .85em; }
.problem { color: var(--alarm); }
.tools { display: flex; flex-wrap: wrap; gap: .6em 1.2em; align-items: center; font-size: .92em; margin: .5em 0; }
.tools label { display: inline-flex; gap: .5em; align-items: center; }
.tools input, .tools select { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--dim);
  border-radius: 6px; padding: .3em .5em; min-width: 0; max-width: 100%; }
.tools input { width: 17em; }
:is(button, input, select, summary, a, .area):focus-visible { outline: 2px solid var(--strong); outline-offset: 2px; }
a { color: var(--strong); }
.curves { margin: .2em 0 .6em; gap: .25em .5em; }
.curves button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 999px;
  padding: .18em .75em .18em .55em; cursor: pointer; text-align: left; overflow-wrap: anywhere; }
.curves button[aria-pressed="false"] { color: var(--dim); text-decoration: line-through; }
.curves button[aria-pressed="false"] .swatch { opacity: .25; }
.swatch, .bars .swatch { display: inline-block; width: 24px; height: 8px; margin-right: .45em;
  vertical-align: .1em; flex: none; }
.swatch path { fill: none; stroke-width: 2.5; }
.d1 { stroke-dasharray: 7 3; }
.d2 { stroke-dasharray: 2 3; }
figure.lines { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .92em; margin-bottom: .5em; }
figcaption small { font-weight: normal; color: var(--dim); margin-left: .6em; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24em, 100%), 1fr)); gap: .8em;
  margin: .6em 0; }
.pairs { grid-template-columns: repeat(auto-fit, minmax(min(28em, 100%), 1fr)); }
.plots .panel { margin: 0; min-width: 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30em, 100%), 1fr)); gap: 0 1.2em; }
.facts > div { min-width: 0; }
.frame { display: grid; grid-template-columns: 4.6em minmax(0, 1fr); padding-top: .5em; font-size: 12.5px;
  font-variant-numeric: tabular-nums; }
.area { position: relative; height: 15em; cursor: crosshair; touch-action: pan-y; }
.wide-plot .area { height: 20em; }
.area > svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.area path { fill: none; vector-effect: non-scaling-stroke; }
.area .grid { stroke: var(--line); stroke-width: 1; }
.area .curve { stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
.area .curve.d1, .area .curve.d2 { stroke-linecap: butt; }
.layered .curve:not(.points, .hot):nth-child(2) { stroke-width: 8; }
.layered .curve:not(.points, .hot):nth-child(3) { stroke-width: 4.6; }
.layered .curve:not(.points, .hot):nth-child(4) { stroke-width: 1.8; }
.layered .curve:not(.points, .hot):nth-child(5) { stroke-width: .8; }
.many .area .curve { stroke-width: 1; opacity: .55; }
.area .curve.points { stroke-width: 7; stroke-linecap: round; stroke-dasharray: none; }
.area .curve.second { stroke-width: 2.2; }
.area .curve.hot { stroke-width: 3.4; opacity: 1; }
.area .at { stroke: var(--dim); stroke-width: 1; }
.area .spot { stroke: var(--ink); stroke-width: 8; stroke-linecap: round; }
.flag { position: absolute; top: -.45em; width: 0; height: 0; margin-left: -5px; border: 5px solid transparent;
  border-top: 8px solid var(--ink); border-bottom: 0; }
.flag.fault { border-top-color: var(--alarm); }
.ys { position: relative; }
.ys span { position: absolute; right: .6em; transform: translateY(50%); color: var(--dim); white-space: nowrap; }
.xs { grid-column: 2; position: relative; height: 1.9em; }
.xs span { position: absolute; top: .35em; transform: translateX(-50%); color: var(--dim); white-space: nowrap; }
.xs span.edge { transform: translateX(-80%); }
.foot { display: flex; gap: 1em; justify-content: space-between; font-size: .85em; }
.foot span { flex: none; }
.frame { container-type: inline-size; }
@container (max-width: 480px) { .xs span:nth-of-type(even) { display: none; } }
.readout { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.spread .row { grid-template-columns: minmax(8em, 30%) 1fr 6.4em; color: var(--ink); }
.spread .row > span { display: flex; align-items: baseline; overflow-wrap: anywhere; }
.spread .row > span > span { min-width: 0; }
.spread .row > b { white-space: nowrap; }
.spread svg:not(.swatch) { height: 1.2em; background: none; }
.spread .reach { stroke: currentColor; stroke-width: 1.5; opacity: .75; vector-effect: non-scaling-stroke; fill: none; }
.spread .middle-line { stroke: var(--ink); stroke-width: 2; vector-effect: non-scaling-stroke; fill: none; }
.spread .half, .spread .full { opacity: .8; }
.spread .hot { background: var(--line); border-radius: 4px; }
.runs th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; text-align: inherit; }
.runs th[aria-sort="ascending"] button::after { content: " \\2191"; }
.runs th[aria-sort="descending"] button::after { content: " \\2193"; }
.runs { overflow-x: auto; }
@container (min-width: 721px) {
  .runs th { vertical-align: bottom; overflow-wrap: normal; }
  .runs :is(td, th) { padding: .42em .5em; }
  .runs td { overflow-wrap: break-word; }
  .runs td:first-child { min-width: 9em; overflow-wrap: anywhere; }
  .runs td.number { white-space: nowrap; }
}
.runs tr.hot td { background: var(--line); }
.values { margin: 0; padding: 0; list-style: none; }
.values b { font-weight: 600; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
.hidden { display: none !important; }
@media (max-width: 600px) {
  .frame { grid-template-columns: 4.2em minmax(0, 1fr); }
  .spread .row { grid-template-columns: 1fr 6.4em; row-gap: 0; }
  .spread .row > svg { grid-row: 2; grid-column: 1 / 3; }
  .tools input { width: 100%; }
  .tools label { width: 100%; }
}
"""

STYLE = f".aottrain {{{_RULES}}}\n"
