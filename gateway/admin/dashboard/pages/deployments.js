// @ts-check
// The table of deployments: circuit breaker, load, and the sums of a time range.

import { meter } from "../charts.js";
import { DataTable } from "../data_table.js";
import { h, update } from "../dom.js";
import { NOTHING, share, short, whole } from "../format.js";
import { perSecond, sumOf } from "../history.js";
import { samples, totals } from "../prometheus.js";
import { empty, state } from "../widgets.js";
import { GROUP_COLUMNS, rangeText } from "./groups.js";

/**
 * @typedef {import("../history.js").Point} Point
 * @typedef {{ name: string, provider: string, base_url: string, model: string, max_concurrency: number,
 *   role: string | null }} Deployment
 * @typedef {{
 *   name: string, deployment: Deployment, point: Point, states: string[], inFlight: number | null,
 *   reported: Map<string, number> | undefined, unavailable: string | undefined, prefilled: number | null,
 * }} Row  `unavailable`: why it gets no requests; `prefilled`: prompt tokens computed for other deployments
 */

/** How the states of a circuit breaker are shown: [level, label, explanation], from best to worst. */
const STATES = /** @type {Record<string, [import("../widgets.js").Level, string, string]>} */ ({
  closed: ["good", "available", "circuit breaker closed"],
  resting: ["warn", "backing off", "it failed just now or sent Retry-After; other deployments are preferred"],
  half_open: ["warn", "half-open", "circuit breaker half-open; one probe request at a time decides whether it closes"],
  open: ["bad", "ejected", "circuit breaker open; a probe request will close it"],
});
const ORDER = Object.keys(STATES);

/** @type {Point} */
const NO_CALLS = {
  at: 0,
  seconds: 0,
  results: {},
  errors: {},
  ttft_ms: { p50: null, p95: null, p99: null },
  hit_rate: null,
  prompt_tokens: 0,
  cached_tokens: 0,
  output_tokens: 0,
  cost: {},
  queued: null,
  in_flight: null,
  storage_timeouts: 0,
};

/** @type {import("../data_table.js").Column<Row>[]} */
const COLUMNS = [
  { name: "Deployment", value: ({ name }) => name, cell: nameOf },
  {
    name: "State",
    value: ({ states }) => worstOf(states),
    cell: ({ states, unavailable }) => [stateOf(states), unavailable && h("span", { class: "second" }, unavailable)],
  },
  {
    name: "In flight",
    title: "calls in flight, of its max_concurrency",
    value: ({ inFlight }) => inFlight,
    cell: loadOf,
  },
  {
    name: "Requests",
    title: "calls that ended at this deployment",
    isNumber: true,
    value: ({ point }) => sumOf(point.results),
    cell: ({ point }) => [
      whole(sumOf(point.results)),
      h("span", { class: "second" }, `${short(perSecond(sumOf(point.results), point))}/s`),
    ],
  },
  {
    name: "Errors",
    title: "attempts that failed because of it: no connection, 5xx, 429, timeouts, cut answers",
    isNumber: true,
    value: ({ point }) => sumOf(point.errors),
    cell: errorsOf,
  },
  ...GROUP_COLUMNS,
  {
    name: "Reported load",
    title: "load that the deployment itself reports, if its `metrics` are enabled in the policy",
    value: ({ reported }) => reported?.get("kv_usage"),
    cell: ({ reported }) => h("span", { class: "nowrap" }, reportOf(reported)),
  },
];

