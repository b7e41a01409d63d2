// The latest requests, and the timeline of one.
const STEP_COLORS = {
  encode: "var(--pink)", queue: "var(--gray)", prefill: "var(--blue)", relay: "var(--orange)", transfer: "var(--teal)",
  verify: "var(--purple)", first_step: "var(--blue)", decode: "var(--green)", first_token: "var(--blue)",
};
const STEP_NAMES = {
  first_token: {encode: "encode", queue: "queue at prefill", prefill: "prefill", relay: "relay", first_token: "to the first token"},
  second_token: {relay: "relay", queue: "queue at decode", transfer: "transfer", verify: "verify", first_step: "first step"},
  output: {decode: "further tokens"},
};
const STATE_STYLES = {running: "", finished: "good", failed: "bad", refused: "off"};
const REASONS = {
  prefix: "holds most of the prompt", wait: "sooner than the worker that holds more", load: "nobody holds any of it",
  source: "loads it from another worker", session: "its session's worker, about as soon as any",
  availability: "a cheaper worker could not take it", local: "the decode worker is sooner alone", by_load: "least loaded, nothing predicted",
};
let shownId = "";
let wantsFocus = false; // the next timeline is one that the reader has asked for

function showLatest(latest) {
  rows("latest", latest.map(each => {
    const name = element("button", "link", each.request_id);
    name.type = "button";
    name.addEventListener("click", () => open(each.request_id));
    return [
      name, {text: each.state, className: STATE_STYLES[each.state] || ""}, words(each.outcome) || "–", number(age(each.age_s)),
      each.num_prompt_tokens, each.num_output_tokens, number(milliseconds(each.ttft_ms)), number(milliseconds(each.total_ms)),
      each.num_retries,
    ];
  }), cells => cells[0] instanceof Node ? cells[0].textContent : "none");
}

function open(id) {
  byId("request-id").value = id;
  wantsFocus = Boolean(id);
  location.hash = id ? `request=${encodeURIComponent(id)}` : "";
}

function showTimelines(found) {
  const place = byId("timeline");
  if (!shownId) return place.replaceChildren();
  if (!found.length) {
    const hint = "It is older than the requests kept here, another router served it, or vLLM's own endpoint did.";
    return place.replaceChildren(element("p", "", `No request ${shownId} is known. `), element("p", "note", hint));
  }
  place.replaceChildren(...found.slice(0, 8).map(timeline));
  if (found.length > 8) place.append(element("p", "note", `and ${found.length - 8} more with this id`));
}

function timeline(request) {
  const title = element("h3", "", `${request.request_id}: `, element("span", STATE_STYLES[request.state], request.outcome ? `${request.state}, ${words(request.outcome)}` : request.state));
  return element("article", "", title, facts(request), waterfall(request), events(request));
}

function facts(request) {
  const {routing, handoff} = request;
  const tokens = `${plural(request.num_prompt_tokens, "prompt token")}, ${request.num_output_tokens} out` + (request.num_choices > 1 ? ` (${request.num_choices} choices)` : "");
  const pairs = [
    ["tokens", tokens],
    ["workers", [request.prefill, request.decode].filter(Boolean).join(" → ") || "none"],
    ["placed because", routing ? `${REASONS[routing.reason] || routing.reason} (${plural(routing.candidates, "candidate")})` : REASONS.by_load],
    ["prompt found in a cache", hitText(request)],
    ["first token", routing ? `${milliseconds(request.ttft_ms)}, predicted ${milliseconds(routing.predicted_ttft_ms)}` : milliseconds(request.ttft_ms)],
    ["between tokens, mean", milliseconds(request.mean_itl_ms)],
    ["handoff", handoff ? handoffText(handoff) : "none"],
    ["retries", String(request.num_retries) + (request.num_refusals ? `, ${plural(request.num_refusals, "refusal")}` : "")],
  ];
  return element("dl", "facts-list", ...pairs.map(([name, text]) => element("div", "", element("dt", "", name), element("dd", "", text))));
}

function hitText({routing, num_cached_tokens: found}) {
  const real = isNumber(found) ? plural(found, "token") : "not known";
  return routing ? `${real}, predicted ${routing.predicted_hit_tokens}` : real;
}

function handoffText(handoff) {
  const moved = handoff.transport ? `${bytes(handoff.num_bytes)} by ${handoff.transport}, ${plural(handoff.verified_blocks, "block")} verified` : "";
  const computed = handoff.recomputed_tokens ? `${plural(handoff.recomputed_tokens, "token")} computed instead` : "";
  return [words(handoff.outcome), moved, computed].filter(Boolean).join(", ");
}

function waterfall(request) {
  const total = Math.max(request.total_ms, 0.001);
  const lines = request.steps.map(step => {
    const bar = element("span");
    bar.style.left = `${Math.min(99.5, 100 * step.start_ms / total)}%`;
    bar.style.width = `${Math.max(0, Math.min(100, 100 * step.ms / total))}%`;
    bar.style.background = STEP_COLORS[step.name] || "var(--gray)";
    const lane = element("td", "bar", element("div", "lane", bar));
    lane.setAttribute("aria-hidden", "true");
    const name = element("th", "step", (STEP_NAMES[step.leg] || {})[step.name] || words(step.name));
    name.scope = "row";
    return element("tr", "", name, element("td", "number", milliseconds(step.start_ms)), element("td", "number", milliseconds(step.ms)), lane);
  });
  if (!lines.length) return element("p", "note", "No token has arrived, so no part is measured.");
  const heads = ["part", "begins", "lasts"].map((text, index) => { const head = element("th", index ? "number" : "", text); head.scope = "col"; return head; });
  const table = element("table", "waterfall", element("thead", "", element("tr", "", ...heads, element("td"))), element("tbody", "", ...lines));
  const note = "Workers measure their parts; relay is the rest: the network, this router, and failed attempts.";
  return element("div", "scroll", table, element("p", "note", note));
}

function events(request) {
  const lines = request.events.map(each => element("li", "", element("span", "time", `${milliseconds(each.at_ms)} `), eventText(each)));
  if (request.num_more_events) lines.push(element("li", "", `${request.num_more_events} more`));
  return element("ol", "events", ...lines);
}

function eventText(event) {
  const worker = event.worker || "";
  const code = words(event.code || "");
  switch (event.name) {
    case "move": return `left the queue of ${worker} for one that is nearly idle`;
    case "retry": return `${worker} failed it (${code}); retried from ${event.kind === "replay" ? "the output so far" : `the ${event.kind}`}`;
    case "first_token": return "first token passed to the client";
    case "ended": return code ? `ended with ${code}` : "ended";
    case "encoded": return `embeddings of ${worker}: ${code}`;
    case "alone": return `sent to ${worker}, which serves it alone`;
    default: return `${event.name} leg sent to ${worker}`;
  }
}
