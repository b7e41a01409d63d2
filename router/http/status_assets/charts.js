// Small charts of the last ten minutes: lines, or bars that add up.
const SPAN_S = 600;
const COLORS = ["blue", "orange", "teal", "purple", "pink", "gray"].map(name => `var(--${name})`);
const WIDTH = 600, HEIGHT = 100;

function niceLimit(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find(step => step * power >= value * 0.999);
}

const x = ageSeconds => WIDTH * (1 - ageSeconds / SPAN_S);

function linePath(values, ages, limit) {
  let path = "", isDrawing = false;
  values.forEach((value, index) => {
    if (!isNumber(value)) return void (isDrawing = false);
    const point = `${x(ages[index]).toFixed(1)} ${(HEIGHT - HEIGHT * Math.min(value, limit) / limit).toFixed(1)}`;
    path += isDrawing ? `L${point}` : `M${point}h.1`;
    isDrawing = true;
  });
  return path;
}

function barPath(values, below, ages, limit, seconds) {
  const width = WIDTH * seconds / SPAN_S;
  return values.map((value, index) => {
    if (!(value > 0)) return "";
    const height = HEIGHT * value / limit, bottom = HEIGHT - HEIGHT * below[index] / limit;
    return `M${(x(ages[index]) - width).toFixed(1)} ${bottom.toFixed(1)}v${(-height).toFixed(2)}h${(width * 0.9).toFixed(1)}v${height.toFixed(2)}z`;
  }).join("");
}

class Chart {
  // `read(history)` returns the series: {name, values, color?, isDashed?}. `limit` fixes the top of the scale.
  constructor({title, format, read, isStacked = false, limit = null}) {
    Object.assign(this, {title, format, read, isStacked, limit, ages: [], series: [], index: null});
    this.svg = vector("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true"});
    this.top = element("span", "top");
    this.middle = element("span", "middle");
    this.none = element("span", "none", "nothing measured yet");
    this.cursor = element("div", "cursor");
    this.cursor.hidden = true;
    this.plot = element("div", "plot", this.svg, this.top, this.middle, this.none, this.cursor);
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    this.keys = element("div", "chart-keys");
    this.scale = element("div", "scale", element("span", "", "10 min ago"), element("span", "", "now"));
    this.scale.setAttribute("aria-hidden", "true");
    this.figure = element("figure", "", element("figcaption", "", title), this.keys, this.plot, this.scale);
    this.spoken = element("span", "hidden-text");
    this.spoken.setAttribute("aria-live", "polite");
    this.figure.append(this.spoken);
    this.plot.addEventListener("pointermove", event => this.pointAt(event));
    this.plot.addEventListener("pointerleave", () => this.select(null));
    this.plot.addEventListener("blur", () => this.select(null));
    this.plot.addEventListener("keydown", event => this.onKey(event));
  }

  show(history) {
    this.ages = history.ages_s;
    this.series = this.read(history).map((each, index) => ({color: COLORS[index % COLORS.length], ...each}));
    const totals = this.isStacked ? this.ages.map((_, index) => sum(this.series.map(each => each.values[index] || 0))) : [];
    const all = this.isStacked ? totals : this.series.flatMap(each => each.values.filter(isNumber));
    const limit = this.limit ?? niceLimit(Math.max(0, ...all));
    this.none.hidden = all.length > 0 && this.series.length > 0;
    setText(this.top, this.format(limit));
    setText(this.middle, this.format(limit / 2));
    const lines = [0, HEIGHT / 2].map(y => vector("line", {x1: 0, x2: WIDTH, y1: y, y2: y, class: "grid"}));
    this.svg.replaceChildren(...lines, ...this.paths(limit, history.interval_s));
    this.plot.setAttribute("aria-label", this.description());
    this.select(this.index === null ? null : Math.min(this.index, this.ages.length - 1));
  }

  paths(limit, seconds) {
    const below = this.ages.map(() => 0);
    return this.series.map(each => {
      if (!this.isStacked) {
        const shape = {d: linePath(each.values, this.ages, limit), class: each.isDashed ? "line dashed" : "line"};
        return vector("path", shape, {stroke: each.color});
      }
      const path = vector("path", {d: barPath(each.values, below, this.ages, limit, seconds)}, {fill: each.color});
      each.values.forEach((value, index) => { below[index] += value || 0; });
      return path;
    });
  }

  description() {
    const parts = this.series.map(each => {
      const known = each.values.filter(isNumber);
      if (!known.length) return `${each.name}: nothing measured`;
      const [low, high] = [Math.min(...known), Math.max(...known)];
      return `${each.name}: latest ${this.format(last(known))}, lowest ${this.format(low)}, highest ${this.format(high)}`;
    });
    return `${this.title}, last ten minutes. ${parts.join("; ") || "Nothing measured yet"}.`;
  }

  select(index) {
    this.index = index;
    this.cursor.hidden = index === null;
    if (index !== null) this.cursor.style.left = `${100 * (1 - this.ages[index] / SPAN_S)}%`;
    const value = each => index === null ? last(each.values.filter(isNumber)) : each.values[index];
    sync(this.keys, this.series, each => each.name, () => element("span", "", element("i", "swatch"), "", element("b")), (key, each) => {
      swatch(key.firstChild, each.color, each.isDashed ? "dash" : "");
      key.childNodes[1].textContent = `${each.name} `;
      setText(key.lastChild, this.format(value(each)));
    });
    const when = index === null ? "" : `, ${age(this.ages[index])} ago`;
    setText(this.figure.firstChild, this.title + when);
  }

  pointAt(event) {
    if (!this.ages.length) return;
    const box = this.plot.getBoundingClientRect();
    const wanted = SPAN_S * (1 - (event.clientX - box.left) / box.width);
    let best = 0;
    this.ages.forEach((each, index) => { if (Math.abs(each - wanted) < Math.abs(this.ages[best] - wanted)) best = index; });
    this.select(best);
  }

  onKey(event) {
    const final = this.ages.length - 1, from = this.index ?? final + 1;
    const target = {ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: final, Escape: null}[event.key];
    if (target === undefined || final < 0) return;
    event.preventDefault();
    this.select(target === null ? null : Math.max(0, Math.min(final, target)));
    if (target !== null) {
      const values = this.series.map(each => `${each.name} ${this.format(each.values[this.index])}`);
      setText(this.spoken, `${age(this.ages[this.index])} ago: ${values.join(", ")}`);
    }
  }
}

