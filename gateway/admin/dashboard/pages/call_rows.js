// @ts-check
// The columns of the table of calls.

import { promptTokens } from "../callstats.js";
import { h } from "../dom.js";
import { duration, money, NOTHING, share, whole } from "../format.js";
import { name, state, time } from "../widgets.js";

/**
 * @typedef {import("../callstats.js").Call} Call
 * @typedef {import("./call_filters.js").Filters} Filters
 * @typedef {import("../data_table.js").Column<Call>} Column
 */

export const ENDS = /** @type {Record<string, [import("../widgets.js").Level, string]>} */ ({
  answered: ["good", "answered"],
  rejected: ["warn", "rejected"],
  limited: ["warn", "rate-limited"],
  failed: ["bad", "failed"],
  disconnected: ["off", "client disconnected"],
});

/** @param {() => Filters} filters those of the page, which a call's link keeps @returns {Column[]} */
export function callColumns(filters) {
  return [
    {
      name: "Time",
      plain: true,
      value: (call) => call.time,
      cell: (call) =>
        h(
          "a",
          { class: "nowrap", href: linkTo(call.call_id, filters()) },
          time(call.time),
          h("span", { class: "hidden" }, ` call ${call.call_id}`),
        ),
    },
    { name: "Outcome", value: (call) => `${ENDS[call.result][1]} ${call.status}`, cell: outcomeCell },
    { name: "Model", value: (call) => call.model, cell: modelCell },
    named("Tenant", (call) => call.tenant),
    named("Key", (call) => call.key_id),
    named("Class", (call) => call.class),
    { name: "Deployment", value: deploymentOf, cell: deploymentCell },
    timed("Duration", "time from the request's arrival to the end of its reply", (call) => call.duration_ms),
    timed("First token", "time from the request's arrival", (call) => call.ttft_ms),
    timed("Queue", "time in the queue", (call) => call.queued_ms),
    numeric("Prompt", "tokens", (call) => call.usage && promptTokens(call.usage)),
    {
      ...numeric("Cached", "share of the prompt's tokens", (call) => call.usage && call.usage.cache_read),
      cell: (call) => (call.usage ? share(call.usage.cache_read, promptTokens(call.usage)) : NOTHING),
    },
    numeric("Output", "tokens", (call) => call.usage && call.usage.output),
    {
      name: "Cost",
      isNumber: true,
      value: (call) => (call.cost === null ? null : Number(call.cost)),
      cell: costOf,
    },
  ];
}

/** What CSV files have besides the table's columns. @type {Column[]} */
export const CSV_COLUMNS = [
  { name: "Call", value: (call) => call.call_id, cell: () => null },
  { name: "Trace", value: (call) => call.trace_id, cell: () => null },
  { name: "Error", value: (call) => call.error_code, cell: () => null },
  { name: "Currency", value: (call) => call.currency, cell: () => null },
];

/** @param {Call} call */
export function costOf(call) {
  if (call.cost !== null) return money(call.cost, call.currency ?? "");
  return call.event_id ? "unpriced" : NOTHING;
}

/** @param {string} title @param {(call: Call) => string | null} value @returns {Column} */
function named(title, value) {
  return { name: title, value, cell: (call) => name(value(call)) };
}

/** @param {string} head @param {string} title @param {(call: Call) => number | null} value @returns {Column} */
function numeric(head, title, value) {
  return { name: head, title, isNumber: true, value, cell: (call) => whole(value(call)) };
}

/** @param {string} head @param {string} title @param {(call: Call) => number | null} value @returns {Column} */
function timed(head, title, value) {
  return { ...numeric(head, title, value), cell: (call) => duration(value(call)) };
}

/** @param {Call} call */
function outcomeCell(call) {
  const [level, label] = ENDS[call.result];
  const other = call.outcome && call.outcome !== "complete" && call.outcome !== "client_gone" ? call.outcome : "";
  const reason = call.error_code ?? other;
  return [state(level, `${label} ${call.status}`), reason && h("span", { class: "second" }, reason)];
}

/** @param {Call} call */
function modelCell(call) {
  const other = call.operation !== "chat/completions" && (call.operation ?? call.path);
  return [name(call.model), other && h("span", { class: "second" }, other)];
}

/** @param {Call} call */
function deploymentCell(call) {
  const attempts = call.attempts.length;
  return [name(deploymentOf(call)), attempts > 1 && h("span", { class: "second" }, `${attempts} attempts`)];
}

/** @param {Call} call */
function deploymentOf(call) {
  if (call.deployment !== null) return call.deployment;
  return call.cache === "hit" || call.cache === "shared" ? `response cache: ${call.cache}` : null;
}

/**
 * Opens the call on a click anywhere in its row, unless text is being selected.
 * @param {MouseEvent} event @param {string} link
 */
export function onRow(event, link) {
  const onLink = event.target instanceof Element && event.target.closest("a, button");
  if (!onLink && !getSelection()?.toString()) location.hash = link;
}

/** @param {string} id @param {Filters} filters */
export function linkTo(id, filters) {
  const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value)).toString();
  return `#/calls/${encodeURIComponent(id)}${query && `?${query}`}`;
}
