// @ts-check
// Small charts in SVG: lines over time, and bars by day. A line is told from another by its dashes and its name, too.

import { h, fill, svg } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 120;
const PAD = { right: 8, top: 8, bottom: 18 };
const LETTER_PX = 7; // of a label of the scale
const SPAN_MS_MIN = 120_000; // which a chart shows even where less has been seen
const GAP_FACTOR = 4; // a pause so many times longer than usual is a hole in the line

/**
 * @typedef {{ name: string, values: [at: number, value: number | null][] }} Line
 * @typedef {{ name: string, values: number[] }} Stack
 */

/** Up to `count` round steps that cover 0 to `max`. @param {number} max @param {number} count */
export function ticks(max, count) {
  if (!(max > 0)) return [0, 1];
  const rough = max / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9)) ?? 10 * power;
  const steps = Math.max(1, Math.ceil(max / step - 1e-9));
  return Array.from({ length: steps + 1 }, (_, index) => Number((index * step).toPrecision(12)));
}

/** A chart that fits its width, drawn again when that changes. */
class Chart {
  /** @param {string} title @param {string} [note] what it is of, and the unit */
  constructor(title, note = "") {
    this.legend = h("ul", { class: "legend" });
    this.plot = svg("svg", { class: "plot", height: HEIGHT, role: "img" });
    this.frame = h("div", { class: "plot-frame" }, this.plot);
    const head = h("figcaption", null, h("strong", null, title), note && h("span", { class: "dim" }, ` ${note}`));
    this.element = h("figure", { class: "chart" }, head, this.frame, this.legend);
    this.title = title;
    this.width = 0;
    this.left = 0;
    this.observer = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width === this.width || !width) return;
      this.width = width;
      this.plot.setAttribute("width", String(width));
      this.draw();
    });
    this.observer.observe(this.frame);
  }

  draw() {}

  close() {
    this.observer.disconnect();
  }

  /** Also finds out how much room the labels at the left need. @param {number[]} steps @param {(value: number) => string} unit @param {(value: number) => number} y */
  grid(steps, unit, y) {
    const labels = steps.map(unit);
    this.left = 8 + Math.ceil(LETTER_PX * Math.max(...labels.map((label) => label.length)));
    return steps.map((step, index) => [
      svg("line", { class: "grid", x1: this.left, x2: this.width - PAD.right, y1: y(step), y2: y(step) }),
      svg("text", { class: "tick", x: this.left - 6, y: y(step) + 4, "text-anchor": "end" }, labels[index]),
    ]);
  }
}

export class LineChart extends Chart {
  /** @type {Line[]} */
  #lines = [];
  #now = 0;
  /** @type {number} */
  #ms;
  /** @type {(value: number) => string} */
  #unit;
  /** @type {(value: number) => string} */
  #mark;
  /** @type {number} */
  #ceiling;
  /** @type {number | null} */
  #pointed = null;

