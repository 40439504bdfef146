// @ts-check
// The sign-in form: an admin key, or a link to the OpenID Connect provider if the policy has one.

import { Api, currentSession } from "./api.js";
import { fill, h } from "./dom.js";

const SIGN_IN = "/session/sign-in";
const REFUSALS = /** @type {Record<string, string>} */ ({
  denied: "The provider did not sign you in.",
  expired: "The sign-in took too long, or began in another browser. Try again.",
  "no-role": "You are known to the provider, but the gateway's policy gives you no role.",
  off: "The gateway's policy has no provider for signing in.",
  provider: "The provider did not answer as it should. The gateway's log says why.",
});

/** Takes the reason of a refused sign-in from `#sign-in=…`. */
export function takeRefusalFromAddress() {
  const code = new URLSearchParams(location.hash.slice(1)).get("sign-in");
  if (code === null) return "";
  history.replaceState(null, "", location.pathname);
  return Object.hasOwn(REFUSALS, code) ? REFUSALS[code] : "You were not signed in.";
}

/**
 * @param {string} reason why the last session ended, or why none began
 * @param {(key: string) => void} onKey called with a valid admin key
 */
export function signInForm(reason, onKey) {
  const box = h("input", {
    type: "password",
    id: "key",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
  });
  const refusal = h("p", { class: "refusal", role: "alert" }, reason);
  const submit = h("button", { type: "submit" }, "Sign in");
  const provider = h("p", { class: "provider" });
  const form = h(
    "form",
    { class: "sign-in", onsubmit: onSubmit },
    h("h1", null, "Warmpath"),
    provider,
    h("input", { type: "text", autocomplete: "username", value: "admin", hidden: true }), // for password managers
    h("label", { class: "field", for: "key" }, h("span", null, "Admin key"), box),
    refusal,
    submit,
    h(
      "p",
      { class: "dim" },
      "The value of ",
      h("code", null, "WARMPATH_ADMIN_KEY"),
      ". ",
      h("code", null, "warmpath up"),
      " prints an address that contains it. The key is stored in this tab only.",
    ),
  );

  /** @param {SubmitEvent} event */
  async function onSubmit(event) {
    event.preventDefault();
    submit.disabled = true;
    refusal.textContent = "";
    try {
      await new Api(box.value.trim(), () => {}).get("/admin/state");
      onKey(box.value.trim());
    } catch (error) {
      refusal.textContent = /** @type {Error} */ (error).message;
      submit.disabled = false;
      box.select();
    }
  }

  currentSession().then(({ sign_in: name }) => {
    if (name === null) return;
    const leave = () => location.assign(SIGN_IN);
    fill(provider, h("button", { type: "button", onclick: leave }, `Sign in with ${name}`));
  });
  return { element: form, focus: () => box.focus() };
}
