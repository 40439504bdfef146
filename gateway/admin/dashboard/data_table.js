// @ts-check
// A table whose rows can be sorted by any column and downloaded as CSV.

import { downloadCsv } from "./csv.js";
import { fill, h, keyed } from "./dom.js";

/**
 * @template T
 * @typedef {{
 *   name: string, title?: string, isNumber?: boolean,
 *   value?: (item: T) => string | number | null | undefined, cell: (item: T) => import("./dom.js").Child,
 *   plain?: boolean,
 * }} Column
 *   `value` is what is sorted and downloaded; a column without it, such as buttons, is neither. `cell` is the content
 *   of the cell. The first column is the header of its row, unless it is `plain`.
 */

/** @template T */
export class DataTable {
  /** @type {Column<T>[]} */
  #columns;
  /** @type {(item: T) => string} */
  #key;
  /** @type {(item: T) => Record<string, any>} */
  #attributes;
  /** @type {number} */
  #rowsMax;
  /** @type {T[]} */
  #items = [];
  /** Index of the column that sorts, and its direction; -1: in the given order. */
  #sorted = -1;
  #down = false;

  /**
   * @param {Column<T>[]} columns
   * @param {{
   *   label: string, key: (item: T) => string, attributes?: (item: T) => Record<string, any>, rowsMax?: number,
   * }} options  `label` for screen readers; `attributes` of a row
   */
  constructor(columns, { label, key, attributes = () => ({}), rowsMax = Infinity }) {
    [this.#columns, this.#key, this.#attributes, this.#rowsMax] = [columns, key, attributes, rowsMax];
    this.head = h("tr");
    this.rows = h("tbody");
    this.foot = h("tfoot");
    const all = h("table", { class: "rows", "aria-label": label }, h("thead", null, this.head), this.rows, this.foot);
    this.element = h("div", { class: "scroll" }, all);
    this.#drawHead();
  }

  /** @param {T[]} items @param {import("./dom.js").Child} [sums] the row of sums */
  show(items, sums = null) {
    this.#items = items;
    this.#draw();
    fill(this.foot, sums);
  }

  /** Replaces the columns; the order of rows becomes the given one if the sorting column is gone. @param {Column<T>[]} columns */
  setColumns(columns) {
    const names = (/** @type {Column<T>[]} */ list) => list.map((column) => column.name).join("\n");
    const same = names(columns) === names(this.#columns);
    if (!same) this.#sorted = columns.findIndex((column) => column.name === this.#columns[this.#sorted]?.name);
    this.#columns = columns;
    if (!same) this.#drawHead();
  }

  /**
   * A button that downloads all rows, in the order shown.
   * @param {string} name of the file, without suffix @param {Column<T>[]} [more] columns of the file only
   */
  csvButton(name, more = []) {
    return h(
      "button",
      {
        type: "button",
        class: "quiet small",
        onclick: () => this.#download(name, more),
        "aria-label": `Download ${name} as CSV`,
      },
      "CSV",
    );
  }

  /** @param {string} name @param {Column<T>[]} more */
  #download(name, more) {
    const columns = [...this.#columns, ...more].filter((column) => column.value);
    const cells = (/** @type {T} */ item) => columns.map((column) => column.value?.(item));
    downloadCsv(name, [columns.map((column) => column.name), ...this.#ordered().map(cells)]);
  }

  #ordered() {
    const value = this.#columns[this.#sorted]?.value;
    if (!value) return this.#items;
    const sign = this.#down ? -1 : 1;
    return [...this.#items].sort((a, b) => compared(value(a), value(b), sign));
  }

  #draw() {
    keyed(this.rows, this.#ordered().slice(0, this.#rowsMax), this.#key, (item) =>
      h(
        "tr",
        this.#attributes(item),
        this.#columns.map((column, index) =>
          h(
            index || column.plain ? "td" : "th",
            { class: column.isNumber ? "number" : null, scope: index || column.plain ? null : "row" },
            column.cell(item),
          ),
        ),
      ),
    );
  }

  #drawHead() {
    fill(
      this.head,
      this.#columns.map(({ name, title, isNumber, value }, index) => {
        const sorted = index === this.#sorted;
        const order = sorted ? (this.#down ? "descending" : "ascending") : null;
        const sign = h("span", { class: "order", "aria-hidden": "true" }, sorted ? (this.#down ? "▼" : "▲") : "");
        return h(
          "th",
          { scope: "col", class: isNumber ? "number" : null, title, "aria-sort": order },
          value ? h("button", { type: "button", class: "sort", onclick: () => this.#sort(index) }, name, sign) : name,
        );
      }),
    );
  }

  /** Numbers are sorted from the largest first, text from the first letter. The second click reverses the order.
   * @param {number} index */
  #sort(index) {
    this.#down = index === this.#sorted ? !this.#down : Boolean(this.#columns[index].isNumber);
    this.#sorted = index;
    this.#drawHead();
    /** @type {HTMLElement} */ (this.head.children[index].firstElementChild).focus();
    this.#draw();
  }
}

/**
 * Rows without a value come last in both directions.
 * @param {string | number | null | undefined} a @param {string | number | null | undefined} b @param {number} sign
 */
export function compared(a, b, sign) {
  const [noA, noB] = [a === null || a === undefined || a === "", b === null || b === undefined || b === ""];
  if (noA || noB) return Number(noA) - Number(noB);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  return sign * order;
}
