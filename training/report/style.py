"""The look of the report, light and dark."""

# Colours of curves: Okabe and Ito's palette, safe for the colour-blind, and lighter in the dark.
STYLE = """
:root{--ink:#1c2733;--soft:#5b6b7b;--back:#fff;--card:#f5f7f9;--edge:#d9e0e6;--good:#0b7a4b;
--bad:#b3261e;--calm:#8a5a00;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b3589a;--c4:#3a97cc;
--c5:#b87a00;--c6:#000}
@media(prefers-color-scheme:dark){:root{--ink:#e4e9ee;--soft:#9aa7b4;--back:#12171c;--card:#1b2229;
--edge:#313b45;--good:#4cc38a;--bad:#ff8a80;--calm:#f0b64a;--c0:#5cb0ea;--c1:#ff8a3d;--c2:#3fcf9f;
--c3:#e79bc4;--c4:#9ad7ff;--c5:#f0c04a;--c6:#fff}}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:34px 0 8px}p{margin:6px 0}
h3{font-size:15px;margin:20px 0 4px;color:var(--soft)}summary{cursor:pointer}
code{font:12.5px ui-monospace,monospace;background:var(--card);border-radius:4px;padding:1px 5px;
overflow-wrap:anywhere}small{color:var(--soft);white-space:nowrap}ul{margin:4px 0;padding-left:20px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px;
font-variant-numeric:tabular-nums}th{color:var(--soft);font-weight:500}
th,td{padding:5px 12px 5px 0;text-align:right;border-bottom:1px solid var(--edge);
vertical-align:top}th:first-child,td:first-child,.text th,.text td{text-align:left}
.pill{border:1px solid;border-radius:9px;padding:0 8px}.good{color:var(--good)}
.bad{color:var(--bad)}.calm,.warn{color:var(--calm)}
.remark{background:var(--card);border-radius:8px;padding:8px 14px;margin:12px 0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(440px,100%),1fr));gap:16px}
figure{margin:0;background:var(--card);border-radius:8px;padding:10px 12px;min-width:0}
figcaption{font-weight:600;font-size:14px}figcaption b{color:var(--soft);font-size:12.5px;
font-weight:400;margin-left:8px}figure>svg{width:100%;height:auto;display:block}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:2px 16px;font-size:12.5px;
color:var(--soft);overflow-wrap:anywhere}.legend svg{width:24px;height:8px;margin-right:6px}
.legend b{color:var(--ink);font-weight:500}svg text{font:11px system-ui,sans-serif;
fill:var(--soft)}.x{text-anchor:middle}.y{text-anchor:end}.grid{stroke:var(--edge);fill:none}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke:var(--c)}
.band{fill:var(--c);opacity:.18}.dot{fill:var(--c)}video,.film{max-width:100%;border-radius:6px}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}
.c5{--c:var(--c5)}.c6{--c:var(--c6)}
@media print{details>*{display:block}}
"""
