// @ts-check
// A row of the table of calls.

import { outcomeOf, promptTokens } from "../callstats.js";
import { h } from "../dom.js";
import { duration, NOTHING, share, whole } from "../format.js";
import { name, number, state, time } from "../widgets.js";

/** @typedef {import("../callstats.js").Call} Call @typedef {import("./call_filters.js").Filters} Filters */

export const ENDS = /** @type {Record<string, [import("../widgets.js").Level, string]>} */ ({
  answered: ["good", "answered"],
  refused: ["warn", "rejected"],
  limited: ["warn", "rate-limited"],
  failed: ["bad", "failed"],
  left: ["off", "client disconnected"],
});

/** @type {(string | [string, string])[]} */
export const COLUMNS = [
  "Time",
  "Outcome",
  "Model",
  "Tenant",
  "Key",
  "Class",
  "Deployment",
  ["#Duration", "time from the request's arrival to the end of its reply"],
  ["#First token", "time from the request's arrival"],
  ["#Queue", "time in the queue"],
  ["#Prompt", "tokens"],
  ["#Cached", "share of the prompt's tokens"],
  ["#Output", "tokens"],
];

/** @param {Call} call @param {boolean} isOpened @param {Filters} filters */
export function row(call, isOpened, filters) {
  const [level, label] = ENDS[outcomeOf(call)];
  const reason =
    call.error_code ??
    (call.outcome && call.outcome !== "complete" && call.outcome !== "client_gone" ? call.outcome : "");
  const attempts = call.attempts.length;
  const prompt = call.usage && promptTokens(call.usage);
  const link = linkTo(call.call_id, filters);
  return h(
    "tr",
    {
      class: isOpened ? "opened" : null,
      "aria-current": isOpened ? "true" : null,
      onclick: (/** @type {MouseEvent} */ event) => onRow(event, link),
    },
    h("td", { class: "nowrap" }, h("a", { href: link, "aria-label": `Call ${call.call_id}` }, time(call.time))),
    h("td", null, state(level, `${label} ${call.status}`), reason && h("span", { class: "second" }, reason)),
    h(
      "td",
      null,
      name(call.model),
      call.operation !== "chat/completions" && h("span", { class: "second" }, call.operation ?? call.path),
    ),
    h("td", null, name(call.tenant)),
    h("td", null, name(call.key_id)),
    h("td", null, name(call.class)),
    h("td", null, name(deploymentOf(call)), attempts > 1 && h("span", { class: "second" }, `${attempts} attempts`)),
    number(duration(call.duration_ms)),
    number(duration(call.ttft_ms)),
    number(duration(call.queued_ms)),
    number(whole(prompt)),
    number(call.usage ? share(call.usage.cache_read, prompt) : NOTHING),
    number(whole(call.usage?.output)),
  );
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
function onRow(event, link) {
  const onLink = event.target instanceof Element && event.target.closest("a, button");
  if (!onLink && !getSelection()?.toString()) location.hash = link;
}

/** @param {string} id @param {Filters} filters */
function linkTo(id, filters) {
  const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value)).toString();
  return `#/calls/${encodeURIComponent(id)}${query && `?${query}`}`;
}
