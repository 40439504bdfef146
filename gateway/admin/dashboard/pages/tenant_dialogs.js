// @ts-check
// Dialogs that create, disable, enable and delete tenants in the storage.

import { openDialog } from "../dialog.js";
import { h } from "../dom.js";
import { select } from "../widgets.js";
import { input, numeric } from "./key_dialogs.js";

/** @typedef {import("./tenants.js").Tenant} Tenant @typedef {import("../api.js").Api} Api */

/** @param {Api} api @param {string[]} names of possible parents @param {() => void} onDone */
export function newTenantDialog(api, names, onDone) {
  let parent = "";
  let per = "month";
  const name = input("Name", "as it is in receipts and bills");
  const requests = input("Requests", "600/1m");
  const tokens = input("Tokens", "1M/1m");
  const concurrency = input("Concurrent calls", "16");
  const budget = input("Budget", "50.00");
  const fields = [
    name.field,
    select("Parent", [["", "none: an organisation of its own"], ...names], parent, (chosen) => (parent = chosen)),
    h(
      "fieldset",
      null,
      h("legend", null, "Limits of the tenant and of all below it; default: none"),
      requests.field,
      tokens.field,
      concurrency.field,
      budget.field,
      select("Budget per", ["hour", "day", "week", "month", "total"], per, (chosen) => (per = chosen)),
    ),
  ];
  openDialog("New tenant", fields, "Create tenant", false, async () => {
    const limits = {
      requests: requests.text(),
      tokens: tokens.text(),
      concurrency: numeric(concurrency.text()),
      budget: budget.text() && { amount: budget.text(), per },
    };
    const given = Object.fromEntries(Object.entries(limits).filter(([, value]) => value));
    await api.send("POST", "/admin/tenants", {
      name: name.text(),
      ...(parent && { parent }),
      ...(Object.keys(given).length && { limits: given }),
    });
    onDone();
    return null;
  });
}

/** @param {Api} api @param {Tenant} tenant @param {() => void} onDone */
export function tenantActions(api, tenant, onDone) {
  const path = `/admin/tenants/${encodeURIComponent(tenant.name)}`;
  const button = (/** @type {string} */ verb, /** @type {string} */ kind, /** @type {() => void} */ act) =>
    h(
      "button",
      { type: "button", class: `quiet small ${kind}`, onclick: act, "aria-label": `${verb} tenant ${tenant.name}` },
      verb,
    );
  const change = tenant.disabled
    ? button("Enable", "", () =>
        ask("Enable", "Its keys will be accepted again.", false, () => api.send("PATCH", path, { disabled: false })),
      )
    : button("Disable", "danger", () =>
        ask("Disable", "Calls of its keys, and of all tenants below it, will be rejected.", true, () =>
          api.send("PATCH", path, { disabled: true }),
        ),
      );
  const remove = button("Delete", "danger", () =>
    ask("Delete", "Its keys will be rejected. Its receipts stay.", true, () => api.send("DELETE", path)),
  );
  return h("span", { class: "nowrap" }, change, " ", remove);

  /** @param {string} verb @param {string} text @param {boolean} danger @param {() => Promise<any>} send */
  function ask(verb, text, danger, send) {
    openDialog(`${verb} tenant ${tenant.name}?`, [h("p", null, text)], verb, danger, async () => {
      await send();
      onDone();
      return null;
    });
  }
}
