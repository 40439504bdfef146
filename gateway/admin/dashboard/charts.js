// @ts-check
// Base of the small SVG charts, and the meter.

import { h, svg } from "./dom.js";

export const HEIGHT = 120;
export const PAD = { right: 8, top: 8, bottom: 18 };
const LETTER_PX = 7; // width of a letter in a label of the scale

/** Up to `count` round steps that cover 0 to `max`. @param {number} max @param {number} count */
export function ticks(max, count) {
  if (!(max > 0)) return [0, 1];
  const rough = max / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step =
    [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9)) ?? 10 * power;
  const steps = Math.max(1, Math.ceil(max / step - 1e-9));
  return Array.from({ length: steps + 1 }, (_, index) => Number((index * step).toPrecision(12)));
}

/** A chart that fills its width and is redrawn when the width changes. */
export class Chart {
  /** @param {string} title @param {string} [note] the subject and the unit */
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

  /**
   * Horizontal grid lines with labels at the left. Sets `left` to the width that the labels need.
   * @param {number[]} steps @param {(value: number) => string} unit @param {(value: number) => number} y
   */
  grid(steps, unit, y) {
    const labels = steps.map(unit);
    this.left = 8 + Math.ceil(LETTER_PX * Math.max(...labels.map((label) => label.length)));
    return steps.map((step, index) => [
      svg("line", { class: "grid", x1: this.left, x2: this.width - PAD.right, y1: y(step), y2: y(step) }),
      svg("text", { class: "tick", x: this.left - 6, y: y(step) + 4, "text-anchor": "end" }, labels[index]),
    ]);
  }
}

/**
 * A bar that shows the used share of something.
 * @param {number} used @param {number} all @param {string} text
 * @param {{ neutral?: boolean }} [options]  neutral: a large share is no problem
 */
export function meter(used, all, text, { neutral = false } = {}) {
  const part = all > 0 ? Math.min(Math.max(used / all, 0), 1) : 0;
  const level = neutral || part < 0.7 ? "low" : part < 0.9 ? "middle" : "high";
  const bar = h("span", { class: `meter-bar ${level}` });
  bar.style.width = `${(100 * part).toFixed(1)}%`;
  return h(
    "span",
    {
      class: "meter",
      role: "meter",
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": Math.round(100 * part),
      "aria-valuetext": text,
      "aria-label": text,
    },
    bar,
  );
}
