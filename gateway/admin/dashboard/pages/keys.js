// @ts-check
// The keys page: lists keys with their last use and spend; creates, rotates and revokes keys in the storage.

import { withQuery } from "../api.js";
import { DataTable } from "../data_table.js";
import { h, setText, update } from "../dom.js";
import { counted, money, NOTHING, period, whole } from "../format.js";
import { Poll } from "../poll.js";
import { empty, select, state, time, trouble } from "../widgets.js";
import { createDialog, revokeDialog, rotateDialog } from "./key_dialogs.js";
import { LIMIT_LABELS } from "./limits.js";

/**
 * @typedef {{
 *   id: string, tenant: string, state: "active" | "expired" | "revoked" | "in the policy", created: string | null,
 *   expires: string | null, models: string[] | null, classes: string[] | null, limits: any,
 *   old_secret_expires: string | null, last_used: string | null,
 * }} Key
 * @typedef {Map<string, [currency: string, amount: number]>} Spent  by key id, in the currency of the largest amount
 */

const ROWS_MAX = 500;
const SPEND_DAYS = 30;
const DAY_SECONDS = 86_400;
const SPEND_MS = 60_000; // each poll reads the ledger
const LEVELS = /** @type {Record<string, import("../widgets.js").Level>} */ ({
  active: "good",
  expired: "warn",
  revoked: "off",
  "in the policy": "good",
});
const STATES = /** @type {[string, string][]} */ ([
  ["", "all"],
  ["active", "active"],
  ["expired", "expired"],
  ["revoked", "revoked"],
  ["in the policy", "in the policy"],
]);

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function keysPage({ api, sources, go }) {
  let filters = { tenant: "", state: "" };
  const source = sources.keys;
  const refresh = () => source.refresh();
  const spend = new Poll((signal) => loadSpend(api, signal), SPEND_MS);
  /** @type {DataTable<Key>} */
  const table = new DataTable(
    keyColumns(
      () => spend.value ?? new Map(),
      (key) => rotateDialog(api, key, refresh),
      (key) => revokeDialog(api, key, refresh),
    ),
    { label: "Keys", key: (key) => key.id, rowsMax: ROWS_MAX },
  );

  const choices = h("span", { class: "selects" });
  const counts = h("span", { class: "dim", role: "status" });
  const make = h(
    "button",
    { type: "button", onclick: () => createDialog(api, sources.policy.value, refresh) },
    "New key",
  );
  const troubles = h("div");
  const none = h("div");
  const element = h(
    "div",
    { class: "page" },
    h(
      "div",
      { class: "bar" },
      h("h1", null, "Keys"),
      counts,
      h("span", { class: "grow" }),
      choices,
      table.csvButton("keys"),
      make,
    ),
    troubles,
    h(
      "section",
      { class: "panel" },
      table.element,
      none,
      h(
        "p",
        { class: "dim" },
        `Last uses are up to a minute old. Spend is that of the last ${SPEND_DAYS} days, from this gateway's receipts. `,
        "Keys in the policy are changed in its file.",
      ),
    ),
  );

  function draw() {
    update(troubles, trouble(source, "the keys"), trouble(spend, "the ledger"));
    const keys = allKeys(source.value);
    const tenants = [...new Set([...keys.map((key) => key.tenant), filters.tenant])].filter(Boolean).sort();
    update(
      choices,
      select("Tenant", [["", "all"], ...tenants], filters.tenant, (tenant) => go(["keys"], { ...filters, tenant })),
      select("State", STATES, filters.state, (value) => go(["keys"], { ...filters, state: value })),
    );
    const shown = keys.filter(
      (key) => (!filters.tenant || key.tenant === filters.tenant) && (!filters.state || key.state === filters.state),
    );
    shown.sort((a, b) => (b.created ?? "").localeCompare(a.created ?? "") || a.id.localeCompare(b.id));
    const more = shown.length > ROWS_MAX ? ` (newest ${ROWS_MAX} shown)` : "";
    if (source.value) setText(counts, `${counted(shown.length, "key")}${more}`);
    table.show(shown);
    const message = keys.length
      ? empty("No matching keys", "Remove a filter.")
      : empty("No keys", "Create one with New key or with `warmpath keys create`.");
    update(none, source.value && !shown.length && message);
  }

  const ends = [source, spend, sources.policy].map((each) => each.subscribe(draw));
  return {
    element,
    show({ query }) {
      filters = { tenant: query.get("tenant") ?? "", state: query.get("state") ?? "" };
      draw();
    },
    close: () => ends.forEach((end) => end()),
  };
}

/** The keys in the storage and in the policy. @param {any} page @returns {Key[]} */
function allKeys(page) {
  if (!page) return [];
  const inPolicy = page.policy_keys.map((/** @type {any} */ key) => ({
    ...key,
    state: "in the policy",
    created: null,
    expires: null,
    models: null,
    classes: null,
    limits: null,
    old_secret_expires: null,
  }));
  return [...page.data, ...inPolicy];
}

