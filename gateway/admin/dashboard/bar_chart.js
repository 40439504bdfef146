// @ts-check
// A stacked bar chart by day.

import { Chart, HEIGHT, PAD, ticks } from "./charts.js";
import { fill, h, svg } from "./dom.js";

/** @typedef {{ name: string, values: number[] }} Stack  by day */

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
    const every = Math.ceil(60 / wide); // one label for so many days
    fill(
      this.plot,
      grid,
      this.#days.map((day, index) => {
        const x = this.left + index * wide;
        let base = 0;
        const parts = this.#stacks.map((stack, place) => {
          const value = stack.values[index];
          base += value;
          const box = {
            x: x + wide * 0.12,
            y: y(base),
            width: wide * 0.76,
            height: Math.max(0, y(base - value) - y(base)),
          };
          return (
            value > 0 &&
            svg(
              "rect",
              { class: `bar series-${place}`, ...box },
              svg("title", null, `${day} ${stack.name}: ${this.#unit(value)}`),
            )
          );
        });
        const named = index % every === 0;
        return [
          parts,
          named &&
            svg("text", { class: "tick", x: x + wide / 2, y: HEIGHT - 3, "text-anchor": "middle" }, day.slice(5)),
        ];
      }),
    );
    const spoken = this.#days.map((day, index) => `${day} ${this.#unit(sums[index])}`);
    this.plot.setAttribute("aria-label", `${this.title} by day: ${spoken.join(", ")}`);
    fill(
      this.legend,
      this.#stacks.map((stack, index) => swatch(index, stack.name)),
    );
  }
}

/** @param {number} index @param {string} name */
function swatch(index, name) {
  const sample = svg(
    "svg",
    { width: 10, height: 10, "aria-hidden": "true" },
    svg("rect", { class: `bar series-${index}`, width: 10, height: 10 }),
  );
  return h("li", null, sample, h("span", null, name));
}
