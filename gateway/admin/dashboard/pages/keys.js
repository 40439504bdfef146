// @ts-check
// The keys page: lists the keys in the storage; creates, rotates and revokes keys.

import { h, keyed, setText, update } from "../dom.js";
import { counted, NOTHING, period, whole } from "../format.js";
import { empty, row, select, state, table, time, trouble } from "../widgets.js";
import { createDialog, revokeDialog, rotateDialog } from "./key_dialogs.js";
import { LIMIT_LABELS } from "./limits.js";

/**
 * @typedef {{
 *   id: string, tenant: string, state: "active" | "expired" | "revoked", created: string, expires: string | null,
 *   models: string[] | null, classes: string[] | null, limits: any, old_secret_expires: string | null,
 * }} Key
 */

const ROWS_MAX = 500;
const LEVELS = /** @type {Record<string, import("../widgets.js").Level>} */ ({
  active: "good",
  expired: "warn",
  revoked: "off",
});
const STATES = /** @type {[string, string][]} */ ([
  ["", "all"],
  ["active", "active"],
  ["expired", "expired"],
  ["revoked", "revoked"],
]);

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function keysPage({ api, sources, go }) {
  let filters = { tenant: "", state: "" };
  const source = sources.keys;
  const refresh = () => source.refresh();

  const choices = h("span", { class: "selects" });
  const counts = h("span", { class: "dim", role: "status" });
  const make = h(
    "button",
    { type: "button", onclick: () => createDialog(api, sources.policy.value, refresh) },
    "New key",
  );
  const troubles = h("div");
  const rows = h("tbody");
  const none = h("div");
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", null, "Keys"), counts, h("span", { class: "grow" }), choices, make),
    troubles,
    h(
      "section",
      { class: "panel" },
      table(COLUMNS, rows),
      none,
      h("p", { class: "dim" }, "Keys in the policy file are not listed. Change them in the file."),
    ),
  );

  function draw() {
    update(troubles, trouble(source, "the keys"));
    /** @type {Key[]} */
    const keys = source.value?.data ?? [];
    const tenants = [...new Set([...keys.map((key) => key.tenant), filters.tenant])].filter(Boolean).sort();
    update(
      choices,
      select("Tenant", [["", "all"], ...tenants], filters.tenant, (tenant) => go(["keys"], { ...filters, tenant })),
      select("State", STATES, filters.state, (value) => go(["keys"], { ...filters, state: value })),
    );
    const shown = keys.filter(
      (key) => (!filters.tenant || key.tenant === filters.tenant) && (!filters.state || key.state === filters.state),
    );
    shown.sort((a, b) => b.created.localeCompare(a.created) || a.id.localeCompare(b.id));
    const more = shown.length > ROWS_MAX ? ` (newest ${ROWS_MAX} shown)` : "";
    if (source.value) setText(counts, `${counted(shown.length, "key")}${more}`);
    keyed(
      rows,
      shown.slice(0, ROWS_MAX),
      (key) => key.id,
      (key) =>
        keyRow(
          key,
          () => rotateDialog(api, key, refresh),
          () => revokeDialog(api, key, refresh),
        ),
    );
    const message = keys.length
      ? empty("No matching keys", "Remove a filter.")
      : empty("No keys in the storage", "Create one with New key or with `warmpath keys create`.");
    update(none, source.value && !shown.length && message);
  }

  const ends = [source.subscribe(draw), sources.policy.subscribe(draw)];
  return {
    element,
    show({ query }) {
      filters = { tenant: query.get("tenant") ?? "", state: query.get("state") ?? "" };
      draw();
    },
    close: () => ends.forEach((end) => end()),
  };
}

const COLUMNS = ["Key", "Tenant", "State", "Created", "Expires", "Models", "Classes", "Key limits", "Actions"];

/** @param {Key} key @param {() => void} rotate @param {() => void} revoke */
function keyRow(key, rotate, revoke) {
  const changes = [
    h(
      "button",
      { type: "button", class: "quiet small", onclick: rotate, "aria-label": `Rotate key ${key.id}` },
      "Rotate",
    ),
    " ",
    h(
      "button",
      { type: "button", class: "quiet small danger", onclick: revoke, "aria-label": `Revoke key ${key.id}` },
      "Revoke",
    ),
  ];
  return row(
    h("code", null, key.id),
    h("td", null, key.tenant),
    h(
      "td",
      null,
      state(LEVELS[key.state] ?? "off", key.state),
      key.old_secret_expires && h("span", { class: "second" }, "old secret until ", time(key.old_secret_expires)),
    ),
    h("td", { class: "nowrap" }, time(key.created)),
    h("td", { class: "nowrap" }, key.expires ? time(key.expires) : "never"),
    h("td", null, key.models?.join(", ") ?? "all"),
    h("td", null, key.classes?.join(", ") ?? "all"),
    h("td", null, limitsText(key.limits)),
    h("td", { class: "nowrap" }, key.state === "revoked" ? NOTHING : changes),
  );
}

/** @param {any} limits */
function limitsText(limits) {
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
