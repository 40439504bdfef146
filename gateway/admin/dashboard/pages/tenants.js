// @ts-check
// The tenants page: the hierarchy with spend, limits and keys; creates, disables, enables and deletes stored tenants.

import { withQuery } from "../api.js";
import { DataTable } from "../data_table.js";
import { h, setText, update } from "../dom.js";
import { counted, money, NOTHING } from "../format.js";
import { Poll } from "../poll.js";
import { costsByProject, inHierarchy } from "../tenant_tree.js";
import { empty, state, time, trouble } from "../widgets.js";
import { limitsText } from "./keys.js";
import { newTenantDialog, tenantActions } from "./tenant_dialogs.js";

/**
 * @typedef {{
 *   name: string, parent: string | null, source: "policy" | "storage", disabled: boolean, models: string[] | null,
 *   limits: any,
 * }} Tenant
 * @typedef {import("../tenant_tree.js").Node<Tenant>} Row
 */

const PAGE = 1000;
const TENANTS_MAX = 5000; // loaded at each poll
const ROWS_MAX = 500;
const EVERY_MS = 30_000;
const SPEND_DAYS = 30;
const SPEND_MS = 60_000; // each poll reads the ledger
const DAY_SECONDS = 86_400;
const INDENT = "\u2003"; // for each level of the hierarchy

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function tenantsPage({ api, sources }) {
  const source = new Poll((signal) => loadTenants(api, signal), EVERY_MS);
  const me = new Poll((signal) => api.get("/admin/me", signal), EVERY_MS);
  const spend = new Poll((signal) => loadSpend(api, signal), SPEND_MS);
  const refresh = () => source.refresh();
  const mayChange = () => ["admin", "owner"].includes(me.value?.role);
  const seesMoney = () => me.value?.role !== "viewer";
  /** @type {DataTable<Row>} */
  const table = new DataTable(columns(), { label: "Tenants", key: (row) => row.item.name, rowsMax: ROWS_MAX });
  const counts = h("span", { class: "dim", role: "status" });
  const make = h("span");
  const troubles = h("div");
  const none = h("div");
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", null, "Tenants"), counts, h("span", { class: "grow" }), table.csvButton("tenants"), make),
    troubles,
    h(
      "section",
      { class: "panel" },
      table.element,
      none,
      h(
        "p",
        { class: "dim" },
        `Spend is that of the last ${SPEND_DAYS} days, from this gateway's receipts, with all tenants below. `,
        "Tenants in the policy are changed in its file.",
      ),
    ),
  );

  /** @returns {import("../data_table.js").Column<Row>[]} */
  function columns() {
    return [
      {
        name: "Tenant",
        value: ({ item }) => item.name,
        cell: ({ item, depth }) => h("span", { class: "tree" }, INDENT.repeat(depth), item.name),
      },
      { name: "Parent", value: ({ item }) => item.parent, cell: ({ item }) => item.parent ?? NOTHING },
      {
        name: "State",
        value: ({ item }) => stateOf(item),
        cell: ({ item }) => state(item.disabled ? "off" : "good", stateOf(item)),
      },
      {
        name: "Spend",
        isNumber: true,
        value: (row) => (seesMoney() ? mainCost(row)?.[1] : null),
        cell: (row) => {
          const found = seesMoney() ? mainCost(row) : null;
          return found ? money(found[1], found[0]) : NOTHING;
        },
      },
      { name: "Limits", value: ({ item }) => limitsText(item.limits), cell: ({ item }) => limitsText(item.limits) },
      { name: "Keys", isNumber: true, value: ({ item }) => keysOf(item).length, cell: ({ item }) => keysOf(item).length },
      {
        name: "Last used",
        value: ({ item }) => lastUse(item),
        cell: ({ item }) => {
          const last = lastUse(item);
          return last ? h("span", { class: "nowrap" }, time(last)) : "never";
        },
      },
      {
        name: "Actions",
        cell: ({ item }) => (mayChange() && item.source === "storage" ? tenantActions(api, item, refresh) : NOTHING),
      },
    ];
  }

  /** @param {Tenant} tenant @returns {{ last_used: string | null }[]} */
  function keysOf(tenant) {
    const { data = [], policy_keys: fixed = [] } = sources.keys.value ?? {};
    return [...data, ...fixed].filter((/** @type {any} */ key) => key.tenant === tenant.name && key.state !== "revoked");
  }

  /** @param {Tenant} tenant */
  function lastUse(tenant) {
    const used = keysOf(tenant).flatMap((key) => key.last_used ?? []);
    return used.sort().at(-1) ?? null;
  }

  function draw() {
    update(troubles, trouble(source, "the tenants"), seesMoney() && trouble(spend, "the ledger"));
    const found = source.value;
    if (!found) return;
    const rows = inHierarchy(found.tenants, spend.value ?? new Map());
    const shown = rows.length > ROWS_MAX ? ` (first ${ROWS_MAX} shown)` : "";
    setText(counts, `${counted(rows.length, "tenant")}${found.hasMore ? " and more" : ""}${shown}`);
    update(
      make,
      mayChange() &&
        h("button", { type: "button", onclick: () => newTenantDialog(api, rows.map(({ item }) => item.name), refresh) }, "New tenant"),
    );
    table.show(rows);
    update(none, !rows.length && empty("No tenants", "Create one with New tenant or with `warmpath tenants create`."));
  }

  const ends = [source, me, spend, sources.keys].map((each) => each.subscribe(draw));
  return { element, show: draw, close: () => ends.forEach((end) => end()) };
}

/** @param {Tenant} tenant */
function stateOf(tenant) {
  return tenant.disabled ? "disabled" : tenant.source === "policy" ? "in the policy" : "active";
}

/** The sum in the currency with the largest one. @param {Row} row */
function mainCost(row) {
  return [...row.costs].sort(([, a], [, b]) => b - a)[0] ?? null;
}

/** @param {import("../api.js").Api} api @param {AbortSignal} signal @returns {Promise<{ tenants: Tenant[], hasMore: boolean }>} */
async function loadTenants(api, signal) {
  /** @type {Tenant[]} */
  const tenants = [];
  for (;;) {
    const after = tenants.at(-1)?.name;
    const page = await api.get(withQuery("/admin/tenants", { limit: PAGE, after }), signal);
    tenants.push(...page.data);
    if (!page.has_more || tenants.length >= TENANTS_MAX) return { tenants, hasMore: page.has_more };
  }
}

/** @param {import("../api.js").Api} api @param {AbortSignal} signal */
async function loadSpend(api, signal) {
  const now = Math.floor(Date.now() / 1000);
  const start = now - (now % DAY_SECONDS) - (SPEND_DAYS - 1) * DAY_SECONDS;
  const query = { start_time: start, end_time: now + 1, bucket_width: "1d", limit: SPEND_DAYS, group_by: "project_id" };
  const { role } = await api.get("/admin/me", signal);
  if (role === "viewer") return new Map();
  return costsByProject((await api.get(withQuery("/v1/organization/costs", query), signal)).data);
}
