// @ts-check
// The panel of prefix cache hits, by model and by deployment.

import { h } from "../dom.js";
import { NOTHING, share, whole } from "../format.js";
import { totals } from "../prometheus.js";
import { empty, number, row, table } from "../widgets.js";

const MODEL_COLUMNS = ["Model", "#Prompt tokens", "#Cached tokens", "#Cached"];
const DEPLOYMENT_COLUMNS = /** @type {(string | [string, string])[]} */ ([
  "Deployment",
  ["#Predicted", "cached tokens that the router predicted"],
  ["#Reported", "cached tokens that the deployment reported"],
  ["#KV blocks", "KV blocks it reported, if it publishes KV events"],
]);

/** @param {import("../prometheus.js").Snapshot | null} latest */
export function cacheHitsPanel(latest) {
  const head = h("h2", null, "Prefix cache hits since the gateway's start");
  if (!latest) return [head, h("p", { class: "dim" }, "Reading metrics …")];
  const byDeployment = (/** @type {string} */ name) => totals(latest, name, "deployment");
  const [reported, predicted, blocks] = [
    "warmpath_prefix_reported_tokens_total",
    "warmpath_prefix_predicted_tokens_total",
    "warmpath_kv_blocks",
  ].map(byDeployment);
  const ofKind = (/** @type {string[]} */ kinds) =>
    totals(latest, "warmpath_tokens_total", "model", (labels) => kinds.includes(labels.kind));
  const [cached, prompt] = [ofKind(["cache_read"]), ofKind(["input_uncached", "cache_read", "cache_write"])];
  if (!prompt.size) return [head, empty("No tokens yet", "Tokens are counted from the first answered call on.")];
  const deployments = [...new Set([...reported.keys(), ...predicted.keys()])].sort();
  const models = [...prompt.keys()].sort();
  const modelRow = (/** @type {string} */ model) => {
    const [part, all] = [cached.get(model) ?? 0, prompt.get(model)];
    return row(model, number(whole(all)), number(whole(part)), number(share(part, all)));
  };
  const deploymentRow = (/** @type {string} */ deployment) => {
    const tokens = (/** @type {Map<string, number>} */ sums) => `${whole(sums.get(deployment) ?? 0)} tokens`;
    return row(
      deployment,
      number(tokens(predicted)),
      number(tokens(reported)),
      number(blocks.has(deployment) ? whole(blocks.get(deployment)) : NOTHING),
    );
  };
  return [
    head,
    h(
      "div",
      { class: "columns" },
      table(MODEL_COLUMNS, models.map(modelRow)),
      table(DEPLOYMENT_COLUMNS, deployments.map(deploymentRow)),
    ),
  ];
}
