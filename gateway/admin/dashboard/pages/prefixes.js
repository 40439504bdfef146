// @ts-check
// The prefixes page: what breaks prefixes, the policy lines that a replay proposes, and prefix cache hit rates.

import { withQuery } from "../api.js";
import { h, update } from "../dom.js";
import { counted, duration, share, short } from "../format.js";
import { Poll } from "../poll.js";
import { copyButton, empty, select, trouble, withCode } from "../widgets.js";
import { cacheHitsPanel } from "./cache_hits.js";
import { costs, proposalsOf } from "./prefix_proposals.js";

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
const ENABLE_LINE = "diagnosis: {sample: 10%}";

/** What differs where a prefix breaks. */
const KINDS = /** @type {Record<string, string>} */ ({
  clock: "a time of day that changes",
  date: "a date that changes",
  uuid: "a random id (UUID)",
  request_id: "an id of a request",
  cwd: "a working directory",
  noise: "a header that a client writes into its system prompt",
  git_status: "the state of a repository",
  memory: "what a client remembers of its user",
  chunk_order: "the same chunks in another order",
  example_order: "the same examples in another order",
  tool_order: "the same tools in another order",
  key_order: "the same JSON with its keys in another order",
  tool_set: "tools were added, removed or changed",
  dropped_reasoning: "the assistant's reasoning is not sent back",
  history_rewritten: "earlier messages were changed",
  history_cut: "messages were removed from the conversation",
  text: "different text in the system prompt or a user message",
  template_date: "not in the request: the chat template prints the date",
  evicted: "not in the request: the deployment evicted the prefix",
});

const NOWHERE = new Set(["template_date", "evicted"]); // kinds without a position in the request
const FINDINGS_MAX = 50;

/**
 * @typedef {{
 *   calls: number, prompt_tokens: number, cached_tokens: number, enabled: boolean, findings: any[], proposals: any[],
 *   replayed_calls: number, predicted_share: number, reported_share: number,
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
  const proposals = h("section", { class: "panel" });
  const cacheHits = h("section", { class: "panel" });
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", null, "Prefixes"), h("span", { class: "grow" }), choices),
    troubles,
    sums,
    findings,
    proposals,
    cacheHits,
  );

  /** @param {AbortSignal} signal */
  async function load(signal) {
    const period = since;
    return { ...(await api.get(withQuery("/admin/diagnosis", { since: period }), signal)), since: period };
  }

  function draw() {
    update(
      choices,
      select("Period", SINCE, since, (value) => go(["prefixes"], { since: value, rank })),
      select("Sort by", RANKS, rank, (value) => go(["prefixes"], { since, rank: value })),
    );
    update(troubles, trouble(source, "the diagnosis"));
    update(cacheHits, cacheHitsPanel(sources.metrics.value));
    const found = source.value;
    element.classList.toggle("waiting", found !== null && found.since !== since);
    if (!found) return void update(findings, h("p", { class: "dim" }, source.error ? "" : "Reading summaries …"));
    update(sums, found.calls > 0 && sumsOf(found));
    update(findings, h("h2", null, "What breaks prefixes"), findingsOf(found, rank));
    proposals.hidden = !found.findings.length;
    update(
      proposals,
      h("h2", null, "Proposals for the policy"),
      proposalsOf(found, api, () => source.refresh()),
    );
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
      "Diagnosis is off",
      `Add this line to the policy to compare a sample of conversations with earlier ones: \`${ENABLE_LINE}\` `,
      copyButton(ENABLE_LINE),
    );
  }
  const off =
    !found.enabled &&
    h(
      "p",
      { class: "trouble" },
      "Diagnosis is off in the policy. These findings are from earlier calls. ",
      h("code", null, ENABLE_LINE),
      " ",
      copyButton(ENABLE_LINE),
    );
  if (!found.calls)
    return [off, empty("No sampled calls in this period", "Choose a longer period, or wait for calls.")];
  if (!found.findings.length)
    return [
      off,
      empty(
        "No broken prefixes",
        `All shared prefixes of ${counted(Math.round(found.calls), "call")} could be read from a cache.`,
      ),
    ];
  const of = (/** @type {any} */ finding) =>
    rank === "seconds" ? finding.lost_seconds : rank === "money" ? total(finding.lost_cost) : finding.lost_tokens;
  const sorted = [...found.findings].sort((a, b) => of(b) - of(a));
  return [
    off,
    h("ol", { class: "findings" }, sorted.slice(0, FINDINGS_MAX).map(item)),
    sorted.length > FINDINGS_MAX && h("p", { class: "dim" }, `The first ${FINDINGS_MAX} of ${sorted.length}.`),
  ];
}

/** @param {Record<string, string>} amounts by currency */
function total(amounts) {
  return Object.values(amounts).reduce((sum, amount) => sum + Number(amount), 0);
}

/**
 * One finding. If the policy records the words around a break, only `warmpath doctor` shows them.
 * @param {any} finding
 */
function item(finding) {
  const where = finding.within ? "between turns of a conversation" : "between conversations";
  const numbers = finding.proposals.map((/** @type {number} */ number) => number + 1).join(" and ");
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
      `, ${duration(1000 * finding.lost_seconds)} and ${costs(finding.lost_cost)} lost in `,
      counted(Math.round(finding.calls), "call"),
    ),
    h(
      "p",
      { class: "dim" },
      `tenant ${finding.tenant}, key ${finding.key_id}, ${finding.agent ? `client ${finding.agent}, ` : ""}`,
      `${finding.models.length === 1 ? "model" : "models"} ${finding.models.join(", ")}, last seen in `,
      h("a", { href: `#/calls/${encodeURIComponent(finding.example)}` }, finding.example),
    ),
    numbers ? h("p", null, `Fixed by proposal ${numbers}.`) : h("p", null, "Advice: ", withCode(finding.advice), "."),
  );
}
