"use strict";
// The page of `sac compare --html`: charts with what is alive at the cursor, and the filter of the table of decisions.
// The tables are in the page; this script only draws, hides and sorts.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 300;
const MOST_ROWS = 12;  // of the list of what is alive
const STEP_OF_KEY = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -25, PageUp: 25, Home: -1e9, End: 1e9 };

const byId = (id) => document.getElementById(id);

function made(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "g"].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function bytesText(count) {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return unit === "B" ? `${count} B` : `${size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
}

// -- What is alive

// A mode's points are stored as changes: [row, bytes, tensors, row, bytes, tensors, …]; see `_alive_over` in page.py.
class Mode {
  constructor(stored, categories) {
    Object.assign(this, stored);
    this.before = new Set(stored.before);
    this.categories = categories;
    this.sums = this.x.map(() => new Float64Array(2 * categories.length));  // per category: on top, then before the step
    const live = new Map();
    this.changes.forEach((changed, at) => {
      this.apply(live, changed);
      for (const [row, [bytes]] of live)
        this.sums[at][this.rows[row][0] + (this.before.has(row) ? categories.length : 0)] += bytes;
    });
    this.peak = this.x.reduce((best, _, at) => (this.total(at, true) > this.total(best, true) ? at : best), 0);
  }

  apply(live, changed) {
    for (let i = 0; i < changed.length; i += 3) {
      if (changed[i + 1]) live.set(changed[i], [changed[i + 1], changed[i + 2]]);
      else live.delete(changed[i]);
    }
  }

  category(at, number, whole) {
    return this.sums[at][number] + (whole ? this.sums[at][number + this.categories.length] : 0);
  }

  total(at, whole) {
    return this.categories.reduce((sum, _, number) => sum + this.category(at, number, whole), 0);
  }

  alive(at, whole) {
    const live = new Map();
    for (const changed of this.changes.slice(0, at + 1)) this.apply(live, changed);
    return [...live]
      .filter(([row]) => whole || !this.before.has(row))
      .map(([row, [bytes, tensors]]) => ({ row: this.rows[row], bytes, tensors }))
      .sort((a, b) => b.bytes - a.bytes);
  }

  placeAt(x) {  // the last point that is not after x
    let low = 0, high = this.x.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.x[middle] <= x) low = middle; else high = middle;
    }
    return low;
  }
}

// -- The charts

class Charts {
  constructor(data) {
    this.categories = data.categories;
    this.modes = data.modes.map((stored) => stored && new Mode(stored, data.categories));
    this.chosen = this.modes.findLastIndex((mode) => mode);
    this.slider = byId("charts");
    this.choose(this.chosen);
    for (const input of document.querySelectorAll("#modes input"))
      input.addEventListener("change", () => this.choose(Number(input.value)));
    byId("whole").addEventListener("change", () => this.draw());
    byId("to-peak").addEventListener("click", () => this.choose(this.chosen));
    this.slider.addEventListener("pointermove", (event) => this.follow(event));
    this.slider.addEventListener("pointerdown", (event) => this.follow(event));
    this.slider.addEventListener("keydown", (event) => {
      if (!(event.key in STEP_OF_KEY)) return;
      event.preventDefault();
      const last = this.mode.x.length - 1;
      this.x = this.mode.x[Math.min(last, Math.max(0, this.at + STEP_OF_KEY[event.key]))];
      this.mark();
    });
    new ResizeObserver(() => this.draw()).observe(this.slider);
  }

  get mode() { return this.modes[this.chosen]; }
  get at() { return this.mode.placeAt(this.x); }
  get whole() { return byId("whole").checked; }

  choose(index) {
    this.chosen = index;
    document.querySelector(`#modes input[value="${index}"]`).checked = true;
    this.x = this.mode.x[this.mode.peak];
    this.draw();
  }

  follow(event) {
    const box = byId("lines").getBoundingClientRect();
    this.x = Math.min(2, Math.max(0, (2 * (event.clientX - box.left)) / box.width));
    this.mark();
  }

  draw() {
    this.width = Math.max(200, this.slider.clientWidth);
    this.top = Math.max(1, ...this.modes.flatMap((mode) => (mode ? [mode.total(mode.peak, this.whole)] : []))) * 1.06;
    const lines = this.frame(byId("lines"));
    const order = this.modes.map((_, index) => index).filter((index) => this.modes[index] && index !== this.chosen);
    for (const index of [...order, this.chosen]) {
      const mode = this.modes[index];
      lines.append(made("path", {
        class: index === this.chosen ? "curve chosen" : "curve", d: this.path(mode, (at) => mode.total(at, this.whole)),
        style: `stroke: var(--mode-${index % 8})`,
      }));
    }
    const stack = this.frame(byId("stack"));
    const base = new Float64Array(this.mode.x.length);
    this.categories.forEach(([, colour], number) => {
      const below = base.slice();
      this.mode.x.forEach((_, at) => { base[at] += Math.max(0, this.mode.category(at, number, this.whole)); });
      if (base.every((high, at) => high === below[at])) return;
      const up = this.path(this.mode, (at) => base[at]);
      const down = this.path(this.mode, (at) => below[at], true);
      stack.append(made("path", { d: `${up}L${down.slice(1)}Z`, style: `fill: var(--${colour})` }));
    });
    byId("stack-of").textContent = byId(`mode-${this.chosen}`).textContent;
    this.mark();
  }

  frame(svg) {
    svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT + 20}`);
    svg.setAttribute("height", HEIGHT + 20);
    const grid = made("g"), inside = made("g"), above = made("g", { class: "marks" });
    const unit = 2 ** Math.floor(Math.log2(this.top / 4));
    for (let level = 0; level <= this.top; level += this.top / unit > 6 ? 2 * unit : unit) {
      grid.append(made("line", { class: "grid", x1: 0, x2: this.width, y1: this.y(level), y2: this.y(level) }));
      if (level) above.append(made("text", { class: "tick", x: 2, y: this.y(level) - 3 }, bytesText(level).replace(".0 ", " ")));
    }
    grid.append(made("line", { class: "grid", x1: this.width / 2, x2: this.width / 2, y1: 0, y2: HEIGHT }));
    for (const [place, name] of [[0.25, "forward"], [0.75, "backward"]])
      grid.append(made("text", { class: "tick", x: this.width * place, y: HEIGHT + 15, "text-anchor": "middle" }, name));
    svg.replaceChildren(grid, inside, above, made("g", { class: "at-cursor" }));
    return inside;
  }

  y(level) { return HEIGHT * (1 - level / this.top); }

  path(mode, levelAt, backwards = false) {  // a staircase: each level lasts until the next point
    const steps = [];
    mode.x.forEach((x, at) => {
      const left = ((x / 2) * this.width).toFixed(1), y = this.y(levelAt(at)).toFixed(1);
      const right = (((at + 1 < mode.x.length ? mode.x[at + 1] : 2) / 2) * this.width).toFixed(1);
      steps.push(`${left},${y}`, `${right},${y}`);
    });
    return "M" + (backwards ? steps.reverse() : steps).join("L");
  }

  mark() {
    const at = this.at, left = (this.x / 2) * this.width;
    for (const id of ["lines", "stack"]) {
      const marks = byId(id).querySelector(".at-cursor");
      marks.replaceChildren(made("line", { class: "cursor", x1: left, x2: left, y1: 0, y2: HEIGHT }));
      this.modes.forEach((mode, index) => {
        if (!mode || (id === "stack" && index !== this.chosen)) return;
        const y = this.y(mode.total(mode.placeAt(this.x), this.whole));
        marks.append(made("circle", { class: "dot", cx: left, cy: y, r: 4, style: `fill: var(--mode-${index % 8})` }));
      });
    }
    this.describe(at);
  }

  describe(at) {
    const total = bytesText(this.mode.total(at, this.whole)), moment = this.mode.texts[this.mode.moments[at]];
    byId("total").textContent = total;
    byId("moment").textContent = `${this.mode.mode}, ${moment}`;
    byId("is-peak").hidden = at !== this.mode.peak;
    byId("beside").replaceChildren(...this.modes.flatMap((mode, index) => {
      if (!mode || index === this.chosen) return [];
      const swatch = made("span", { class: "swatch", style: `background: var(--mode-${index % 8})` });
      return [made("span", { class: "named" }, swatch, `${mode.mode} ${bytesText(mode.total(mode.placeAt(this.x), this.whole))}`)];
    }));
    const sums = this.categories.map(([name, colour], number) => [name, colour, this.mode.category(at, number, this.whole)]);
    byId("categories").replaceChildren(...sums.filter((one) => one[2]).map(([name, colour, bytes]) => made("tr", {},
      made("th", { scope: "row" }, made("span", { class: "named" },
        made("span", { class: "swatch", style: `background: var(--${colour})` }), name)),
      made("td", { class: "right" }, bytesText(bytes)))));
    const rows = this.mode.alive(at, this.whole), rest = rows.slice(MOST_ROWS);
    const shown = rows.slice(0, MOST_ROWS).map(({ row: [category, where, op, keptBy], bytes, tensors }) => made("tr", {},
      made("th", { scope: "row" }, made("span", { class: "named" },
        made("span", { class: "swatch", style: `background: var(--${this.categories[category][1]})` }),
        made("span", {}, made("span", { class: "path" }, [where, op].filter(Boolean).join(" · ")),
          keptBy ? made("small", {}, ` ${keptBy}`) : ""))),
      made("td", { class: "right" }, tensors || "–"), made("td", { class: "right" }, bytesText(bytes))));
    const more = rest.reduce((sum, one) => sum + one.bytes, 0);
    if (rest.length) shown.push(made("tr", {}, made("th", { scope: "row" }, `${rest.length} smaller`),
      made("td"), made("td", { class: "right" }, bytesText(more))));
    byId("alive").replaceChildren(...shown);
    this.slider.setAttribute("aria-valuemax", this.mode.x.length - 1);
    this.slider.setAttribute("aria-valuenow", at);
    this.slider.setAttribute("aria-valuetext", `${total}, ${moment}`);
  }
}

// -- The table of decisions

function filterDecisions() {
  const form = byId("filter"), body = byId("decisions").tBodies[0], rows = [...body.rows];
  const is = {
    all: () => true,
    kept: (decided) => decided.some((one) => one && one !== "recompute"),
    recomputed: (decided) => decided.every((one) => !one || one === "recompute"),
    different: (decided) => new Set(decided.filter(Boolean)).size > 1,
  };
  const show = () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const region = form.elements.region ? form.elements.region.value : "";
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !(words.every((word) => text.includes(word)) && (!region || row.dataset.region === region) &&
        is[form.elements.which.value](row.dataset.decided.split(",")) &&
        (form.elements.views.checked || row.dataset.memory === "1"));
      shown += !row.hidden;
    }
    byId("shown").textContent = `${shown} of ${rows.length} calls`;
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const button of document.querySelectorAll("#decisions th button")) button.addEventListener("click", () => {
    const header = button.closest("th"), column = header.cellIndex;
    const order = header.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
    body.append(...[...rows].sort((a, b) => (order === "ascending" ? compare(a, b) : compare(b, a))));
  });
  show();
}

const data = JSON.parse(byId("data").textContent);
if (data.modes.some((mode) => mode)) new Charts(data);
if (byId("decisions")) filterDecisions();
