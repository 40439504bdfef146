// @ts-check
// The table of the spend page: tokens and cost by tenant, model or key.

import { DataTable } from "../data_table.js";
import { h, update } from "../dom.js";
import { money, moneyPlaces, NOTHING, share, whole } from "../format.js";
import { empty, withCode } from "../widgets.js";

/**
 * @typedef {import("../spend.js").Line} Line
 * @typedef {import("../spend.js").Spend} Spend
 * @typedef {import("./limits.js").Limit} Limit
 * @typedef {import("../data_table.js").Column<Line>} Column
 */

const ROWS_MAX = 200;

export function spendPanel() {
  const title = h("h2", null, "Usage");
  const buttons = h("span");
  /** @type {DataTable<Line>} */
  const table = new DataTable(/** @type {Column[]} */ ([]), {
    label: "Usage and cost",
    key: (line) => line.name,
    rowsMax: ROWS_MAX,
  });
  const notes = h("div", null, h("p", { class: "dim" }, "Reading the ledger …"));
  const head = h("div", { class: "bar" }, title, h("span", { class: "grow" }), buttons);
  return {
    element: h("section", { class: "panel" }, head, table.element, notes),
    /** @param {Spend} spend @param {string} group @param {number} days @param {Map<string, Limit>} budgets by tenant */
    show(spend, group, days, budgets) {
      const columns = columnsOf(spend, group, budgets);
      table.setColumns(columns);
      table.show(spend.lines, spend.lines.length > 1 && sumRow(columns, spend));
      update(title, `By ${group}`);
      update(buttons, table.csvButton(`spend-by-${group}-${days}-days`));
      update(notes, notesOf(spend));
    },
  };
}

/** @param {Spend} spend */
function notesOf({ lines, currencies }) {
  if (!lines.length) return empty("No usage in this period", "Calls appear here once they have a receipt.");
  return [
    lines.length > ROWS_MAX &&
      h(
        "p",
        { class: "dim" },
        withCode(`The first ${ROWS_MAX} of ${whole(lines.length)} rows. \`warmpath usage\` prints all of them.`),
      ),
    !currencies.length &&
      h("p", { class: "dim" }, withCode("These calls are unpriced. Set a `price` for the deployments in the policy.")),
  ];
}

/** @param {Spend} spend @param {string} group @param {Map<string, Limit>} budgets @returns {Column[]} */
function columnsOf({ lines, currencies }, group, budgets) {
  const numeric = (/** @type {string} */ name, /** @type {(line: Line) => number} */ value) => ({
    name,
    isNumber: true,
    value,
    cell: (/** @type {Line} */ line) => whole(value(line)),
  });
  const costs = currencies.flatMap((currency) => {
    const cost = (/** @type {Line} */ line) => line.cost.get(currency);
    const each = (/** @type {Line} */ line) =>
      cost(line) && line.requests ? Number(cost(line)) / line.requests : null;
    const places = moneyPlaces(Math.max(...lines.map((line) => cost(line) ?? 0)));
    const unit = currency.toUpperCase();
    return [
      {
        name: `Cost in ${unit}`,
        isNumber: true,
        value: cost,
        cell: (/** @type {Line} */ line) => money(cost(line), currency, places),
      },
      {
        name: `${unit} per request`,
        isNumber: true,
        value: each,
        cell: (/** @type {Line} */ line) => money(each(line)),
      },
    ];
  });
  const left = {
    name: "Budget left",
    isNumber: true,
    value: (/** @type {Line} */ line) => (budgets.has(line.name) ? Number(budgets.get(line.name)?.left) : null),
    cell: (/** @type {Line} */ line) => budgetText(budgets.get(line.name)),
  };
  return [
    { name: group[0].toUpperCase() + group.slice(1), value: (line) => line.name, cell: (line) => line.name },
    numeric("Requests", (line) => line.requests),
    numeric("Prompt tokens", (line) => line.input),
    {
      ...numeric("Cached", (line) => (line.input ? line.cached / line.input : 0)),
      cell: (line) => share(line.cached, line.input),
    },
    numeric("Output tokens", (line) => line.output),
    ...costs,
    ...(group === "tenant" && budgets.size ? [left] : []),
  ];
}

/** @param {Limit | undefined} limit */
function budgetText(limit) {
  return limit ? `${money(limit.left)} of ${money(limit.amount)}` : NOTHING;
}

/** @param {Column[]} columns @param {Spend} spend */
function sumRow(columns, { lines, currencies }) {
  const sum = (/** @type {(line: Line) => number} */ of) => lines.reduce((all, line) => all + of(line), 0);
  /** @type {Line} */
  const all = {
    name: "total",
    requests: sum((line) => line.requests),
    input: sum((line) => line.input),
    cached: sum((line) => line.cached),
    output: sum((line) => line.output),
    cost: new Map(currencies.map((currency) => [currency, sum((line) => line.cost.get(currency) ?? 0)])),
    costByDay: new Map(),
    tokensByDay: [],
  };
  const [first, ...others] = columns;
  return h(
    "tr",
    null,
    h("th", { scope: "row" }, first.cell(all)),
    others.map((column) => h("td", { class: column.isNumber ? "number" : null }, column.cell(all))),
  );
}
