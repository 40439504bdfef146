// @ts-check
// A dialog with a form, whose request the gateway may refuse.

import { fill, h } from "./dom.js";

/**
 * Opens a dialog with a form. `send` sends the request. Its result replaces the form; without a result, the dialog
 * closes.
 * @param {string} title @param {import("./dom.js").Child[]} fields
 * @param {string | null} verb null: there is nothing to send
 * @param {boolean} danger
 * @param {() => Promise<import("./dom.js").Child>} send
 */
export function openDialog(title, fields, verb, danger, send) {
  const refusal = h("p", { class: "refusal", role: "alert" });
  const submit = h("button", { type: "submit", class: danger ? "danger" : null }, verb);
  const buttons = h(
    "div",
    { class: "buttons" },
    h("button", { type: "button", class: "quiet", onclick: closeDialog }, verb === null ? "Close" : "Cancel"),
    verb !== null && submit,
  );
  const form = h("form", { onsubmit: onSubmit }, fields, refusal, buttons);
  const dialog = h("dialog", { "aria-label": title, onclose: () => dialog.remove() }, h("h2", null, title), form);

  /** Closes the dialog and removes it with what it shows, for example a secret. */
  function closeDialog() {
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
      if (!made) return closeDialog();
      fill(form, made, h("div", { class: "buttons" }, h("button", { type: "button", onclick: closeDialog }, "Done")));
    } catch (error) {
      const { message, param } = /** @type {import("./api.js").ApiError} */ (error);
      refusal.textContent = param && !message.startsWith(param) ? `${param}: ${message}` : message;
      submit.disabled = false;
    }
  }

  document.body.append(dialog);
  dialog.showModal();
}
