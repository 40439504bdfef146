// @ts-check
// Which of the calls are shown.

import { endOf, speaksAgainst } from "../callstats.js";
import { h, update } from "../dom.js";
import { select } from "../widgets.js";
import { ENDS } from "./call_rows.js";

export const LIMITS = [100, 200, 500];

/** @typedef {import("../callstats.js").Call} Call */

/** What is looked for; empty: anything. */
export const FILTERS = /** @type {const} */ (["show", "class", "tenant", "model", "server", "text"]);
/** @typedef {Record<(typeof FILTERS)[number], string>} Wanted */

/** @param {Call} call @param {Wanted} wanted */
export function fits(call, wanted) {
  const end = endOf(call);
  const wellEnded = end === "answered" && !call.attempts.some((each) => speaksAgainst(each.outcome));
  if (wanted.show === "problems" ? wellEnded : wanted.show && wanted.show !== end) return false;
  const named = /** @type {const} */ (["class", "tenant", "model"]);
  if (named.some((field) => wanted[field] && wanted[field] !== call[field])) return false;
  const servers = [call.deployment, ...call.attempts.map((each) => each.deployment)];
  if (wanted.server && !servers.includes(wanted.server)) return false;
  if (!wanted.text) return true;
  const { call_id, trace_id, event_id, key_id, tenant, model, error_code, path } = call;
  const said = [call_id, trace_id, event_id, key_id, tenant, model, error_code, path, ...servers];
  return said.some((each) => each?.toLowerCase().includes(wanted.text.toLowerCase()));
}

/**
 * @param {Element} place @param {Call[]} calls @param {string[]} classes @param {Wanted} wanted @param {number} limit
 * @param {(change: Partial<Wanted>) => void} want @param {(limit: number) => void} onLimit
 */
export function drawFilters(place, calls, classes, wanted, limit, want, onLimit) {
  if (!place.firstChild) {
    const box = h("input", {
      type: "search",
      value: wanted.text,
      placeholder: "id, key, error …",
      oninput: () => want({ text: box.value }),
    });
    place.append(h("span", { class: "selects" }), h("label", { class: "field" }, h("span", null, "Find"), box));
  }
  const choice = (
    /** @type {string} */ label,
    /** @type {keyof Wanted} */ field,
    /** @type {(string | null)[]} */ found,
  ) => {
    const names = [...new Set([...found, wanted[field]])]
      .map((each) => each ?? "")
      .filter(Boolean)
      .sort();
    return select(label, [["", "all"], ...names], wanted[field], (value) => want({ [field]: value }));
  };
  const ends = Object.entries(ENDS).map(([end, [, words]]) => /** @type {[string, string]} */ ([end, words]));
  const limits = LIMITS.map((each) => /** @type {[string, string]} */ ([String(each), `last ${each}`]));
  const servers = calls.flatMap((call) => call.attempts.map((each) => each.deployment));
  update(
    /** @type {Element} */ (place.firstElementChild),
    select("Ended", [["", "all"], ["problems", "with problems"], ...ends], wanted.show, (show) => want({ show })),
    choice("Class", "class", classes),
    choice(
      "Tenant",
      "tenant",
      calls.map((call) => call.tenant),
    ),
    choice(
      "Model",
      "model",
      calls.map((call) => call.model),
    ),
    choice("Server", "server", servers),
    select("Show", limits, String(limit), (count) => onLimit(Number(count))),
  );
}
