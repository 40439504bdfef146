// @ts-check
// A panel with the sums of a time range by model or by latency class.

import { DataTable } from "../data_table.js";
import { h, update } from "../dom.js";
import { duration, money, NOTHING, share, short, whole } from "../format.js";
import { SPANS, sumOf } from "../history.js";
import { empty, name } from "../widgets.js";

/**
 * @typedef {import("../history.js").Point} Point
 * @typedef {{ name: string, point: Point }} Group
 */

/** @param {Group} group */
const requestsOf = ({ point }) => sumOf(point.results);

/** The cost of all calls, in the currency with the largest sum. @param {Point} point */
export function mainCost(point) {
  return Object.entries(point.cost).sort(([, a], [, b]) => b - a)[0] ?? null;
}

/** The columns that models, classes and deployments share.
 * @type {import("../data_table.js").Column<Group>[]} */
export const GROUP_COLUMNS = [
  {
    name: "p50",
    title: "time to first token, median",
    isNumber: true,
    value: ({ point }) => point.ttft_ms.p50,
    cell: ({ point }) => duration(point.ttft_ms.p50),
  },
  {
    name: "p99",
    title: "time to first token, 99th percentile",
    isNumber: true,
    value: ({ point }) => point.ttft_ms.p99,
    cell: ({ point }) => duration(point.ttft_ms.p99),
  },
  {
    name: "Cached",
    title: "share of prompt tokens read from a prefix cache",
    isNumber: true,
    value: ({ point }) => point.hit_rate,
    cell: ({ point }) => share(point.cached_tokens, point.prompt_tokens),
  },
  {
    name: "Output",
    title: "generated tokens",
    isNumber: true,
    value: ({ point }) => point.output_tokens,
    cell: ({ point }) => short(point.output_tokens),
  },
  {
    name: "Cost",
    title: "in the currency with the largest sum",
    isNumber: true,
    value: ({ point }) => mainCost(point)?.[1],
    cell: ({ point }) => costText(mainCost(point), 1),
  },
  {
    name: "Per request",
    title: "cost per request",
    isNumber: true,
    value: (group) => (mainCost(group.point)?.[1] ?? NaN) / requestsOf(group) || null,
    cell: (group) => costText(mainCost(group.point), requestsOf(group)),
  },
];

/** @param {[string, number] | null} cost @param {number} requests */
function costText(cost, requests) {
  return cost && requests ? money(cost[1] / requests, cost[0]) : NOTHING;
}

/** @param {string} title @param {"model" | "class"} by */
export function groupPanel(title, by) {
  /** @type {DataTable<Group>} */
  const table = new DataTable(
    [
      { name: by === "model" ? "Model" : "Class", value: (group) => group.name, cell: (group) => name(group.name) },
      { name: "Requests", isNumber: true, value: requestsOf, cell: (group) => whole(requestsOf(group)) },
      {
        name: "Failed",
        title: "5xx, timeouts, cut streams",
        isNumber: true,
        value: ({ point }) => point.results.failed ?? 0,
        cell: ({ point }) => failedText(point),
      },
      ...GROUP_COLUMNS,
    ],
    { label: title, key: (group) => group.name },
  );
  const note = h("span", { class: "dim" });
  const none = h("div");
  const head = h(
    "div",
    { class: "bar" },
    h("h2", null, title),
    note,
    h("span", { class: "grow" }),
    table.csvButton(by),
  );
  return {
    element: h("section", { class: "panel" }, head, table.element, none),
    /** @param {import("../history.js").History | null} history */
    show(history) {
      const groups = Object.entries(history?.by[by] ?? {}).map(([name, point]) => ({ name, point }));
      table.show(groups);
      update(note, history && rangeText(history));
      update(none, history && !groups.length && empty("No calls in this range", "Calls appear here when they end."));
    },
  };
}

/** @param {import("../history.js").History} history */
export function rangeText(history) {
  return `last ${SPANS.find(([name]) => name === history.span)?.[1].replace(/^1 /, "") ?? history.span}`;
}

/** @param {Point} point */
function failedText(point) {
  const failed = point.results.failed ?? 0;
  return failed ? h("span", { class: "bad" }, `${whole(failed)} (${share(failed, sumOf(point.results))})`) : "0";
}
