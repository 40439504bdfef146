// @ts-check
// The queues by latency class, and how the gateway itself is.

import { fill, h, keyed, update } from "../dom.js";
import { counted, duration, whole } from "../format.js";
import { samples, total, totals } from "../prometheus.js";
import { copied, empty, number, row, state, table, time } from "../widgets.js";

const QUEUE_COLUMNS = /** @type {(string | [string, string])[]} */ ([
  "Class",
  ["#Waiting", "calls that wait for their turn now"],
  ["#Waited on average", "since the gateway's start"],
  ["#Gave way", "calls refused since its start, because more had come than may wait"],
]);

/** @param {Element} panel @param {import("../history.js").History} history */
export function queuePanel(panel, { latest }) {
  if (!panel.firstChild) fill(panel, h("h2", null, "Queue"), table(QUEUE_COLUMNS, h("tbody")));
  if (!latest) return;
  const waiting = [...totals(latest, "warmpath_queue_depth", "class")].sort(([a], [b]) => a.localeCompare(b));
  const gaveWay = totals(latest, "warmpath_queue_gave_way_total", "class");
  const waited = totals(latest, "warmpath_queue_wait_seconds_sum", "class");
  const turns = totals(latest, "warmpath_queue_wait_seconds_count", "class");
  const body = /** @type {Element} */ (panel.querySelector("tbody"));
  keyed(
    body,
    waiting,
    ([name]) => name,
    ([name, count]) => {
      const had = turns.get(name) ?? 0;
      return row(
        name,
        number(count ? h("span", { class: "stands" }, whole(count)) : "0"),
        number(duration(had ? (1000 * (waited.get(name) ?? 0)) / had : null)),
        number(whole(gaveWay.get(name) ?? 0)),
      );
    },
  );
}

/**
 * @param {Element} panel
 * @param {{ history: import("../history.js").History, policy: any, state: any }} known
 */
export function gatewayPanel(panel, { history: { latest }, policy, state: told }) {
  const sum = (/** @type {string} */ name) => (latest ? total(latest, name) : null);
  const facts = [
    ["State", stateOf(told)],
    ["Policy", policyOf(policy)],
    ["Ledger", latest && ledgerOf(latest, sum)],
    ["Limits", latest && limitsOf(sum)],
    ["Workers", latest && workersOf(latest)],
    ["On its storage", latest && othersOf(latest)],
    ["Batches", latest && batchesOf(latest)],
  ];
  update(
    panel,
    h("h2", null, "Gateway"),
    latest || told
      ? h(
          "dl",
          { class: "facts" },
          facts.map(([name, value]) => value && [h("dt", null, name), h("dd", null, value)]),
        )
      : empty("Nothing yet", "The first figures come in a moment."),
  );
}

/** @param {any} told */
function stateOf(told) {
  if (!told) return null;
  if (told.status === "ready") return state("good", "ready");
  return [
    state("bad", told.status),
    h(
      "ul",
      null,
      told.faults.map((/** @type {string} */ fault) => h("li", null, fault)),
    ),
  ];
}

/** @param {any} policy */
function policyOf(policy) {
  if (!policy) return null;
  const loaded = [
    copied(policy.hash),
    h("span", { class: "second" }, policy.path, ", taken over ", time(policy.loaded_at)),
  ];
  if (!policy.last_error) return loaded;
  return [
    state("bad", "the file has changed and was not taken over"),
    h("pre", { class: "said" }, policy.last_error),
    loaded,
  ];
}

/** @typedef {(name: string) => number | null} Sum */

/** @param {import("../prometheus.js").Snapshot} latest @param {Sum} sum */
function ledgerOf(latest, sum) {
  const works = samples(latest, "warmpath_ledger_ok").every((each) => each.value === 1);
  const drift = samples(latest, "warmpath_ledger_drift_tokens").filter((each) => each.value !== 0);
  return [
    works
      ? state("good", `${counted(sum("warmpath_ledger_rows_total") ?? 0, "receipt")} since the start`)
      : state("bad", "receipts can not be written"),
    drift.map(({ labels, value }) =>
      h(
        "span",
        { class: "second" },
        `${labels.deployment} counted ${whole(value)} ${labels.kind} tokens beyond what was billed`,
      ),
    ),
  ];
}

/** @param {Sum} sum */
function limitsOf(sum) {
  const away = (sum("warmpath_limits_local") ?? 0) > 0;
  const unsettled = sum("warmpath_limits_unsettled") ?? 0;
  const failures = sum("warmpath_limits_store_failures_total") ?? 0;
  return [
    away ? state("warn", "the storage is away: this gateway goes by its share") : state("good", "the storage answers"),
    unsettled > 0 &&
      h("span", { class: "second" }, `${counted(unsettled, "ended reservation")} still to be told to it`),
    failures > 0 &&
      h("span", { class: "second" }, `${counted(failures, "operation")} without an answer since the start`),
  ];
}

/** @param {import("../prometheus.js").Snapshot} latest */
function workersOf(latest) {
  const workers = samples(latest, "warmpath_worker_up");
  if (!workers.length) return null;
  const up = workers.filter((each) => each.value === 1).length;
  return up === workers.length ? state("good", `all ${up} answer`) : state("warn", `${up} of ${workers.length} answer`);
}

/** Each worker hears the others as it hears other machines. @param {import("../prometheus.js").Snapshot} latest */
function othersOf(latest) {
  const heard = samples(latest, "warmpath_gateways_heard").map((each) => each.value);
  return heard.length ? `${counted(Math.max(...heard), "other process", "other processes")} of gateways heard` : null;
}

/** @param {import("../prometheus.js").Snapshot} latest */
function batchesOf(latest) {
  const open = [...totals(latest, "warmpath_batches", "status")].filter(([, count]) => count > 0);
  return open.length ? open.map(([status, count]) => `${whole(count)} ${status}`).join(", ") : null;
}
