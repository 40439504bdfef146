// @ts-check
// The panel that explains a request: its class, its canonical form, and its route with predicted costs.

import { withQuery } from "../api.js";
import { h, update } from "../dom.js";
import { counted, duration, whole } from "../format.js";
import { diffOf, keyOptions, number, row, select, table } from "../widgets.js";

const ENDPOINTS = ["chat/completions", "completions", "responses", "messages", "embeddings"];
const EXAMPLE = '{"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}]}';

/** @param {import("../api.js").Api} api */
export function explainPanel(api) {
  const chosen = { key: "", endpoint: ENDPOINTS[0] };
  const selects = h("span", { class: "selects" });
  const body = h("textarea", { rows: 6, required: true, spellcheck: "false", placeholder: EXAMPLE });
  const headers = h("textarea", { rows: 2, spellcheck: "false", placeholder: "x-team: search" });
  const refusal = h("p", { class: "refusal", role: "alert" });
  const result = h("div", { role: "status" });
  const submit = h("button", { type: "submit" }, "Explain");
  const form = h(
    "form",
    { class: "explain", onsubmit: onSubmit },
    h("label", { class: "field tall" }, h("span", null, "Request body, as JSON"), body),
    h("label", { class: "field tall" }, h("span", null, "Further headers, one on each line"), headers),
    h("div", { class: "bar" }, selects, submit),
  );

  /** @param {SubmitEvent} event */
  async function onSubmit(event) {
    event.preventDefault();
    submit.disabled = true;
    refusal.textContent = "";
    const header = headers.value.split("\n").filter((/** @type {string} */ line) => line.trim());
    try {
      update(result, resultOf(await api.sendText(withQuery("/admin/explain", { ...chosen, header }), body.value)));
    } catch (error) {
      update(result);
      refusal.textContent = `The gateway would reject this request: ${/** @type {Error} */ (error).message}`;
    }
    submit.disabled = false;
  }

  return {
    element: h(
      "section",
      { class: "panel" },
      h("h2", null, "Explain a request"),
      h("p", { class: "note" }, "Shows what the gateway would do with it now. Nothing is sent."),
      form,
      refusal,
      result,
    ),
    /** @param {any} keys the reply of `GET /admin/keys` */
    show(keys) {
      const options = keyOptions(keys);
      if (!options.some(([id]) => id === chosen.key)) chosen.key = options[0]?.[0] ?? "";
      submit.disabled = !options.length;
      update(
        selects,
        select("As key", options, chosen.key, (key) => (chosen.key = key)),
        select("Endpoint", ENDPOINTS, chosen.endpoint, (endpoint) => (chosen.endpoint = endpoint)),
      );
    },
  };
}

/** @param {any} found the reply of `POST /admin/explain` */
function resultOf({ model, rule, class: className, prompt, candidates, why, tenant, key }) {
  const requested = model.asked;
  const alias = requested === model.served ? "" : ` (requested as ${requested})`;
  const media = Object.entries(prompt.media_tokens).map(([kind, tokens]) => `, ${whole(tokens)} of ${kind}`);
  const facts = [
    ["Key", `${key} of ${tenant}`],
    ["Model", `${model.served}${alias}`],
    [
      "Class",
      `${className}, by ${rule ? `rule ${rule.index + 1}: ${JSON.stringify(rule.match)}` : "default: no rule matches"}`,
    ],
    [
      "Prompt",
      `about ${counted(prompt.tokens_estimate, "token")}${media.join("")}, ${counted(prompt.blocks, "block")} of ${prompt.block_bytes} bytes`,
    ],
    ["Canonical form", canonicalOf(prompt)],
  ];
  const rows = candidates.map((/** @type {any} */ each, /** @type {number} */ index) =>
    row(
      [each.deployment, h("span", { class: "second" }, standing(each, index))],
      number(duration(1000 * each.cost_seconds)),
      number(whole(each.matched_tokens)),
      h("td", null, each.reason),
    ),
  );
  return [
    h(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
    ),
    table(["Deployment", "#Predicted cost", "#Tokens in cache", "Reason"], rows),
    h("p", null, `Choice: ${why}.`),
  ];
}

/** @param {any} candidate @param {number} index */
function standing({ unavailable, fallback }, index) {
  return [index === 0 && "first choice", fallback && "of a fallback model", unavailable].filter(Boolean).join(", ");
}

/** @param {any} prompt */
function canonicalOf({ canonical_steps: steps, diff, fingerprint: { as_sent: sent, canonical, equal_blocks: equal } }) {
  if (!steps.length) return "already canonical";
  const same = equal === canonical.length && equal === sent.length;
  const prefix = same
    ? "the prefix is the same as sent"
    : `the prefix differs from block ${equal + 1} of ${canonical.length}`;
  return [`${steps.join(", ")}: ${prefix}`, diff.length > 0 && diffOf(diff)];
}
