// The workers, and the handoffs between them as arrows.
const DENSE_FROM = 9; // workers of a role: then one line each
const MAX_ARROWS = 60, MAX_LABELS = 8;
const STATE_CLASSES = {ready: "good", full: "warn", draining: "warn", closed: "off", stalled: "bad"};
const TRANSPORT_COLORS = {shm: "var(--teal)", tcp: "var(--blue)", nixl: "var(--purple)"};
const NOT_LOADED = "var(--red)";
const POOLS = ["prefill", "decode", "aggregated", "encode"];

let traffic = [];
let chosen = null; // the engine id of the worker whose traffic is shown alone

const transportColor = name => TRANSPORT_COLORS[name] || "var(--gray)";
const fullness = share => share >= 0.95 ? "bad" : share >= 0.8 ? "warn" : "";

function makeWorker() {
  const parts = {
    name: element("span", "name"), brief: element("span", "brief"), state: element("span", "state"),
    bar: element("span"), value: element("span", "value"), load: element("span", "load"), via: element("span", "via"),
  };
  const button = element("button", "worker",
    element("span", "line", parts.name, parts.brief, parts.state),
    element("span", "line meter", element("span", "track", parts.bar), parts.value),
    element("span", "line", parts.load, parts.via));
  button.type = "button";
  button.addEventListener("click", () => choose(button.dataset.name));
  const item = element("li", "", button);
  item.parts = parts;
  return item;
}

function choose(name) {
  chosen = chosen === name ? null : name;
  document.querySelectorAll(".worker").forEach(each => each.setAttribute("aria-pressed", each.dataset.name === chosen));
  drawWires();
}

// `pool` says how long the beginning and the end are that all names share, and whether a worker has one line only.
function showWorker(item, worker, pool) {
  const button = item.firstChild, {name, brief, state, bar, value, load, via} = item.parts;
  const style = STATE_CLASSES[worker.state] || "off";
  const isEncoder = worker.role === "encode"; // it counts images, and has no KV
  const share = isEncoder ? worker.num_running / worker.max_num_seqs : worker.kv_cache_usage;
  const use = `${isEncoder ? "load" : "KV"} ${percent(share)}`;
  const notes = [worker.transport && `via ${worker.transport}`, worker.is_agent && "vLLM", worker.prompts_per_s > 0 && `${amount(worker.prompts_per_s)} prompts/s`].filter(Boolean);
  if (!worker.transport && worker.transports.length) notes.unshift(`offers ${worker.transports.join(", ")}`);
  const loads = [`${worker.num_running} running`, `${worker.num_waiting} waiting`];
  button.dataset.name = worker.engine_id;
  button.title = worker.engine_id;
  button.setAttribute("aria-pressed", worker.engine_id === chosen);
  button.setAttribute("aria-label", [worker.engine_id, worker.state, use, ...loads, ...notes].join(", "));
  setClass(button, `worker ${style}`);
  setText(name, worker.engine_id);
  setText(brief, `…${worker.engine_id.slice(pool.start, worker.engine_id.length - pool.end)}`);
  setText(state, worker.state);
  setClass(state, `state ${style}`);
  bar.style.width = `${Math.min(100, 100 * share).toFixed(1)}%`;
  setClass(bar, fullness(share));
  setText(value, use);
  segments(load, pool.isDense ? [`${worker.num_running} + ${worker.num_waiting}`] : loads);
  segments(via, notes);
}

// Short texts in a row, none of which is broken.
function segments(place, texts) {
  sync(place, texts.map((text, index) => ({text, index})), each => each.index, () => element("span"), (part, each) => setText(part, each.text));
}

function commonAffix(names) {
  if (names.length < 2) return {start: 0, end: 0};
  const shortest = Math.min(...names.map(name => name.length));
  let start = 0, end = 0;
  while (start < shortest - 1 && names.every(name => name[start] === names[0][start])) start++;
  while (end < shortest - start - 1 && names.every(name => name.at(-1 - end) === names[0].at(-1 - end))) end++;
  return {start, end};
}

function showPool(role, workers) {
  const list = byId(role);
  const isDense = workers.length >= DENSE_FROM;
  setClass(list, isDense ? "dense" : "");
  const shared = {...commonAffix(workers.map(worker => worker.engine_id)), isDense};
  sync(list, workers, worker => worker.engine_id, makeWorker, (item, worker) => showWorker(item, worker, shared));
  const title = `${role[0].toUpperCase()}${role.slice(1)}: ${workers.length}`;
  setText(byId(`${role}-title`), isDense ? `${title} (running + waiting)` : title);
  const pool = byId(`${role}-pool`);
  if (pool) pool.hidden = workers.length === 0;
}

