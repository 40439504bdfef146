// @ts-check
// How warm the prefix caches have been, by model and by server.

import { h } from "../dom.js";
import { NOTHING, share, whole } from "../format.js";
import { totals } from "../prometheus.js";
import { empty, number, row, table } from "../widgets.js";

const MODEL_COLUMNS = ["Model", "#Prompt tokens", "#Cached tokens", "#Cached"];
const SERVER_COLUMNS = /** @type {(string | [string, string])[]} */ ([
  "Server",
  ["#Expected", "cached tokens that the router predicted"],
  ["#Reported", "cached tokens that the server reported"],
  ["#KV blocks", "that it has told of, where it publishes KV events"],
]);

/** @param {import("../prometheus.js").Snapshot | null} latest */
export function warmthOf(latest) {
  const head = h("h2", null, "Warmth since the gateway's start");
  if (!latest) return [head, h("p", { class: "dim" }, "The metrics are being read …")];
  const byServer = (/** @type {string} */ name) => totals(latest, name, "deployment");
  const [reported, predicted, blocks] = [
    "warmpath_prefix_reported_tokens_total",
    "warmpath_prefix_predicted_tokens_total",
    "warmpath_kv_blocks",
  ].map(byServer);
  const ofKind = (/** @type {string[]} */ kinds) =>
    totals(latest, "warmpath_tokens_total", "model", (labels) => kinds.includes(labels.kind));
  const [cached, prompt] = [ofKind(["cache_read"]), ofKind(["input_uncached", "cache_read", "cache_write"])];
  if (!prompt.size) return [head, empty("No tokens yet", "They are counted with the first answered call.")];
  const servers = [...new Set([...reported.keys(), ...predicted.keys()])].sort();
  const models = [...prompt.keys()].sort();
  const ofModel = (/** @type {string} */ model) => {
    const [part, all] = [cached.get(model) ?? 0, prompt.get(model)];
    return row(model, number(whole(all)), number(whole(part)), number(share(part, all)));
  };
  const ofServer = (/** @type {string} */ server) => {
    const [expected, told] = [predicted, reported].map((sums) => `${whole(sums.get(server) ?? 0)} tokens`);
    return row(
      server,
      number(expected),
      number(told),
      number(blocks.has(server) ? whole(blocks.get(server)) : NOTHING),
    );
  };
  return [
    head,
    h(
      "div",
      { class: "columns" },
      table(MODEL_COLUMNS, models.map(ofModel)),
      table(SERVER_COLUMNS, servers.map(ofServer)),
    ),
  ];
}
