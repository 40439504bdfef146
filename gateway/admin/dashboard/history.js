// @ts-check
// A history of the metrics since the page was opened: one point for each pair of consecutive scrapes.

import { bucketIncreases, increases, increasesBy, mergedBuckets, total, totals } from "./prometheus.js";

/** @typedef {import("./prometheus.js").Snapshot} Snapshot */

export const HISTORY_MS = 15 * 60_000;
const POINTS_MAX = 1000;

/**
 * One step. Counts are increases in the `seconds` before `at`; `queue` and `inFlight` are values at `at`.
 * @typedef {{
 *   at: number, seconds: number,
 *   requests: Map<string, number>, tokens: Map<string, number>,
 *   ttft: import("./prometheus.js").Buckets, overhead: import("./prometheus.js").Buckets,
 *   queue: Map<string, number>, inFlight: number | null,
 * }} Point
 */

export class History {
  /** @type {Snapshot | null} */
  latest = null;
  /** @type {Point[]} */
  points = [];

  /** @param {Snapshot} snapshot */
  add(snapshot) {
    if (this.latest) this.points.push(step(this.latest, snapshot));
    this.latest = snapshot;
    const oldest = snapshot.at - HISTORY_MS;
    const kept = this.points.findIndex((point) => point.at >= oldest);
    this.points.splice(0, Math.max(kept, this.points.length - POINTS_MAX, 0));
  }

  /** The points of the last `ms` milliseconds. @param {number} ms */
  last(ms) {
    const since = (this.latest?.at ?? 0) - ms;
    return this.points.filter((point) => point.at > since);
  }
}

/** @param {Snapshot} before @param {Snapshot} after @returns {Point} */
export function step(before, after) {
  const requests = new Map();
  for (const { labels, value } of increases(before, after, "warmpath_requests_total")) {
    const kind = outcomeKind(labels.status, labels.outcome);
    requests.set(kind, (requests.get(kind) ?? 0) + value);
  }
  return {
    at: after.at,
    seconds: (after.at - before.at) / 1000,
    requests,
    tokens: increasesBy(before, after, "warmpath_tokens_total", "kind"),
    ttft: bucketIncreases(before, after, "warmpath_time_to_first_token_seconds"),
    overhead: bucketIncreases(before, after, "warmpath_overhead_seconds"),
    queue: totals(after, "warmpath_queue_depth", "class"),
    inFlight: total(after, "warmpath_inflight"),
  };
}

/**
 * The kind of a request's outcome for operators: `answered`, `refused` (rejected, the client's error), `limited` (rate
 * limit), `failed`, or `left` (the client disconnected).
 * @param {number | string} status @param {string | null | undefined} outcome
 */
export function outcomeKind(status, outcome) {
  const code = Number(status);
  if (outcome === "client_gone" || code === 499) return "left";
  if (code >= 500 || outcome === "upstream_cut" || outcome === "timeout" || outcome === "gateway_lost") return "failed";
  if (code === 429) return "limited";
  return code >= 400 ? "refused" : "answered";
}

/** @typedef {ReturnType<typeof summed>} Sums */

/** The sums over several points. @param {Point[]} points */
export function summed(points) {
  const seconds = points.reduce((sum, point) => sum + point.seconds, 0);
  const requests = added(points.map((point) => point.requests));
  const tokens = added(points.map((point) => point.tokens));
  const ttft = mergedBuckets(points.map((point) => point.ttft));
  const overhead = mergedBuckets(points.map((point) => point.overhead));
  return { seconds, requests, tokens, ttft, overhead, requestCount: sumOf(requests), inputTokens: inputOf(tokens) };
}

/** @param {Map<string, number>[]} maps */
function added(maps) {
  /** @type {Map<string, number>} */
  const sums = new Map();
  for (const [name, value] of maps.flatMap((each) => [...each])) sums.set(name, (sums.get(name) ?? 0) + value);
  return sums;
}

/** @param {Map<string, number>} map */
export function sumOf(map) {
  return [...map.values()].reduce((sum, value) => sum + value, 0);
}

/** Prompt tokens: computed, read from and written to a cache. @param {Map<string, number>} tokens by kind */
export function inputOf(tokens) {
  return ["input_uncached", "cache_read", "cache_write"].reduce((sum, kind) => sum + (tokens.get(kind) ?? 0), 0);
}

/**
 * A line of a chart: for each point, the value over a sliding window of `ms`.
 * @param {Point[]} points @param {number} ms @param {(sums: Sums) => number | null} value
 * @returns {[at: number, value: number | null][]}
 */
export function sliding(points, ms, value) {
  let first = 0;
  return points.map((point, index) => {
    while (points[first].at <= point.at - ms) first += 1;
    return [point.at, value(summed(points.slice(first, index + 1)))];
  });
}
