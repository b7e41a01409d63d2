"""The page of ``/status``: one document without external assets, which reads ``/status.json`` every two seconds.

Owns markup and script. Values are inserted as text, never as markup, because names come from the workers.
"""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
header { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
.muted { opacity: .65; } .good { color: #1a7f37; } .bad { color: #cf222e; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin-top: 1rem; }
.tile { border: 1px solid #8884; border-radius: .5rem; padding: .5rem .75rem; }
.tile b { display: block; font-size: 1.4rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #8883; } td.number, th.number { text-align: right; }
td { font-variant-numeric: tabular-nums; }
.bar { background: #8883; border-radius: .25rem; height: .6rem; min-width: 6rem; overflow: hidden; }
.bar div { background: #0969da; height: 100%; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 0 2rem; }
"""

_SCRIPT = """
"use strict";
const PERIOD_MS = 2000;
let last = null;
const byId = id => document.getElementById(id);
function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function rows(id, lines) {
  byId(id).replaceChildren(...lines.map(cells => {
    const row = element("tr");
    for (const cell of cells) {
      row.append(cell instanceof Node ? cell : element("td", cell, typeof cell === "number" ? "number" : ""));
    }
    return row;
  }));
}
function bar(share) {
  const cell = element("td"), outer = element("div", undefined, "bar"), inner = element("div");
  inner.style.width = `${Math.round(100 * share)}%`;
  outer.title = `${Math.round(100 * share)} %`;
  outer.append(inner);
  cell.append(outer);
  return cell;
}
const sum = counts => Object.values(counts).reduce((a, b) => a + b, 0);
function rate(now, read) {
  if (!last || now.at === last.at) return "–";
  const perSecond = 1000 * (read(now.status) - read(last.status)) / (now.at - last.at);
  return perSecond < 0 ? "–" : perSecond.toFixed(perSecond < 10 ? 1 : 0);
}
function means(parts) {
  return Object.entries(parts).map(([name, part]) => {
    const mean = part.num_requests ? 1000 * part.seconds / part.num_requests : 0;
    return [name, Number(mean.toFixed(1))];
  });
}
function show(now) {
  const status = now.status;
  byId("model").textContent = status.model;
  byId("version").textContent = `kvferry ${status.version}, wire version ${status.wire_version}`;
  byId("state").textContent = status.is_ready ? "ready" : `not ready: ${status.reason}`;
  byId("state").className = status.is_ready ? "good" : "bad";
  byId("in-flight").textContent = status.num_requests;
  byId("finished").textContent = rate(now, s => s.finished);
  byId("tokens").textContent = rate(now, s => s.generation_tokens);
  byId("prompt-tokens").textContent = rate(now, s => s.prompt_tokens);
  byId("transfers").textContent = rate(now, s => sum(s.handoffs));
  byId("failed").textContent = sum(status.failures);
  rows("workers", status.workers.map(worker => [
    worker.engine_id, worker.is_switching ? `${worker.role} (switching)` : worker.role, worker.version,
    element("td", worker.state, worker.state === "ready" ? "good" : "bad"),
    worker.num_running, worker.num_waiting, bar(worker.num_running / worker.max_num_seqs), bar(worker.kv_cache_usage),
    worker.num_leased_blocks, worker.transports.join(", "),
  ]));
  const planner = status.planner, planned = planner.last;
  byId("planner").textContent = !planner.is_enabled ? "" : `Planner over ${planner.num_workers} workers: ${planner.why_idle}.` +
    (planned ? ` Last: ${planned.engine_id} from ${planned.before} to ${planned.role}, ${planned.outcome}, ` +
      `${Math.round(planned.seconds_ago)} s ago, because ${planned.reason}.` : "");
  rows("phases", Object.entries(status.requests_by_phase));
  rows("handoffs", Object.entries(status.handoffs));
  rows("failures", Object.entries(status.failures));
  rows("refusals", Object.entries(status.refusals));
  rows("first", means(status.first_token_parts));
  rows("second", means(status.second_token_parts));
  last = now;
}
async function look() {
  try {
    const response = await fetch("status.json", {cache: "no-store"});
    if (!response.ok) throw new Error(`HTTP ${response.status}`);
    show({at: performance.now(), status: await response.json()});
  } catch (error) {
    byId("state").textContent = `no answer: ${error.message}`;
    byId("state").className = "bad";
  }
  setTimeout(look, PERIOD_MS);
}
look();
"""


_NUMBERS = {"running", "waiting", "leased blocks", "ms", "count"}


def _tile(name: str, title: str) -> str:
    return f'<div class="tile"><b id="{name}">–</b><span class="muted">{title}</span></div>'


def _table(name: str, title: str, *columns: str) -> str:
    heads = "".join(f'<th class="number">{column}</th>' if column in _NUMBERS else f"<th>{column}</th>" for column in columns)
    return f'<section><h2>{title}</h2><table><thead><tr>{heads}</tr></thead><tbody id="{name}"></tbody></table></section>'


_TILES = (
    ("in-flight", "requests in flight"),
    ("finished", "answers per second"),
    ("tokens", "tokens per second"),
    ("prompt-tokens", "prompt tokens per second"),
    ("transfers", "handoffs per second"),
    ("failed", "failed requests so far"),
)
_WORKER_COLUMNS = (
    "worker",
    "role",
    "version",
    "state",
    "running",
    "waiting",
    "load",
    "KV in use",
    "leased blocks",
    "transports",
)

PAGE = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>kvferry status</title>
<style>{_STYLE}</style></head>
<body>
<header><h1 id="model">kvferry</h1><span id="state">…</span><span id="version" class="muted"></span></header>
<div class="tiles">{"".join(_tile(*tile) for tile in _TILES)}</div>
{_table("workers", "Workers", *_WORKER_COLUMNS)}
<p id="planner" class="muted"></p>
<div class="columns">
{_table("first", "To the first token, mean", "part", "ms")}
{_table("second", "From the first to the second token, mean", "part", "ms")}
{_table("handoffs", "Handoffs", "outcome", "count")}
{_table("failures", "Failed requests", "code", "count")}
{_table("refusals", "Clients' mistakes, and requests that they gave up", "code", "count")}
{_table("phases", "Requests in flight", "leg", "count")}
</div>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _hash_of(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Only this script, this style and the router's own report may load, under any name of a worker.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{_hash_of(_SCRIPT)}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
