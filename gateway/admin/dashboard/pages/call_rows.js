// @ts-check
// A call in a row of the table of calls.

import { endOf, promptTokens } from "../callstats.js";
import { h } from "../dom.js";
import { duration, NOTHING, share, whole } from "../format.js";
import { name, number, state, time } from "../widgets.js";

/** @typedef {import("../callstats.js").Call} Call @typedef {import("./call_filters.js").Wanted} Wanted */

export const ENDS = /** @type {Record<string, [import("../widgets.js").Level, string]>} */ ({
  answered: ["good", "answered"],
  refused: ["warn", "refused"],
  limited: ["warn", "limited"],
  failed: ["bad", "failed"],
  left: ["off", "client left"],
});

/** @type {(string | [string, string])[]} */
export const COLUMNS = [
  "Time",
  "Ended",
  "Model",
  "Tenant",
  "Key",
  "Class",
  "Server",
  ["#Duration", "from the request's arrival to the end of its reply"],
  ["#First token", "from the request's arrival"],
  ["#Queue", "waited for its turn"],
  ["#Prompt", "tokens"],
  ["#Cached", "share of the prompt's tokens"],
  ["#Output", "tokens"],
];

/** @param {Call} call @param {boolean} isOpened @param {Wanted} wanted */
export function row(call, isOpened, wanted) {
  const [level, words] = ENDS[endOf(call)];
  const why =
    call.error_code ??
    (call.outcome && call.outcome !== "complete" && call.outcome !== "client_gone" ? call.outcome : "");
  const tried = call.attempts.length;
  const prompt = call.usage && promptTokens(call.usage);
  const link = linkTo(call.call_id, wanted);
  return h(
    "tr",
    {
      class: isOpened ? "opened" : null,
      "aria-current": isOpened ? "true" : null,
      onclick: (/** @type {MouseEvent} */ event) => onRow(event, link),
    },
    h("td", { class: "nowrap" }, h("a", { href: link, "aria-label": `Call ${call.call_id}` }, time(call.time))),
    h("td", null, state(level, `${words} ${call.status}`), why && h("span", { class: "second" }, why)),
    h(
      "td",
      null,
      name(call.model),
      call.operation !== "chat/completions" && h("span", { class: "second" }, call.operation ?? call.path),
    ),
    h("td", null, name(call.tenant)),
    h("td", null, name(call.key_id)),
    h("td", null, name(call.class)),
    h("td", null, name(serverOf(call)), tried > 1 && h("span", { class: "second" }, `${tried} tried`)),
    number(duration(call.duration_ms)),
    number(duration(call.ttft_ms)),
    number(duration(call.queued_ms)),
    number(whole(prompt)),
    number(call.usage ? share(call.usage.cache_read, prompt) : NOTHING),
    number(whole(call.usage?.output)),
  );
}

/** @param {Call} call */
function serverOf(call) {
  if (call.deployment !== null) return call.deployment;
  return call.cache === "hit" || call.cache === "shared" ? `response cache: ${call.cache}` : null;
}

/**
 * A click anywhere in a row opens its call, unless text is being selected.
 * @param {MouseEvent} event @param {string} link
 */
function onRow(event, link) {
  const onLink = event.target instanceof Element && event.target.closest("a, button");
  if (!onLink && !getSelection()?.toString()) location.hash = link;
}

/** @param {string} id @param {Wanted} wanted */
function linkTo(id, wanted) {
  const query = new URLSearchParams(Object.entries(wanted).filter(([, value]) => value)).toString();
  return `#/calls/${encodeURIComponent(id)}${query && `?${query}`}`;
}
