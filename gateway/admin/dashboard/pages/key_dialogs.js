// @ts-check
// Dialogs that create, rotate and revoke keys. A secret is shown once, in its dialog, and is not stored.

import { openDialog } from "../dialog.js";
import { h } from "../dom.js";
import { copyButton, select } from "../widgets.js";

/** @typedef {import("./keys.js").Key} Key @typedef {import("../api.js").Api} Api */

/** @param {{ key: string, id: string }} made @param {string} title */
function secret(made, title) {
  return [
    h("p", null, title),
    h("p", { class: "secret" }, h("code", null, made.key), " ", copyButton(made.key)),
    h("p", { class: "dim" }, "It will not be shown again. The gateway stores only its hash."),
  ];
}

/** @param {Api} api @param {any} policy @param {() => void} onDone */
export function createDialog(api, policy, onDone) {
  const tenants = (policy?.tenants ?? []).map((/** @type {any} */ tenant) => tenant.name);
  let tenant = tenants[0] ?? "";
  const id = input("Id", "a-z, 0-9 and _; default: random", "the public part of the key: wp-<id>-<secret>");
  const expires = input("Expires after", "90d; default: never");
  const models = input("Models", "names, separated by commas; default: all");
  const classes = input("Classes", `${(policy?.classes ?? ["realtime", "batch"]).join(", ")}; default: all`);
  const requests = input("Requests", "60/1m");
  const tokens = input("Tokens", "1M/1m");
  const concurrency = input("Concurrent calls", "16");
  const budget = input("Budget", "50.00");
  let per = "month";
  const periods = ["hour", "day", "week", "month", "total"];
  const fields = [
    select("Tenant", tenants, tenant, (name) => (tenant = name)),
    id.field,
    expires.field,
    models.field,
    classes.field,
    h(
      "fieldset",
      null,
      h("legend", null, "Limits of the key, within those of its tenant; default: none"),
      requests.field,
      tokens.field,
      concurrency.field,
      budget.field,
      select("Budget per", periods, per, (name) => (per = name)),
    ),
  ];
  openDialog("New key", fields, "Create key", false, async () => {
    const limits = {
      requests: requests.text(),
      tokens: tokens.text(),
      concurrency: numeric(concurrency.text()),
      budget: budget.text() && { amount: budget.text(), per },
    };
    const given = Object.fromEntries(Object.entries(limits).filter(([, value]) => value));
    const made = await api.send("POST", "/admin/keys", {
      tenant,
      ...present({
        id: id.text(),
        expires: expires.text(),
        models: list(models.text()),
        classes: list(classes.text()),
      }),
      ...(Object.keys(given).length && { limits: given }),
    });
    onDone();
    return secret(made, `Key ${made.id} of ${made.tenant}:`);
  });
}

/** @param {Api} api @param {Key} key @param {() => void} onDone */
export function rotateDialog(api, key, onDone) {
  let overlap = "24h";
  const overlaps = /** @type {[string, string][]} */ ([
    ["0s", "no time"],
    ["1h", "1 hour"],
    ["24h", "1 day"],
    ["7d", "7 days"],
    ["30d", "30 days"],
  ]);
  const fields = [
    h("p", null, `Key ${key.id} of ${key.tenant} gets a new secret. Its id, limits and rights stay the same.`),
    select("The old secret stays valid for", overlaps, overlap, (value) => (overlap = value)),
  ];
  openDialog(`Rotate key ${key.id}`, fields, "Rotate", false, async () => {
    const made = await api.send("POST", `/admin/keys/${encodeURIComponent(key.id)}/rotate`, { overlap });
    onDone();
    return secret(made, `New secret of key ${key.id}:`);
  });
}

/** @param {Api} api @param {Key} key @param {() => void} onDone */
export function revokeDialog(api, key, onDone) {
  const warning = h(
    "p",
    null,
    `Calls with key ${key.id} of ${key.tenant} will be rejected. `,
    "This cannot be undone, and the id cannot be reused.",
  );
  openDialog(`Revoke key ${key.id}?`, [warning], "Revoke", true, async () => {
    await api.send("DELETE", `/admin/keys/${encodeURIComponent(key.id)}`);
    onDone();
    return null;
  });
}

/** @param {string} label @param {string} placeholder @param {string} [title] */
export function input(label, placeholder, title) {
  const box = h("input", { type: "text", placeholder, title, autocomplete: "off", spellcheck: "false" });
  return { field: h("label", { class: "field" }, h("span", null, label), box), text: () => box.value.trim() };
}

/** A number for digits. Other text is sent unchanged, and the gateway reports what is wrong. @param {string} text */
export function numeric(text) {
  return /^\d+$/.test(text) ? Number(text) : text;
}

/** @param {string} text */
function list(text) {
  return text
    .split(",")
    .map((each) => each.trim())
    .filter(Boolean);
}

/** @param {Record<string, string | string[]>} fields */
function present(fields) {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value.length));
}
