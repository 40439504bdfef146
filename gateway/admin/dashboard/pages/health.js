// @ts-check
// The queue panel, by latency class, and the panel with the health of the gateway.

import { fill, h, keyed, update } from "../dom.js";
import { counted, duration, whole } from "../format.js";
import { samples, total, totals } from "../prometheus.js";
import { rangeText } from "./groups.js";
import { copied, empty, number, row, state, table, time } from "../widgets.js";

const QUEUE_COLUMNS = /** @type {(string | [string, string])[]} */ ([
  "Class",
  ["#Queued", "calls queued now"],
  ["#Average wait", "since the gateway's start"],
  ["#Shed", "calls shed since the start, because more calls arrived than may wait"],
]);

/** @param {Element} panel @param {import("../prometheus.js").Snapshot | null} latest */
export function queuePanel(panel, latest) {
  if (!panel.firstChild) fill(panel, h("h2", null, "Queue"), table(QUEUE_COLUMNS, h("tbody")));
  if (!latest) return;
  const waiting = [...totals(latest, "warmpath_queue_depth", "class")].sort(([a], [b]) => a.localeCompare(b));
  const shed = totals(latest, "warmpath_queue_gave_way_total", "class");
  const waited = totals(latest, "warmpath_queue_wait_seconds_sum", "class");
  const waits = totals(latest, "warmpath_queue_wait_seconds_count", "class");
  const body = /** @type {Element} */ (panel.querySelector("tbody"));
  keyed(
    body,
    waiting,
    ([name]) => name,
    ([name, count]) => {
      const had = waits.get(name) ?? 0;
      return row(
        name,
        number(count ? h("span", { class: "stands" }, whole(count)) : "0"),
        number(duration(had ? (1000 * (waited.get(name) ?? 0)) / had : null)),
        number(whole(shed.get(name) ?? 0)),
      );
    },
  );
}

/**
 * @param {Element} panel
 * @param {{
 *   metrics: import("../prometheus.js").Snapshot | null, policy: any, state: any,
 *   history: import("../history.js").History | null,
 * }} data
 */
export function gatewayPanel(panel, { metrics: latest, policy, state: health, history }) {
  const sum = (/** @type {string} */ name) => (latest ? total(latest, name) : null);
  const facts = [
    ["State", stateOf(health)],
    ["Policy", policyOf(policy)],
    ["Ledger", latest && ledgerOf(latest, sum)],
    ["Storage", latest && storageOf(sum, history)],
    ["Workers", latest && workersOf(latest)],
    ["Peer gateways", latest && peersOf(latest)],
    ["Batches", latest && batchesOf(latest)],
  ];
  update(
    panel,
    h("h2", null, "Gateway"),
    latest || health
      ? h(
          "dl",
          { class: "facts" },
          facts.map(([name, value]) => value && [h("dt", null, name), h("dd", null, value)]),
        )
      : empty("No data yet", "The first values arrive in a moment."),
  );
}

/** @param {any} health */
function stateOf(health) {
  if (!health) return null;
  if (health.status === "ready") return state("good", "ready");
  return [
    state("bad", health.status),
    h(
      "ul",
      null,
      health.faults.map((/** @type {string} */ fault) => h("li", null, fault)),
    ),
  ];
}

/** @param {any} policy */
function policyOf(policy) {
  if (!policy) return null;
  const loaded = [
    copied(policy.hash),
    h("span", { class: "second" }, policy.path, ", loaded ", time(policy.loaded_at)),
  ];
  if (!policy.last_error) return loaded;
  return [
    state("bad", "the changed file is invalid; the old policy stays in force"),
    h("pre", { class: "said" }, policy.last_error),
    loaded,
  ];
}

/** @typedef {(name: string) => number | null} Sum */

/** @param {import("../prometheus.js").Snapshot} latest @param {Sum} sum */
function ledgerOf(latest, sum) {
  const healthy = samples(latest, "warmpath_ledger_ok").every((each) => each.value === 1);
  const drift = samples(latest, "warmpath_ledger_drift_tokens").filter((each) => each.value !== 0);
  return [
    healthy
      ? state("good", `healthy: ${counted(sum("warmpath_ledger_rows_total") ?? 0, "receipt")} since the start`)
      : state("bad", "receipts cannot be written"),
    drift.map(({ labels, value }) =>
      h(
        "span",
        { class: "second" },
        `${labels.deployment}: drift of ${whole(value)} ${labels.kind} tokens (engine count minus billed)`,
      ),
    ),
  ];
}

/**
 * Healthy only if no operation has timed out lately. The counter since the start would blame a storage for long.
 * @param {Sum} sum @param {import("../history.js").History | null} history
 */
function storageOf(sum, history) {
  const unsettled = sum("warmpath_limits_unsettled") ?? 0;
  const failures = sum("warmpath_limits_store_failures_total") ?? 0;
  return [
    storageState((sum("warmpath_limits_local") ?? 0) > 0, history?.last_minute?.storage_timeouts ?? 0),
    unsettled > 0 && h("span", { class: "second" }, `Pending settlements: ${whole(unsettled)}`),
    failures > 0 && h("span", { class: "second" }, timeoutsText(failures, history)),
  ];
}

/** @param {boolean} unavailable @param {number} timeouts in the last minute */
function storageState(unavailable, timeouts) {
  if (unavailable) return state("warn", "unavailable: enforcing this gateway's share of the limits");
  if (timeouts) return state("warn", `slow: ${counted(timeouts, "timeout")} in the last minute`);
  return state("good", "healthy");
}

/** @param {number} failures since the start @param {import("../history.js").History | null} history */
function timeoutsText(failures, history) {
  const last = history?.points.findLast((point) => point.storage_timeouts > 0);
  const when = !history
    ? ""
    : last
      ? [", the last one at ", time(1000 * last.at)]
      : `, none in the ${rangeText(history)}`;
  return [`Timeouts since start: ${whole(failures)}`, when];
}

/** @param {import("../prometheus.js").Snapshot} latest */
function workersOf(latest) {
  const workers = samples(latest, "warmpath_worker_up");
  if (!workers.length) return null;
  const up = workers.filter((each) => each.value === 1).length;
  return up === workers.length ? state("good", `${up} running`) : state("warn", `${up} of ${workers.length} running`);
}

/** The other workers of this gateway count as peers, too. @param {import("../prometheus.js").Snapshot} latest */
function peersOf(latest) {
  const peers = samples(latest, "warmpath_gateways_heard").map((each) => each.value);
  if (!peers.length) return null;
  const title = "other processes on the same storage, this gateway's workers included";
  return h("span", { title }, whole(Math.max(...peers)));
}

/** @param {import("../prometheus.js").Snapshot} latest */
function batchesOf(latest) {
  const open = [...totals(latest, "warmpath_batches", "status")].filter(([, count]) => count > 0);
  return open.length ? open.map(([status, count]) => `${whole(count)} ${status}`).join(", ") : null;
}
