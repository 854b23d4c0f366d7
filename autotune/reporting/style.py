"""Style sheet of the report: light and dark, laptop and phone; no fonts or files from elsewhere."""

#: colours of the terms of a cycle, in order; readable on both backgrounds
TERM_COLORS = (
    "#3b78c4", "#c2703a", "#5a9e4b", "#b8478c", "#7a68c9",
    "#8a8a3a", "#2f9c95", "#c9a227", "#8c8c8c",
)  # fmt: skip

CSS = """
:root { color-scheme: light dark; --bg:#ffffff; --fg:#1d2126; --soft:#5b6570; --line:#d9dee4;
  --panel:#f4f6f8; --good:#1d7a3a; --bad:#b3261e; --warn:#8a5a00; --accent:#2560a8; }
@media (prefers-color-scheme: dark) { :root { --bg:#14171a; --fg:#e4e7ea; --soft:#9aa5b1;
  --line:#343a41; --panel:#1d2226; --good:#6fd08c; --bad:#ff8a80; --warn:#e8b45a;
  --accent:#8ab8f0; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--bg); color:var(--fg);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; }
main { max-width:1080px; margin:0 auto; padding:24px 20px 64px; }
h1 { font-size:1.5rem; margin:0 0 4px; overflow-wrap:anywhere; }
h2 { font-size:1.15rem; margin:40px 0 10px; padding-top:12px; border-top:1px solid var(--line); }
h3 { font-size:1rem; margin:20px 0 6px; }
p { margin:6px 0; max-width:75ch; }
.soft { color:var(--soft); font-size:.92rem; }
.verdict { background:var(--panel); border-left:4px solid var(--accent); padding:12px 16px;
  font-size:1.1rem; margin:14px 0; }
.verdict.good { border-color:var(--good); } .verdict.bad { border-color:var(--bad); }
.good { color:var(--good); } .bad { color:var(--bad); } .warn { color:var(--warn); }
.verdict.good, .verdict.bad { color:var(--fg); }
.scroll { overflow-x:auto; }
table { border-collapse:collapse; font-size:.92rem; margin:8px 0; }
th,td { text-align:left; vertical-align:top; padding:6px 22px 6px 0;
  border-bottom:1px solid var(--line); }
th { color:var(--soft); font-weight:600; }
.n { text-align:right; font-variant-numeric:tabular-nums; }
td.n, .dense td:first-child { white-space:nowrap; }
code,pre { font:.86rem/1.45 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace; }
code { background:var(--panel); padding:1px 5px; border-radius:3px; overflow-wrap:anywhere; }
td code { white-space:nowrap; }
pre { background:var(--panel); padding:10px 12px; overflow-x:auto; margin:6px 0; max-height:320px; }
details { margin:6px 0; } summary { cursor:pointer; }
.bars { display:grid; grid-template-columns:7.5em 1fr 6em; gap:4px 10px; align-items:center;
  margin:8px 0; font-size:.92rem; }
.bar { display:flex; height:26px; }
.bar span { display:block; min-width:1px; border-right:1px solid var(--bg); }
.swatch { display:inline-block; width:.8em; height:.8em; border-radius:2px; margin-right:.5em; }
.plot { max-width:560px; } .plot svg { width:100%; height:auto; display:block; }
svg text { fill:var(--fg); font:11px system-ui,"DejaVu Sans",sans-serif; }
svg .axis { stroke:var(--line); } svg .diagonal { stroke:var(--soft); stroke-dasharray:4 3; }
.legend { display:flex; flex-wrap:wrap; gap:2px 16px; font-size:.88rem; margin:4px 0; }
.share { display:inline-block; height:.7em; background:var(--accent); vertical-align:middle; }
@media (max-width:640px) {
  main { padding:16px 14px 48px; }
  .cards thead { display:none; }
  .cards tr { display:block; border-bottom:2px solid var(--line); padding:8px 0; }
  .cards td { display:grid; grid-template-columns:9.2em minmax(0,1fr); gap:8px; border:0;
    padding:2px 0; overflow-wrap:anywhere; }
  .cards td.n { text-align:left; white-space:normal; }
  td code { white-space:normal; }
  .cards td::before { content:attr(data-head); color:var(--soft); }
  .cards td:empty { display:none; }
  .dense { font-size:.8rem; width:100%; }
  .cards, .cards tbody { display:block; width:100%; }
  .dense th:nth-child(n+4), .dense td:nth-child(n+4) { display:none; }
  .dense td.n { white-space:normal; }
  th,td { padding:5px 8px 5px 0; }
  .bars { grid-template-columns:5.6em 1fr 4.4em; gap:4px 8px; }
}
@media print { main { max-width:none; } details { display:block; } }
"""
