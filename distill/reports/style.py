"""How a report looks: one style sheet for light and dark, desktop and phone."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f5f6f8; --ink: #1c2430; --quiet: #647082;
  --rule: #dfe3e8; --series-0: #2563eb; --series-1: #dc2626; --series-2: #059669; --series-3: #d97706;
  --series-4: #7c3aed; --series-5: #0891b2; --rest: #cfd5dd; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --card: #1b212a; --ink: #e6eaf0; --quiet: #98a4b5;
  --rule: #2c3440; --series-0: #6ea8fe; --series-1: #ff7b72; --series-2: #4ade80; --series-3: #fbbf24;
  --series-4: #b794f6; --series-5: #4dd0e1; --rest: #3a4452; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; padding-bottom: 4px; border-bottom: 1px solid var(--rule); }
h3 { font-size: 15px; margin: 20px 0 8px; overflow-wrap: anywhere; }
h4 { font-size: 12px; margin: 0 0 4px; color: var(--quiet); font-weight: 600; }
.facts span { display: inline-block; margin: 0 18px 2px 0; overflow-wrap: anywhere; }
.facts b, .note, .what { color: var(--quiet); font-weight: 500; font-size: 13px; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin-top: 16px; }
.card { background: var(--card); border-radius: 8px; padding: 12px 14px; }
.figure { font-size: 26px; font-weight: 650; font-variant-numeric: tabular-nums; }
.warning { border-left: 3px solid var(--series-3); padding-left: 10px; }
.charts { display: grid; gap: 20px 24px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; gap: 10px; font-size: 13px; margin-bottom: 4px; }
figcaption b { margin-left: auto; font-variant-numeric: tabular-nums; }
.held-out { color: var(--series-1); white-space: nowrap; }
svg { width: 100%; height: auto; display: block; }
.axis { stroke: var(--rule); stroke-width: 1; } .tick { fill: var(--quiet); font-size: 11px; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.line.series-0 { stroke: var(--series-0); } .dot.series-0 { fill: var(--series-0); }
.line.series-1 { stroke: var(--series-1); } .dot.series-1 { fill: var(--series-1); }
.line.series-2 { stroke: var(--series-2); } .dot.series-2 { fill: var(--series-2); }
.line.series-3 { stroke: var(--series-3); } .dot.series-3 { fill: var(--series-3); }
.line.series-4 { stroke: var(--series-4); } .dot.series-4 { fill: var(--series-4); }
.line.series-5 { stroke: var(--series-5); } .dot.series-5 { fill: var(--series-5); }
.bar { display: flex; height: 16px; border-radius: 4px; overflow: hidden; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 0; }
.entry { display: inline-block; margin-right: 14px; white-space: nowrap; }
.part-0 { background: var(--series-0); } .part-1 { background: var(--series-2); }
.part-2 { background: var(--series-3); } .part-3 { background: var(--series-4); }
.part-4, .part-rest { background: var(--rest); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
pre { background: var(--card); border-radius: 8px; padding: 10px 12px; margin: 0; overflow-x: auto;
  font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.answers { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 240px), 1fr)); }
.answers pre { white-space: pre-wrap; overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--quiet); font-size: 13px; margin-bottom: 8px; }
@media (max-width: 560px) { main { padding: 20px 14px 40px; } th, td { padding-right: 8px; font-size: 13px; }
  th { font-size: 11px; } .figure { font-size: 22px; } }
@media print { main { max-width: none; } }
"""