function showCluster(status) {
  traffic = status.traffic;
  const byRole = Object.fromEntries(POOLS.map(role => [role, status.workers.filter(each => each.role === role)]));
  for (const role of POOLS) showPool(role, byRole[role]);
  byId("pairs").hidden = !byRole.prefill.length && !byRole.decode.length;
  if (!status.workers.some(each => each.engine_id === chosen)) chosen = null;
  const handoffs = sum(traffic.map(pair => pair.handoffs_per_s));
  const moved = sum(traffic.map(pair => pair.bytes_per_s));
  const lost = sum(traffic.map(pair => pair.failed_per_s));
  setText(byId("cluster-note"), !status.workers.length ? "No worker has registered with this router." :
    "Load is that of all routers; traffic, requests and history are those of this one. Press a worker to see its handoffs alone. " +
    `The last minute had ${amount(handoffs)} handoffs/s, ` +
    `${bytes(moved)}/s${lost ? `, of which ${amount(lost)}/s were not loaded` : ""}.`);
  const order = {ready: 1, full: 1};
  rows("workers", [...status.workers].sort((a, b) => (order[a.state] || 0) - (order[b.state] || 0)).map(worker => [
    {text: worker.engine_id, className: "id"}, worker.role + (worker.is_agent ? " (vLLM)" : "") + (worker.is_switching ? " (switching)" : ""),
    {text: worker.state, className: STATE_CLASSES[worker.state] || "off"}, worker.version, worker.transport || "none lately",
    worker.transports.join(", "), number(worker.role === "encode" ? "–" : percent(worker.kv_cache_usage)), worker.num_running,
    worker.num_waiting, worker.max_num_seqs, worker.num_leased_blocks, number(amount(worker.prompts_per_s)),
  ]), cells => cells[0].text);
  rows("traffic", traffic.map(pair => [
    {text: pair.prefill, className: "id"}, {text: pair.decode, className: "id"}, pair.transport || "–",
    number(amount(pair.handoffs_per_s)), number(amount(pair.failed_per_s)), number(bytes(pair.bytes_per_s)),
  ]), cells => JSON.stringify([cells[0].text, cells[1].text]));
  setText(byId("traffic-note"), status.num_more_pairs ? `${plural(status.num_more_pairs, "further pair")} had less traffic.` : "");
  showPlanner(status.planner);
  showTransports();
  drawWires();
}

function showPlanner(planner) {
  const last = planner.last;
  const why = planner.why_idle ? `: ${planner.why_idle}` : "";
  setText(byId("planner"), !planner.is_enabled ? "" : `The planner gives roles to ${plural(planner.num_workers, "worker")}${why}.` + (last ?
    ` Last: ${last.engine_id} from ${last.before} to ${last.role}, ${age(last.seconds_ago)} ago, ${last.outcome}: ${last.reason}.` : ""));
}

function showTransports() {
  const names = [...new Set(traffic.map(pair => pair.transport).filter(Boolean))].sort();
  const keys = names.map(name => ({name, color: transportColor(name)}));
  if (traffic.some(pair => isFailing(pair))) keys.push({name: "a tenth or more not loaded", color: NOT_LOADED});
  sync(byId("transports"), keys, key => key.name, () => element("span", "", element("i", "swatch"), ""), (item, key) => {
    swatch(item.firstChild, key.color);
    item.lastChild.textContent = key.name;
  });
}

const isFailing = pair => pair.failed_per_s >= 0.1 * pair.handoffs_per_s && pair.failed_per_s > 0;

