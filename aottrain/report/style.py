"""The compile report's stylesheet."""

CSS = """
:root { color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1c1e21; --dim: #6a7077; --line: #e4e5e3; --strong: #2f6fbb; --weak: #b9c4d0;
  --alarm: #a3341f; --alarm-page: #fdf1ee; --good: #2c7a4b;
  --c0: #2f6fbb; --c1: #e08a3c; --c2: #4d9a6a; --c3: #b5546a; --c4: #7b68b5; --c5: #c2a83e;
  --c6: #4aa3b0; --c7: #969ba1; }
@media (prefers-color-scheme: dark) { :root {
  --page: #15171a; --card: #1c1f23; --ink: #e4e6e8; --dim: #969da5; --line: #30353b; --strong: #6ba3e8; --weak: #475361;
  --alarm: #f0917e; --alarm-page: #2c1d1a; --good: #78c294;
  --c0: #5b93d8; --c1: #d98d4b; --c2: #62ac7d; --c3: #c66d81; --c4: #9484cb; --c5: #c9b357;
  --c6: #5fb2be; --c7: #7c828a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .8rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.8rem 0 .5rem; }
h3 small { font-weight: normal; color: var(--dim); margin-left: .5em; }
p { margin: .3rem 0; max-width: 110ch; }
.dim { color: var(--dim); }
.good { color: var(--good); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .9rem; margin: 1.2rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .85rem 1rem; }
.card h3 { margin: 0; font-size: .8rem; font-weight: 600; color: var(--dim); }
.card .figure { font-size: 1.65rem; font-weight: 600; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.card p { font-size: .85rem; color: var(--dim); }
.panel { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem;
  margin: .6rem 0; }
.long { overflow: auto; max-height: 22rem; }
.alarm { background: var(--alarm-page); border: 1px solid var(--alarm); border-radius: 8px; padding: .4rem 1rem .9rem;
  margin: 1.2rem 0; }
.alarm h2 { border: 0; padding: 0; margin: .5rem 0; color: var(--alarm); }
svg.bar { display: block; width: 100%; height: 1.75rem; border-radius: 4px; }
.legend { list-style: none; margin: .6rem 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.3rem;
  font-size: .86rem; }
.legend b, .bars b { font-weight: 600; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .4rem; }
.bars .row { display: grid; grid-template-columns: minmax(11rem, 24%) 1fr 6rem; gap: .8rem; align-items: center;
  padding: .15rem 0; font-size: .9rem; }
.bars span { overflow-wrap: anywhere; }
.bars svg { width: 100%; height: .8rem; }
.bars b { text-align: right; }
.bars .weak { color: var(--dim); }
rect.strong { fill: var(--strong); } rect.weak { fill: var(--weak); }
svg.plot { display: block; width: 100%; font-size: 13px; }
.plot text { fill: var(--dim); } .plot text.label { fill: var(--ink); } .plot .grid { stroke: var(--line); }
.plot polyline { fill: none; stroke-width: 1.5; opacity: .5; }
.plot .predicted { stroke: var(--dim); stroke-width: 2; stroke-dasharray: 2 5; stroke-linecap: round; opacity: .9; }
.plot .beaten { opacity: .45; } .plot .knee { stroke: var(--ink); stroke-width: 2; }
.plot .mark { stroke: var(--dim); stroke-dasharray: 3 4; }
.scroll { overflow: auto; max-height: 34rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th { position: sticky; top: 0; background: var(--card); text-align: left; font-weight: 600; color: var(--dim);
  box-shadow: inset 0 -1px var(--line); white-space: nowrap; }
th, td { padding: .42rem .75rem; vertical-align: top; }
td { border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.keep { white-space: nowrap; }
td small { display: block; color: var(--dim); font-size: .92em; overflow-wrap: anywhere; }
code, pre, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .92em; }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .25rem 0; font-weight: 600; font-size: .92rem; }
summary small { font-weight: normal; color: var(--dim); margin-left: .4em; }
pre { overflow: auto; max-height: 40rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .8rem 1rem; line-height: 1.4; font-size: .8rem; margin: .3rem 0 .8rem; }
@media (max-width: 600px) { .bars .row { grid-template-columns: 7rem 1fr 5rem; gap: .5rem; }
  main { padding-top: 1rem; } }
@media print { .scroll, .long, pre { max-height: none; } }
""" + "\n".join(
    f".c{index} {{ fill: var(--c{index}); background: var(--c{index}); }} .l{index} {{ stroke: var(--c{index}); }}"
    for index in range(8)
)
