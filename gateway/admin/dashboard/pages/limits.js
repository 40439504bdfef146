// @ts-check
// The limits panel: what is left of each limit, by tenant.

import { meter } from "../charts.js";
import { h, update } from "../dom.js";
import { counted, money, NOTHING, period, whole } from "../format.js";
import { Poll } from "../poll.js";
import { empty, trouble } from "../widgets.js";

const EVERY_MS = 10_000;
const TENANTS_MAX = 20; // loaded one after the other at each poll
const LIMITS_MAX = 12; // shown per tenant, its keys included

export const LIMIT_LABELS = /** @type {Record<string, string>} */ ({
  requests: "requests",
  tokens: "tokens",
  input_tokens: "prompt tokens",
  output_tokens: "output tokens",
  concurrency: "concurrent calls",
});

/**
 * @typedef {{
 *   scope: string, limit: string, amount: number | string, left: number | string,
 *   period?: string, period_seconds?: number,
 * }} Limit  money as text
 */

/**
 * @param {import("../api.js").Api} api @param {import("../poll.js").Poll<any>} policy
 * @param {() => string} currency the currency of all prices; empty if it is unknown
 */
export function limitsPanel(api, policy, currency) {
  const source = new Poll(load, EVERY_MS);
  const element = h("section", { class: "panel" });

  function limited() {
    /** @type {{ name: string, has_limits: boolean }[]} */
    const tenants = policy.value?.tenants ?? [];
    return tenants.filter((tenant) => tenant.has_limits).map((tenant) => tenant.name);
  }

  /** @param {AbortSignal} signal @returns {Promise<{ tenant: string, limits: Limit[] }[]>} */
  async function load(signal) {
    const found = [];
    for (const name of limited().slice(0, TENANTS_MAX)) {
      found.push(await api.get(`/admin/limits/${encodeURIComponent(name)}`, signal));
    }
    return found;
  }

  function draw() {
    const names = limited();
    update(
      element,
      h("h2", null, "Limits"),
      trouble(source, "the limits"),
      policy.value &&
        !names.length &&
        empty("No tenant has limits", "Set `limits` in the policy, or create keys with limits."),
      h(
        "div",
        { class: "limits" },
        (source.value ?? []).map(({ tenant, limits }) => group(tenant, limits, currency())),
      ),
      names.length > TENANTS_MAX &&
        h("p", { class: "dim" }, `The first ${TENANTS_MAX} of ${names.length} tenants with limits.`),
    );
  }

  return {
    element,
    draw,
    /** What is left of the tightest budget of each tenant, as far as it was loaded. @returns {Map<string, Limit>} */
    budgets() {
      const found = (source.value ?? []).flatMap(({ tenant, limits }) => {
        const own = limits.filter((limit) => limit.limit === "budget" && isTenants(limit, tenant));
        const [least] = own.sort((a, b) => Number(a.left) - Number(b.left));
        return least ? [/** @type {[string, Limit]} */ ([tenant, least])] : [];
      });
      return new Map(found);
    },
    /** Begins to load. @param {() => void} onChange */
    open(onChange) {
      let known = "";
      const ends = [
        source.subscribe(() => {
          draw();
          onChange();
        }),
        policy.subscribe(() => {
          const names = JSON.stringify(limited());
          if (names !== known) source.change(load);
          known = names;
          draw();
        }),
      ];
      return () => ends.forEach((end) => end());
    },
  };
}

/**
 * The limits of one tenant, those with the smallest share left first.
 * @param {string} tenant @param {Limit[]} limits @param {string} currency
 */
function group(tenant, limits, currency) {
  const leftShare = (/** @type {Limit} */ { left, amount }) => (Number(amount) > 0 ? Number(left) / Number(amount) : 0);
  const sorted = [...limits].sort((a, b) => leftShare(a) - leftShare(b));
  const more = sorted.length - LIMITS_MAX;
  return h(
    "article",
    null,
    h("h3", null, tenant),
    h(
      "ul",
      null,
      sorted.slice(0, LIMITS_MAX).map((limit) => item(limit, tenant, currency)),
    ),
    more > 0 && h("p", { class: "dim" }, `and ${counted(more, "limit")} with a larger share left`),
  );
}

/** @param {Limit} limit @param {string} tenant @param {string} currency */
function item(limit, tenant, currency) {
  const [all, left] = [Number(limit.amount), Number(limit.left)];
  const isMoney = limit.limit === "budget";
  const shown = (/** @type {number} */ amount) => (isMoney ? money(amount) : whole(amount));
  const what = isMoney ? currency || "money" : (LIMIT_LABELS[limit.limit] ?? limit.limit);
  const per = limit.period_seconds ? ` per ${period(limit.period_seconds)}` : limit.period ? ` in ${limit.period}` : "";
  const scope = isTenants(limit, tenant) ? "" : limit.scope;
  const text = `${Number.isFinite(left) ? shown(left) : NOTHING} of ${shown(all)} ${what} left${per}`;
  return h(
    "li",
    null,
    h("span", null, text, scope && h("span", { class: "second" }, scope)),
    meter(all - left, all, text),
  );
}

/** True for a limit of the whole tenant, not of a key or a part of its calls. @param {Limit} limit @param {string} tenant */
function isTenants({ scope }, tenant) {
  return scope === tenant || scope === `tenant ${tenant}`;
}