// Arrows from the right edge of a prefill worker to the left edge of a decode worker. Their width is the share of the busiest.
function drawWires() {
  const canvas = byId("wires"), frame = canvas.getBoundingClientRect();
  if (!frame.width) return;
  const places = {prefill: edges("prefill", frame.top), decode: edges("decode", frame.top)};
  const known = traffic.filter(pair => pair.handoffs_per_s > 0 && places.prefill.has(pair.prefill) && places.decode.has(pair.decode));
  const isChosen = pair => chosen === null || pair.prefill === chosen || pair.decode === chosen;
  const drawn = [...known].sort((a, b) => isChosen(b) - isChosen(a)).slice(0, MAX_ARROWS);
  const busiest = Math.max(...drawn.map(pair => pair.handoffs_per_s), 0);
  const widest = drawn.length > 20 ? 2.5 : 5;
  const wires = drawn.map(pair => ({pair, width: 1.2 + widest * Math.sqrt(pair.handoffs_per_s / busiest)}));
  spread(wires, "from", wire => wire.pair.prefill, wire => places.decode.get(wire.pair.decode).middle, places.prefill);
  spread(wires, "to", wire => wire.pair.decode, wire => places.prefill.get(wire.pair.prefill).middle, places.decode);
  const labelled = new Set(wires.filter(wire => isChosen(wire.pair)).slice(0, MAX_LABELS));
  const arrows = [], labels = [], taken = [];
  for (const wire of wires.reverse()) {
    const color = isFailing(wire.pair) ? NOT_LOADED : transportColor(wire.pair.transport);
    arrows.push(...arrow(frame.width, wire, color, isChosen(wire.pair)));
    if (labelled.has(wire)) labels.push(...label(frame.width, wire.from, wire.to, `${amount(wire.pair.handoffs_per_s)}/s`, taken));
  }
  canvas.replaceChildren(...arrows, ...labels);
  canvas.setAttribute("aria-label", describeTraffic(known));
}

function edges(role, top) {
  return new Map([...byId(role).querySelectorAll(".worker")].map(worker => {
    const box = worker.getBoundingClientRect();
    return [worker.dataset.name, {middle: box.top + box.height / 2 - top, height: box.height}];
  }));
}

// Set where wires touch their workers: side by side along the edge, in the order of their other ends.
function spread(wires, end, nameOf, otherEnd, places) {
  const groups = new Map();
  for (const wire of wires) groups.set(nameOf(wire), [...(groups.get(nameOf(wire)) || []), wire]);
  for (const [name, group] of groups) {
    const {middle, height} = places.get(name);
    const needed = sum(group.map(wire => wire.width + 2)), scale = Math.min(1, 0.85 * height / needed);
    let next = middle - needed * scale / 2;
    for (const wire of group.sort((a, b) => otherEnd(a) - otherEnd(b))) {
      const room = (wire.width + 2) * scale;
      wire[end] = next + room / 2;
      next += room;
    }
  }
}

function arrow(right, {from, to, width}, color, isShown) {
  const head = 4 + width, style = isShown ? "" : "faded", bend = right * 0.45;
  const line = `M2 ${from}C${bend} ${from} ${right - bend} ${to} ${right - head} ${to}`;
  const tip = `M${right - 1} ${to}l${-head - 1} ${-head * 0.55}v${head * 1.1}z`;
  return [
    vector("path", {d: line, class: style, "stroke-width": width}, {stroke: color}),
    vector("path", {d: tip, class: style}, {fill: color}),
  ];
}

// A rate on its arrow: where it is free of the labels before it.
function label(right, from, to, text, taken) {
  for (const share of [0.5, 0.36, 0.64, 0.25, 0.75]) {
    const [px, py] = pointOf(right, from, to, share);
    if (taken.some(([x, y]) => Math.abs(x - px) < 50 && Math.abs(y - py) < 17)) continue;
    taken.push([px, py]);
    const half = 4 + 3.4 * text.length;
    const plate = vector("rect", {x: px - half, y: py - 9, width: 2 * half, height: 18, rx: 4, class: "plate"});
    const written = vector("text", {x: px, y: py});
    written.textContent = text;
    return [plate, written];
  }
  return [];
}

function pointOf(right, from, to, t) {
  const bend = right * 0.45, rest = 1 - t;
  const mix = (a, b, c, d) => rest ** 3 * a + 3 * rest ** 2 * t * b + 3 * rest * t ** 2 * c + t ** 3 * d;
  return [mix(2, bend, right - bend, right), mix(from, from, to, to)];
}

function describeTraffic(pairs) {
  if (!pairs.length) return "No handoffs in the last minute";
  const named = pairs.slice(0, 5).map(pair => `${pair.prefill} to ${pair.decode} ${amount(pair.handoffs_per_s)} per second`);
  return `Handoffs of the last minute: ${named.join("; ")}${pairs.length > 5 ? `; and ${plural(pairs.length - 5, "more pair")}` : ""}`;
}

new ResizeObserver(() => drawWires()).observe(byId("pairs"));
