// @ts-check
// The policy page: the policy in force, its last change, and how it handles a request.

import { h, update } from "../dom.js";
import { counted } from "../format.js";
import { Poll } from "../poll.js";
import { copyButton, copied, diffOf, state, time, trouble } from "../widgets.js";
import { explainPanel } from "./explain.js";

const EVERY_MS = 15_000;

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function policyPage({ api, sources }) {
  const source = new Poll((signal) => api.get("/admin/policy/document", signal), EVERY_MS);
  const explain = explainPanel(api);
  const troubles = h("div");
  const facts = h("section", { class: "panel" });
  const change = h("section", { class: "panel" });
  const text = h("section", { class: "panel" });
  const refusal = h("span", { class: "refusal", role: "alert" });
  const reload = h("button", { type: "button", class: "quiet", onclick: onReload }, "Reload the file");
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", null, "Policy"), h("span", { class: "grow" }), refusal, reload),
    troubles,
    facts,
    explain.element,
    h("div", { class: "columns" }, change, text),
  );

  async function onReload() {
    reload.disabled = true;
    refusal.textContent = "";
    try {
      await api.send("POST", "/admin/policy/reload", {});
    } catch (error) {
      refusal.textContent = /** @type {Error} */ (error).message;
    }
    reload.disabled = false;
    source.refresh();
  }

  function draw() {
    update(troubles, trouble(source, "the policy"));
    explain.show(sources.keys.value);
    const found = source.value;
    if (!found) return;
    update(facts, h("h2", null, "In force"), h("dl", { class: "facts" }, factsOf(found)));
    update(change, h("h2", null, "Last change"), changeOf(found));
    update(
      text,
      h(
        "div",
        { class: "bar" },
        h("h2", null, "Values"),
        h("span", { class: "dim" }, "that differ from the defaults; secrets are hidden"),
        h("span", { class: "grow" }),
        copyButton(found.text),
      ),
      h("pre", { class: "diff", tabindex: 0, role: "region", "aria-label": "The policy" }, found.text),
    );
  }

  const ends = [source.subscribe(draw), sources.keys.subscribe(draw)];
  return { element, show() {}, close: () => ends.forEach((end) => end()) };
}

/** @param {any} found */
function factsOf(found) {
  const names = [
    counted(found.deployments.length, "deployment"),
    counted(found.models.length, "model"),
    counted(found.classes.length, "class", "classes"),
    counted(found.tenants.length, "tenant"),
  ];
  const facts = [
    ["Hash", copied(found.hash)],
    ["File", [h("code", null, found.path), ", loaded ", time(found.loaded_at)]],
    ["Names", names.join(", ")],
    [
      "State",
      found.last_error
        ? [
            state("bad", "the changed file is invalid; this policy stays in force"),
            h("pre", { class: "said" }, found.last_error),
          ]
        : state("good", "the file is valid"),
    ],
  ];
  return facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]);
}

/** @param {any} found */
function changeOf({ hash, previous, diff }) {
  if (previous === null) return h("p", { class: "dim" }, "No other policy has been in force at this gateway.");
  const hashes = h("p", { class: "dim" }, "From ", h("code", null, previous), " to ", h("code", null, hash), ".");
  if (!diff.length) return [hashes, h("p", null, "Only hidden or default values differ.")];
  return [hashes, diffOf(diff)];
}
