// @ts-check
// The filters of the list of calls.

import { isDeploymentFault } from "../callstats.js";
import { h, update } from "../dom.js";
import { select } from "../widgets.js";
import { ENDS } from "./call_rows.js";

export const LIMITS = [100, 200, 500];

/** @typedef {import("../callstats.js").Call} Call */

/** The names of the filters, which are also in the address. An empty value matches all calls. */
export const FILTERS = /** @type {const} */ (["show", "class", "tenant", "model", "server", "text"]);
/** @typedef {Record<(typeof FILTERS)[number], string>} Filters */

/** True if a call matches the filters. @param {Call} call @param {Filters} filters */
export function matches(call, filters) {
  const end = call.result;
  const succeeded = end === "answered" && !call.attempts.some((each) => isDeploymentFault(each.outcome));
  if (filters.show === "problems" ? succeeded : filters.show && filters.show !== end) return false;
  const named = /** @type {const} */ (["class", "tenant", "model"]);
  if (named.some((field) => filters[field] && filters[field] !== call[field])) return false;
  const deployments = [call.deployment, ...call.attempts.map((each) => each.deployment)];
  if (filters.server && !deployments.includes(filters.server)) return false;
  if (!filters.text) return true;
  const { call_id, trace_id, event_id, key_id, tenant, model, error_code, path } = call;
  const texts = [call_id, trace_id, event_id, key_id, tenant, model, error_code, path, ...deployments];
  return texts.some((each) => each?.toLowerCase().includes(filters.text.toLowerCase()));
}

/**
 * @param {Element} place @param {Call[]} calls @param {string[]} classes @param {Filters} filters @param {number} limit
 * @param {(change: Partial<Filters>) => void} onChange @param {(limit: number) => void} onLimit
 */
export function drawFilters(place, calls, classes, filters, limit, onChange, onLimit) {
  if (!place.firstChild) {
    const box = h("input", {
      type: "search",
      value: filters.text,
      placeholder: "id, key, error …",
      oninput: () => onChange({ text: box.value }),
    });
    place.append(h("span", { class: "selects" }), h("label", { class: "field" }, h("span", null, "Find"), box));
  }
  const choice = (
    /** @type {string} */ label,
    /** @type {keyof Filters} */ field,
    /** @type {(string | null)[]} */ found,
  ) => {
    const names = [...new Set([...found, filters[field]])]
      .map((each) => each ?? "")
      .filter(Boolean)
      .sort();
    return select(label, [["", "all"], ...names], filters[field], (value) => onChange({ [field]: value }));
  };
  const ends = Object.entries(ENDS).map(([end, [, label]]) => /** @type {[string, string]} */ ([end, label]));
  const limits = LIMITS.map((each) => /** @type {[string, string]} */ ([String(each), `last ${each}`]));
  const deployments = calls.flatMap((call) => call.attempts.map((each) => each.deployment));
  update(
    /** @type {Element} */ (place.firstElementChild),
    select("Outcome", [["", "all"], ["problems", "with problems"], ...ends], filters.show, (show) =>
      onChange({ show }),
    ),
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
    choice("Deployment", "server", deployments),
    select("Show", limits, String(limit), (count) => onLimit(Number(count))),
  );
}
