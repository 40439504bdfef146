// @ts-check
// The history that the gateway keeps: what is asked for, and values that are computed from its points.

import { withQuery } from "./api.js";
import { Poll } from "./poll.js";

const FINE_MS = 5000; // a new point comes every 10 s
const COARSE_MS = 30_000;

/** The time ranges, as the gateway names them. */
export const SPANS = /** @type {[string, string][]} */ ([
  ["15m", "15 minutes"],
  ["1h", "1 hour"],
  ["6h", "6 hours"],
  ["24h", "24 hours"],
  ["7d", "7 days"],
]);
const FINE_SPANS = new Set(["15m", "1h"]);

/**
 * A point in the format of `GET /admin/history`: sums over some seconds. `in_flight` and `queued` are the most at any
 * moment, and null where they are not known for the selected calls.
 * @typedef {{
 *   at: number, seconds: number, results: Record<string, number>, errors: Record<string, number>,
 *   ttft_ms: { p50: number | null, p95: number | null, p99: number | null }, hit_rate: number | null,
 *   prompt_tokens: number, cached_tokens: number, output_tokens: number, cost: Record<string, number>,
 *   queued: number | null, in_flight: number | null, storage_timeouts: number,
 * }} Point
 * @typedef {{
 *   span: string, step_seconds: number, from: number, to: number, points: Point[], last_minute: Point | null,
 *   summary: Point | null, by: Record<"class" | "model" | "deployment", Record<string, Point>>, path: string,
 * }} History
 * @typedef {{ span: string, of: string }} Wanted  `of`: all calls if empty, else as in `model:NAME`
 */

/** @param {Wanted} wanted */
export function historyPath({ span, of }) {
  const [by, ...name] = of.split(":");
  return withQuery("/admin/history", { span, ...(of && { [by]: name.join(":") }) });
}

/** @param {import("./api.js").Api} api @param {Wanted} wanted @returns {(signal: AbortSignal) => Promise<History>} */
export function loadHistory(api, wanted) {
  const path = historyPath(wanted);
  return async (signal) => ({ ...(await api.get(path, signal)), path });
}

/** @param {string} span */
export function historyMs(span) {
  return FINE_SPANS.has(span) ? FINE_MS : COARSE_MS;
}

/** @param {import("./api.js").Api} api @param {Wanted} wanted @returns {Poll<History>} */
export function historyPoll(api, wanted) {
  return new Poll(loadHistory(api, wanted), historyMs(wanted.span));
}

/** @param {Record<string, number>} counts */
export function sumOf(counts) {
  return Object.values(counts).reduce((sum, count) => sum + count, 0);
}

/** A count per second. Null if the gateway was not running. @param {number} count @param {Point} point */
export function perSecond(count, point) {
  return point.seconds > 0 ? count / point.seconds : null;
}

/** The keys with the largest sums over all points, largest first.
 * @param {Point[]} points @param {(point: Point) => Record<string, number>} of @param {number} most */
export function largest(points, of, most) {
  /** @type {Map<string, number>} */
  const sums = new Map();
  for (const [name, count] of points.flatMap((point) => Object.entries(of(point)))) {
    sums.set(name, (sums.get(name) ?? 0) + count);
  }
  return [...sums]
    .sort(([a, x], [b, y]) => y - x || a.localeCompare(b))
    .slice(0, most)
    .map(([name]) => name);
}
