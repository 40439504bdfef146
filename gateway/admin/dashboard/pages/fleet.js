// @ts-check
// One row a server: whether it is asked, how busy it is, and how it has done lately.

import { ofServers, percentile } from "../callstats.js";
import { meter } from "../charts.js";
import { fill, h, keyed, say, update } from "../dom.js";
import { counted, duration, NOTHING, share, short, span, whole } from "../format.js";
import { samples, totals } from "../prometheus.js";
import { RECENT_CALLS_MAX } from "../sources.js";
import { empty, number, row, state, table } from "../widgets.js";

const LOOK_BACK_MS = 5 * 60_000;

/**
 * @typedef {{ name: string, provider: string, base_url: string, model: string, max_concurrency: number }} Deployment
 */

/** How a breaker's state is told: [level, words, explanation]. The later ones are worse. */
const STATES = /** @type {Record<string, [import("../widgets.js").Level, string, string]>} */ ({
  closed: ["good", "available", "calls are sent there"],
  resting: ["warn", "resting", "it has just failed, or asked to be left alone: others go first"],
  half_open: ["warn", "being tried", "one call at a time tries it, and decides"],
  open: ["bad", "not asked", "its circuit breaker is open: it has failed too often"],
});
const ORDER = Object.keys(STATES);

/**
 * @param {Element} panel
 * @param {{ history: import("../history.js").History, policy: any, recent: any, now: number }} known
 *   `now` by the gateway's clock
 */
export function fleetTable(panel, { history, policy, recent, now }) {
  if (!panel.firstChild) {
    fill(panel, h("h2", null, "Servers"), h("p", { class: "note" }), table(COLUMNS, h("tbody")), h("div"));
  }
  if (!policy) return;
  /** @type {Deployment[]} */
  const deployments = policy.deployments;
  const calls = recent?.data ?? [];
  const lookBackMs = Math.min(LOOK_BACK_MS, now - startOf(history));
  const looked = ofServers(calls, calls.length >= RECENT_CALLS_MAX, now, lookBackMs);
  const note = /** @type {Element} */ (panel.querySelector(".note"));
  const since = `${counted(looked.calls, "call")} of the last ${span(looked.seconds)}`;
  say(note, `State and load are as of now; the columns from Requests on are of ${since}.`);
  const states = nowOf(history);
  const body = /** @type {Element} */ (panel.querySelector("tbody"));
  keyed(
    body,
    deployments,
    (each) => each.name,
    (each) => serverRow(each, states, looked),
  );
  const none = empty("No servers", "Add some under `deployments` in the policy.");
  update(/** @type {Element} */ (panel.lastElementChild), !deployments.length && none);
}

/** @type {(string | [string, string])[]} */
const COLUMNS = [
  "Server",
  "State",
  ["In flight", "calls that it is busy with, of those that it may be sent at the same time"],
  ["#Requests", "attempts at this server"],
  ["#Errors", "attempts that speak against it: no connection, 5xx, 429, timeouts, answers that broke off"],
  ["#First token p50", "from asking the server to its first chunk"],
  ["#p95", "first token, 95th percentile"],
  ["#Output", "tokens generated per second, all calls together"],
  ["#Cached", "share of the prompt tokens that its prefix cache had"],
  ["It reports", "what the server says of its own load, where the policy has it asked"],
];

/**
 * When the oldest of the gateway's processes began, in ms since the epoch.
 * @param {import("../history.js").History} history
 */
function startOf({ latest }) {
  const starts = latest ? samples(latest, "process_start_time_seconds") : [];
  return starts.length ? 1000 * Math.min(...starts.map((each) => each.value)) : 0;
}

/** What the metrics say of all servers. @param {import("../history.js").History} history */
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

/** @param {Deployment} server @param {ReturnType<typeof nowOf>} now @param {ReturnType<typeof ofServers>} looked */
function serverRow(server, now, looked) {
  const stats = looked.servers.get(server.name);
  const inFlight = now.inFlight.get(server.name) ?? null;
  const words = `${whole(inFlight)} of ${whole(server.max_concurrency)}`;
  const failed = [...(stats?.failed ?? [])].sort((a, b) => b[1] - a[1]);
  const failures = failed.reduce((sum, [, count]) => sum + count, 0);
  const link = `#/calls?${new URLSearchParams({ server: server.name, show: "problems" })}`;
  const served = h("span", { class: "second", title: server.base_url }, `${server.model} · ${server.provider}`);
  return row(
    [server.name, served],
    h("td", null, stateOf(now.states.get(server.name) ?? [])),
    h("td", { class: "nowrap" }, meter(inFlight ?? 0, server.max_concurrency, `${words} calls in flight`), ` ${words}`),
    number(stats ? `${short(stats.tries / looked.seconds)}/s` : NOTHING),
    number(
      failures
        ? [
            h(
              "a",
              { href: link, class: "bad", title: failed.map(([outcome, count]) => `${outcome}: ${count}`).join(", ") },
              `${whole(failures)} (${share(failures, stats?.tries)})`,
            ),
            h("span", { class: "second" }, failed[0][0]),
          ]
        : stats
          ? "0"
          : NOTHING,
    ),
    number(duration(stats ? percentile(0.5, stats.ttft) : null)),
    number(duration(stats ? percentile(0.95, stats.ttft) : null)),
    number(stats?.answers ? `${short(stats.output / looked.seconds)} tok/s` : NOTHING),
    number(stats ? share(stats.cached, stats.prompt) : NOTHING),
    h("td", { class: "nowrap" }, reportOf(now.reported.get(server.name))),
  );
}

/** The worst of what the workers think of it. @param {string[]} states */
function stateOf(states) {
  if (!states.length) return state("off", "not known yet", "no metrics of this server have come");
  const worst = [...states].sort((a, b) => ORDER.indexOf(b) - ORDER.indexOf(a))[0];
  const [level, words, why] = STATES[worst] ?? ["warn", worst, ""];
  const at = states.filter((each) => each === worst).length;
  return state(level, at === states.length ? words : `${words}, at ${at} of ${states.length} workers`, why);
}

/** @param {Map<string, number> | undefined} report */
function reportOf(report) {
  if (!report) return h("span", { class: "dim" }, NOTHING);
  const usage = report.get("kv_usage");
  return `${whole(report.get("running"))} running, ${whole(report.get("waiting"))} waiting, KV ${share(usage, 1)}`;
}