export function deploymentsPanel() {
  const table = new DataTable(COLUMNS, { label: "Deployments", key: ({ name }) => name });
  const note = h("span", { class: "dim" });
  const none = h("div");
  const head = h(
    "div",
    { class: "bar" },
    h("h2", null, "Deployments"),
    note,
    h("span", { class: "grow" }),
    table.csvButton("deployments"),
  );
  return {
    element: h("section", { class: "panel" }, head, table.element, none),
    /**
     * @param {{
     *   metrics: import("../prometheus.js").Snapshot | null, policy: any, unavailable: Record<string, string>,
     *   history: import("../history.js").History | null,
     * }} data  `unavailable` has the reasons why deployments get no requests, by name
     */
    show({ metrics, policy, history, unavailable }) {
      if (!policy) return;
      const { states, inFlight, reported, prefilled } = nowOf(metrics);
      table.show(
        policy.deployments.map((/** @type {Deployment} */ deployment) => ({
          name: deployment.name,
          deployment,
          point: history?.by.deployment[deployment.name] ?? NO_CALLS,
          states: states.get(deployment.name) ?? [],
          inFlight: inFlight.get(deployment.name) ?? null,
          reported: reported.get(deployment.name),
          unavailable: unavailable[deployment.name],
          prefilled: prefilled.get(deployment.name) ?? null,
        })),
      );
      update(note, history && `State and load are current; the other columns cover the ${rangeText(history)}.`);
      update(none, !policy.deployments.length && empty("No deployments", "Add `deployments` to the policy."));
    },
  };
}

/** The current state of all deployments. @param {import("../prometheus.js").Snapshot | null} latest */
function nowOf(latest) {
  /** @type {Map<string, string[]>} */
  const states = new Map();
  /** @type {Map<string, Map<string, number>>} */
  const reported = new Map();
  if (!latest) return { states, inFlight: new Map(), reported, prefilled: new Map() };
  for (const { labels } of samples(latest, "warmpath_deployment_breaker").filter((each) => each.value === 1)) {
    states.set(labels.deployment, [...(states.get(labels.deployment) ?? []), labels.state]);
  }
  for (const { labels, value } of samples(latest, "warmpath_deployment_reported")) {
    reported.set(labels.deployment, (reported.get(labels.deployment) ?? new Map()).set(labels.what, value));
  }
  const prefilled = totals(latest, "warmpath_prefill_tokens_total", "deployment", ({ kind }) => kind === "computed");
  return { states, inFlight: totals(latest, "warmpath_deployment_inflight", "deployment"), reported, prefilled };
}

/** @param {Row} row */
function nameOf({ deployment, prefilled }) {
  const role = deployment.role ? ` · ${deployment.role}` : "";
  const tokens = prefilled ? `, ${short(prefilled)} prompt tokens computed` : "";
  const model = `${deployment.model} · ${deployment.provider}${role}${tokens}`;
  return [deployment.name, h("span", { class: "second", title: deployment.base_url }, model)];
}

/** @param {Row} row */
function loadOf({ deployment, inFlight }) {
  const load = `${whole(inFlight)} of ${whole(deployment.max_concurrency)}`;
  const bar = meter(inFlight ?? 0, deployment.max_concurrency, `${load} calls in flight`);
  return h("span", { class: "nowrap" }, bar, ` ${load}`);
}

/** @param {Row} row */
function errorsOf({ deployment, point }) {
  const errors = Object.entries(point.errors).sort(([, a], [, b]) => b - a);
  if (!errors.length) return sumOf(point.results) ? "0" : NOTHING;
  const link = `#/calls?${new URLSearchParams({ server: deployment.name, show: "problems" })}`;
  const title = errors.map(([outcome, count]) => `${outcome}: ${count}`).join(", ");
  return [
    h("a", { href: link, class: "bad", title }, whole(sumOf(point.errors))),
    h("span", { class: "second" }, errors[0][0]),
  ];
}

/** @param {string[]} states */
function worstOf(states) {
  return [...states].sort((a, b) => ORDER.indexOf(b) - ORDER.indexOf(a))[0];
}

/** The worst state of its circuit breaker among the workers. @param {string[]} states */
function stateOf(states) {
  if (!states.length) return state("off", "unknown", "no metrics of this deployment yet");
  const worst = worstOf(states);
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
