// The document and numbers as text. Values are inserted as text, never as markup: names come from outside.
const byId = id => document.getElementById(id);

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// An element of SVG. `paint` goes through the style object, because the page's policy forbids style attributes.
function vector(tag, attributes, paint = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  Object.assign(made.style, paint);
  return made;
}

function setText(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

function setClass(node, className) {
  if (node.className !== className) node.className = className;
}

// Give `parent` one child per item, in order. Children are kept by key, so that focus and selection survive an update.
function sync(parent, items, keyOf, make, update) {
  const known = parent.keyed || new Map();
  const wanted = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (wanted.has(key)) continue;
    const child = known.get(key) || make(item);
    update(child, item);
    wanted.set(key, child);
  }
  const children = [...wanted.values()];
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] || null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
  parent.keyed = wanted;
}

// Rows of a table. A cell is a number, a text, a node, or {text, className}.
function rows(id, lines, keyOf = cells => String(cells[0])) {
  const none = [{text: "none", className: "off"}];
  const keyed = cells => cells === none ? "" : keyOf(cells);
  sync(byId(id), lines.length ? lines : [none], keyed, () => element("tr"), (row, cells) => {
    cells.forEach((cell, index) => {
      if (cell instanceof Node && row.children[index]) return;
      const slot = row.children[index] || row.appendChild(element("td"));
      if (cell instanceof Node) return slot.append(cell);
      const isPlain = typeof cell !== "object";
      setText(slot, isPlain ? cell : cell.text);
      setClass(slot, isPlain ? (typeof cell === "number" ? "number" : "") : cell.className);
      if (cells === none) slot.colSpan = 20;
    });
  });
}

// A coloured mark in a legend; `style` is "dash" for a dashed line.
function swatch(mark, color, style = "") {
  setClass(mark, `swatch ${style}`.trim());
  mark.style.color = color;
}

const number = text => ({text, className: "number"});
const sum = values => values.reduce((a, b) => a + b, 0);
const isNumber = value => typeof value === "number" && Number.isFinite(value);
const last = values => values.length ? values[values.length - 1] : null;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function amount(value) {
  if (!isNumber(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
  if (Number.isInteger(value) || value >= 100) return value.toFixed(0);
  return value.toFixed(value < 0.1 ? 2 : 1);
}

function milliseconds(value) {
  if (!isNumber(value)) return "–";
  if (value >= 60000) return `${(value / 60000).toFixed(1)} min`;
  if (value >= 1000) return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
  return `${value.toFixed(value < 1 ? 2 : value < 10 ? 1 : 0)} ms`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${value.toFixed(unit && value < 10 ? 1 : 0)} ${units[unit]}`;
}

function age(seconds) {
  if (seconds < 60) return `${Math.max(0, seconds).toFixed(0)} s`;
  return seconds < 3600 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const percent = share => isNumber(share) ? `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %` : "–";
const words = name => name.replaceAll("_", " ");
