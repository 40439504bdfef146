// @ts-check
// Dialogs that change keys. A secret is shown once, in the dialog that has made it, and is kept nowhere.

import { fill, h } from "../dom.js";
import { copyButton, select } from "../widgets.js";

/** @typedef {import("./keys.js").Key} Key @typedef {import("../api.js").Api} Api */

/**
 * Opens a dialog with a form. `send` asks the gateway; what it returns is shown in the form's place, or, where that is
 * nothing, the dialog closes.
 * @param {string} title @param {import("../dom.js").Child[]} fields @param {string} verb @param {boolean} danger
 * @param {() => Promise<import("../dom.js").Child>} send
 */
function ask(title, fields, verb, danger, send) {
  const refusal = h("p", { class: "refusal", role: "alert" });
  const submit = h("button", { type: "submit", class: danger ? "danger" : null }, verb);
  const buttons = h(
    "div",
    { class: "buttons" },
    h("button", { type: "button", class: "quiet", onclick: leave }, "Cancel"),
    submit,
  );
  const form = h("form", { onsubmit: onSubmit }, fields, refusal, buttons);
  const dialog = h("dialog", { "aria-label": title, onclose: () => dialog.remove() }, h("h2", null, title), form);

  /** With all that it has shown. */
  function leave() {
    dialog.close();
    dialog.remove();
  }

  /** @param {SubmitEvent} event */
  async function onSubmit(event) {
    event.preventDefault();
    submit.disabled = true;
    refusal.textContent = "";
    try {
      const made = await send();
      if (!made) return leave();
      fill(form, made, h("div", { class: "buttons" }, h("button", { type: "button", onclick: leave }, "I have it")));
    } catch (error) {
      const { message, param } = /** @type {import("../api.js").ApiError} */ (error);
      refusal.textContent = param && !message.startsWith(param) ? `${param}: ${message}` : message;
      submit.disabled = false;
    }
  }

  document.body.append(dialog);
  dialog.showModal();
}

/** @param {{ key: string, id: string }} made @param {string} words */
function secret(made, words) {
  return [
    h("p", null, words),
    h("p", { class: "secret" }, h("code", null, made.key), " ", copyButton(made.key)),
    h("p", { class: "dim" }, "It is shown this once. The gateway keeps its hash alone."),
  ];
}

/** @param {Api} api @param {any} policy @param {() => void} onDone */
export function createDialog(api, policy, onDone) {
  const tenants = (policy?.tenants ?? []).map((/** @type {any} */ tenant) => tenant.name);
  let tenant = tenants[0] ?? "";
  const id = input("Id", "a-z, 0-9 and _; left out: made up", "the public part of the key: wp-<id>-<secret>");
  const expires = input("Expires after", "90d; left out: never");
  const models = input("Models", "names, with commas between them; left out: all");
  const classes = input("Classes", `${(policy?.classes ?? ["realtime", "batch"]).join(", ")}; left out: all`);
  const requests = input("Requests", "60/1m");
  const tokens = input("Tokens", "1M/1m");
  const concurrency = input("Calls at the same time", "16");
  const budget = input("Money", "50.00");
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
      h("legend", null, "Limits of its own, within its tenant's; left out: none"),
      requests.field,
      tokens.field,
      concurrency.field,
      budget.field,
      select("Money per", periods, per, (name) => (per = name)),
    ),
  ];
  ask("New key", fields, "Make the key", false, async () => {
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
    return secret(made, `The key ${made.id} of ${made.tenant}:`);
  });
}

/** @param {Api} api @param {Key} key @param {() => void} onDone */
export function rotateDialog(api, key, onDone) {
  let overlap = "24h";
  const overlaps = /** @type {[string, string][]} */ ([
    ["0s", "not at all"],
    ["1h", "an hour"],
    ["24h", "a day"],
    ["7d", "a week"],
    ["30d", "30 days"],
  ]);
  const fields = [
    h("p", null, `${key.id} of ${key.tenant} gets a new secret. Its id, limits and rights stay.`),
    select("The old secret stays good for", overlaps, overlap, (value) => (overlap = value)),
  ];
  ask(`Rotate key ${key.id}`, fields, "Rotate", false, async () => {
    const made = await api.send("POST", `/admin/keys/${encodeURIComponent(key.id)}/rotate`, { overlap });
    onDone();
    return secret(made, `The new secret of ${key.id}:`);
  });
}

/** @param {Api} api @param {Key} key @param {() => void} onDone */
export function revokeDialog(api, key, onDone) {
  const words = h(
    "p",
    null,
    `Calls with ${key.id} of ${key.tenant} are refused from now on. `,
    "This can not be undone: a revoked key keeps its id.",
  );
  ask(`Revoke key ${key.id}?`, [words], "Revoke", true, async () => {
    await api.send("DELETE", `/admin/keys/${encodeURIComponent(key.id)}`);
    onDone();
    return null;
  });
}

/** @param {string} label @param {string} placeholder @param {string} [title] */
function input(label, placeholder, title) {
  const box = h("input", { type: "text", placeholder, title, autocomplete: "off", spellcheck: "false" });
  return { field: h("label", { class: "field" }, h("span", null, label), box), text: () => box.value.trim() };
}

/** A number as one; whatever else goes as it is, and the gateway says what is wrong with it. @param {string} text */
function numeric(text) {
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