const perSecond = value => isNumber(value) ? `${amount(value)}/s` : "–";
const OUTCOME_COLORS = {loaded: "var(--blue)", local: "var(--teal)", no_prefill: "var(--orange)"};
const FALLBACK_COLORS = ["red", "purple", "pink", "gray"].map(name => `var(--${name})`);

function outcomes(history) {
  const order = Object.keys(OUTCOME_COLORS);
  const names = Object.keys(history.handoffs_per_s).sort((a, b) => (order.indexOf(a) >>> 0) - (order.indexOf(b) >>> 0));
  let next = 0;
  return names.map(name => ({
    name: words(name), values: history.handoffs_per_s[name],
    color: OUTCOME_COLORS[name] || FALLBACK_COLORS[next++ % FALLBACK_COLORS.length],
  }));
}

// The worker with the least free KV, of all roles.
function fullest(history) {
  const roles = Object.values(history.kv_usage_highest);
  const values = history.ages_s.map((_, index) => Math.max(...roles.map(values => values[index] ?? -1)));
  return roles.length ? [{name: "fullest", values: values.map(value => value < 0 ? null : value), color: "var(--gray)", isDashed: true}] : [];
}

const CHARTS = [
  new Chart({title: "Time to the first token", format: milliseconds, read: h => [
    {name: "p50", values: h.ttft_p50_ms}, {name: "p99", values: h.ttft_p99_ms, isDashed: true}]}),
  new Chart({title: "Time between tokens", format: milliseconds, read: h => [
    {name: "p50", values: h.itl_p50_ms}, {name: "p99", values: h.itl_p99_ms, isDashed: true}]}),
  new Chart({title: "Tokens", format: perSecond, read: h => [
    {name: "output", values: h.output_tokens_per_s}, {name: "prompt", values: h.prompt_tokens_per_s, isDashed: true}]}),
  new Chart({title: "KV in use, mean by role", format: percent, limit: 1, read: h => [
    ...Object.entries(h.kv_usage_mean).map(([name, values]) => ({name, values})), ...fullest(h)]}),
  new Chart({title: "Handoffs by outcome", format: perSecond, isStacked: true, read: outcomes}),
  new Chart({title: "Hit rate of prompt tokens", format: percent, limit: 1, read: h => [{name: "found in a cache", values: h.hit_rate}]}),
  new Chart({title: "Requests", format: perSecond, read: h => [
    {name: "answers", values: h.answers_per_s}, {name: "failed", values: h.failures_per_s, color: "var(--red)"},
    {name: "refused", values: h.refusals_per_s, color: "var(--gray)", isDashed: true}]}),
  new Chart({title: "In flight", format: amount, read: h => [{name: "requests", values: h.num_requests}]}),
];

byId("charts").append(...CHARTS.map(chart => chart.figure));

// One row per minute: the mean of what was measured in it.
function showMinutes(history) {
  const columns = CHARTS.flatMap(chart => chart.series.map(each => ({name: `${chart.title}: ${each.name}`, format: chart.format, values: each.values})));
  const head = byId("minutes-head");
  sync(head, [columns], () => "head", () => element("tr"), row => sync(
    row, [{name: "minutes ago"}, ...columns], each => each.name,
    each => { const cell = element("th", "number", each.name); cell.scope = "col"; return cell; }, () => {},
  ));
  const minutes = [...Array(10).keys()].map(minute => {
    const inside = history.ages_s.map((each, index) => [each, index]).filter(([each]) => Math.floor(each / 60) === minute).map(([, index]) => index);
    const means = columns.map(each => {
      const known = inside.map(index => each.values[index]).filter(isNumber);
      return number(known.length ? each.format(sum(known) / known.length) : "–");
    });
    return [number(`${minute}–${minute + 1}`), ...means];
  });
  rows("minutes", minutes, cells => cells[0].text);
}

function showHistory(history) {
  for (const chart of CHARTS) chart.show(history);
  showMinutes(history);
  showPlacements(history);
}
