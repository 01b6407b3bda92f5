"""The style sheet of the HTML report.

Colours are from Okabe and Ito's set for colour-blind readers ("Color Universal Design", 2008), lightened for dark
backgrounds. Print uses the light set.
"""

CSS = """
:root { color-scheme: light dark; --ground: #fff; --panel: #f5f6f7; --ink: #1c2024; --soft: #5a636b; --rule: #d9dde1;
  --main: #0072b2; --base: #b34a00; --bad: #8a3a6c; --good: #00694b; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --panel: #1d2125; --ink: #e6e9ec; --soft: #a0a9b1;
  --rule: #343a40; --main: #56b4e9; --base: #f0a24a; --bad: #de9bc4; --good: #4cc9a0; } }
@media print { :root { color-scheme: light; --ground: #fff; --panel: #fff; --ink: #000; --soft: #444; --rule: #bbb;
  --main: #0072b2; --base: #b34a00; --bad: #8a3a6c; --good: #00694b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header p { margin: 0; color: var(--soft); }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .3rem 0 .6rem; text-wrap: balance; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.8rem 0 .6rem; padding-top: .7rem; border-top: 1px solid var(--rule); }
h3 { font-size: .95rem; margin: 1.4rem 0 .3rem; }
p, ul { margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
nav { margin: 1rem 0 0; font-size: .85rem; display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
a { color: var(--main); }
code, pre { font: .86em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; margin: .5rem 0;
  padding: .6rem .8rem;   white-space: pre-wrap; overflow-wrap: anywhere; }
.choice { display: inline-block; max-width: 100%; }
.soft { color: var(--soft); } small { font-size: .82rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.tile { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: .7rem .9rem;
  break-inside: avoid; }
.tile .what { font-size: .82rem; color: var(--soft); display: flex; justify-content: space-between; gap: .5rem; }
.tile .figure { font-size: 1.55rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile .more { font-size: .82rem; color: var(--soft); }
.tag { font-size: .7rem; line-height: 1.35; padding: 0 .35em; border: 1px solid var(--soft); border-radius: 4px;
  color: var(--soft); white-space: nowrap; align-self: start; font-weight: 400; }
.tag.predicted, .tag.dry { border-style: dashed; } .tag.computed { border-style: dotted; }
.tag.best { color: var(--main); border-color: var(--main); font-weight: 650; }
.tag.job { color: var(--base); border-color: var(--base); }
.tag.changes { color: var(--bad); border-color: var(--bad); }
.note { border-left: 3px solid var(--base); padding: .1rem 0 .1rem .8rem; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .86rem; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .5rem; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; white-space: nowrap; } thead th { color: var(--soft); font-size: .8rem; vertical-align: bottom; }
.num { text-align: right; white-space: nowrap; } td.wide { min-width: 18rem; overflow-wrap: anywhere; }
td.plot { min-width: 9rem; width: 30%; padding: 0; height: 2.2rem; vertical-align: middle; }
.folder { white-space: nowrap; }
.plot { position: relative; min-height: 2rem; align-self: stretch; }
.plot svg.row { position: absolute; inset: 0; }
table.facts { width: auto; } table.facts th { color: var(--soft); font-weight: 400; }
table.facts td { overflow-wrap: anywhere; }
svg { display: block; } svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart { margin: .4rem 0; overflow: visible; }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.reference { stroke: var(--base); stroke-width: 1.5; stroke-dasharray: 4 3; }
.identity { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 5 4; }
.interval { stroke: var(--main); stroke-width: 2; } .best-line { stroke: var(--main); stroke-width: 2; }
.mark { stroke: var(--main); stroke-width: 2; fill: var(--ground); } .mark.final { fill: var(--main); }
.mark.baseline { stroke: var(--base); fill: var(--base); } .mark.failed { stroke: var(--bad); fill: none; }
.mark.dry { stroke-dasharray: 2.4 2; }
.ring { fill: none; stroke: var(--main); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.1rem; font-size: .82rem; color: var(--soft); align-items: center; }
.legend span { display: inline-flex; align-items: center; gap: .2rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 0 2rem; }
.rows { list-style: none; padding: 0; margin: .6rem 0; max-width: none; }
.rows li { display: grid; grid-template-columns: minmax(12rem, 40%) 1fr 8.5rem; gap: 0 .8rem; align-items: center;
  margin: 0; padding: 0; border-bottom: 1px solid var(--rule); break-inside: avoid; }
.rows li.best { background: var(--panel); } .folder code { overflow-wrap: normal; }
.rows .name { font-size: .84rem; line-height: 1.35; padding: .3rem 0; overflow-wrap: anywhere; }
.rows .value { text-align: right; font-size: .86rem; font-variant-numeric: tabular-nums; line-height: 1.25; }
.rows .value small { color: var(--soft); display: block; }
@media (max-width: 42rem) {
  .rows li { grid-template-columns: 1fr 7.5rem; } .rows .name { grid-column: 1 / -1; }
  .tile .figure { font-size: 1.35rem; } h1 { font-size: 1.25rem; } th, td { padding: .3rem .45rem; }
}
@media print {
  body { font-size: 10pt; } main { max-width: none; padding: 0; } nav { display: none; }
  h2 { break-after: avoid; } tr, .chart, .pair > div { break-inside: avoid; } .scroll { overflow: visible; }
  td.wide { min-width: 12rem; } table { font-size: 8pt; } th { white-space: normal; } th, td { padding: .25rem; }
}
"""
