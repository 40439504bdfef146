// @ts-check
// The table of deployments: circuit breaker, load, and statistics of recent calls.

import { deploymentStats, percentile } from "../callstats.js";
import { meter } from "../charts.js";
import { fill, h, keyed, setText, update } from "../dom.js";
import { counted, duration, NOTHING, share, short, span, whole } from "../format.js";
import { samples, totals } from "../prometheus.js";
import { RECENT_CALLS_MAX } from "../sources.js";
import { empty, number, row, state, table } from "../widgets.js";

const LOOK_BACK_MS = 5 * 60_000;

/**
 * @typedef {{ name: string, provider: string, base_url: string, model: string, max_concurrency: number }} Deployment
 */

/** How the states of a circuit breaker are shown: [level, label, explanation], from best to worst. */
const STATES = /** @type {Record<string, [import("../widgets.js").Level, string, string]>} */ ({
  closed: ["good", "available", "circuit breaker closed"],
  resting: ["warn", "backing off", "it failed just now or sent Retry-After; other deployments are preferred"],
  half_open: ["warn", "half-open", "circuit breaker half-open; one probe request at a time decides whether it closes"],
  open: ["bad", "ejected", "circuit breaker open; a probe request will close it"],
});
const ORDER = Object.keys(STATES);

/**
 * @param {Element} panel
 * @param {{
 *   history: import("../history.js").History, policy: any, recent: any, unavailable: Record<string, string>, now: number
 * }} data
 *   `now` by the gateway's clock; `unavailable` has the reasons why deployments get no requests, by name
 */
export function deploymentsTable(panel, { history, policy, recent, unavailable, now }) {
  if (!panel.firstChild) {
    fill(panel, h("h2", null, "Deployments"), h("p", { class: "note" }), table(COLUMNS, h("tbody")), h("div"));
  }
  if (!policy) return;
  /** @type {Deployment[]} */
  const deployments = policy.deployments;
  const calls = recent?.data ?? [];
  const lookBackMs = Math.min(LOOK_BACK_MS, now - startOf(history));
  const stats = deploymentStats(calls, calls.length >= RECENT_CALLS_MAX, now, lookBackMs);
  const note = /** @type {Element} */ (panel.querySelector(".note"));
  const since = `${counted(stats.calls, "call")} in the last ${span(stats.seconds)}`;
  setText(note, `State and load are current. The columns from Requests on cover ${since}.`);
  const states = nowOf(history);
  const body = /** @type {Element} */ (panel.querySelector("tbody"));
  keyed(
    body,
    deployments,
    (each) => each.name,
    (each) => deploymentRow(each, states, stats, unavailable[each.name]),
  );
  const none = empty("No deployments", "Add `deployments` to the policy.");
  update(/** @type {Element} */ (panel.lastElementChild), !deployments.length && none);
}

/** @type {(string | [string, string])[]} */
const COLUMNS = [
  "Deployment",
  "State",
  ["In flight", "calls in flight, of its max_concurrency"],
  ["#Requests", "attempts on this deployment"],
  ["#Errors", "attempts that failed because of it: no connection, 5xx, 429, timeouts, cut answers"],
  ["#First token p50", "time from the attempt to its first chunk"],
  ["#p95", "first token, 95th percentile"],
  ["#Output", "generated tokens per second, over all calls"],
  ["#Cached", "share of prompt tokens read from its prefix cache"],
  ["Reported load", "load that the deployment itself reports, if its `metrics` are enabled in the policy"],
];

/**
 * Start of the gateway's oldest process, in ms since the epoch.
 * @param {import("../history.js").History} history
 */
function startOf({ latest }) {
  const starts = latest ? samples(latest, "process_start_time_seconds") : [];
  return starts.length ? 1000 * Math.min(...starts.map((each) => each.value)) : 0;
}

/** The current state of all deployments, from the metrics. @param {import("../history.js").History} history */
function nowOf({ latest }) {
  /** @type {Map<string, string[]>} */
  const states = new Map();
  if (!latest) return { states, inFlight: new Map(), reported: new Map() };
  for (const { labels } of samples(latest, "warmpath_deployment_breaker").filter((each) => each.value === 1)) {
    states.set(labels.deployment, [...(states.get(labels.deployment) ?? []), labels.state]);
  }
  /** @type {Map<string, Map<string, number>>} */
  const reported = new Map();
  for (const { labels, value } of samples(latest, "warmpath_deployment_reported")) {
    reported.set(labels.deployment, (reported.get(labels.deployment) ?? new Map()).set(labels.what, value));
  }
  return { states, inFlight: totals(latest, "warmpath_deployment_inflight", "deployment"), reported };
}

/**
 * @param {Deployment} deployment @param {ReturnType<typeof nowOf>} now
 * @param {ReturnType<typeof deploymentStats>} all
 * @param {string | undefined} reason why it gets no requests
 */
function deploymentRow(deployment, now, all, reason) {
  const stats = all.deployments.get(deployment.name);
  const inFlight = now.inFlight.get(deployment.name) ?? null;
  const load = `${whole(inFlight)} of ${whole(deployment.max_concurrency)}`;
  const failed = [...(stats?.failed ?? [])].sort((a, b) => b[1] - a[1]);
  const failures = failed.reduce((sum, [, count]) => sum + count, 0);
  const link = `#/calls?${new URLSearchParams({ server: deployment.name, show: "problems" })}`;
  const model = `${deployment.model} · ${deployment.provider}`;
  const served = h("span", { class: "second", title: deployment.base_url }, model);
  return row(
    [deployment.name, served],
    h("td", null, stateOf(now.states.get(deployment.name) ?? []), reason && h("span", { class: "second" }, reason)),
    h(
      "td",
      { class: "nowrap" },
      meter(inFlight ?? 0, deployment.max_concurrency, `${load} calls in flight`),
      ` ${load}`,
    ),
    number(stats ? `${short(stats.attempts / all.seconds)}/s` : NOTHING),
    number(
      failures
        ? [
            h(
              "a",
              { href: link, class: "bad", title: failed.map(([outcome, count]) => `${outcome}: ${count}`).join(", ") },
              `${whole(failures)} (${share(failures, stats?.attempts)})`,
            ),
            h("span", { class: "second" }, failed[0][0]),
          ]
        : stats
          ? "0"
          : NOTHING,
    ),
    number(duration(stats ? percentile(0.5, stats.ttft) : null)),
    number(duration(stats ? percentile(0.95, stats.ttft) : null)),
    number(stats?.answers ? `${short(stats.output / all.seconds)} tok/s` : NOTHING),
    number(stats ? share(stats.cached, stats.prompt) : NOTHING),
    h("td", { class: "nowrap" }, reportOf(now.reported.get(deployment.name))),
  );
}

/** The worst state of its circuit breaker among the workers. @param {string[]} states */
function stateOf(states) {
  if (!states.length) return state("off", "unknown", "no metrics of this deployment yet");
  const worst = [...states].sort((a, b) => ORDER.indexOf(b) - ORDER.indexOf(a))[0];
  const [level, label, reason] = STATES[worst] ?? ["warn", worst, ""];
  const at = states.filter((each) => each === worst).length;
  return state(level, at === states.length ? label : `${label} (${at} of ${states.length} workers)`, reason);
}

/** @param {Map<string, number> | undefined} report */
function reportOf(report) {
  if (!report) return h("span", { class: "dim" }, NOTHING);
  const usage = report.get("kv_usage");
  return `${whole(report.get("running"))} running, ${whole(report.get("waiting"))} waiting, KV ${share(usage, 1)}`;
}