/** @param {import("../api.js").Api} api @param {AbortSignal} signal @returns {Promise<Spent>} */
async function loadSpend(api, signal) {
  const now = Math.floor(Date.now() / 1000);
  const start = now - (now % DAY_SECONDS) - (SPEND_DAYS - 1) * DAY_SECONDS;
  const query = { start_time: start, end_time: now + 1, bucket_width: "1d", limit: SPEND_DAYS, group_by: "api_key_id" };
  const page = await api.get(withQuery("/v1/organization/costs", query), signal);
  /** @type {Map<string, Map<string, number>>} */
  const sums = new Map();
  for (const { api_key_id: id, amount } of page.data.flatMap((/** @type {any} */ bucket) => bucket.results)) {
    const of = sums.get(id) ?? new Map();
    sums.set(id, of.set(amount.currency, (of.get(amount.currency) ?? 0) + amount.value));
  }
  return new Map([...sums].map(([id, of]) => [id, [...of].sort(([, a], [, b]) => b - a)[0]]));
}

/**
 * @param {() => Spent} spent @param {(key: Key) => void} rotate @param {(key: Key) => void} revoke
 * @returns {import("../data_table.js").Column<Key>[]}
 */
function keyColumns(spent, rotate, revoke) {
  const fixed = (/** @type {Key} */ key) => key.state === "in the policy";
  return [
    { name: "Key", value: (key) => key.id, cell: (key) => h("code", null, key.id) },
    { name: "Tenant", value: (key) => key.tenant, cell: (key) => key.tenant },
    {
      name: "State",
      value: (key) => key.state,
      cell: (key) => [
        state(LEVELS[key.state] ?? "off", key.state),
        key.old_secret_expires && h("span", { class: "second" }, "old secret until ", time(key.old_secret_expires)),
      ],
    },
    {
      name: "Last used",
      value: (key) => key.last_used,
      cell: (key) => (key.last_used ? moment(key.last_used) : "never"),
    },
    {
      name: "Spend",
      isNumber: true,
      value: (key) => spent().get(key.id)?.[1],
      cell: (key) => {
        const found = spent().get(key.id);
        return found ? money(found[1], found[0]) : NOTHING;
      },
    },
    { name: "Created", value: (key) => key.created, cell: (key) => (key.created ? moment(key.created) : NOTHING) },
    {
      name: "Expires",
      value: (key) => key.expires,
      cell: (key) => (key.expires ? moment(key.expires) : fixed(key) ? NOTHING : "never"),
    },
    { name: "Rights", value: rightsText, cell: rightsText },
    { name: "Key limits", value: (key) => limitsText(key.limits), cell: (key) => limitsText(key.limits) },
    {
      name: "Actions",
      cell: (key) => (key.state === "revoked" || fixed(key) ? NOTHING : actions(key, rotate, revoke)),
    },
  ];
}

/** @param {string} text */
function moment(text) {
  return h("span", { class: "nowrap" }, time(text));
}

/** The models and classes that a key may use. @param {Key} key */
function rightsText({ state, models, classes }) {
  if (state === "in the policy") return NOTHING;
  if (!models && !classes) return "all";
  return [models && `models ${models.join(", ")}`, classes && `classes ${classes.join(", ")}`]
    .filter(Boolean)
    .join("; ");
}

/** @param {Key} key @param {(key: Key) => void} rotate @param {(key: Key) => void} revoke */
function actions(key, rotate, revoke) {
  const button = (/** @type {string} */ verb, /** @type {string} */ kind, /** @type {(key: Key) => void} */ act) =>
    h(
      "button",
      { type: "button", class: `quiet small ${kind}`, onclick: () => act(key), "aria-label": `${verb} key ${key.id}` },
      verb,
    );
  return h("span", { class: "nowrap" }, button("Rotate", "", rotate), " ", button("Revoke", "danger", revoke));
}

/** @param {any} limits */
export function limitsText(limits) {
  if (!limits) return NOTHING;
  const entries = Object.entries(limits).filter(([, value]) => value !== null && !Array.isArray(value));
  return entries
    .map(([name, value]) => limitText(name, value))
    .filter(Boolean)
    .join(", ");
}

/** @param {string} name @param {any} value */
function limitText(name, value) {
  if (name === "budget")
    return value.per === "total" ? `budget ${value.amount}` : `budget ${value.amount} per ${value.per}`;
  if (!(name in LIMIT_LABELS)) return "";
  return value.period
    ? `${whole(value.amount)} ${LIMIT_LABELS[name]} per ${period(value.period)}`
    : `${whole(value)} ${LIMIT_LABELS[name]}`;
}
