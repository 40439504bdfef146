// @ts-check
// How warm the prefix caches are, what breaks prefixes, and the line of policy that mends it.

import { withQuery } from "../api.js";
import { h, update } from "../dom.js";
import { counted, duration, money, share, short } from "../format.js";
import { Poll } from "../poll.js";
import { copyButton, empty, select, trouble } from "../widgets.js";
import { warmthOf } from "./warmth.js";

const EVERY_MS = 30_000;
const SINCE = /** @type {[string, string][]} */ ([
  ["1h", "last hour"],
  ["24h", "last 24 hours"],
  ["7d", "last 7 days"],
  ["30d", "last 30 days"],
]);
const RANKS = /** @type {[string, string][]} */ ([
  ["tokens", "tokens lost"],
  ["seconds", "seconds lost"],
  ["money", "money lost"],
]);
const SWITCH_ON = "diagnosis: {sample: 10%}";

/** What differs at the place where a prompt breaks. */
const KINDS = /** @type {Record<string, string>} */ ({
  clock: "a time of day that changes",
  date: "a date that changes",
  uuid: "a random id (UUID)",
  request_id: "an id of a request",
  cwd: "a working directory",
  noise: "a header that a client writes into its system prompt",
  tool_order: "the same tools in another order",
  key_order: "the same JSON with its keys in another order",
  tool_set: "tools were added, taken away or changed",
  dropped_reasoning: "the assistant's reasoning is not sent back",
  history_rewritten: "what was said before was changed",
  history_cut: "messages were taken out of the conversation",
  text: "other words of the system prompt or the user",
  template_date: "nothing in the request: the server's template prints the date",
  evicted: "nothing in the request: the server's cache had lost it",
});

const NOWHERE = new Set(["template_date", "evicted"]); // kinds that have no place in a request
const FINDINGS_MAX = 50;

/**
 * @typedef {{
 *   calls: number, prompt_tokens: number, cached_tokens: number, enabled: boolean, findings: any[],
 * }} Diagnosis
 */

/** @param {import("../app.js").Context} context @returns {import("../app.js").Page} */
export function prefixesPage({ api, sources, go }) {
  let [since, rank] = ["24h", "tokens"];
  /** @type {Poll<Diagnosis & { since: string }>} */
  const source = new Poll(load, EVERY_MS);
  const choices = h("span", { class: "selects" });
  const troubles = h("div");
  const sums = h("dl", { class: "figures" });
  const findings = h("section", { class: "panel" });
  const warmth = h("section", { class: "panel" });
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", null, "Prefixes"), h("span", { class: "grow" }), choices),
    troubles,
    sums,
    findings,
    warmth,
  );

  /** @param {AbortSignal} signal */
  async function load(signal) {
    const asked = since;
    return { ...(await api.get(withQuery("/admin/diagnosis", { since: asked }), signal)), since: asked };
  }

  function draw() {
    update(
      choices,
      select("Calls of the", SINCE, since, (value) => go(["prefixes"], { since: value, rank })),
      select("Most first by", RANKS, rank, (value) => go(["prefixes"], { since, rank: value })),
    );
    update(troubles, trouble(source, "The diagnosis"));
    update(warmth, warmthOf(sources.history.latest));
    const found = source.value;
    element.classList.toggle("waiting", found !== null && found.since !== since);
    if (!found)
      return void update(findings, h("p", { class: "dim" }, source.error ? "" : "The summaries are being read …"));
    update(sums, found.calls > 0 && sumsOf(found));
    update(findings, h("h2", null, "What breaks prefixes"), findingsOf(found, rank));
  }

  const ends = [source.subscribe(draw), sources.metrics.subscribe(draw)];
  return {
    element,
    show({ query }) {
      const was = since;
      since = query.get("since") ?? "24h";
      rank = query.get("rank") ?? "tokens";
      draw();
      if (since !== was) source.change(load);
    },
    close: () => ends.forEach((end) => end()),
  };
}

/** @param {Diagnosis} found */
function sumsOf(found) {
  const lost = found.findings.reduce((sum, finding) => sum + finding.lost_tokens, 0);
  const entries = [
    ["Calls", short(found.calls)],
    ["Prompt tokens", short(found.prompt_tokens)],
    ["Cached", share(found.cached_tokens, found.prompt_tokens)],
    ["Lost to breaks", `${short(lost)} tokens`],
    ["Could be cached", share(Math.min(found.cached_tokens + lost, found.prompt_tokens), found.prompt_tokens)],
  ];
  return entries.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)));
}

/** @param {Diagnosis} found @param {string} rank */
function findingsOf(found, rank) {
  if (!found.enabled && !found.calls) {
    return empty(
      "Nothing is looked at",
      `With this line in the policy, some conversations are compared with earlier ones: \`${SWITCH_ON}\` `,
      copyButton(SWITCH_ON),
    );
  }
  const off =
    !found.enabled &&
    h(
      "p",
      { class: "trouble" },
      "The policy does not sample calls any more: these are from before. ",
      h("code", null, SWITCH_ON),
      " ",
      copyButton(SWITCH_ON),
    );
  if (!found.calls)
    return [off, empty("No call was looked at in this time", "Ask for a longer time, or wait until calls have come.")];
  if (!found.findings.length)
    return [
      off,
      empty(
        "Nothing breaks prefixes",
        `What ${counted(Math.round(found.calls), "call")} had in common could be read from a cache.`,
      ),
    ];
  const of = (/** @type {any} */ finding) =>
    Number(
      (rank === "seconds" ? finding.lost_seconds : rank === "money" ? finding.lost_cost : finding.lost_tokens) ?? 0,
    );
  const sorted = [...found.findings].sort((a, b) => of(b) - of(a));
  return [
    off,
    h("ol", { class: "findings" }, sorted.slice(0, FINDINGS_MAX).map(item)),
    sorted.length > FINDINGS_MAX && h("p", { class: "dim" }, `The first ${FINDINGS_MAX} of ${sorted.length}.`),
  ];
}

/** The words around a break, which a policy may have kept, are for `warmpath doctor` alone. @param {any} finding */
function item(finding) {
  const cost = finding.lost_cost === null ? "unpriced" : money(finding.lost_cost, finding.currency ?? "");
  const where = finding.within ? "between turns of a conversation" : "between conversations";
  return h(
    "li",
    null,
    h(
      "h3",
      null,
      NOWHERE.has(finding.kind) ? "" : `${finding.place}: `,
      KINDS[finding.kind] ?? finding.kind,
      h("span", { class: "dim" }, ` ${where}`),
    ),
    h(
      "p",
      { class: "lost" },
      h("b", null, `${short(finding.lost_tokens)} tokens`),
      `, ${duration(1000 * finding.lost_seconds)} and ${cost} lost in ${counted(Math.round(finding.calls), "call")}`,
    ),
    h(
      "p",
      { class: "dim" },
      `tenant ${finding.tenant}, key ${finding.key_id}, ${finding.agent ? `program ${finding.agent}, ` : ""}`,
      `model ${finding.model}, seen last in `,
      h("a", { href: `#/calls/${encodeURIComponent(finding.example)}` }, finding.example),
    ),
    finding.fix
      ? h(
          "div",
          { class: "fix" },
          h("span", null, "Add to the policy:"),
          h("pre", null, finding.fix),
          copyButton(finding.fix),
        )
      : h("p", null, `What helps: ${finding.advice}.`),
  );
}
