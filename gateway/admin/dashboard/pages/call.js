// @ts-check
// The detail of one call: its waterfall and its facts.

import { attemptsMs, promptTokens } from "../callstats.js";
import { h } from "../dom.js";
import { counted, duration, NOTHING, share, whole } from "../format.js";
import { waterfall } from "../waterfall.js";
import { copied, empty, time } from "../widgets.js";
import { costOf } from "./call_rows.js";

const PAUSE_MS_MIN = 1; // shorter pauses are not mentioned

/** @typedef {import("../callstats.js").Call} Call */

/**
 * @param {Call | null} call null if it is not among the stored calls
 * @param {{ opened: string, sought: boolean, policy: any, close: () => void }} location
 */
export function callDetail(call, { opened, sought, policy, close }) {
  const head = h(
    "div",
    { class: "bar" },
    h("h2", null, "Call ", copied(opened)),
    h("span", { class: "grow" }),
    h("button", { type: "button", class: "quiet", onclick: close }, "Close"),
  );
  if (!call && !sought) return [head, h("p", { class: "dim" }, "Searching …")];
  if (!call) {
    return [
      head,
      empty(
        "This call is not among the last calls",
        "If it is older, `warmpath usage export` has its receipt. Each gateway lists its own calls only.",
      ),
    ];
  }
  return [
    head,
    h("p", { class: "summary" }, summary(call)),
    waterfall(call),
    h(
      "dl",
      { class: "facts" },
      facts(call, policy?.trace_url ?? null).map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
    ),
  ];
}

/** A sentence on where the time went. @param {Call} call */
function summary(call) {
  const parts = [`${duration(call.duration_ms)} total`];
  if (call.queued_ms) parts.push(`${duration(call.queued_ms)} queued`);
  const chat = call.phases.find((phase) => phase.name === "chat");
  if (chat) {
    const upstream = attemptsMs(call.attempts, chat.end_ms);
    parts.push(`${duration(upstream)} upstream`);
    const between = chat.end_ms - chat.start_ms - upstream;
    if (call.attempts.length > 1 && between > PAUSE_MS_MIN) parts.push(`${duration(between)} between attempts`);
  }
  parts.push(`${duration(call.own_ms)} in the gateway`);
  const end =
    call.result === "answered"
      ? ""
      : ` Ended with HTTP ${call.status}${call.error_code ? ` (${call.error_code})` : ""}.`;
  return `${parts.join(", ")}.${end}`;
}

/** @param {Call} call @param {string | null} traceUrl @returns {[string, import("../dom.js").Child][]} */
function facts(call, traceUrl) {
  const used = call.usage && promptTokens(call.usage) + call.usage.output > 0 ? call.usage : null;
  const found = /** @type {[string, import("../dom.js").Child][]} */ ([
    ["Start", time(call.time)],
    ["Request", [`${call.model ?? NOTHING}, `, h("code", null, call.path)]],
    ["Tenant, key", `${call.tenant ?? NOTHING}, ${call.key_id ?? NOTHING}`],
    ["Class", call.class ?? NOTHING],
    [
      "Outcome",
      [
        `HTTP ${call.status}`,
        call.outcome && `, ${call.outcome}`,
        call.error_code && `, ${call.error_code}`,
        call.finish_reasons.length > 0 && `, finish ${call.finish_reasons.join(", ")}`,
      ],
    ],
    ["Response cache", call.cache],
    ["Deployment", call.deployment ?? NOTHING],
    ["Route reason", call.route_reason ?? NOTHING],
    ["First token", call.ttft_ms === null ? NOTHING : `after ${duration(call.ttft_ms)}`],
    ["Tokens", used ? tokens(used) : "none"],
    [
      "Cached tokens",
      used
        ? `${whole(call.predicted_cached_tokens)} predicted, ${whole(used.cache_read)} reported (${cachedShare(used)})`
        : NOTHING,
    ],
    ["Cost", costOf(call)],
    ["Receipt", call.event_id ? copied(call.event_id) : "none: not sent to a deployment"],
    ["Trace", [copied(call.trace_id), traceLink(call.trace_id, traceUrl)]],
    ["Worker", whole(call.worker)],
  ]);
  return found;
}

/** @param {import("../callstats.js").Usage} usage */
function cachedShare(usage) {
  return `${share(usage.cache_read, promptTokens(usage))} of the prompt`;
}

/** @param {import("../callstats.js").Usage} usage */
function tokens(usage) {
  const written = usage.cache_write ? `, ${whole(usage.cache_write)} written to the cache` : "";
  const parts = `${whole(usage.input_uncached)} computed, ${whole(usage.cache_read)} cached${written}`;
  const read = `${counted(promptTokens(usage), "prompt token")} (${parts})`;
  return `${read}, ${whole(usage.output)} out${usage.reasoning ? `, ${whole(usage.reasoning)} of them reasoning` : ""}`;
}

/**
 * A link to the trace. Only http and https URLs are linked, whatever the setting contains.
 * @param {string} traceId @param {string | null} template
 */
function traceLink(traceId, template) {
  if (!template || !/^https?:\/\//i.test(template)) return null;
  const href = template.replace("{trace_id}", encodeURIComponent(traceId));
  return [" ", h("a", { href, target: "_blank", rel: "noopener noreferrer" }, "Open trace")];
}
