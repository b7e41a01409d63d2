// Asks the router, and shows the answers.
const PERIOD_MS = 2000, HISTORY_PERIOD_MS = 5000, TIMEOUT_MS = 10000;
let before = null; // the last answer, for rates between two
let answeredAt = null;
let isPaused = false;
let historyAt = -Infinity;

function rate(now, read) {
  if (!before || now.at === before.at || now.status.router_id !== before.status.router_id) return "–";
  const perSecond = 1000 * (read(now.status) - read(before.status)) / (now.at - before.at);
  return perSecond < 0 ? "–" : amount(perSecond);
}

function showTiles(now, history) {
  const status = now.status;
  const tiles = [
    ["in-flight", "requests in flight", amount(status.num_requests)],
    ["finished", "answers/s", rate(now, each => each.finished)],
    ["tokens", "output tokens/s", rate(now, each => each.output_tokens)],
    ["transfers", "handoffs/s", rate(now, each => sum(Object.values(each.handoffs)))],
    ["hits", "hit rate, 10 min", history ? percent(history.num_prompt_tokens ? history.num_cached_tokens / history.num_prompt_tokens : NaN) : "–"],
    ["failed", "failed requests, 10 min", history ? amount(history.num_failures) : "–", history && history.num_failures ? "bad" : ""],
  ];
  sync(byId("tiles"), tiles, ([id]) => id, ([id, title]) => {
    const value = element("dd");
    value.id = id;
    return element("div", "", value, element("dt", "", title));
  }, (tile, [, , text, style = ""]) => {
    setText(tile.firstChild, text);
    setClass(tile.firstChild, style);
  });
}

function showState(text, className) {
  setText(byId("state"), text);
  setClass(byId("state"), `pill ${className}`);
}

let latestHistory = null;

function show(now) {
  const status = now.status;
  setText(byId("model"), status.model);
  document.title = `${status.model}: kvferry status`;
  setText(byId("version"), `kvferry ${status.version}, wire ${status.wire_version}`);
  const count = status.num_processes;
  const process = count > 1 ? `process ${status.process_number + 1} of ${count}, ` : "";
  setText(byId("router"), `as ${process}${status.router_id.slice(0, 15)} sees it`);
  byId("router").title = `${status.router_id}: each router shows its own requests, traffic and history`;
  byId("partial").hidden = count === 1;
  setText(byId("partial"), `${count} router processes serve one port. Requests, traffic, charts and counts on this page are those ` +
    "of one process; each has a page of its own at its operations port.");
  showState(status.is_ready ? "ready" : `not ready: ${status.reason}`, status.is_ready ? "good" : "bad");
  showTiles(now, latestHistory);
  showCluster(status);
  showShares("first", parts(status.first_token_parts));
  showShares("second", parts(status.second_token_parts));
  setText(byId("prediction"), status.predicted_hit_tokens || status.real_hit_tokens ?
    `Since the start ${amount(status.predicted_hit_tokens)} tokens were expected in caches and ${amount(status.real_hit_tokens)} were there; ` +
    `the predicted prefill time is off by ${percent(status.prefill_time_error)} on average.` : "");
  for (const name of ["handoffs", "failures", "refusals"]) {
    const counts = Object.entries(status[name]).sort((a, b) => b[1] - a[1]);
    rows(name, counts.map(([code, count]) => [words(code), count]));
  }
  before = now;
}

function parts(found) {
  return Object.entries(found).filter(([, part]) => part.num_requests).map(([name, part]) => {
    const mean = 1000 * part.seconds / part.num_requests;
    return {name: words(name), value: mean, text: milliseconds(mean), color: STEP_COLORS[name]};
  });
}

// A bar of shares with its key.
function showShares(id, shares) {
  const total = sum(shares.map(each => each.value));
  sync(byId(`${id}-bar`), shares.filter(each => each.value > 0), each => each.name, () => element("span"), (piece, each) => {
    piece.style.flex = `${each.value / total} 0 0`;
    piece.style.background = each.color || "var(--gray)";
    piece.title = `${each.name}: ${each.text}`;
  });
  const items = shares.length ? shares : [{name: "nothing measured yet", text: "", color: "transparent"}];
  sync(byId(id), items, each => each.name, () => element("li", "", element("i", "swatch"), "", element("b")), (item, each) => {
    swatch(item.firstChild, each.color || "var(--gray)");
    item.childNodes[1].textContent = `${each.name} `;
    setText(item.lastChild, each.text);
  });
}

function showPlacements(history) {
  const share = history.num_prompt_tokens ? history.num_cached_tokens / history.num_prompt_tokens : NaN;
  setText(byId("hit-rate"), percent(share));
  setText(byId("hit-note"), `of ${amount(history.num_prompt_tokens)} prompt tokens were found in a cache, last ten minutes`);
  const total = sum(Object.values(history.placements));
  const names = Object.keys(REASONS).filter(name => history.placements[name]);
  showShares("reasons", names.map(name => {
    const count = history.placements[name];
    return {name: REASONS[name], value: count, text: `${percent(count / total)} (${amount(count)})`, color: COLORS[Object.keys(REASONS).indexOf(name) % COLORS.length]};
  }));
}

async function ask(path) {
  const response = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS)});
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response.json();
}

async function askRequests() {
  const id = shownId;
  const found = await ask(`status/requests.json${id ? `?id=${encodeURIComponent(id)}` : ""}`);
  showLatest(found.latest);
  if (id === shownId && (!byId("timeline").hasChildNodes() || found.found.some(each => each.state === "running") || byId("timeline").dataset.isLive)) {
    byId("timeline").dataset.isLive = found.found.some(each => each.state === "running") ? "1" : "";
    showTimelines(found.found);
    if (wantsFocus) byId("timeline").focus();
    wantsFocus = false;
  }
}

async function look() {
  try {
    if (!isPaused && !document.hidden) {
      const status = await ask("status.json");
      const at = performance.now();
      if (at - historyAt >= HISTORY_PERIOD_MS) {
        historyAt = at;
        latestHistory = await ask("status/history.json");
        showHistory(latestHistory);
        await askRequests();
      }
      show({at, status});
      answeredAt = at;
      setClass(document.body, "");
    }
  } catch (error) {
    showState(`no answer: ${error.message}`, "bad");
  }
  setTimeout(look, PERIOD_MS);
}

function showAge() {
  const seconds = answeredAt === null ? null : (performance.now() - answeredAt) / 1000;
  setText(byId("age"), isPaused ? "paused" : seconds === null ? "" : seconds < 5 ? "live" : `${age(seconds)} old`);
}

byId("pause").addEventListener("click", event => {
  isPaused = !isPaused;
  event.target.setAttribute("aria-pressed", isPaused);
  showAge();
});
byId("find").addEventListener("submit", event => {
  event.preventDefault();
  open(byId("request-id").value.trim());
});

async function followHash() {
  const found = location.hash.match(/^#request=(.*)$/);
  try {
    shownId = found ? decodeURIComponent(found[1]) : "";
  } catch {
    shownId = "";
  }
  byId("request-id").value = shownId;
  byId("timeline").replaceChildren();
  try {
    await askRequests();
  } catch (error) {
    showState(`no answer: ${error.message}`, "bad");
  }
}

window.addEventListener("hashchange", followHash);
if (location.hash) followHash();
setInterval(showAge, 1000);
look();