  /**
   * @param {string} title @param {{ note?: string, ms: number, unit: (value: number) => string, mark?: (value: number) => string, ceiling?: number }} options
   *   `ms`: how far back at most; `ceiling`: the least that the scale goes to; `mark`: as `unit`, for its round numbers
   */
  constructor(title, { note, ms, unit, mark = unit, ceiling = 0 }) {
    super(title, note);
    [this.#ms, this.#unit, this.#mark, this.#ceiling] = [ms, unit, mark, ceiling];
    this.frame.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#point(event.offsetX));
    this.frame.addEventListener("pointerleave", () => this.#point(null));
  }

  /** @param {Line[]} lines @param {number} now */
  show(lines, now) {
    [this.#lines, this.#now] = [lines, now];
    this.draw();
  }

  /** @param {number | null} x */
  #point(x) {
    this.#pointed = x;
    this.draw();
  }

  draw() {
    if (!this.width) return;
    const first = Math.min(...this.#lines.map((line) => line.values[0]?.[0] ?? this.#now));
    const ms = Math.min(Math.max(this.#now - first, SPAN_MS_MIN), this.#ms);
    const from = this.#now - ms;
    const seen = this.#lines.flatMap((line) => line.values.map(([, value]) => value ?? 0));
    const steps = ticks(Math.max(this.#ceiling, ...seen), 3);
    const top = steps[steps.length - 1];
    const x = (/** @type {number} */ at) => this.left + ((at - from) / ms) * (this.width - this.left - PAD.right);
    const y = (/** @type {number} */ value) => PAD.top + (1 - value / top) * (HEIGHT - PAD.top - PAD.bottom);
    const grid = this.grid(steps, this.#mark, y);
    const at = this.#nearest(x);
    fill(
      this.plot,
      grid,
      [0, 0.5, 1].map((part) => {
        const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
        const moment = from + part * ms;
        return svg("text", { class: "tick", x: x(moment), y: HEIGHT - 3, "text-anchor": anchor }, clock(new Date(moment)).slice(0, 5));
      }),
      this.#lines.map((line, index) => svg("path", { class: `line series-${index}`, d: pathOf(line.values, x, y) })),
      at !== null && svg("line", { class: "pointer", x1: x(at), x2: x(at), y1: PAD.top, y2: HEIGHT - PAD.bottom }),
    );
    const shown = this.#lines.map((line) => `${line.name} ${this.#reading(line, at)}`);
    this.plot.setAttribute("aria-label", `${this.title}: ${shown.join(", ") || "nothing yet"}`);
    fill(this.legend, this.#lines.map((line, index) => entry(index, line.name, this.#reading(line, at))), at !== null && h("li", { class: "dim" }, `at ${clock(new Date(at))}`));
  }

  /** The moment that the pointer is at. @param {(at: number) => number} x */
  #nearest(x) {
    const pointed = this.#pointed;
    const moments = this.#lines[0]?.values.map(([at]) => at) ?? [];
    if (pointed === null || !moments.length) return null;
    return moments.reduce((best, at) => (Math.abs(x(at) - pointed) < Math.abs(x(best) - pointed) ? at : best));
  }

  /** @param {Line} line @param {number | null} at */
  #reading(line, at) {
    const found = at === null ? line.values.at(-1) : line.values.find(([moment]) => moment === at);
    const value = found?.[1] ?? null;
    return value === null ? "–" : this.#unit(value);
  }
}

/** @param {number} index @param {string} name @param {string} [reading] */
function entry(index, name, reading) {
  const sample = svg("svg", { width: 18, height: 8, "aria-hidden": "true" }, svg("line", { class: `line series-${index}`, x1: 0, x2: 18, y1: 4, y2: 4 }));
  return h("li", null, sample, h("span", null, name), reading && h("b", null, reading));
}

/**
 * @param {[number, number | null][]} values @param {(at: number) => number} x @param {(value: number) => number} y
 */
function pathOf(values, x, y) {
  const pauses = values.slice(1).map(([at], index) => at - values[index][0]).sort((a, b) => a - b);
  const usual = pauses[Math.floor(pauses.length / 2)] ?? 0;
  let path = "";
  let drawing = false;
  let last = 0;
  for (const [at, value] of values) {
    if (value === null) drawing = false;
    else {
      const goesOn = drawing && at - last <= GAP_FACTOR * usual;
      path += `${goesOn ? "L" : "M"}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
      if (!goesOn) path += "h0.01"; // a point alone is a dot
      drawing = true;
    }
    last = at;
  }
  return path;
}

/** Bars by day, each cut into the same stacks. */
export class BarChart extends Chart {
  /** @type {string[]} */
  #days = [];
  /** @type {Stack[]} */
  #stacks = [];
  #unit;

  /** @param {string} title @param {{ note?: string, unit: (value: number) => string }} options */
  constructor(title, { note, unit }) {
    super(title, note);
    this.#unit = unit;
  }

  /** @param {string[]} days @param {Stack[]} stacks */
  show(days, stacks) {
    [this.#days, this.#stacks] = [days, stacks];
    this.draw();
  }

  draw() {
    if (!this.width || !this.#days.length) return;
    const sums = this.#days.map((_, day) => this.#stacks.reduce((sum, stack) => sum + stack.values[day], 0));
    const steps = ticks(Math.max(...sums), 3);
    const top = steps[steps.length - 1];
    const y = (/** @type {number} */ value) => PAD.top + (1 - value / top) * (HEIGHT - PAD.top - PAD.bottom);
    const grid = this.grid(steps, this.#unit, y);
    const wide = (this.width - this.left - PAD.right) / this.#days.length;
    const every = Math.ceil(60 / wide); // days between two that are named
    fill(
      this.plot,
      grid,
      this.#days.map((day, index) => {
        const x = this.left + index * wide;
        let base = 0;
        const parts = this.#stacks.map((stack, place) => {
          const value = stack.values[index];
          base += value;
          const box = { x: x + wide * 0.12, y: y(base), width: wide * 0.76, height: Math.max(0, y(base - value) - y(base)) };
          return value > 0 && svg("rect", { class: `bar series-${place}`, ...box }, svg("title", null, `${day} ${stack.name}: ${this.#unit(value)}`));
        });
        const named = index % every === 0;
        return [parts, named && svg("text", { class: "tick", x: x + wide / 2, y: HEIGHT - 3, "text-anchor": "middle" }, day.slice(5))];
      }),
    );
    const spoken = this.#days.map((day, index) => `${day} ${this.#unit(sums[index])}`);
    this.plot.setAttribute("aria-label", `${this.title} by day: ${spoken.join(", ")}`);
    fill(this.legend, this.#stacks.map((stack, index) => swatch(index, stack.name)));
  }
}

/** @param {number} index @param {string} name */
function swatch(index, name) {
  const sample = svg("svg", { width: 10, height: 10, "aria-hidden": "true" }, svg("rect", { class: `bar series-${index}`, width: 10, height: 10 }));
  return h("li", null, sample, h("span", null, name));
}

/** How much of something is used. @param {number} used @param {number} all @param {string} words */
export function meter(used, all, words) {
  const part = all > 0 ? Math.min(Math.max(used / all, 0), 1) : 0;
  const level = part >= 0.9 ? "high" : part >= 0.7 ? "middle" : "low";
  const bar = h("span", { class: `meter-bar ${level}` });
  bar.style.width = `${(100 * part).toFixed(1)}%`;
  return h("span", { class: "meter", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * part), "aria-valuetext": words, "aria-label": words }, bar);
}
