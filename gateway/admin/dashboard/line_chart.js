// @ts-check
// A line chart over time. Lines differ in dashes and names, not only in colour.

import { Chart, HEIGHT, PAD, ticks } from "./charts.js";
import { fill, h, svg } from "./dom.js";
import { clock, local } from "./format.js";

const DAY_MS = 86_400_000;
const GAP_FACTOR = 4; // a pause this many times longer than usual interrupts the line

/**
 * @typedef {{ name: string, values: [at: number, value: number | null][] }} Line
 * @typedef {(value: number) => string} Unit  a value as text
 */

export class LineChart extends Chart {
  /** @type {Line[]} */
  #lines = [];
  #from = 0;
  #to = 0;
  /** @type {Unit} */
  #unit;
  /** @type {Unit} */
  #mark;
  /** @type {number} */
  #ceiling;
  /** @type {number | null} */
  #pointed = null;

  /**
   * @param {string} title
   * @param {{ note?: string, unit: Unit, mark?: Unit, ceiling?: number }} options
   *   `ceiling`: minimum upper end of the scale; `mark`: `unit` for the scale's round numbers
   */
  constructor(title, { note, unit, mark = unit, ceiling = 0 }) {
    super(title, note);
    [this.#unit, this.#mark, this.#ceiling] = [unit, mark, ceiling];
    this.frame.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#point(event.offsetX));
    this.frame.addEventListener("pointerleave", () => this.#point(null));
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "group");
    this.frame.setAttribute("aria-label", `${title}: the arrow keys read the values at a time`);
    this.frame.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#onKey(event));
    this.frame.addEventListener("blur", () => this.#point(null));
  }

  /** @param {Line[]} lines @param {number} from @param {number} to in ms since the epoch */
  show(lines, from, to) {
    [this.#lines, this.#from, this.#to] = [lines, from, to];
    this.draw();
  }

  /** Moves the pointer to the next or previous point. @param {KeyboardEvent} event */
  #onKey(event) {
    const moments = this.#lines[0]?.values.map(([at]) => at) ?? [];
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !moments.length) return;
    event.preventDefault();
    const at = this.#nearest((moment) => this.#x(moment));
    const index = at === null ? moments.length - (step < 0 ? 0 : 1) : moments.indexOf(at);
    const next = Math.min(Math.max(index + step, 0), moments.length - 1);
    this.legend.setAttribute("aria-live", "polite");
    this.#point(this.#x(moments[next]));
  }

  /** The position of a time. @param {number} at */
  #x(at) {
    return this.left + ((at - this.#from) / (this.#to - this.#from)) * (this.width - this.left - PAD.right);
  }

  /** @param {number | null} x */
  #point(x) {
    this.#pointed = x;
    this.draw();
  }

  draw() {
    if (!this.width || this.#to <= this.#from) return;
    const [from, ms] = [this.#from, this.#to - this.#from];
    const seen = this.#lines.flatMap((line) => line.values.map(([, value]) => value ?? 0));
    const steps = ticks(Math.max(this.#ceiling, ...seen), 3);
    const top = steps[steps.length - 1];
    const x = (/** @type {number} */ at) => this.#x(at);
    const y = (/** @type {number} */ value) => PAD.top + (1 - value / top) * (HEIGHT - PAD.top - PAD.bottom);
    const grid = this.grid(steps, this.#mark, y);
    const at = this.#nearest(x);
    fill(
      this.plot,
      grid,
      [0, 0.5, 1].map((part) => {
        const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
        const moment = from + part * ms;
        return svg(
          "text",
          { class: "tick", x: x(moment), y: HEIGHT - 3, "text-anchor": anchor },
          axisTime(new Date(moment), ms),
        );
      }),
      this.#lines.map((line, index) => svg("path", { class: `line series-${index}`, d: pathOf(line.values, x, y) })),
      at !== null && svg("line", { class: "pointer", x1: x(at), x2: x(at), y1: PAD.top, y2: HEIGHT - PAD.bottom }),
    );
    const shown = this.#lines.map((line) => `${line.name} ${this.#reading(line, at)}`);
    this.plot.setAttribute("aria-label", `${this.title}: ${shown.join(", ") || "no data yet"}`);
    fill(
      this.legend,
      this.#lines.map((line, index) => entry(index, line.name, this.#reading(line, at))),
      at !== null && h("li", { class: "dim" }, `at ${local(new Date(at))}`),
    );
  }

  /** The time of the point nearest to the pointer. @param {(at: number) => number} x */
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

/** The time of day, and the day if the axis is long. @param {Date} moment @param {number} ms of the axis */
function axisTime(moment, ms) {
  const time = clock(moment).slice(0, 5);
  return ms > DAY_MS ? `${local(moment, new Date(0)).slice(5, 10)} ${time}` : time;
}

/** @param {number} index @param {string} name @param {string} [reading] */
function entry(index, name, reading) {
  const sample = svg(
    "svg",
    { width: 18, height: 8, "aria-hidden": "true" },
    svg("line", { class: `line series-${index}`, x1: 0, x2: 18, y1: 4, y2: 4 }),
  );
  return h("li", null, sample, h("span", null, name), reading && h("b", null, reading));
}

/**
 * @param {[number, number | null][]} values @param {(at: number) => number} x @param {(value: number) => number} y
 */
function pathOf(values, x, y) {
  const pauses = values
    .slice(1)
    .map(([at], index) => at - values[index][0])
    .sort((a, b) => a - b);
  const usual = pauses[Math.floor(pauses.length / 2)] ?? 0;
  let path = "";
  let drawing = false;
  let last = 0;
  for (const [at, value] of values) {
    if (value === null) drawing = false;
    else {
      const continues = drawing && at - last <= GAP_FACTOR * usual;
      path += `${continues ? "L" : "M"}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
      if (!continues) path += "h0.01"; // a single point is drawn as a dot
      drawing = true;
    }
    last = at;
  }
  return path;
}
